"""The agent: handles each message of the master, each end of a process, and each signal.

The agent decides little. It reports a process that failed; the master decides whether and with which nodes to go on.
Messages about older rounds are ignored. An agent that has begun to leave does not come back. `Workers` decide how
processes get from one round to the next.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec

from resile.agent.checkpoints.checkpoint_server import CheckpointServer
from resile.agent.failures.evidence import in_order
from resile.agent.options import RunOptions
from resile.agent.session import Session
from resile.agent.standby.pool import NO_STANDBYS, StandbyPool
from resile.agent.wait_log import WaitLog
from resile.agent.worker_relay import Relay
from resile.agent.workers.attempt import LogDirectory, NodeContext
from resile.agent.workers.base import Workers
from resile.agent.workers.launcher import WorkerLauncher
from resile.agent.workers.output import Output
from resile.agent.workers.restarting_workers import RestartingWorkers
from resile.agent.workers.worker_group import stdin
from resile.api.ids import NodeId, NodeKey, Rank, Round
from resile.api.kinds.run.names import WORKER
from resile.checkpoint.memory_client import SOCKET as CHECKPOINT_SOCKET
from resile.protocol.agent_to_master import CanRegroup, Hello, LastStepTaken, Leaving, StepReport
from resile.protocol.master_to_agent import (
    JobOver,
    Leave,
    MasterMessage,
    Refused,
    RoundComplete,
    RoundFormed,
    RoundOver,
    StateHeld,
    Welcome,
)
from resile.protocol.message import PROTOCOL
from resile.protocol.reports import RoundAssignment, WorkerFailure
from resile.protocol.shards import DatasetOpen, ShardGranted, ShardNoted
from resile.protocol.worker_to_agent import WorkerMessage, WorkerReady
from resile.wire.transport import Connection

log = logging.getLogger("resile.agent")

FAILED = 1
SIGNALLED = 128
STORE_PATIENCE = 600.0
"""Seconds to wait for the last checkpoint to be stored when a node leaves; the platform may allow less."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this node is, for its first message to the master (Hello). The master chooses an id or rank that is None."""

    role: str = WORKER
    node_id: NodeId | None = None
    rank: Rank | None = None
    address: str = ""
    """If empty, other nodes get the local address of the connection to the master."""
    host: str


class JobWasOver(Exception):
    """The job had ended before this node connected. A new run has to wait until the old job's master is gone."""

    def __init__(self, over: JobOver) -> None:
        super().__init__(f"the job was over when this node came: {over.message}")
        self.succeeded = over.succeeded


class Agent:
    """The agent of one node. The future `done` gets the exit code, or an exception such as JobWasOver."""

    def __init__(
        self,
        options: RunOptions,
        identity: Identity,
        *,
        session: Session,
        token: Callable[[], bytes],
        revive_master: Callable[[float], None],
        directory: Path,
        logs: LogDirectory,
        output: Output,
    ) -> None:
        """`revive_master` gets the seconds since the master was last reached, and may start the master again."""
        self._options = options
        self._identity = identity
        self._session = session
        self._revive_master = revive_master
        self._incarnation = uuid.uuid4().hex
        self.socket = directory / "agent.sock"
        self._output = output
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.standbys = StandbyPool(options, stdin=stdin(), changed=session.send)
        self.checkpoints = CheckpointServer(
            directory / CHECKPOINT_SOCKET, token=token, yield_memory=self.standbys.yield_memory
        )
        self._relay = Relay(session.send)
        self._waits = WaitLog(options.rendezvous, options.timeouts, None if options.managed else options.endpoint)
        self._launcher = WorkerLauncher(
            NodeContext(options, logs, self.socket, self._incarnation[:12], output, self.standbys),
            relay=self._relay,
            waits=self._waits,
            in_background=self.in_background,
            on_end=lambda local_rank, failures: self._workers.on_end(local_rank, failures),
            on_stopped=self._on_stopped,
        )
        self._workers: Workers = RestartingWorkers(session.send, self._launcher)
        self._node: NodeKey | None = None
        self._rank: Rank | None = identity.rank
        self._exit_grace: float = options.timeouts.exit_grace
        self._is_leaving = False
        self._signals = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # the master -------------------------------------------------------------------------------------------------------

    def hello(self, local_address: str) -> Hello:
        identity, standing = self._identity, self._workers.standing()
        address = identity.address or local_address
        return Hello(
            protocol=PROTOCOL,
            job=self._options.job_name,
            incarnation=self._incarnation,
            address=address,
            host=identity.host,
            nproc=self._options.nproc,
            rendezvous=self._options.rendezvous,
            role=identity.role,
            node_id=identity.node_id,
            rank=self._rank,
            round=self._workers.newest,
            running=standing.running,
            finished=standing.finished,
            elastic=standing.elastic,
            replica_endpoint=self.checkpoints.replicas.replica_endpoint(address),
        )

    def on_message(self, message: MasterMessage) -> None:
        match message:
            case Welcome():
                self._on_welcome(message)
            case DatasetOpen() | ShardGranted() | ShardNoted():
                self._relay.answer(message)
            case _ if self._is_leaving or self.done.done():
                return  # this node leaves already
            case RoundFormed() if message.round > self._workers.newest:
                self.checkpoints.enter(message.round, message.assignment.partner)
                self._workers.on_round_formed(message.round, message.assignment)
            case RoundOver() if self._workers.is_news(message.round):
                log.info("round %d is over: %s", message.round, message.because)
                if message.elastic:
                    self._become_elastic()
                self._workers.on_round_over(message)
            case RoundComplete():
                self._workers.on_round_complete(message.round)
            case StateHeld():
                self._workers.on_state_held(message.round)
            case Leave():
                log.warning("this node leaves the job: %s", message.because)
                self._leave(message.exit_code)
            case Refused():
                log.error("the master refused this node: %s", message.because)
                self._leave(FAILED)
            case JobOver():
                self._on_job_over(message)

    def on_away(self, seconds: float, why: str) -> None:
        self._revive_master(seconds)
        patience = self._options.rendezvous.join_timeout or self._options.timeouts.connect
        if self._workers.is_training or self._is_leaving or self.done.done():
            return
        self._waits.away(self._options.endpoint, seconds, why, patience)
        if seconds < patience:
            return
        if self._launcher.attempt is not None and self._launcher.attempt.has_finished:
            log.warning("training is done on this node, but its master is gone; ending without its word")
            self._leave(0)
        else:
            log.error("the master cannot be reached for %.0f s: %s", seconds, why)
            self._leave(FAILED)

    def _on_welcome(self, welcome: Welcome) -> None:
        self._waits.met()
        if self._node != welcome.node:
            log.info("this node is %s with rank %d", welcome.node, welcome.rank)
        self._node, self._rank = welcome.node, welcome.rank
        self._launcher.kill_grace, self._exit_grace = welcome.kill_grace, welcome.exit_grace
        self._session.beat(welcome.heartbeat)
        self._relay.repeat()
        if self.standbys.facts != NO_STANDBYS:
            self._session.send(self.standbys.facts)
        if self._is_leaving:
            return
        if welcome.elastic:
            self._become_elastic()
        self._workers.on_welcome()

    def _on_job_over(self, over: JobOver) -> None:
        if self._node is None and not self._options.managed:
            self.done.set_exception(JobWasOver(over))
        elif over.succeeded:
            log.info("the job is over: %s", over.message)
            self._leave(0)
        else:
            log.error("the job failed (%s): %s", over.reason, over.message)
            self._leave(FAILED, over=over)

    # the workers ------------------------------------------------------------------------------------------------------

    def on_worker(self, connection: Connection, message: WorkerMessage) -> None:
        match message:
            case WorkerReady():
                if self._launcher.owns(message.worker) and self._become_elastic():
                    self._session.send(CanRegroup())
                self._workers.on_ready(connection, message)
            case LastStepTaken():
                self._workers.on_last_step(connection, message)
            case _:
                self._relay.on_message(connection, message)
                if isinstance(message, StepReport):
                    self._launcher.on_step()

    def on_worker_close(self, connection: Connection, because: str) -> None:
        self._workers.on_close(connection)
        self._relay.on_close(connection, because)

    def _become_elastic(self) -> bool:
        if not isinstance(self._workers, RestartingWorkers):
            return False
        from resile.agent.workers.elastic_workers import ElasticWorkers  # restarting workers do not need it

        self._workers = ElasticWorkers(
            self._workers,
            send=self._session.send,
            launcher=self._launcher,
            rescue=self.checkpoints.rescue,
            leave_within=self._options.timeouts.recovery_budget,
            ready_within=self._options.rendezvous.join_timeout or self._options.timeouts.join,
        )
        return True

    def _on_stopped(self, following: tuple[Round, RoundAssignment] | None) -> None:
        self.checkpoints.flush()
        self._workers.on_stopped(following)

    # the end ----------------------------------------------------------------------------------------------------------

    def on_signal(self, number: int) -> None:
        """Leave the job: pass the signal on to the processes and give them time to save. A second signal kills them."""
        self._signals += 1
        name = signal.Signals(number).name
        if self._signals > 1:
            log.warning("%s again: killing what is left", name)
            self.checkpoints.hurry()
            self._launcher.kill()
            return
        if self._launcher.is_running:
            log.warning("%s: passing it on to the training processes, which have %g s to save", name, self._exit_grace)
        else:
            log.warning("%s: this node leaves", name)
        if number == signal.SIGTERM or not self._options.managed:
            self._session.send(Leaving(because=f"it got {name}"))
        self._leave(SIGNALLED + number, number)

    def _leave(self, exit_code: int, number: int = signal.SIGTERM, over: JobOver | None = None) -> None:
        if self._is_leaving or self.done.done():
            return
        self._is_leaving = True
        self._waits.over()
        self.standbys.close()
        self._workers.stop()
        self.in_background(self._stop_and_exit(exit_code, number, over))

    async def _stop_and_exit(self, exit_code: int, number: int, over: JobOver | None) -> None:
        await self._launcher.stop(self._exit_grace, number)
        if self._launcher.attempt is not None:
            interrupted = exit_code > SIGNALLED and not self._options.managed
            self.checkpoints.flush("; the same command goes on from there" if interrupted else "")
            await self.checkpoints.flushed(STORE_PATIENCE)
        if over is not None and over.failure is not None:
            self._output.say(self._failure_report(over.failure, over.failed_node))
        if not self.done.done():
            self.done.set_result(exit_code)

    def _failure_report(self, told: WorkerFailure, failed_node: str) -> str:
        """Write a report of the earliest failure: either `told` or a failure of this node.

        The master sent `told`, a failure of `failed_node`.
        """
        from resile.agent.failures.report import report, terminal_width  # not needed unless the job fails

        attempt, here = self._launcher.attempt, str(self._node)
        own = attempt.failures if attempt is not None else []
        first, *others = in_order([told, *(failure for failure in own if failure.pid != told.pid)])
        node = failed_node if first is told else here
        return report(
            first,
            node=node,
            log_file=attempt.log_of(first) if attempt is not None and node == here else "",
            others=others,
            width=terminal_width(),
        )

    def in_background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task. If the task raises an exception, the agent ends with that exception."""

        def check(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None and not self.done.done():
                self.done.set_exception(error)

        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(check)
        return task

    def close(self) -> None:
        self._waits.over()
        self.standbys.close()
        self._launcher.close()
        self._workers.stop()
        for task in self._tasks:
            task.cancel()
        self._launcher.kill()
