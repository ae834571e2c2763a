"""The agent: what it does on each word of the master, each end of a process, and each signal.

It decides little. A process that fails is reported and its siblings are stopped; whether and with whom to go on is the
master's to say. Only words about the newest round are obeyed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from resile.agent.failure_report import report
from resile.agent.failures import read_failure
from resile.agent.oom import oom_kills
from resile.agent.options import RunOptions, Std
from resile.agent.output import Output
from resile.agent.ports import free_port
from resile.agent.relay import Relay
from resile.agent.session import Session
from resile.agent.workerenv import NoDeviceError, worker_environment
from resile.agent.workers import CannotStart, Ended, LogFiles, Spawn, WorkerGroup
from resile.api.ids import NO_ROUND, NodeId, NodeKey, Rank, Round
from resile.api.reports import Place, WorkerFailure
from resile.wire import messages as ms

log = logging.getLogger("resile.agent")

FAILED = 1
SIGNALLED = 128


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this node is before the master has spoken."""

    role: str = "worker"
    node_id: NodeId | None = None
    rank: Rank | None = None
    address: str = ""
    """Empty: the address by which this machine reaches the master."""
    host: str


class Agent:
    """One node's agent. `done` gets the exit code."""

    def __init__(self, options: RunOptions, identity: Identity, directory: Path) -> None:
        """Prepare; nothing runs before the master has formed a round.

        Args:
            options: the flags.
            identity: who this node is.
            directory: a private directory for the socket and error files of this agent.
        """
        self._options = options
        self._identity = identity
        self._incarnation = uuid.uuid4().hex
        self._directory = directory
        self._output = Output()
        self._logs = LogFiles(Path(options.log_dir or directory / "logs") / options.run_id)
        self.session: Session
        self.relay = Relay(lambda message: self.session.send(message))
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._node: NodeKey | None = None
        self._rank: Rank | None = identity.rank
        self._round: Round = NO_ROUND
        self._place: Place | None = None
        self._group: WorkerGroup | None = None
        self._names: dict[int, str] = {}
        self._starts = 0
        self._finished = False
        self._stopping: asyncio.Task[None] | None = None
        self._failures: list[WorkerFailure] = []
        self._join: ms.Join | None = None
        self._next: tuple[Round, Place] | None = None
        self._oom_kills = oom_kills()
        self._signals = 0
        self._regroup_grace: float = options.timeouts.regroup_grace
        self._exit_grace: float = options.timeouts.exit_grace

    @property
    def training(self) -> bool:
        """Whether processes run."""
        return self._group is not None and self._group.alive > 0

    # the master ----------------------------------------------------------------------------------------------------

    def hello(self, local_address: str) -> ms.Hello:
        """The greeting: who this is and all it holds."""
        identity = self._identity
        return ms.Hello(
            protocol=ms.PROTOCOL,
            job=self._options.job_name,
            incarnation=self._incarnation,
            address=identity.address or local_address,
            host=identity.host,
            nproc=self._options.nproc,
            meeting=self._options.meeting,
            role=identity.role,
            node_id=self._node.id if self._node is not None else identity.node_id,
            rank=self._rank,
            round=self._round,
            running=self.training and not self._failures,
            finished=self._finished,
        )

    def on_message(self, message: ms.MasterMessage) -> None:
        """One word of the master."""
        match message:
            case ms.Welcome():
                self._welcome(message)
            case ms.RoundFormed():
                if message.round > self._round:
                    self._start(message.round, message.place)
            case ms.RoundOver():
                if message.round >= self._round and self._join is None:
                    log.info("round %d is over: %s", message.round, message.because)
                    self._regroup()
            case ms.Leave():
                log.warning("this node leaves the job: %s", message.because)
                self._leave(message.exit_code)
            case ms.Refused():
                log.error("the master refused this node: %s", message.because)
                self._leave(FAILED)
            case ms.JobOver():
                self._job_over(message)
            case ms.DatasetOpen() | ms.ShardGranted() | ms.ShardNoted():
                self.relay.answer(message)
            case ms.Answer():
                return  # meant for a command line

    def on_away(self, seconds: float) -> None:
        """The master cannot be reached. Training goes on; an agent without work does not wait for ever."""
        if self.training or self.done.done() or seconds < self._options.timeouts.connect:
            return
        if self._finished:
            log.warning("training is done on this node, but its master is gone; ending without its word")
            self._finish(0)
        else:
            log.error("the master at %s cannot be reached for %.0f s", self._options.endpoint, seconds)
            self._leave(FAILED)

    def _welcome(self, welcome: ms.Welcome) -> None:
        if self._node != welcome.node:
            log.info("this node is %s with rank %d", welcome.node, welcome.rank)
        self._node, self._rank = welcome.node, welcome.rank
        self._regroup_grace, self._exit_grace = welcome.regroup_grace, welcome.exit_grace
        self.session.beat(welcome.heartbeat)
        for failure in self._failures:
            self.session.send(ms.Failed(round=self._round, failure=failure))
        if self._join is not None:
            self.session.send(self._join)
        elif self._group is None and self._round == NO_ROUND:
            self._ask_to_join()
        self.relay.repeat()

    def _ask_to_join(self) -> None:
        self._join = ms.Join(after=self._round, port=free_port())
        self.session.send(self._join)

    def _job_over(self, over: ms.JobOver) -> None:
        if self._signals:
            return  # on its way out already, with the signal's exit code
        if over.succeeded:
            log.info("the job is over: %s", over.message)
            self._leave(0)
            return
        log.error("the job failed (%s): %s", over.reason, over.message)
        if over.failure is not None:
            others = [failure for failure in self._failures if failure.pid != over.failure.pid]
            self._output.close(0.5)
            print(report(over.failure, node=over.failed_node, others=others), file=sys.stderr, flush=True)
        self._leave(FAILED)

    # training processes --------------------------------------------------------------------------------------------

    def _start(self, round_: Round, place: Place) -> None:
        if self.training or self._stopping is not None:
            # The word about the old round's end was lost on the way: stop it first.
            self._next = (round_, place)
            self._regroup()
            return
        self._round, self._place = round_, place
        self._join, self._failures, self._finished = None, [], False
        restarts = self._starts
        self._starts += 1
        self._log_rendezvous(place, restarts)
        self._names = {rank: f"{self._incarnation[:12]}.{self._starts}.{rank}" for rank in range(self._options.nproc)}
        self.relay.begin(round_, set(self._names.values()))
        self._group = WorkerGroup(self._output, self._ended)
        try:
            self._group.start([self._spawn(rank, place, restarts) for rank in range(self._options.nproc)])
        except (CannotStart, NoDeviceError, OSError) as error:
            log.error("%s", error)
            failure = WorkerFailure(
                global_rank=place.first_rank, local_rank=0, pid=0, at=time.time(), exit_code=127, error=str(error)
            )
            self._report([failure])
            self._regroup()

    def _spawn(self, local_rank: int, place: Place, restarts: int) -> Spawn:
        options = self._options
        directory = self._logs.attempt(restarts, local_rank)
        environment = worker_environment(
            os.environ,
            options=options,
            place=place,
            local_rank=local_rank,
            nproc=options.nproc,
            round_=self._round,
            restart_count=restarts,
            run_id=options.run_id,
            error_file=str(directory / "error.json"),
            agent_socket=str(self._directory / "agent.sock"),
            worker=self._names[local_rank],
        )
        prefix = b""
        if options.tee.get(local_rank, Std.NONE):
            prefix = _prefix(options, place.first_rank + local_rank, local_rank)
        return Spawn(
            options.command_of(local_rank),
            environment,
            self._sinks(local_rank, Std.OUT, directory / "stdout.log", sys.stdout.buffer),
            self._sinks(local_rank, Std.ERR, directory / "stderr.log", sys.stderr.buffer),
            prefix,
        )

    def _sinks(self, local_rank: int, which: Std, path: Path, console: IO[bytes]) -> list[IO[bytes]]:
        sinks = [self._logs.open(path)] if self._options.to_file(local_rank) & which else []
        return [*sinks, console] if self._options.to_console(local_rank) & which else sinks

    def _ended(self, ended: Ended) -> None:
        worker = self._names[ended.local_rank]
        self.relay.gone(worker)
        self.session.send(ms.WorkerGone(worker=worker))
        if self._stopping is not None or self.done.done():
            return
        if not ended.well:
            self._report([self._failure(ended)])
            self._regroup()
        elif self._group is not None and not self._group.alive:
            self._finished = True
            log.info("all training processes of this node ended well")
            self.session.send(ms.Finished(round=self._round))

    def _failure(self, ended: Ended) -> WorkerFailure:
        assert self._place is not None
        kills = oom_kills()
        by_kernel, self._oom_kills = kills > self._oom_kills, kills
        directory = self._logs.attempt(self._starts - 1, ended.local_rank)
        return read_failure(
            returncode=ended.returncode,
            global_rank=self._place.first_rank + ended.local_rank,
            local_rank=ended.local_rank,
            pid=ended.pid,
            ended_at=ended.at,
            error_file=str(directory / "error.json"),
            log_tail=ended.tail,
            oom_killed=by_kernel and ended.returncode == -signal.SIGKILL,
        )

    def _report(self, failures: list[WorkerFailure]) -> None:
        for failure in failures:
            log.error("%s", failure)
            self._failures.append(failure)
            self.session.send(ms.Failed(round=self._round, failure=failure))

    def _regroup(self) -> None:
        """Stop what runs and ask for the next round."""
        if self._stopping is None and not self.done.done():
            self._finished = False
            self._stopping = asyncio.ensure_future(self._stop_and_join())

    async def _stop_and_join(self) -> None:
        if self._group is not None:
            await self._group.stop(self._regroup_grace)
        self._stopping = None
        following, self._next = self._next, None
        if following is not None:
            self._start(*following)
        else:
            self._ask_to_join()

    # the end -------------------------------------------------------------------------------------------------------

    def on_signal(self, number: int) -> None:
        """A person or the platform wants this node to go: pass it on, and leave time to save."""
        self._signals += 1
        name = signal.Signals(number).name
        if self._signals > 1:
            log.warning("%s again: killing what is left", name)
            if self._group is not None:
                self._group.kill()
            return
        log.warning("%s: passing it on to the training processes, which have %g s to save", name, self._exit_grace)
        if number == signal.SIGTERM or not self._options.managed:
            self.session.send(ms.Leaving(because=f"it got {name}"))
        self._leave(SIGNALLED + number, number)

    def _leave(self, exit_code: int, number: int = signal.SIGTERM) -> None:
        if self._stopping is not None:
            self._stopping.cancel()
        self._stopping = asyncio.ensure_future(self._stop_and_exit(exit_code, number))

    async def _stop_and_exit(self, exit_code: int, number: int) -> None:
        if self._group is not None:
            self._group.signal(number)
            await self._group.gone(self._exit_grace)
        self._finish(exit_code)

    def _finish(self, exit_code: int) -> None:
        if not self.done.done():
            self.done.set_result(exit_code)

    def close(self) -> None:
        """Leave nothing behind: no process, no unwritten line, no open file."""
        if self._group is not None:
            self._group.kill()
        self._output.close()
        self._logs.close()

    def _log_rendezvous(self, place: Place, restarts: int) -> None:
        nproc = self._options.nproc
        ranks = list(range(place.first_rank, place.first_rank + nproc))
        worlds = [place.world_size] * nproc
        fields: Mapping[str, object] = {
            "restart_count": restarts,
            "master_addr": place.master_addr,
            "master_port": place.master_port,
            "group_rank": place.group_rank,
            "group_world_size": place.group_world_size,
            "local_ranks": list(range(nproc)),
            "role_ranks": ranks,
            "global_ranks": ranks,
            "role_world_sizes": worlds,
            "global_world_sizes": worlds,
        }
        lines = "".join(f"\n  {name}={value}" for name, value in fields.items())
        log.info("[%s] Rendezvous complete for workers. Result:%s\n", self._options.role, lines)


def _prefix(options: RunOptions, rank: int, local_rank: int) -> bytes:
    template = options.log_prefix or "[${role_name}${rank}]:"
    words = {"${role_name}": options.role, "${rank}": str(rank), "${local_rank}": str(local_rank)}
    for word, value in words.items():
        template = template.replace(word, value)
    return template.encode()
