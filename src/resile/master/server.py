"""The connections of a master: turns messages into events, and decisions into messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import count

import msgspec

from resile.api.ids import Bytes, NodeKey, Seconds
from resile.core import decisions as de
from resile.core import events as ev
from resile.master.job_view import StandbyView
from resile.platform.base import Launch, Platform
from resile.protocol.agent_to_master import Heartbeat, Hello, StandbyReport
from resile.protocol.commands import Answer, Ask, Command, Result, ToMaster
from resile.protocol.master_to_agent import JobOver, MasterMessage, Refused, Welcome
from resile.protocol.message import PROTOCOL
from resile.wire.frames import encode
from resile.wire.transport import Connection

log = logging.getLogger("resile.master")

Answerer = Callable[[Command, Callable[[Result], None]], None]
"""Executes a command, and passes the result to the callback, now or later."""


class _AnyHello(msgspec.Struct, tag="Hello"):
    """An agent's first message to the master, with only the field that is the same in every protocol version."""

    protocol: int


_decode_any_hello = msgspec.msgpack.Decoder(_AnyHello).decode


class AgentConnections:
    """The connections of agents and command lines to the master.

    A connection belongs to a node only after the core has admitted the agent that opened it.
    """

    def __init__(
        self,
        submit: Callable[[ev.AnyEvent], None],
        heard: Callable[[NodeKey], None],
        job: str,
        answer: Answerer,
        standbys: dict[NodeKey, StandbyView],
    ) -> None:
        """Prepare. What agents report of their standbys is put into `standbys`.

        These reports are for views, and are not written to the journal.
        """
        self._submit = submit
        self._heard = heard
        self._job = job
        self._numbers = count(1)
        self._by_number: dict[int, Connection] = {}
        self._numbers_of: dict[Connection, int] = {}
        self._nodes: dict[Connection, NodeKey] = {}
        self._connections: dict[NodeKey, Connection] = {}
        self._answer = answer
        self._standbys = standbys

    @property
    def agents(self) -> tuple[NodeKey, ...]:
        return tuple(self._connections)

    # what comes in -----------------------------------------------------------------------------------------------

    def on_message(self, connection: Connection, message: ToMaster) -> None:
        node = self._nodes.get(connection)
        if node is not None:
            self._heard(node)
        match message:
            case Heartbeat() if node is not None:
                return
            case Hello():
                self._hello(connection, message)
            case Ask():
                self._ask(connection, message)
            case StandbyReport() if node is not None:
                self._standbys[node] = StandbyView(message.ready, Bytes(message.memory))
            case _ if node is not None:
                self._submit(ev.AgentSaid(node=node, message=message))
            case _ if connection not in self._numbers_of:
                connection.close("it spoke before it said Hello")

    def on_bad_message(self, connection: Connection, body: bytes) -> None:
        """Refuse an agent whose first message has another protocol version. Ignore other undecodable messages."""
        try:
            protocol = _decode_any_hello(body).protocol
        except (ValueError, RecursionError, OverflowError):
            return
        if protocol != PROTOCOL:
            _refuse(connection, _other_protocol(protocol))

    def on_close(self, connection: Connection, because: str) -> None:
        number = self._numbers_of.pop(connection, 0)
        self._by_number.pop(number, None)
        node = self._nodes.pop(connection, None)
        if node is None:
            return
        log.info("the connection of %s ended: %s", node, because)
        if self._connections.get(node) is connection:
            del self._connections[node]
            self._standbys.pop(node, None)
        self._submit(ev.AgentDisconnected(node=node, connection=number))

    def _hello(self, connection: Connection, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            _refuse(connection, _other_protocol(hello.protocol))
        elif hello.job != self._job:
            _refuse(connection, f"this is the master of job {self._job}, not of {hello.job}")
        else:
            number = self._numbers_of.get(connection) or next(self._numbers)
            self._by_number[number] = connection
            self._numbers_of[connection] = number
            self._submit(ev.AgentConnected(connection=number, hello=hello))

    def _ask(self, connection: Connection, ask: Ask) -> None:
        def reply(result: Result) -> None:
            if not connection.closed:
                connection.send(Answer(request=ask.request, result=result))

        self._answer(ask.command, reply)

    # what goes out -----------------------------------------------------------------------------------------------

    def admit(self, number: int, welcome: Welcome) -> None:
        connection, node = self._by_number.get(number), welcome.node
        if connection is None:
            return
        old = self._connections.get(node)
        if old is not None and old is not connection:
            self._nodes.pop(old, None)
            old.close(f"{node} came again on another connection")
        self._nodes[connection] = node
        self._connections[node] = connection
        connection.send(welcome)

    def refuse(self, number: int, message: Refused | JobOver) -> None:
        connection = self._by_number.get(number)
        if connection is not None:
            connection.send(message)
            connection.close(message.because if isinstance(message, Refused) else message.message)

    def drop(self, node: NodeKey) -> None:
        connection = self._connections.pop(node, None)
        if connection is not None:
            self._nodes.pop(connection, None)
            self._standbys.pop(node, None)
            connection.abort(f"{node} was declared lost")

    def send(self, nodes: Iterable[NodeKey], message: MasterMessage) -> None:
        frame = encode(message)
        for node in nodes:
            connection = self._connections.get(node)
            if connection is not None:
                connection.send_frame(frame)


def _other_protocol(protocol: int) -> str:
    return f"this master speaks protocol {PROTOCOL}, and the agent speaks {protocol}"


def _refuse(connection: Connection, because: str) -> None:
    connection.send(Refused(because=because))
    connection.close(because)


def executor(
    connections: AgentConnections,
    platform: Platform | None,
    reply: Callable[[de.Reply], None],
    finished: Callable[[], None],
    observers: Sequence[Callable[[de.Note], None]],
) -> Callable[[de.AnyDecision], None]:
    """The function that executes decisions of the core. `finished` is called when the job is over."""

    def execute(decision: de.AnyDecision) -> None:
        match decision:
            case de.Note():
                for observer in observers:
                    observer(decision)
            case de.Send():
                connections.send(decision.to, decision.message)
            case de.Admit():
                connections.admit(decision.connection, decision.message)
            case de.Refuse():
                connections.refuse(decision.connection, decision.message)
            case de.Drop():
                connections.drop(decision.node)
            case de.LaunchNode():
                if platform is not None:
                    platform.launch(Launch(**msgspec.structs.asdict(decision)))
            case de.DeleteNode():
                if platform is not None:
                    platform.delete(decision.node, Seconds(decision.grace))
            case de.Reply():
                reply(decision)
            case de.Finish():
                connections.send(connections.agents, decision.message)
                finished()

    return execute


def log_note(note: de.Note) -> None:
    log.log(logging.WARNING if note.warning else logging.INFO, "%s: %s", note.reason, note.message)
