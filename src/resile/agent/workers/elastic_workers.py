"""The processes of an elastic node, from round to round: who can meet, who is in a round, who has to leave it.

A seat is a local rank and the process that fills it now. When a round is over its processes are told to break off and
say Ready; the node then joins with as many as it has. A process that failed is replaced at once, ahead of any round:
its siblings go on without it, and when the new one is ready a new round takes it in. Every wait has an end: a process
that does not leave its round, or is started and never gets ready, is killed and counts as failed. One that may be the
last to have the state is waited for longer, unless the master says that another node has it.

This decides and speaks for the elastic part of an agent and starts nothing itself; a script that never says Ready never
gets here, and is treated as under torchrun.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from typing import Protocol

from resile.agent.workers.attempt import Attempt
from resile.agent.workers.ports import free_port
from resile.agent.workers.workers import CannotStart
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
"""Times the usual wait for a process to leave its round: as long as nobody else is known to have the state, its step
may be a long one, and killing it would lose the state."""


class Line(Protocol):
    """A process's connection."""

    def send(self, message: Message, /) -> None:
        """Say something."""

    def close(self, because: str = "", /) -> None:
        """Hang up."""


class Phase(enum.Enum):
    """What the process of a seat is doing."""

    STARTING = "starting"
    READY = "ready"
    PLACED = "placed"
    LEFT = "left"
    """It took the last step long ago, and its script has something else to do: nobody waits for it."""
    DOWN = "down"


class ElasticWorker:
    """One local rank and its process."""

    def __init__(self, local_rank: int) -> None:
        self.local_rank = local_rank
        self.phase = Phase.STARTING
        self.line: Line | None = None
        self.due: Round = NO_ROUND
        """The round it was started for, which keeps a place for it."""
        self.veteran = False
        """It has been in a round."""
        self.round: Round = NO_ROUND
        """The last one it was in."""
        self.done = False
        """It took the last step of the training there, as everybody in that round did."""
        self.holds = False
        """It is ready, and has the outcome of training."""
        self.agreed: Round = NO_ROUND
        """The newest round in which it came to one state with all members; known when it is ready."""
        self.spared = False
        """It did not leave its round in time, and is waited for since it may be the last that has the state."""
        self.unplaced = 0
        """Processes in a row that failed here before they had a place."""
        self.timer: asyncio.TimerHandle | None = None

    def wait(self, seconds: float, then: Callable[[ElasticWorker], None]) -> None:
        """Call `then` unless something happens first."""
        self.calm()
        self.timer = asyncio.get_running_loop().call_later(seconds, then, self)

    def calm(self) -> None:
        """Call the deadline off."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class ElasticWorkers:
    """All seats of one node."""

    def __init__(
        self,
        *,
        send: Callable[[Message], None],
        replace: Callable[[int], None],
        met: Callable[[], None],
        desert: Callable[[], None],
        leave_within: float,
        ready_within: float,
    ) -> None:
        """Nothing is here before `begin`.

        Args:
            send: speaks to the master.
            replace: starts a process for a seat; raises CannotStart.
            met: called when processes are about to be given their places in a new round.
            desert: called when all processes are gone and none of them had finished a round.
            leave_within: seconds that a process has to leave a round that is over: it may be in the middle of a step.
                The recovery budget.
            ready_within: seconds that a process started ahead has to get ready.
        """
        self._send = send
        self._replace = replace
        self._met = met
        self._desert = desert
        self._leave_within = leave_within
        self._ready_within = ready_within
        self._attempt: Attempt | None = None
        self._seats: list[ElasticWorker] = []
        self._lines: dict[Line, ElasticWorker] = {}
        self._newest: Round = NO_ROUND
        self._current: Round | None = None
        """The round that this node is in, as long as it is not over."""
        self._join: Join | None = None
        """Said, and not answered yet."""
        self._changed: WorkersChanged | None = None
        """Said of the newest round, and not answered by its end yet."""
        self._unheard: list[WorkerFailed] = []
        """What a master that comes back may not have heard."""
        self._late = False
        """Somebody was waited for in vain; those that are ready wait no longer."""
        self._complete: Round = NO_ROUND
        """The newest round of which processes here have said that its last step is taken."""
        self._failed_late = False
        """The script failed after its last step in the newest round: that is tried again, as any other failure."""
        self.elastic = False
        """Whether the script's processes stay from round to round."""

    # what the agent asks ----------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether these processes are here to stay: a round's end does not end them."""
        attempt = self._attempt
        return self.elastic and attempt is not None and not attempt.stopped and not attempt.finished

    @property
    def in_round(self) -> bool:
        """Whether this node is a member of a round that is not over."""
        return self._current is not None

    # what the agent tells ---------------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt, *, ahead: bool) -> None:
        """Processes were started: for a round, or ahead of any."""
        self.clear()
        self._attempt = attempt
        self._newest = max(self._newest, attempt.round)
        self._current = None if ahead else attempt.round
        self._seats = [ElasticWorker(local_rank) for local_rank in attempt.names]
        for seat in self._seats:
            seat.due = attempt.round
            if ahead:
                self.elastic = True
                seat.wait(self._ready_within, self._never_ready)

    def clear(self) -> None:
        """Forget all processes; they are stopped, or will be."""
        for seat in self._seats:
            seat.calm()
        self._attempt, self._seats, self._current, self._late = None, [], None, False
        self._failed_late = False
        self._join = self._changed = None
        self._unheard.clear()
        self._lines.clear()

    def formed(self, round_: Round, place: RoundAssignment) -> None:
        """The master formed a round with this node: let the processes meet, if they are as many as it thinks."""
        self._newest, self._join, self._changed, self._late = round_, None, None, False
        self._failed_late = False
        self._unheard.clear()
        ready = self._in(Phase.READY)
        if len(ready) == place.nproc and not self._in(Phase.PLACED) and self._attempt is not None:
            self._current = round_
            self._attempt.enter(round_, place, [seat.local_rank for seat in ready])
            self._met()
            for number, seat in enumerate(ready):
                self._place(seat, place, number)
        elif not ready or self._in(Phase.PLACED):  # it cannot join at once, so its peers are not to wait for it
            self._change(0)
        self._settle()

    def over(self, round_: Round, because: str) -> None:
        """A round is over: all processes leave it."""
        self._newest, self._join, self._changed = max(self._newest, round_), None, None
        self._break_off(because)
        for seat in self._in(Phase.STARTING):
            if seat.timer is None:
                seat.wait(self._ready_within, self._never_ready)
        self._settle()

    def held(self, round_: Round) -> None:
        """Another node has the state of a round: no process that stays in it is the last one."""
        for seat in self._in(Phase.PLACED):
            if seat.spared and seat.round <= round_:
                log.error(
                    "local rank %d did not leave its round within %g s (--recovery-budget), and another node has the "
                    "state of the training: killing it",
                    seat.local_rank,
                    self._leave_within,
                )
                self._kill(seat)

    def welcomed(self) -> None:
        """A master has just greeted us: say again what the last one may not have heard."""
        if self.elastic:
            self._send(CanRegroup())
        for failed in self._unheard:
            self._send(failed)
        if self._join is not None:
            self._send(self._join)
        elif self._changed is not None:
            self._send(self._changed)
        if self._complete == self._newest and self._members():
            self._send(LastStepTaken(round=self._complete))
        for seat in self._in(Phase.PLACED):
            if seat.spared:
                self._send(WorkerStuck(round=seat.round))

    def ended(self, local_rank: int, failures: list[WorkerFailure]) -> None:
        """A process ended: badly if there are failures."""
        seat = self._seats[local_rank]
        was, seat.phase, seat.line, seat.holds = seat.phase, Phase.DOWN, None, False
        seat.calm()
        expected = was is Phase.STARTING and self._current is not None and seat.due == self._current
        if not failures:
            self._ended_well()
            return
        self._failed_late = self._failed_late or seat.done
        met = was in (Phase.PLACED, Phase.LEFT)
        member = met or expected or (was is Phase.READY and self._join is not None)
        left = len(self._in(Phase.READY)) + len(self._in(Phase.PLACED))
        placed = seat.round if met else seat.due if expected else NO_ROUND
        for failure in failures:
            failed = WorkerFailed(round=self._newest, failure=failure, member=member, left=left, placed=placed)
            self._unheard.append(failed)
            self._send(failed)
        if was is Phase.READY:
            self._join = self._changed = None
        if member:
            self._break_off("a process of this node failed")
        seat.unplaced = 0 if met else seat.unplaced + 1
        delay = BACKOFF.after(seat.unplaced - 1)
        if delay:
            log.warning(
                "local rank %d failed %d times before it was ready; next try in %g s", local_rank, seat.unplaced, delay
            )
            seat.wait(delay, self._refill)
        else:
            self._refill(seat)
        self._settle()

    # what processes say -----------------------------------------------------------------------------------------------

    def on_ready(self, line: Line, message: WorkerReady) -> None:
        """A process is in no round and can meet."""
        names = self._attempt.names if self._attempt is not None and not self._attempt.stopped else {}
        seat = next((s for s in self._seats if names.get(s.local_rank) == message.worker), None)
        if seat is None or seat.phase is Phase.DOWN:
            line.close(f"no process '{message.worker}' runs here")
            return
        if not self.elastic:
            self.elastic = True
            self._send(CanRegroup())
        was, seat.phase, seat.line = seat.phase, Phase.READY, line
        self._lines[line] = seat
        seat.holds, seat.spared, seat.done = message.step > 0, False, False
        seat.agreed = message.agreed
        seat.calm()
        if seat.holds:
            self._spare_no_longer()
        if was in (Phase.PLACED, Phase.LEFT) and self._current is not None:
            self._break_off("a process of this node lost touch with its peers")
        elif self._current is not None and seat.due == self._current and self._attempt is not None:
            self._place(seat, self._attempt.place, seat.local_rank)
        self._settle()

    def on_complete(self, line: Line, message: LastStepTaken) -> None:
        """A process says that all of its round have taken the last step: what it still does needs no peer."""
        seat = self._lines.get(line)
        if seat is None or seat.phase is not Phase.PLACED or seat.round != message.round:
            return
        self._took_its_last_step(seat)
        if message.round > self._complete:
            self._complete = message.round
            self._send(message)

    def on_close(self, line: Line) -> None:
        """A process hung up. In a round: it took its last step. Else nobody could tell it of its place, and it goes."""
        seat = self._lines.pop(line, None)
        if seat is None or seat.line is not line:
            return
        seat.line = None
        if seat.phase is Phase.PLACED:
            self._took_its_last_step(seat)
        elif seat.phase is Phase.READY:
            seat.calm()
            self._kill(seat)

    # inside -----------------------------------------------------------------------------------------------------------

    def _in(self, phase: Phase) -> list[ElasticWorker]:
        return [seat for seat in self._seats if seat.phase is phase]

    def _place(self, seat: ElasticWorker, place: RoundAssignment, number: int) -> None:
        assert seat.line is not None
        seat.phase, seat.veteran, seat.holds, seat.unplaced, seat.due = Phase.PLACED, True, False, 0, NO_ROUND
        seat.round, seat.done = self._newest, False
        seat.line.send(
            WorkerAssignment(
                round=self._newest,
                rank=place.first_rank + number,
                world_size=place.world_size,
                local_rank=seat.local_rank,
                local_world_size=place.nproc or len(self._seats),
                group_rank=place.group_rank,
                group_world_size=place.group_world_size,
                master_addr=place.master_addr,
                master_port=place.master_port,
                verdict=VERDICT * self._leave_within,
            )
        )

    def _break_off(self, because: str) -> None:
        """Tell every process that is in a round to leave it."""
        self._current = None
        for seat in self._in(Phase.PLACED):
            if seat.line is not None and seat.timer is None:
                seat.line.send(RoundOver(round=self._newest, because=because))
                seat.wait(self._leave_within, self._never_left)

    def _settle(self) -> None:
        """Join with the processes that are ready, or say that there are more than the round has places for."""
        if not self.active:
            return
        ready, starting = self._in(Phase.READY), self._in(Phase.STARTING)
        complete = not starting or self._late
        if self._current is not None:
            if ready and complete and self._changed is None and not self._took_the_last_step():
                self._change(len(ready) + len(self._in(Phase.PLACED)))
            return
        veterans = any(seat.veteran for seat in ready)
        if not ready or self._in(Phase.PLACED) or not (complete or veterans):
            return
        if self._took_the_last_step() and not veterans and not self._failed_late:
            return
        if self._join is None or self._join.nproc != len(ready) or self._join.after != self._newest:
            holds = max(seat.agreed for seat in ready)
            self._join = Join(after=self._newest, port=free_port(), nproc=len(ready), elastic=True, holds=holds)
            self._send(self._join)

    def _took_the_last_step(self) -> bool:
        """Whether those of this node that were in the newest round, and have not ended, took its last step.

        A newcomer waits then: to be let go when they end, or to meet them in another loop of the script. In a round of
        its own it would have nobody's state, and train all over again.
        """
        members = self._members()
        return bool(members) and all(seat.done for seat in members)

    def _members(self) -> list[ElasticWorker]:
        """Those in the newest round, or busy with something else after its last step."""
        return [s for s in self._seats if s.phase in (Phase.PLACED, Phase.LEFT) and s.round == self._newest]

    def _took_its_last_step(self, seat: ElasticWorker) -> None:
        """It may store a checkpoint now, evaluate, end or call again: nobody makes it leave its round."""
        seat.done, seat.spared = True, False
        seat.wait(self._leave_within, self._leave_alone)

    def _change(self, nproc: int) -> None:
        self._changed = WorkersChanged(round=self._newest, nproc=nproc)
        self._send(self._changed)

    def _ended_well(self) -> None:
        attempt = self._attempt
        if attempt is None or self._in(Phase.PLACED) or self._in(Phase.LEFT):
            return
        if self._current is None:
            last = max((seat.round for seat in self._seats if seat.done), default=NO_ROUND)
            veterans = any(seat.veteran for seat in self._in(Phase.READY))
            if not attempt.running and not attempt.failures:
                self._tell_finished(last) if last else self._desert()
            elif last and last == self._newest and not self._failed_late and not veterans:
                self._finish(attempt, last)  # the round was ended for a newcomer after its last step was taken
            else:
                self._settle()  # it was the last to leave its round; others may be ready for the next
        elif not any(seat.phase is Phase.STARTING and seat.due == self._current for seat in self._seats):
            self._finish(attempt, self._current)  # else one that has a place is on its way

    def _finish(self, attempt: Attempt, round_: Round) -> None:
        """A round is done: whoever was started ahead of the next one is not needed."""
        attempt.failures.clear()
        for seat in self._seats:
            seat.calm()
            if seat.phase is not Phase.DOWN:
                seat.phase = Phase.DOWN
                attempt.dismiss(seat.local_rank)
        if not attempt.running:
            self._tell_finished(round_)

    def _tell_finished(self, round_: Round) -> None:
        log.info("all training processes of this node ended well")
        self._send(NodeFinished(round=round_))

    def _refill(self, seat: ElasticWorker) -> None:
        if self._attempt is None or self._attempt.stopped:
            return
        seat.phase, seat.veteran, seat.done, seat.due = Phase.STARTING, False, False, NO_ROUND
        seat.wait(self._ready_within, self._never_ready)
        try:
            self._replace(seat.local_rank)
        except CannotStart as error:
            log.error("%s", error)
            seat.phase = Phase.DOWN
            seat.wait(BACKOFF.limit, self._refill)

    def _never_ready(self, seat: ElasticWorker) -> None:
        log.error("local rank %d did not get ready within %g s: killing it", seat.local_rank, self._ready_within)
        self._late = True
        self._kill(seat)
        self._settle()

    def _leave_alone(self, seat: ElasticWorker) -> None:
        """It took its last step, and neither ended nor called again: others do not wait any longer."""
        seat.phase = Phase.LEFT
        self._settle()

    def _never_left(self, seat: ElasticWorker) -> None:
        if not seat.spared and not any(each.holds for each in self._seats):
            seat.spared = True
            log.warning(
                "local rank %d did not leave its round within %g s (--recovery-budget): waiting %g s more for the end "
                "of its step, unless another node has the state of the training: no other process of this one has",
                seat.local_rank,
                self._leave_within,
                STAY * self._leave_within,
            )
            seat.wait(STAY * self._leave_within, self._never_left)
            self._send(WorkerStuck(round=seat.round))
            return
        log.error(
            "local rank %d did not leave its round within %g s (--recovery-budget): killing it",
            seat.local_rank,
            self._leave_within * (1 + STAY if seat.spared else 1),
        )
        self._kill(seat)

    def _kill(self, seat: ElasticWorker) -> None:
        if self._attempt is not None:
            self._attempt.kill_one(seat.local_rank)

    def _spare_no_longer(self) -> None:
        """A process that has the state has left its round: those that are still in theirs have the usual time."""
        for seat in self._in(Phase.PLACED):
            if seat.spared:
                seat.spared = False
                seat.wait(self._leave_within, self._never_left)
