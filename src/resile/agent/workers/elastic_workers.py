"""Workers that stay: the processes of an elastic node, from round to round.

When a round is over its processes are told to break off and say that they are ready; the node then joins with as many
as it has. A process that failed is replaced at once, ahead of any round: its siblings go on without it, and when the
new one is ready a new round takes it in. Every wait has an end: a process that does not leave its round, or is started
and never gets ready, is killed and counts as failed. One that may be the last to have the state is waited for longer,
unless the master says that another node has it. `life` says what one process may go through.

As long as no process is here to stay (none was started yet, all have ended, or none could be started), a node does
what one with restarting workers does, except that it starts its processes before it asks for a round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from resile.agent.workers.attempt import Attempt
from resile.agent.workers.base import Standing
from resile.agent.workers.launcher import WorkerLauncher
from resile.agent.workers.ports import free_port
from resile.agent.workers.restarting_workers import RestartingWorkers
from resile.agent.workers.worker_group import CannotStart
from resile.agent.workers.worker_states import (
    Detached,
    Dismissed,
    Ended,
    Event,
    Failed,
    Finishing,
    InRound,
    Leaving,
    Line,
    Member,
    Ready,
    Starting,
    State,
    Stuck,
    Worker,
)
from resile.api.ids import NO_ROUND, Round
from resile.common.backoff import Backoff
from resile.protocol.agent_to_master import (
    CanRegroup,
    Join,
    LastStepTaken,
    NodeFinished,
    WorkerFailed,
    WorkersChanged,
    WorkerStuck,
)
from resile.protocol.master_to_agent import RoundOver
from resile.protocol.message import Message
from resile.protocol.reports import RoundAssignment, WorkerFailure
from resile.protocol.worker_to_agent import WorkerAssignment, WorkerReady

log = logging.getLogger("resile.agent")

VERDICT = 0.3
"""Share of the recovery budget in which the master ends a round, if it does: it hears of a process's end at once, and
of a node's silence after a fifth."""
BACKOFF = Backoff(first=1.0, limit=30.0)
"""Before a process is started again that failed before it ever had a place, and did so before."""
STAY = 12
"""Times the usual wait for a process to leave its round: as long as no other process is known to have the state, its
step may be a long one, and killing it would lose the state."""

S = TypeVar("S", bound=State)


class ElasticWorkers:
    """Implements `Workers`: processes survive a change of rounds."""

    def __init__(
        self,
        before: RestartingWorkers,
        *,
        send: Callable[[Message], None],
        launcher: WorkerLauncher,
        rescue: Callable[[], None],
        leave_within: float,
        ready_within: float,
    ) -> None:
        """Take over from workers that restart: processes that run stay from now on.

        Args:
            before: what this node had until it learned that its workers stay.
            send: speaks to the master.
            launcher: starts and stops the processes.
            rescue: has what processes saved in memory stored, when another node is lost.
            leave_within: seconds that a process has to leave a round that is over: it may be in the middle of a step.
                The recovery budget.
            ready_within: seconds that a process started ahead has to get ready.
        """
        self._restarting = before
        self._send = send
        self._launcher = launcher
        self._rescue = rescue
        self._leave_within = leave_within
        self._ready_within = ready_within
        self._attempt: Attempt | None = None
        self._workers: list[Worker] = []
        self._by_line: dict[Line, Worker] = {}
        self._current: Round | None = None
        """The round that this node is in, as long as it is not over."""
        self._join: Join | None = None
        """Said, and not answered yet."""
        self._changed: WorkersChanged | None = None
        """Said of the newest round, and not answered by its end yet."""
        self._unheard: list[WorkerFailed] = []
        """What a master that comes back may not have heard."""
        self._waited_in_vain = False
        """A process never got ready: its siblings wait for no other any longer."""
        self._last_step_told: Round = NO_ROUND
        """The newest round of which a process here has said that its last step is taken."""
        self._failed_after_last_step = False
        """In the newest round: the script is tried again then, as after any other failure."""
        if launcher.attempt is not None and launcher.attempt.is_sound:
            self._begin(launcher.attempt)

    # what the agent asks ----------------------------------------------------------------------------------------------

    @property
    def newest(self) -> Round:
        """The newest round that the master has spoken of."""
        return self._restarting.newest

    @newest.setter
    def newest(self, round_: Round) -> None:
        self._restarting.newest = round_

    @property
    def is_training(self) -> bool:
        """Whether this node is a member of a round that is not over."""
        return self._current is not None if self._stays else self._restarting.is_training

    def standing(self) -> Standing:
        """What a greeting tells the master."""
        if self._stays:
            return Standing(running=self._current is not None, finished=False, elastic=True)
        return self._restarting.standing()._replace(elastic=True)

    def is_news(self, over: Round) -> bool:
        """Processes that stay may have joined after a round and hear of its end only then."""
        return over >= self.newest if self._stays else self._restarting.is_news(over)

    @property
    def _stays(self) -> bool:
        """Whether there are processes that a round's end does not end."""
        return self._attempt is not None and not self._attempt.is_stopped and not self._attempt.has_finished

    # what the master says ---------------------------------------------------------------------------------------------

    def on_welcome(self) -> None:
        """Say again what the last master may not have heard."""
        if not self._stays:
            self._restarting.on_welcome()
            return
        self._send(CanRegroup())
        for failed in self._unheard:
            self._send(failed)
        if self._join is not None:
            self._send(self._join)
        elif self._changed is not None:
            self._send(self._changed)
        if self._last_step_told == self.newest and self._of_newest_round():
            self._send(LastStepTaken(round=self._last_step_told))
        for _, stuck in self._in(Stuck):
            self._send(WorkerStuck(round=stuck.round))

    def on_round_formed(self, round_: Round, assignment: RoundAssignment) -> None:
        """Let the processes meet, if they are as many as the master thinks."""
        if not self._stays:
            self._restarting.on_round_formed(round_, assignment)
            return
        self.newest, self._join, self._changed, self._waited_in_vain = round_, None, None, False
        self._failed_after_last_step = False
        self._unheard.clear()
        ready, in_round = self._in(Ready), self._in_round()
        if len(ready) == assignment.nproc and not in_round and self._attempt is not None:
            self._current = round_
            self._attempt.enter(round_, assignment, [worker.local_rank for worker, _ in ready])
            self._launcher.entered_round()
            for number, (worker, state) in enumerate(ready):
                self._place(worker, state, assignment, number)
        elif not ready or in_round:  # it cannot join at once, so its peers are not to wait for it
            self._tell_change(0)
        self._settle()

    def on_round_over(self, over: RoundOver) -> None:
        """All processes leave the round."""
        if not self._stays:
            self._restarting.on_round_over(over)
            return
        self.newest, self._join, self._changed = over.round, None, None
        self._break_off(over.because)
        for worker, _ in self._in(Starting):
            if not worker.has_deadline:
                worker.within(self._ready_within, self._never_ready)
        self._settle()
        if over.lost:
            self._rescue()

    def on_state_held(self, round_: Round) -> None:
        """Another node has the state of a round: no process that stays in it is the last one that has."""
        for worker, stuck in self._in(Stuck):
            if stuck.round <= round_:
                log.error(
                    "local rank %d did not leave its round within %g s (--recovery-budget), and another node has the "
                    "state of the training: killing it",
                    worker.local_rank,
                    self._leave_within,
                )
                self._kill(worker)

    # what happens to processes ----------------------------------------------------------------------------------------

    def on_stopped(self, following: tuple[Round, RoundAssignment] | None) -> None:
        """Start in the round that was formed meanwhile, or ahead of one; after failures, ask for a round first."""
        attempt = self._launcher.attempt
        if following is None and attempt is not None and attempt.failures:
            self._restarting.on_stopped(None)
        else:
            self._begin(self._launcher.start(*following) if following is not None else self._launcher.start_ahead())

    def on_end(self, local_rank: int | None, failures: list[WorkerFailure]) -> None:
        """Replace a process that failed. The node has finished when all have ended well, or the rest is not needed."""
        if local_rank is None or not self._stays:
            self.stop()
            self._restarting.on_end(local_rank, failures)
        elif failures:
            self._failed(self._workers[local_rank], failures)
        else:
            worker = self._workers[local_rank]
            state = worker.state
            worker.on(Event.ENDED, Ended(state.round if isinstance(state, Finishing | Detached) else NO_ROUND))
            self._forget_lines(worker)
            self._ended_well()

    def on_ready(self, line: Line, message: WorkerReady) -> None:
        """A process is in no round and can meet."""
        names = self._attempt.names if self._attempt is not None and self._stays else {}
        worker = next((each for each in self._workers if names.get(each.local_rank) == message.worker), None)
        if worker is None or isinstance(worker.state, Failed | Dismissed | Ended):
            line.close(f"no process '{message.worker}' runs here")
            return
        was = worker.state
        was_in_round = isinstance(was, InRound | Detached)
        was_member = was_in_round or (isinstance(was, Ready) and was.was_member)
        ready = Ready(line, was_member=was_member, has_state=message.step > 0, agreed=message.agreed)
        worker.on(Event.READY, ready)
        self._forget_lines(worker)
        self._by_line[line] = worker
        if ready.has_state:
            self._state_found()
        if was_in_round and self._current is not None:
            self._break_off("a process of this node lost touch with its peers")
        elif isinstance(was, Starting) and was.expected_in == self._current and self._attempt is not None:
            self._place(worker, ready, self._attempt.assignment, worker.local_rank)
        self._settle()

    def on_last_step(self, line: Line, message: LastStepTaken) -> None:
        """A process says that all of its round have taken the last step: what it still does needs no peer."""
        worker = self._by_line.get(line)
        if worker is None or not isinstance(worker.state, InRound) or worker.state.round != message.round:
            return
        self._took_its_last_step(worker, worker.state)
        if message.round > self._last_step_told:
            self._last_step_told = message.round
            self._send(message)

    def on_close(self, line: Line) -> None:
        """A process hung up. In a round: it took its last step. Else it cannot be told of its place, and is killed."""
        worker = self._by_line.pop(line, None)
        if worker is None:
            return
        if isinstance(worker.state, InRound):
            self._took_its_last_step(worker, worker.state)
        elif isinstance(worker.state, Ready):
            self._kill(worker)

    def stop(self) -> None:
        """Wait for nothing any more."""
        for worker in self._workers:
            worker.call_off()
        self._attempt, self._workers, self._current, self._waited_in_vain = None, [], None, False
        self._failed_after_last_step = False
        self._join = self._changed = None
        self._unheard.clear()
        self._by_line.clear()

    # starting and ending ----------------------------------------------------------------------------------------------

    def _begin(self, attempt: Attempt) -> None:
        """Processes were started, for a round or ahead of any, or had been when this node learned that they stay."""
        self.stop()
        if attempt.is_stopped:
            return  # they could not be started; that was told as their end
        self._attempt = attempt
        self._current = attempt.round or None
        self._workers = [
            Worker(rank, Starting(attempt.round) if attempt.runs(rank) else Ended()) for rank in attempt.names
        ]
        if self._current is None:
            for worker in self._workers:
                worker.within(self._ready_within, self._never_ready)

    def _failed(self, worker: Worker, failures: list[WorkerFailure]) -> None:
        was = worker.state
        worker.on(Event.FAILED, Failed())
        self._forget_lines(worker)
        placed = NO_ROUND
        if isinstance(was, InRound | Detached):
            placed = was.round
        elif isinstance(was, Starting) and was.expected_in == self._current:
            placed = was.expected_in
        had_place = isinstance(was, InRound | Detached)
        self._failed_after_last_step |= isinstance(was, Finishing | Detached)
        member = placed != NO_ROUND or (isinstance(was, Ready) and self._join is not None)
        left = len(self._in(Ready)) + len(self._in_round())
        for failure in failures:
            failed = WorkerFailed(round=self.newest, failure=failure, member=member, left=left, placed=placed)
            self._unheard.append(failed)
            self._send(failed)
        self._launcher.restarts.count(placed)
        if isinstance(was, Ready):
            self._join = self._changed = None
        if member:
            self._break_off("a process of this node failed")
        worker.unplaced_failures = 0 if had_place else worker.unplaced_failures + 1
        self._start_again(worker)
        self._settle()

    def _start_again(self, worker: Worker) -> None:
        """Replace a process: at once, unless it keeps failing, or the master is about to end the job for it."""
        delay = BACKOFF.after(worker.unplaced_failures - 1)
        if self._launcher.restarts.is_spent:
            log.warning("local rank %d failed, and no restart is left (--max-restarts)", worker.local_rank)
            delay = max(delay, VERDICT * self._leave_within)
        elif delay:
            log.warning(
                "local rank %d failed %d times before it was ready; next try in %g s",
                worker.local_rank,
                worker.unplaced_failures,
                delay,
            )
        if delay:
            worker.within(delay, self._replace)
        else:
            self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        worker.on(Event.START, Starting())
        worker.within(self._ready_within, self._never_ready)
        try:
            self._launcher.replace(worker.local_rank)
        except CannotStart as error:
            log.error("%s", error)
            worker.on(Event.FAILED, Failed())
            worker.within(BACKOFF.limit, self._replace)

    def _ended_well(self) -> None:
        attempt = self._attempt
        if attempt is None or self._in_round() or self._in(Detached):
            return
        if self._current is None:
            last = max((ended.last_step_in for _, ended in self._in(Ended)), default=NO_ROUND)
            members = any(ready.was_member for _, ready in self._in(Ready))
            if last and last == self.newest and not self._failed_after_last_step and not members:
                self._finish(attempt, last)  # the round was ended for a newcomer after its last step was taken
            else:
                self._settle()  # it was the last to leave its round; others may be ready for the next
        elif not any(starting.expected_in == self._current for _, starting in self._in(Starting)):
            self._finish(attempt, self._current)  # else one that has a place is on its way

    def _finish(self, attempt: Attempt, round_: Round) -> None:
        """A round is done: processes that were started ahead of the next one are not needed."""
        attempt.failures.clear()
        for worker, _ in [*self._in(Starting), *self._in(Ready)]:
            worker.on(Event.DISMISSED, Dismissed())
            attempt.dismiss(worker.local_rank)
        for worker, _ in self._in(Failed):
            worker.on(Event.DISMISSED, Ended())
        if not attempt.is_running:
            log.info("all training processes of this node ended well")
            self._send(NodeFinished(round=round_))

    def _kill(self, worker: Worker) -> None:
        if self._attempt is not None:
            self._attempt.kill_one(worker.local_rank)

    # rounds -----------------------------------------------------------------------------------------------------------

    def _in(self, kind: type[S]) -> list[tuple[Worker, S]]:
        return [(worker, worker.state) for worker in self._workers if isinstance(worker.state, kind)]

    def _in_round(self) -> list[Worker]:
        return [worker for worker in self._workers if isinstance(worker.state, InRound)]

    def _forget_lines(self, worker: Worker) -> None:
        self._by_line = {line: other for line, other in self._by_line.items() if other is not worker}

    def _place(self, worker: Worker, ready: Ready, assignment: RoundAssignment, number: int) -> None:
        worker.on(Event.PLACED, Member(ready.line, self.newest))
        worker.unplaced_failures = 0
        ready.line.send(
            WorkerAssignment(
                round=self.newest,
                rank=assignment.first_rank + number,
                world_size=assignment.world_size,
                local_rank=worker.local_rank,
                local_world_size=assignment.nproc or len(self._workers),
                group_rank=assignment.group_rank,
                group_world_size=assignment.group_world_size,
                master_addr=assignment.master_addr,
                master_port=assignment.master_port,
                verdict=VERDICT * self._leave_within,
            )
        )

    def _break_off(self, because: str) -> None:
        """Tell every process that is in a round to leave it."""
        self._current = None
        for worker, member in self._in(Member):
            member.line.send(RoundOver(round=self.newest, because=because))
            self._leave(worker, Event.ROUND_OVER, member)

    def _leave(self, worker: Worker, event: Event, state: Member | Stuck) -> None:
        worker.on(event, Leaving(state.line, state.round))
        worker.within(self._leave_within, self._never_left)

    def _settle(self) -> None:
        """Join with the processes that are ready, or say that there are more than the round has places for."""
        if not self._stays:
            return
        ready = [state for _, state in self._in(Ready)]
        complete = not self._in(Starting) or self._waited_in_vain
        if self._current is not None:
            if ready and complete and self._changed is None and not self._took_the_last_step():
                self._tell_change(len(ready) + len(self._in_round()))
            return
        members = any(state.was_member for state in ready)
        if not ready or self._in_round() or not (complete or members):
            return
        if self._took_the_last_step() and not members and not self._failed_after_last_step:
            return
        if self._join is None or self._join.nproc != len(ready) or self._join.after != self.newest:
            holds = max(state.agreed for state in ready)
            self._join = Join(after=self.newest, port=free_port(), nproc=len(ready), elastic=True, holds=holds)
            self._send(self._join)

    def _took_the_last_step(self) -> bool:
        """Whether the processes of this node that were in the newest round, and have not ended, took its last step.

        A newcomer waits then: to be let go when they end, or to meet them in another loop of the script. In a round of
        its own it would have no state, and train all over again.
        """
        workers = self._of_newest_round()
        return bool(workers) and all(isinstance(worker.state, Finishing | Detached) for worker in workers)

    def _of_newest_round(self) -> list[Worker]:
        """Those in the newest round, or busy with something else after its last step."""
        return [
            worker
            for worker in self._workers
            if isinstance(worker.state, InRound | Detached) and worker.state.round == self.newest
        ]

    def _took_its_last_step(self, worker: Worker, state: InRound) -> None:
        """It may store a checkpoint now, evaluate, end or get ready again: it is not made to leave its round."""
        worker.on(Event.LAST_STEP, Finishing(state.round))
        worker.within(self._leave_within, self._detach)

    def _tell_change(self, nproc: int) -> None:
        self._changed = WorkersChanged(round=self.newest, nproc=nproc)
        self._send(self._changed)

    # deadlines --------------------------------------------------------------------------------------------------------

    def _never_ready(self, worker: Worker) -> None:
        log.error("local rank %d did not get ready within %g s: killing it", worker.local_rank, self._ready_within)
        self._waited_in_vain = True
        self._kill(worker)
        self._settle()

    def _detach(self, worker: Worker) -> None:
        """It took its last step, and neither ended nor got ready again: its siblings wait no longer."""
        if isinstance(worker.state, Finishing):
            worker.on(Event.DETACHED, Detached(worker.state.round))
            self._settle()

    def _never_left(self, worker: Worker) -> None:
        state = worker.state
        if isinstance(state, Leaving) and not any(ready.has_state for _, ready in self._in(Ready)):
            worker.on(Event.OVERDUE, Stuck(state.line, state.round))
            log.warning(
                "local rank %d did not leave its round within %g s (--recovery-budget): waiting %g s more for the end "
                "of its step, unless another node has the state of the training: no other process of this one has",
                worker.local_rank,
                self._leave_within,
                STAY * self._leave_within,
            )
            worker.within(STAY * self._leave_within, self._never_left)
            self._send(WorkerStuck(round=state.round))
            return
        log.error(
            "local rank %d did not leave its round within %g s (--recovery-budget): killing it",
            worker.local_rank,
            self._leave_within * (1 + STAY if isinstance(state, Stuck) else 1),
        )
        self._kill(worker)

    def _state_found(self) -> None:
        """A process that has the state has left its round: those that are still in theirs have the usual time."""
        for worker, stuck in self._in(Stuck):
            self._leave(worker, Event.STATE_FOUND, stuck)
