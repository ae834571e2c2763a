"""Passes messages between the training processes of a node and the master: steps, shard requests and their answers.

All nodes take the same steps, so the reports of one node are enough: group rank 0 passes every report on. Other nodes
report their first step of a round at once, so that the master learns of training before the slowest node, and then
seldom, in case the script of group rank 0 reports nothing. 10,000 nodes cost the master some 2,000 reports a second.

A request is kept until it is answered and is sent again after every Hello, so a master may restart in between; the
ledger recognises a request that it has answered before. The message that a process with shards is gone is repeated in
the same way: if it were lost, no other process would ever get these shards.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from resile.api.ids import Round, Seconds
from resile.protocol.agent_to_master import ShardsFreed, StepReport
from resile.protocol.message import Message
from resile.protocol.shards import OpenDataset, ShardAnswer, ShardMessage, ShardProgress, TakeShard
from resile.protocol.worker_to_agent import Attach, WorkerMessage
from resile.wire.transport import Connection

MAX_OPEN = 10_000
"""Requests of a node that may wait for an answer. A process that sends more is disconnected."""
MAX_GONE = 1_000
"""Ended processes that are reported again after every Hello: more than can end while a master restarts."""

FOLLOWERS_INTERVAL = Seconds(5.0)
"""Seconds between two step reports of a node other than group rank 0."""


class Relay:
    """Passes messages between the master and processes that the agent has started. Cuts other processes off."""

    def __init__(self, send: Callable[[Message], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._workers: set[str] = set()
        self._connections: dict[str, Connection] = {}
        self._open: dict[tuple[str, int], ShardMessage] = {}
        self._takers: set[str] = set()
        """Living processes that may hold shards."""
        self._gone: deque[str] = deque(maxlen=MAX_GONE)
        self._round = Round(0)
        self._step = -1
        self._interval = 0.0
        self._next_step = 0.0
        self._held: StepReport | None = None
        """The report of the newest step, if it was not sent yet."""

    def begin(self, round_: Round, workers: set[str], *, leads: bool) -> None:
        """Accept messages of `workers` in a new round and report its steps. `leads`: this node has group rank 0."""
        self._round = round_
        self._step = -1
        self._interval = 0.0 if leads else FOLLOWERS_INTERVAL
        self._next_step = 0.0
        self._held = None
        self._workers |= workers

    def expect(self, worker: str) -> None:
        self._workers.add(worker)

    def gone(self, worker: str) -> None:
        """Drop the requests of an ended process and of its children, and report that their shards are free."""
        if self._held is not None:  # it may be the last step
            self._tell_step(self._held)
        self._workers.discard(worker)
        for name in [name for name in self._connections if _belongs(name, worker)]:
            self._connections.pop(name).close("its process ended")
        self._forget({name for name in self._takers if _belongs(name, worker)})

    def repeat(self) -> None:
        """Send unanswered requests and reports of ended processes again. An earlier master may not have got them."""
        for name in self._gone:
            self._send(ShardsFreed(worker=name))
        for request in self._open.values():
            self._send(request)

    def on_message(self, connection: Connection, message: WorkerMessage) -> None:
        match message:
            case Attach(worker=worker):
                if not any(_belongs(worker, known) for known in self._workers):
                    connection.close(f"no process '{worker}' was started here")
                    return
                connection.owner = worker
                self._connections[worker] = connection
            case StepReport(round=round_, step=step):
                if connection.owner is not None and round_ == self._round and step > self._step:
                    self._step = step
                    if self._clock() >= self._next_step:
                        self._tell_step(message)
                    else:
                        self._held = message
            case OpenDataset() | TakeShard() | ShardProgress():
                if message.worker != connection.owner:
                    connection.close("it spoke in another's name")
                elif len(self._open) >= MAX_OPEN:
                    connection.close("it has too many requests open")
                else:
                    self._takers.add(message.worker)
                    self._open[(message.worker, message.request)] = message
                    self._send(message)

    def on_close(self, connection: Connection, _: str) -> None:
        """Forget an ended connection. If it belonged to a forked child, report that the child's shards are free.

        For a worker, `gone` reports that when the agent sees the worker end.
        """
        name = connection.owner
        if name is None or self._connections.get(name) is not connection:
            return
        del self._connections[name]
        if name not in self._workers:
            self._forget({name} & self._takers)

    def answer(self, answer: ShardAnswer) -> None:
        self._open.pop((answer.worker, answer.request), None)
        connection = self._connections.get(answer.worker)
        if connection is not None:
            connection.send(answer)

    def _tell_step(self, step: StepReport) -> None:
        self._held = None
        self._next_step = self._clock() + self._interval
        self._send(step)

    def _forget(self, names: set[str]) -> None:
        self._takers -= names
        self._open = {key: request for key, request in self._open.items() if key[0] not in names}
        for name in sorted(names):
            self._gone.append(name)
            self._send(ShardsFreed(worker=name))


def _belongs(name: str, worker: str) -> bool:
    """True if `name` is the process `worker` or a forked child of it."""
    return name == worker or name.startswith(f"{worker}/")
