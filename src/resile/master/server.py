"""Connections on one side, the core's words on the other: messages become events, decisions become messages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count
from typing import Any

from resile.api.ids import Bytes, NodeKey
from resile.core import decisions as de
from resile.core import events as ev
from resile.master.shell import Shell
from resile.master.view import StandbyView
from resile.protocol.agent_to_master import (
    CanRegroup,
    Heartbeat,
    Hello,
    Join,
    LastStepTaken,
    Leaving,
    NodeFinished,
    StandbyReport,
    StepReport,
    WorkerFailed,
    WorkerGone,
    WorkersChanged,
    WorkerStuck,
)
from resile.protocol.commands import Answer, Ask, ToMaster
from resile.protocol.master_to_agent import JobOver, Leave, Refused, RoundFormed, RoundOver, StateHeld, Welcome
from resile.protocol.message import PROTOCOL, Message
from resile.protocol.shards import DatasetOpen, OpenDataset, ShardGranted, ShardNoted, ShardProgress, TakeShard
from resile.wire.connection import Connection
from resile.wire.frames import encode

log = logging.getLogger("resile.master")

Answerer = Callable[[Ask, Callable[[str, Any], None]], None]
"""Handles an Ask and calls back with (error, result), now or later."""


class AgentConnections:
    """Who is on which connection. A connection is a stranger until the core admits it as a node's agent."""

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
        """What connected agents say of theirs; only to be shown, so the journal does not know it."""

    @property
    def agents(self) -> int:
        """How many nodes' agents are connected."""
        return len(self._connections)

    # what comes in -----------------------------------------------------------------------------------------------

    def on_message(self, connection: Connection, message: ToMaster) -> None:
        """One message of an agent or of a command line."""
        node = self._nodes.get(connection)
        if node is not None:
            self._heard(node)
            if type(message) is Heartbeat:
                return
            if isinstance(message, StandbyReport):
                self.standbys[node] = StandbyView(message.ready, Bytes(message.memory))
                return
            event = _event_of(node, message)
            if event is not None:
                self._submit(event)
                return
        if isinstance(message, Hello):
            self._hello(connection, message)
        elif isinstance(message, Ask):
            self._ask(connection, message)
        elif node is None and connection not in self._numbers_of:
            connection.close("it spoke before it said Hello")

    def on_close(self, connection: Connection, because: str) -> None:
        """A connection ended, for whatever reason."""
        session = self._numbers_of.pop(connection, 0)
        self._sessions.pop(session, None)
        node = self._nodes.pop(connection, None)
        if node is None:
            return
        log.info("the connection of %s ended: %s", node, because)
        if self._connections.get(node) is connection:
            del self._connections[node]
            self.standbys.pop(node, None)
        self._submit(ev.AgentWent(node=node, session=session))

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
        self._submit(
            ev.AgentCame(
                session=session,
                incarnation=hello.incarnation,
                address=hello.address,
                host=hello.host,
                nproc=hello.nproc,
                meeting=hello.rendezvous,
                role=hello.role,
                node_id=hello.node_id,
                rank=hello.rank,
                round=hello.round,
                running=hello.running,
                finished=hello.finished,
                elastic=hello.elastic,
                replica_endpoint=hello.replica_endpoint,
            )
        )

    def _ask(self, connection: Connection, ask: Ask) -> None:
        def reply(error: str, result: Any) -> None:
            if not connection.closed:
                connection.send(Answer(request=ask.request, error=error, result=result))

        if self.answer is None:
            reply("the master is still starting; ask again", None)
        else:
            self.answer(ask, reply)

    # what goes out -----------------------------------------------------------------------------------------------

    def admit(self, decision: de.Admit, welcome: Welcome) -> None:
        """From now on this connection is that node's agent; an older connection of the node is closed."""
        connection = self._sessions.get(decision.session)
        if connection is None:
            return
        old = self._connections.get(decision.node)
        if old is not None and old is not connection:
            self._nodes.pop(old, None)
            old.close(f"{decision.node} came again on another connection")
        self._nodes[connection] = decision.node
        self._connections[decision.node] = connection
        connection.send(welcome)

    def refuse(self, decision: de.Refuse) -> None:
        """One sentence, and the end."""
        connection = self._sessions.get(decision.session)
        if connection is not None:
            connection.send(Refused(because=decision.because))
            connection.close(decision.because)

    def drop(self, node: NodeKey) -> None:
        """Close a node's connection without a word."""
        connection = self._connections.pop(node, None)
        if connection is not None:
            self._nodes.pop(connection, None)
            self.standbys.pop(node, None)
            connection.abort(f"{node} was declared lost")

    def tell(self, node: NodeKey, message: Message) -> None:
        """Send to a node's agent; one that is not connected is told when it comes again."""
        connection = self._connections.get(node)
        if connection is not None:
            connection.send(message)

    def tell_session(self, session: int, message: Message) -> None:
        """Send to a connection that is not (yet) a node's."""
        connection = self._sessions.get(session)
        if connection is not None:
            connection.send(message)

    def tell_many(self, nodes: tuple[NodeKey, ...] | None, message: Message) -> None:
        """Send the same words to many agents (None: to all), encoded once."""
        frame = encode(message)
        for node in tuple(self._connections) if nodes is None else nodes:
            connection = self._connections.get(node)
            if connection is not None:
                connection.send_frame(frame)


def _event_of(node: NodeKey, message: ToMaster) -> ev.AnyEvent | None:
    """The event that an admitted agent's message is; None for those that are none."""
    match message:
        case Join():
            return ev.AgentJoined(
                node=node,
                after=message.after,
                port=message.port,
                nproc=message.nproc,
                elastic=message.elastic,
                holds=message.holds,
            )
        case CanRegroup():
            return ev.CanRegroup(node=node)
        case WorkersChanged():
            return ev.WorkersChanged(node=node, round=message.round, nproc=message.nproc)
        case LastStepTaken():
            return ev.LastStepTaken(node=node, round=message.round)
        case WorkerStuck():
            return ev.WorkerStuck(node=node, round=message.round)
        case WorkerFailed():
            return ev.WorkerFailed(
                node=node,
                round=message.round,
                failure=message.failure,
                member=message.member,
                left=message.left,
                placed=message.placed,
            )
        case NodeFinished():
            return ev.NodeFinished(node=node, round=message.round)
        case StepReport():
            return ev.StepReport(node=node, round=message.round, step=message.step, total=message.total)
        case WorkerGone():
            return ev.WorkerWent(node=node, worker=message.worker)
        case Leaving():
            return ev.AgentLeaving(node=node, because=message.because)
        case OpenDataset():
            return ev.DatasetOpened(
                node=node,
                worker=message.worker,
                request=message.request,
                name=message.name,
                size=message.size,
                shard_size=message.shard_size,
                epochs=message.epochs,
                seed=message.seed,
            )
        case TakeShard():
            return ev.ShardWanted(node=node, worker=message.worker, request=message.request, dataset=message.dataset)
        case ShardProgress():
            return ev.ShardAdvanced(
                node=node,
                worker=message.worker,
                request=message.request,
                dataset=message.dataset,
                lease=message.lease,
                upto=message.upto,
            )
    return None


class Executor:
    """Executes decisions: words go to agents, launches and deletions to the platform, replies to whoever asked."""

    def __init__(self, board: AgentConnections) -> None:
        self._board = board
        self.shell: Shell
        self.launch: Callable[[de.LaunchNode], None] = _no_platform
        self.delete: Callable[[de.DeleteNode], None] = _no_platform
        self.reply: Callable[[de.Reply], None] = _no_platform
        self.finished: Callable[[de.Finish], None] = _no_platform
        self.noted: Callable[[de.Note], None] = _log_note

    def __call__(self, decision: de.AnyDecision) -> None:
        """Execute one decision."""
        board = self._board
        match decision:
            case de.Note():
                self.noted(decision)
            case de.FormRound():
                for node, place in decision.places.items():
                    board.tell(node, RoundFormed(round=decision.round, place=place))
            case de.EndRound():
                over = RoundOver(
                    round=decision.round, because=decision.because, elastic=decision.elastic, lost=decision.lost
                )
                board.tell_many(decision.nodes, over)
            case de.TellStateHeld():
                board.tell(decision.node, StateHeld(round=decision.round))
            case de.Admit():
                board.admit(decision, self._welcome(decision))
            case de.Refuse():
                board.refuse(decision)
            case de.SendAway():
                board.tell(decision.node, Leave(because=decision.because, exit_code=decision.exit_code))
            case de.Drop():
                board.drop(decision.node)
            case de.LaunchNode():
                self.launch(decision)
            case de.DeleteNode():
                self.delete(decision)
            case de.AnswerShard():
                board.tell(
                    decision.node,
                    ShardGranted(
                        worker=decision.worker,
                        request=decision.request,
                        lease=decision.lease,
                        epoch=decision.epoch,
                        start=decision.start,
                        end=decision.end,
                        error=decision.error,
                    ),
                )
            case de.AnswerProgress():
                board.tell(
                    decision.node,
                    ShardNoted(worker=decision.worker, request=decision.request, counted=decision.counted),
                )
            case de.AnswerDataset():
                board.tell(
                    decision.node,
                    DatasetOpen(worker=decision.worker, request=decision.request, error=decision.error),
                )
            case de.Reply():
                self.reply(decision)
            case de.Finish():
                self._finish(decision)

    def _welcome(self, decision: de.Admit) -> Welcome:
        timeouts = self.shell.engine.state.spec.timeouts
        return Welcome(
            node=decision.node,
            rank=decision.rank,
            heartbeat=timeouts.heartbeat,
            heartbeat_timeout=timeouts.heartbeat_timeout,
            regroup_grace=timeouts.regroup_grace,
            exit_grace=timeouts.exit_grace,
            elastic=decision.elastic,
        )

    def _finish(self, decision: de.Finish) -> None:
        over = JobOver(
            succeeded=decision.succeeded,
            reason=decision.reason,
            message=decision.message,
            failure=decision.failure,
            failed_node=decision.failed_node,
        )
        if decision.session:
            self._board.tell_session(decision.session, over)
        else:
            self._board.tell_many(None, over)
            self.finished(decision)


def _no_platform(_: de.AnyDecision) -> None:
    """Jobs on bare machines have nobody to launch or delete nodes."""


def _log_note(note: de.Note) -> None:
    log.log(logging.WARNING if note.warning else logging.INFO, "%s: %s", note.reason, note.message)
