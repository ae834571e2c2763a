"""Workers that stay: the processes of an elastic node live from round to round.

When a round is over, its processes leave it and say that they are ready; the node then joins with all that are. A
process that failed is replaced at once, without waiting for a round: its siblings train on without it, and a new round
takes the new process in when it is ready. `hung_workers` kills processes that do not leave their round or never get
ready. `worker_states` lists the states of one process.

While there is no such process (none was started yet, all have ended, or none could be started), the node does what a
node with restarting workers does, except that it starts its processes before it asks for a round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from resile.agent.workers.attempt import Attempt
from resile.agent.workers.base import Line, Standing
from resile.agent.workers.hung_workers import HungWorkers
from resile.agent.workers.launcher import WorkerLauncher
from resile.agent.workers.ports import free_port
from resile.agent.workers.restarting_workers import RestartingWorkers
from resile.agent.workers.worker_group import CannotStart
from resile.agent.workers.worker_states import (
    Completing,
    Detached,
    Dismissed,
    Ended,
    Event,
    Failed,
    Finishing,
    InRound,
    Member,
    Ready,
    Starting,
    Stuck,
    Worker,
    WorkerList,
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
from resile.protocol.master_to_agent import RoundComplete, RoundOver
from resile.protocol.message import Message
from resile.protocol.reports import RoundAssignment, WorkerFailure
from resile.protocol.worker_to_agent import WorkerAssignment, WorkerReady

log = logging.getLogger("resile.agent")

VERDICT = 0.3
"""Fraction of the recovery budget within which the master ends a round, if it does: it learns at once that a
process ended, and notices a silent node after a fifth of the budget."""
BACKOFF = Backoff(first=1.0, limit=30.0)
"""Pauses before new starts of a local rank whose processes keep failing before they are members of a round."""


class ElasticWorkers:
    """The workers of a node whose processes survive a change of rounds. Implements `Workers`."""

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
        """Take over the processes of `before`. From now on, they live on when a round ends.

        `rescue` is called when a node is lost, and begins to store what the processes have saved. A process has
        `leave_within` seconds to leave a round that is over, and `ready_within` seconds to get ready.
        """
        self._restarting = before
        self._send = send
        self._launcher = launcher
        self._rescue = rescue
        self._verdict_within = VERDICT * leave_within
        self._attempt: Attempt | None = None
        self._workers = WorkerList()
        self._hung = HungWorkers(
            self._workers,
            kill=self._kill,
            send=send,
            go_on=self._settle,
            leave_within=leave_within,
            ready_within=ready_within,
        )
        self._by_line: dict[Line, Worker] = {}
        self._current: Round | None = None
        """The round that this node is in; None once it is over."""
        self._join: Join | None = None
        """The node's request for a round, until the master answers."""
        self._changed: WorkersChanged | None = None
        """What the node reported about its workers in the newest round, until the master ends that round."""
        self._unheard: list[WorkerFailed] = []
        """Failures to report again if the master restarts."""
        self._last_step_told: Round = NO_ROUND
        """The newest round whose last step was reported to the master."""
        self._complete: Round = NO_ROUND
        """The newest round of which the master has noted that all members took the last step."""
        self._failed_after_last_step = False
        """True if a process of the newest round failed after its last step, so the script is tried again."""
        if launcher.attempt is not None and launcher.attempt.is_sound:
            self._begin(launcher.attempt)

    # what the agent asks ----------------------------------------------------------------------------------------------

    @property
    def newest(self) -> Round:
        return self._restarting.newest

    @newest.setter
    def newest(self, round_: Round) -> None:
        self._restarting.newest = round_

    @property
    def is_training(self) -> bool:
        return self._current is not None if self._stays else self._restarting.is_training

    def standing(self) -> Standing:
        if self._stays:
            return Standing(running=self._current is not None, finished=False, elastic=True)
        return self._restarting.standing()._replace(elastic=True)

    def is_news(self, over: Round) -> bool:
        # A node whose processes stay may have asked for the next round before it hears that this one is over.
        return over >= self.newest if self._stays else self._restarting.is_news(over)

    @property
    def _stays(self) -> bool:
        """True if there are processes that live on when a round ends."""
        return self._attempt is not None and not self._attempt.is_stopped and not self._attempt.has_finished

    # what the master says ---------------------------------------------------------------------------------------------

    def on_welcome(self) -> None:
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
        if self._last_step_told == self.newest and self._workers.last_in(self.newest):
            self._send(LastStepTaken(round=self._last_step_told))
        for _, stuck in self._workers.in_state(Stuck):
            self._send(WorkerStuck(round=stuck.round))

    def on_round_formed(self, round_: Round, assignment: RoundAssignment) -> None:
        if not self._stays:
            self._restarting.on_round_formed(round_, assignment)
            return
        self.newest, self._join, self._changed = round_, None, None
        self._hung.reset()
        self._failed_after_last_step = False
        self._unheard.clear()
        ready, in_round = self._workers.in_state(Ready), self._workers.in_round()
        if len(ready) == assignment.nproc and not in_round and self._attempt is not None:
            self._current = round_
            self._attempt.enter(round_, assignment, [worker.local_rank for worker, _ in ready])
            self._launcher.entered_round()
            for number, (worker, state) in enumerate(ready):
                self._place(worker, state, assignment, number)
        elif not ready or in_round:  # this node cannot join at once, so other nodes must not wait for it
            self._tell_change(0)
        self._settle()

    def on_round_over(self, over: RoundOver) -> None:
        if not self._stays:
            self._restarting.on_round_over(over)
            return
        self.newest, self._join, self._changed = over.round, None, None
        self._break_off(over.because)
        self._hung.expect_all_ready()
        self._settle()
        if over.lost:
            self._rescue()

    def on_round_complete(self, round_: Round) -> None:
        self._complete = round_
        for _, member in self._workers.in_state(Member):
            if member.round == round_:  # it will not wait for a lost peer in vain to hear the same
                member.line.send(RoundComplete(round=round_))
        self._let_finish()

    def on_state_held(self, round_: Round) -> None:
        self._hung.on_state_held(round_)

    # what happens to processes ----------------------------------------------------------------------------------------

    def on_stopped(self, following: tuple[Round, RoundAssignment] | None) -> None:
        attempt = self._launcher.attempt
        if following is None and attempt is not None and attempt.failures:
            self._restarting.on_stopped(None)
        else:
            self._begin(self._launcher.start(*following) if following is not None else self._launcher.start_ahead())

    def on_end(self, local_rank: int | None, failures: list[WorkerFailure]) -> None:
        if local_rank is None or not self._stays:
            self.stop()
            self._restarting.on_end(local_rank, failures)
        elif failures:
            self._failed(self._workers[local_rank], failures)
        else:
            worker = self._workers[local_rank]
            worker.on(Event.ENDED, Ended(self._last_step_of(worker)))
            self._forget_lines(worker)
            self._ended_well()

    def on_ready(self, line: Line, message: WorkerReady) -> None:
        names = self._attempt.names if self._attempt is not None and self._stays else {}
        worker = next((each for each in self._workers if names.get(each.local_rank) == message.worker), None)
        if worker is None or isinstance(worker.state, Failed | Dismissed | Ended):
            line.close(f"no process '{message.worker}' runs here")
            return
        was = worker.state
        was_in_round = isinstance(was, InRound | Detached)
        was_member = was_in_round or (isinstance(was, Ready) and was.was_member)
        ready = Ready(line, was_member=was_member, has_state=message.step > 0, holds=message.holds)
        worker.on(Event.READY, ready)
        self._forget_lines(worker)
        self._by_line[line] = worker
        if ready.has_state:
            self._hung.on_state_found()
        if was_in_round and self._current is not None:
            self._break_off("a process of this node lost touch with its peers")
        elif isinstance(was, Starting) and was.expected_in == self._current and self._attempt is not None:
            self._place(worker, ready, self._attempt.assignment, worker.local_rank)
        self._settle()

    def on_last_step(self, line: Line, message: LastStepTaken) -> None:
        """Report that all ranks took the last step. Does nothing if the process knows that the round is over."""
        worker = self._by_line.get(line)
        if worker is None or not isinstance(worker.state, Member) or worker.state.round != message.round:
            return
        worker.on(Event.LAST_STEP, Completing(line, message.round))
        if message.round == self._complete:
            self._let_finish()
        elif message.round > self._last_step_told:
            self._last_step_told = message.round
            self._send(message)

    def on_close(self, line: Line) -> None:
        """Handle that a process closed its connection to the agent.

        If the process is in a round, it counts as having taken its last step. If it waits for a round, it is killed.
        """
        worker = self._by_line.pop(line, None)
        if worker is None:
            return
        if isinstance(worker.state, InRound):
            self._hung.let_finish(worker, Event.CLOSED, worker.state)
        elif isinstance(worker.state, Ready):
            self._kill(worker)

    def stop(self) -> None:
        for worker in self._workers:
            worker.cancel_deadline()
        self._workers.clear()
        self._attempt = self._current = None
        self._hung.reset()
        self._failed_after_last_step = False
        self._join = self._changed = None
        self._unheard.clear()
        self._by_line.clear()

    def _let_finish(self) -> None:
        """Answer the processes that ask whether their round is complete, if it is."""
        for worker, asking in self._workers.in_state(Completing):
            if asking.round == self._complete:
                asking.line.send(RoundComplete(round=asking.round))
                self._hung.let_finish(worker, Event.COMPLETE, asking)

    def _last_step_of(self, worker: Worker) -> Round:
        """The round in which a worker that ends well took the last step; NO_ROUND if it took none."""
        state = worker.state
        if isinstance(state, Completing | Finishing | Detached):
            return state.round
        if isinstance(state, InRound) and state.round == self._last_step_told:
            return state.round  # it had asked, and ended when its round was over
        return NO_ROUND

    # starting and ending ----------------------------------------------------------------------------------------------

    def _begin(self, attempt: Attempt) -> None:
        self.stop()
        if attempt.is_stopped:
            return  # they could not be started; `on_end` was called for that
        self._attempt = attempt
        self._current = attempt.round or None
        self._workers += [
            Worker(rank, Starting(attempt.round) if attempt.runs(rank) else Ended()) for rank in attempt.names
        ]
        if self._current is None:
            self._hung.expect_all_ready()

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
        self._failed_after_last_step |= isinstance(was, Completing | Finishing | Detached)
        member = placed != NO_ROUND or (isinstance(was, Ready) and self._join is not None)
        left = len(self._workers.in_state(Ready)) + len(self._workers.in_round())
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
        self._start_again(worker, permanent=any(failure.permanent for failure in failures))
        self._settle()

    def _start_again(self, worker: Worker, *, permanent: bool) -> None:
        """Replace a failed process, after a pause if it keeps failing before it is in a round.

        There is also a pause if the failure is `permanent` or no restart is left, because the master may end the job
        then.
        """
        delay = BACKOFF.after(worker.unplaced_failures - 1)
        if self._launcher.restarts.is_spent:
            log.warning("local rank %d failed, and no restart is left (--max-restarts)", worker.local_rank)
            delay = max(delay, self._verdict_within)
        elif permanent:
            delay = max(delay, self._verdict_within)
        elif delay:
            log.warning(
                "local rank %d failed %d times before it was ready; next try in %g s",
                worker.local_rank,
                worker.unplaced_failures,
                delay,
            )
        if delay:
            worker.set_deadline(delay, self._replace)
        else:
            self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        worker.on(Event.START, Starting())
        self._hung.expect_ready(worker)
        try:
            self._launcher.replace(worker.local_rank)
        except CannotStart as error:
            log.error("%s", error)
            worker.on(Event.FAILED, Failed())
            worker.set_deadline(BACKOFF.limit, self._replace)

    def _ended_well(self) -> None:
        attempt = self._attempt
        if attempt is None or self._workers.in_round() or self._workers.in_state(Detached):
            return
        if self._current is None:
            last = max((ended.last_step_in for _, ended in self._workers.in_state(Ended)), default=NO_ROUND)
            members = any(ready.was_member for _, ready in self._workers.in_state(Ready))
            if last and last == self.newest and not self._failed_after_last_step and not members:
                self._finish(attempt, last)  # the round was ended for a newcomer after its last step
            else:
                self._settle()  # this process was the last to leave its round; siblings may be ready for the next
        elif not any(starting.expected_in == self._current for _, starting in self._workers.in_state(Starting)):
            self._finish(attempt, self._current)  # else a process that belongs to the round is still starting

    def _finish(self, attempt: Attempt, round_: Round) -> None:
        """End the processes that start or wait for another round, because the training is done.

        If no process is left, report to the master that this node has finished in `round_`.
        """
        attempt.failures.clear()
        for worker, _ in [*self._workers.in_state(Starting), *self._workers.in_state(Ready)]:
            worker.on(Event.DISMISSED, Dismissed())
            attempt.dismiss(worker.local_rank)
        for worker, _ in self._workers.in_state(Failed):
            worker.on(Event.DISMISSED, Ended())
        if not attempt.is_running:
            log.info("all training processes of this node ended well")
            self._send(NodeFinished(round=round_))

    def _kill(self, worker: Worker) -> None:
        if self._attempt is not None:
            self._attempt.kill_one(worker.local_rank)

    # rounds -----------------------------------------------------------------------------------------------------------

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
                verdict_within=self._verdict_within,
            )
        )

    def _break_off(self, because: str) -> None:
        self._current = None
        members: list[tuple[Worker, Member | Completing]] = [*self._workers.in_state(Member)]
        members += self._workers.in_state(Completing)
        for worker, member in members:
            member.line.send(RoundOver(round=self.newest, because=because))
            self._hung.expect_to_leave(worker, Event.ROUND_OVER, member)

    def _settle(self) -> None:
        """Ask for a round for the processes that are ready. If a round is running, report that they are ready."""
        if not self._stays:
            return
        ready = [state for _, state in self._workers.in_state(Ready)]
        complete = not self._workers.in_state(Starting) or self._hung.some_never_got_ready
        if self._current is not None:
            if ready and complete and self._changed is None and not self._workers.all_took_last_step(self.newest):
                self._tell_change(len(ready) + len(self._workers.in_round()))
            return
        members = any(state.was_member for state in ready)
        if not ready or self._workers.in_round() or not (complete or members):
            return
        if self._workers.all_took_last_step(self.newest) and not members and not self._failed_after_last_step:
            return
        if self._join is None or self._join.nproc != len(ready) or self._join.after != self.newest:
            holds = max(state.holds for state in ready)
            self._join = Join(after=self.newest, store_port=free_port(), nproc=len(ready), elastic=True, holds=holds)
            self._send(self._join)

    def _tell_change(self, nproc: int) -> None:
        self._changed = WorkersChanged(round=self.newest, nproc=nproc)
        self._send(self._changed)
