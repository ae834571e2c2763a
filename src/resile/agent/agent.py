"""The agent: what it does on each word of the master, each end of a process, and each signal.

It decides little. A process that fails is reported and its siblings are stopped; whether and with whom to go on is the
master's to say. Only words about the newest round are obeyed. Once it leaves, nothing brings it back.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import uuid
from collections.abc import Coroutine
from pathlib import Path

import msgspec

from resile.agent.checkpoints.checkpoint_server import CheckpointServer
from resile.agent.options import RunOptions
from resile.agent.relay import Relay
from resile.agent.round_log import rendezvous_result, story
from resile.agent.session import Session
from resile.agent.standby.pool import StandbyPool, StandbyRequirements
from resile.agent.wait_log import WaitLog
from resile.agent.workers.attempt import Attempt, LogDirectory
from resile.agent.workers.elastic_workers import ElasticWorkers
from resile.agent.workers.output import Output
from resile.agent.workers.ports import free_port
from resile.agent.workers.workers import stdin
from resile.api.ids import NO_ROUND, NodeId, NodeKey, Rank, Round
from resile.api.kinds.run.names import WORKER
from resile.checkpoint.memory_client import SOCKET as CHECKPOINT_SOCKET
from resile.protocol.agent_to_master import (
    Hello,
    Join,
    LastStepTaken,
    Leaving,
    NodeFinished,
    StandbyReport,
    StepReport,
    WorkerFailed,
)
from resile.protocol.master_to_agent import (
    JobOver,
    Leave,
    MasterMessage,
    Refused,
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
"""Seconds that storage has for the last checkpoint when a node leaves; whoever runs the node may have less patience."""

IDLE_FOR = 1.0
"""Seconds that a node waits for a round before it uses the time to warm up standbys."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this node is before the master has spoken."""

    role: str = WORKER
    node_id: NodeId | None = None
    rank: Rank | None = None
    address: str = ""
    """Empty: the address by which this machine reaches the master."""
    host: str


class JobWasOver(Exception):
    """The master's job had ended before this node came: a new run has to wait until that master is gone."""

    def __init__(self, over: JobOver) -> None:
        super().__init__(f"the job was over when this node came: {over.message}")
        self.succeeded = over.succeeded


class Agent:
    """One node's agent. `done` gets the exit code, or the exception that says why there was nothing to do."""

    def __init__(
        self, options: RunOptions, identity: Identity, *, directory: Path, logs: LogDirectory, output: Output
    ) -> None:
        """Prepare; nothing runs before the master has formed a round.

        Args:
            options: the flags.
            identity: who this node is.
            directory: a private directory, in which processes find the agent's socket.
            logs: where files of the processes go.
            output: who moves what they print.
        """
        self._options = options
        self._identity = identity
        self._incarnation = uuid.uuid4().hex
        self.socket = directory / "agent.sock"
        self._logs = logs
        self._output = output
        self.session: Session
        self.vault = CheckpointServer(directory / CHECKPOINT_SOCKET)
        self.standbys = StandbyPool(options, stdin=stdin(), changed=self._tell_standbys)
        self.vault.yield_memory = self.standbys.yield_memory
        self.relay = Relay(lambda message: self.session.send(message))
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._node: NodeKey | None = None
        self._rank: Rank | None = identity.rank
        self._newest: Round = NO_ROUND
        self._attempt: Attempt | None = None
        self._attempts = 0
        self._crashes = 0
        """Attempts that a process of this node brought to their end."""
        self._waiting = WaitLog(options.meeting, options.timeouts, None if options.managed else options.endpoint)
        self._join: Join | None = None
        """Said, and not answered by a round yet."""
        self._next: tuple[Round, RoundAssignment] | None = None
        """A round to start as soon as the processes of the last one are gone."""
        self._task: asyncio.Task[None] | None = None
        """Processes are being stopped, to regroup or to leave."""
        self._told = StandbyRequirements()
        """What the master knows of the standbys."""
        self._stepped = False
        """The processes of this attempt have taken a step."""
        self._leaving = False
        self._signals = 0
        self._regroup_grace: float = options.timeouts.regroup_grace
        self._exit_grace: float = options.timeouts.exit_grace
        self.seats = ElasticWorkers(
            send=lambda message: self.session.send(message),
            replace=self._replace,
            met=self._met,
            desert=self._go_on,
            leave_within=options.timeouts.recovery_budget,
            ready_within=options.meeting.join_timeout or options.timeouts.join,
        )

    @property
    def training(self) -> bool:
        """Whether processes run."""
        return self._attempt is not None and self._attempt.running

    # the master ----------------------------------------------------------------------------------------------------

    def hello(self, local_address: str) -> Hello:
        """The greeting: who this is and all it holds."""
        identity, attempt, seats = self._identity, self._attempt, self.seats
        current = attempt is not None and attempt.round == self._newest
        runs = seats.in_round if seats.active else current and attempt is not None and attempt.sound
        return Hello(
            protocol=PROTOCOL,
            job=self._options.job_name,
            incarnation=self._incarnation,
            address=identity.address or local_address,
            host=identity.host,
            nproc=self._options.nproc,
            rendezvous=self._options.meeting,
            role=identity.role,
            node_id=identity.node_id,
            rank=self._rank,
            round=self._newest,
            running=self._next is not None or runs,
            finished=current and attempt is not None and attempt.finished and self._join is None,
            elastic=seats.elastic,
            replica_endpoint=self.vault.copies.replica_endpoint(identity.address or local_address),
        )

    def on_message(self, message: MasterMessage) -> None:
        """One word of the master."""
        match message:
            case Welcome():
                self._welcome(message)
            case DatasetOpen() | ShardGranted() | ShardNoted():
                self.relay.answer(message)
            case _ if self._leaving or self.done.done():
                return  # on its way out already, with an exit code of its own
            case RoundFormed():
                if message.round > self._newest:
                    self._newest, self._join = message.round, None
                    self.vault.enter(message.round, message.assignment.partner)
                    if self.seats.active:
                        self.seats.formed(message.round, message.assignment)
                    else:
                        self._next = (message.round, message.assignment)
                        self._go_on()
            case RoundOver():
                if message.round > self._newest or (message.round == self._newest and self._join is None):
                    log.info("round %d is over: %s", message.round, message.because)
                    self._newest, self._join, self._next = message.round, None, None
                    self.seats.elastic |= message.elastic
                    if self.seats.active:
                        self.seats.over(message.round, message.because)
                        if message.lost:
                            self.vault.rescue()
                    else:
                        self._go_on()
            case StateHeld():
                self.seats.held(message.round)
            case Leave():
                log.warning("this node leaves the job: %s", message.because)
                self._leave(message.exit_code)
            case Refused():
                log.error("the master refused this node: %s", message.because)
                self._leave(FAILED)
            case JobOver():
                self._job_over(message)

    def on_worker(self, connection: Connection, message: WorkerMessage) -> None:
        """One word of a training process."""
        if isinstance(message, WorkerReady):
            self.seats.on_ready(connection, message)
        elif isinstance(message, LastStepTaken):
            self.seats.on_complete(connection, message)
        else:
            self.relay.on_message(connection, message)
            if isinstance(message, StepReport) and not self._stepped:
                self._stepped = True
                self.standbys.warm()  # training is under way: now there is time for it

    def on_worker_close(self, connection: Connection, because: str) -> None:
        """A training process hung up."""
        self.seats.on_close(connection)
        self.relay.on_close(connection, because)

    def on_away(self, seconds: float, why: str) -> None:
        """The master cannot be reached. Training goes on; an agent without work does not wait for ever."""
        patience = self._options.meeting.join_timeout or self._options.timeouts.connect
        busy = self.seats.in_round if self.seats.active else self.training
        if busy or self._leaving or self.done.done():
            return
        self._waiting.away(self._options.endpoint, seconds, why, patience)
        if seconds < patience:
            return
        if self._attempt is not None and self._attempt.finished:
            log.warning("training is done on this node, but its master is gone; ending without its word")
            self._leave(0)
        else:
            log.error("the master cannot be reached for %.0f s: %s", seconds, why)
            self._leave(FAILED)

    def _welcome(self, welcome: Welcome) -> None:
        self._waiting.met()
        if self._node != welcome.node:
            log.info("this node is %s with rank %d", welcome.node, welcome.rank)
        self._node, self._rank = welcome.node, welcome.rank
        self._regroup_grace, self._exit_grace = welcome.regroup_grace, welcome.exit_grace
        self.session.beat(welcome.heartbeat)
        self.relay.repeat()
        self._told = StandbyRequirements()  # this master has heard of none
        self._tell_standbys(self.standbys.facts)
        if self._leaving:
            return
        self.seats.elastic |= welcome.elastic
        if self.seats.active:
            self.seats.welcomed()
            return
        if self._attempt is not None and self._attempt.round == self._newest:
            for failure in self._attempt.failures:
                self.session.send(WorkerFailed(round=self._newest, failure=failure))
        if self._join is not None:
            self.session.send(self._join)
        elif self._newest == NO_ROUND:
            self._go_on()

    def _job_over(self, over: JobOver) -> None:
        if self._node is None and not self._options.managed:
            self.done.set_exception(JobWasOver(over))
        elif over.succeeded:
            log.info("the job is over: %s", over.message)
            self._leave(0)
        else:
            log.error("the job failed (%s): %s", over.reason, over.message)
            self._leave(FAILED, over=over)

    def _tell_standbys(self, facts: StandbyRequirements) -> None:
        if facts != self._told:
            self._told = facts
            self.session.send(StandbyReport(ready=facts.ready, memory=facts.memory))

    # rounds --------------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Come to the next round, if there is one to start or to ask for: stop what runs first."""
        if self._task is None and not self._leaving and not self.done.done():
            self._task = self._run(self._change_rounds())

    async def _change_rounds(self) -> None:
        if self._attempt is not None:
            await self._attempt.stop(self._regroup_grace)
            self.vault.flush()
        self._task = None
        following, self._next = self._next, None
        if following is not None:
            self._start(*following)
        elif self.seats.elastic and (self._attempt is None or not self._attempt.failures):
            self._start_ahead()
        else:
            self._join = Join(after=self._newest, port=free_port())
            self.session.send(self._join)
            self._waiting.joined(again=self._attempts > 0)
            self.standbys.later(IDLE_FOR)

    def _start(self, round_: Round, place: RoundAssignment) -> None:
        self._waiting.over()
        if self._attempt is not None:
            log.info("%s", self._restart_words(self._attempt))
        attempt = self._new_attempt(round_, place)
        log.info("[%s] Rendezvous complete for workers. Result:%s\n", self._options.role, rendezvous_result(attempt))
        self.relay.begin(round_, set(attempt.names.values()), leads=place.group_rank == 0)
        self.seats.begin(attempt, ahead=False)
        self._set_off(attempt)

    def _start_ahead(self) -> None:
        """The job's processes meet without restarts: have ours up before anybody stands still for them."""
        log.info("starting processes ahead of the next round")
        nproc = self._options.nproc
        nowhere = RoundAssignment(
            group_rank=Rank(0),
            group_world_size=1,
            first_rank=0,
            world_size=nproc,
            master_addr="127.0.0.1",
            master_port=free_port(),
            nproc=nproc,
        )
        attempt = self._new_attempt(NO_ROUND, nowhere)
        for name in attempt.names.values():
            self.relay.expect(name)
        self.seats.begin(attempt, ahead=True)
        self._set_off(attempt)

    def _set_off(self, attempt: Attempt) -> None:
        self._stepped = False
        # A script that tells no steps has imported what it needs by then, and trains.
        self.standbys.later(self._options.timeouts.recovery_budget)
        attempt.start()

    def _replace(self, local_rank: int) -> None:
        assert self._attempt is not None
        log.info("starting another process for local rank %d, ahead of the next round", local_rank)
        self.relay.expect(self._attempt.replace(local_rank, self._attempts))
        self._attempts += 1

    def _met(self) -> None:
        attempt = self._attempt
        assert attempt is not None
        self._waiting.over()
        log.info("[%s] Rendezvous complete for workers. Result:%s\n", self._options.role, rendezvous_result(attempt))
        self.relay.begin(attempt.round, set(attempt.names.values()), leads=attempt.place.group_rank == 0)

    def _new_attempt(self, round_: Round, place: RoundAssignment) -> Attempt:
        self._attempt = attempt = Attempt(
            round_,
            place,
            number=self._attempts,
            options=self._options,
            logs=self._logs,
            socket=self.socket,
            owner=self._incarnation[:12],
            output=self._output,
            standbys=self.standbys,
            on_end=lambda worker, failures: self._ended(attempt, worker, failures),
        )
        self._attempts += 1
        return attempt

    def _restart_words(self, last: Attempt) -> str:
        if not last.failures:
            return "restarting with the new round; this node uses up no restart for that"
        self._crashes += 1
        allowed = self._options.meeting.max_restarts
        if self._crashes > allowed:  # the master counts, and forgives what is long ago
            return f"restarting; of {allowed} restarts some older ones do not count any more"
        return f"restarting ({self._crashes} of {allowed} restarts used)"

    def _ended(self, attempt: Attempt, worker: str, failures: list[WorkerFailure]) -> None:
        self.relay.gone(worker)
        if self.seats.active and worker:
            for failure in failures:
                log.error("%s", failure)
            self.seats.ended(next(rank for rank, name in attempt.names.items() if name == worker), failures)
            return
        for failure in failures:
            log.error("%s", failure)
            self.session.send(WorkerFailed(round=attempt.round, failure=failure))
        if failures:
            self._go_on()
        elif attempt.finished:
            log.info("all training processes of this node ended well")
            self.session.send(NodeFinished(round=attempt.round))

    # the end -------------------------------------------------------------------------------------------------------

    def on_signal(self, number: int) -> None:
        """A person or the platform wants this node to go: pass it on, and leave time to save."""
        self._signals += 1
        name = signal.Signals(number).name
        if self._signals > 1:
            log.warning("%s again: killing what is left", name)
            self.vault.hurry()
            if self._attempt is not None:
                self._attempt.kill()
            return
        if self.training:
            log.warning("%s: passing it on to the training processes, which have %g s to save", name, self._exit_grace)
        else:
            log.warning("%s: this node leaves", name)
        if number == signal.SIGTERM or not self._options.managed:
            self.session.send(Leaving(because=f"it got {name}"))
        self._leave(SIGNALLED + number, number)

    def _leave(self, exit_code: int, number: int = signal.SIGTERM, over: JobOver | None = None) -> None:
        """Stop what runs and end. The first reason to leave counts; a signal may still hurry it."""
        if self._leaving or self.done.done():
            return
        self._leaving = True
        self._waiting.over()
        self.standbys.close()
        if self._task is not None:
            self._task.cancel()
        self._task = self._run(self._stop_and_exit(exit_code, number, over))

    async def _stop_and_exit(self, exit_code: int, number: int, over: JobOver | None) -> None:
        if self._attempt is not None:
            await self._attempt.stop(self._exit_grace, number)
            interrupted = exit_code > SIGNALLED and not self._options.managed
            self.vault.flush("; the same command goes on from there" if interrupted else "")
            await self.vault.flushed(STORE_PATIENCE)
        if over is not None and over.failure is not None:
            self._output.say(story(over.failure, over.failed_node, self._node, self._attempt))
        if not self.done.done():
            self.done.set_result(exit_code)

    def _run(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Do something on the side; if it fails, so does the agent, instead of standing still."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._check)
        return task

    def _check(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.done.done():
            self.done.set_exception(error)

    def close(self) -> None:
        """Leave no process behind."""
        self._waiting.over()
        self.standbys.close()
        if self._task is not None:
            self._task.cancel()
        if self._attempt is not None:
            self._attempt.kill()
