"""The connections of a master: messages become events, and decisions become messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import count

from resile.api.ids import Bytes, NodeKey
from resile.core import decisions as de
from resile.core import events as ev
from resile.master.view import StandbyView
from resile.protocol.agent_to_master import Heartbeat, Hello, StandbyReport
from resile.protocol.commands import Answer, Ask, Command, NotReady, Result, ToMaster
from resile.protocol.master_to_agent import JobOver, MasterMessage, Refused, Welcome
from resile.protocol.message import PROTOCOL
from resile.wire.connection import Connection
from resile.wire.frames import encode

log = logging.getLogger("resile.master")

Answerer = Callable[[Command, Callable[[Result], None]], None]
"""Handles a command and calls back with the result, now or later."""


class AgentConnections:
    """Which node's agent is on which connection. A connection belongs to no node until the core admits it."""

    def __init__(self, submit: Callable[[ev.AnyEvent], None], heard: Callable[[NodeKey], None], job: str) -> None:
        self._submit = submit
        self._heard = heard
        self._job = job
        self._numbers = count(1)
        self._sessions: dict[int, Connection] = {}
        self._numbers_of: dict[Connection, int] = {}
        self._nodes: dict[Connection, NodeKey] = {}
        self._connections: dict[NodeKey, Connection] = {}
        self.answer: Answerer | None = None
        self.standbys: dict[NodeKey, StandbyView] = {}
        """What connected agents report about their standbys. It is only shown, so it is not in the journal."""

    @property
    def agents(self) -> int:
        return len(self._connections)

    # what comes in -----------------------------------------------------------------------------------------------

    def on_message(self, connection: Connection, message: ToMaster) -> None:
        """Handle one message of an agent or of a command line."""
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
                self.standbys[node] = StandbyView(message.ready, Bytes(message.memory))
            case _ if node is not None:
                self._submit(ev.AgentSaid(node=node, message=message))
            case _ if connection not in self._numbers_of:
                connection.close("it spoke before it said Hello")

    def on_close(self, connection: Connection, because: str) -> None:
        session = self._numbers_of.pop(connection, 0)
        self._sessions.pop(session, None)
        node = self._nodes.pop(connection, None)
        if node is None:
            return
        log.info("the connection of %s ended: %s", node, because)
        if self._connections.get(node) is connection:
            del self._connections[node]
            self.standbys.pop(node, None)
        self._submit(ev.AgentDisconnected(node=node, session=session))

    def _hello(self, connection: Connection, hello: Hello) -> None:
        error = ""
        if hello.protocol != PROTOCOL:
            error = f"this master speaks protocol {PROTOCOL}, and the agent speaks {hello.protocol}"
        elif hello.job != self._job:
            error = f"this is the master of job {self._job}, not of {hello.job}"
        if error:
            connection.send(Refused(because=error))
            connection.close(error)
            return
        session = self._numbers_of.get(connection) or next(self._numbers)
        self._sessions[session] = connection
        self._numbers_of[connection] = session
        self._submit(ev.AgentConnected(session=session, hello=hello))

    def _ask(self, connection: Connection, ask: Ask) -> None:
        def reply(result: Result) -> None:
            if not connection.closed:
                connection.send(Answer(request=ask.request, result=result))

        if self.answer is None:
            reply(NotReady())
        else:
            self.answer(ask.command, reply)

    # what goes out -----------------------------------------------------------------------------------------------

    def admit(self, session: int, welcome: Welcome) -> None:
        """Make this connection the one of a node's agent. An older connection of the node is closed."""
        connection, node = self._sessions.get(session), welcome.node
        if connection is None:
            return
        old = self._connections.get(node)
        if old is not None and old is not connection:
            self._nodes.pop(old, None)
            old.close(f"{node} came again on another connection")
        self._nodes[connection] = node
        self._connections[node] = connection
        connection.send(welcome)

    def refuse(self, session: int, message: Refused | JobOver) -> None:
        """Send one message and close the connection."""
        connection = self._sessions.get(session)
        if connection is not None:
            connection.send(message)
            connection.close(message.because if isinstance(message, Refused) else message.message)

    def drop(self, node: NodeKey) -> None:
        """Close a node's connection without a message."""
        connection = self._connections.pop(node, None)
        if connection is not None:
            self._nodes.pop(connection, None)
            self.standbys.pop(node, None)
            connection.abort(f"{node} was declared lost")

    def send(self, nodes: Iterable[NodeKey], message: MasterMessage) -> None:
        """Send to these nodes' agents, encoded once. An agent that is not connected is skipped."""
        frame = encode(message)
        for node in nodes:
            connection = self._connections.get(node)
            if connection is not None:
                connection.send_frame(frame)

    def send_all(self, message: MasterMessage) -> None:
        self.send(tuple(self._connections), message)


class Executor:
    """Executes decisions: messages go to agents, launches to the platform, replies to the command that asked."""

    def __init__(self, board: AgentConnections) -> None:
        self._board = board
        self.launch: Callable[[de.LaunchNode], None] = _no_platform
        self.delete: Callable[[de.DeleteNode], None] = _no_platform
        self.reply: Callable[[de.Reply], None] = _no_platform
        self.finished: Callable[[de.Finish], None] = _no_platform
        self.noted: Callable[[de.Note], None] = _log_note

    def __call__(self, decision: de.AnyDecision) -> None:
        board = self._board
        match decision:
            case de.Note():
                self.noted(decision)
            case de.Send():
                board.send(decision.to, decision.message)
            case de.Admit():
                board.admit(decision.session, decision.message)
            case de.Refuse():
                board.refuse(decision.session, decision.message)
            case de.Drop():
                board.drop(decision.node)
            case de.LaunchNode():
                self.launch(decision)
            case de.DeleteNode():
                self.delete(decision)
            case de.Reply():
                self.reply(decision)
            case de.Finish():
                board.send_all(decision.message)
                self.finished(decision)


def _no_platform(_: de.AnyDecision) -> None:
    """Jobs on bare machines have no platform that launches or deletes nodes."""


def _log_note(note: de.Note) -> None:
    log.log(logging.WARNING if note.warning else logging.INFO, "%s: %s", note.reason, note.message)
