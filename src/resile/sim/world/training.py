"""Simulated synchronous training: a step needs every member of a round, and saved steps survive the members."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resile.api.ids import NO_ROUND, Rank, Round
from resile.protocol.agent_to_master import StepReport
from resile.protocol.reports import RoundAssignment
from resile.sim.clock import Clock, Timer
from resile.sim.invariants import require

if TYPE_CHECKING:
    from resile.sim.schedule import Schedule
    from resile.sim.world.agent import SimAgent

SAVE_EVERY = 4


class World:
    """The members of one round. Each step needs all of them, so one that is missing keeps the others waiting."""

    def __init__(self, training: SimTraining, round_: Round, size: int) -> None:
        self._training = training
        self._round = round_
        self._size = size
        self._members: dict[Rank, SimAgent] = {}
        self._broken = False
        self._step = 0
        self._timer = Timer()

    def enter(self, place: RoundAssignment, member: SimAgent) -> None:
        self._members[place.group_rank] = member
        if len(self._members) == self._size and not self._broken:
            self._training.begun = max(self._training.begun, self._round)
            self._step = self._training.saved
            self._next()

    def leave(self, member: SimAgent) -> list[SimAgent]:
        self._broken = True
        self._timer.cancel()
        return [other for other in self._members.values() if other is not member]

    def _next(self) -> None:
        self._timer = self._training.clock.after(self._training.step_time, self._take_step)

    def _take_step(self) -> None:
        training = self._training
        if not all(member.able for member in self._members.values()):
            self._next()  # a collective that hangs
            return
        astray = [member for member in self._members.values() if member.round != self._round]
        require(not astray, f"a step of round {self._round} needs all its members to be in it")
        if self._step < training.total:
            self._step += 1
            training.newest = max(training.newest, self._round)
            self._members[Rank(0)].say(StepReport(round=self._round, step=self._step, total=training.total))
        saves = self._step >= training.total or self._step % training.save_every == 0
        if saves and self._round >= training.begun:
            training.saved = self._step
        if self._step < training.total:
            self._next()
            return
        for member in list(self._members.values()):
            member.completed(self._round)


class SimTraining:
    def __init__(self, clock: Clock, schedule: Schedule) -> None:
        self.clock = clock
        self.save_every = 1 if schedule.elastic else SAVE_EVERY
        self.total = schedule.steps
        self.step_time = schedule.step_time
        self.begun = NO_ROUND
        """The newest round in which training has begun. A save of an older round is ignored."""
        self.saved = 0
        """The step of the newest checkpoint."""
        self.newest = NO_ROUND
        """The newest round in which a step was taken."""
        self._worlds: dict[Round, World] = {}

    def enter(self, round_: Round, place: RoundAssignment, member: SimAgent) -> None:
        world = self._worlds.get(round_)
        if world is None:
            world = self._worlds[round_] = World(self, round_, place.group_world_size)
        world.enter(place, member)

    def leave(self, round_: Round, member: SimAgent) -> list[SimAgent]:
        """Let `member` leave a round, which then takes no more steps. Returns the other members."""
        world = self._worlds.get(round_)
        return world.leave(member) if world is not None else []
