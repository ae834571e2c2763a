"""Simulated synchronous training: a step needs every member of a round, and saved steps survive the members."""

from __future__ import annotations

from typing import Protocol

from resile.api.ids import NO_ROUND, Rank, Round
from resile.protocol.reports import RoundAssignment
from resile.sim.clock import Clock, Timer
from resile.sim.invariants import require

SAVE_EVERY = 4
"""Steps between two checkpoints."""


class Member(Protocol):
    """What training needs of an agent."""

    round: Round
    """The newest round it knows of."""

    @property
    def able(self) -> bool:
        """Whether its machine computes and is reachable now."""

    def stepped(self, round_: Round, step: int, total: int) -> None:
        """Its processes took a step."""

    def completed(self, round_: Round) -> None:
        """Its processes of this round ended well."""


class Store:
    """The saved checkpoints. A save from an older round than the newest one that was opened is refused."""

    def __init__(self) -> None:
        self.round = NO_ROUND
        self.step = 0
        self.refused = 0

    def open(self, round_: Round) -> None:
        """A round begins and reads what was saved."""
        self.round = max(self.round, round_)

    def save(self, round_: Round, step: int) -> bool:
        """Keep a step; False if a newer round has begun."""
        if round_ < self.round:
            self.refused += 1
            return False
        self.step = step
        return True


class World:
    """The processes of one round. A missing member keeps all others waiting."""

    def __init__(self, training: SimTraining, round_: Round, size: int) -> None:
        self._training = training
        self._round = round_
        self._size = size
        self._members: dict[Rank, Member] = {}
        self._broken = False
        self._step = 0
        self._timer: Timer | None = None

    def enter(self, place: RoundAssignment, member: Member) -> None:
        """A node's processes are up."""
        self._members[place.group_rank] = member
        if len(self._members) == self._size and not self._broken:
            self._training.store.open(self._round)
            self._step = self._training.store.step
            self._next()

    def leave(self, member: Member) -> list[Member]:
        """A node's processes are down, so this round takes no more steps. Returns the other members."""
        self._broken = True
        if self._timer is not None:
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
            self._members[Rank(0)].stepped(self._round, self._step, training.total)
        if self._step >= training.total or self._step % training.save_every == 0:
            training.store.save(self._round, self._step)
        if self._step < training.total:
            self._next()
            return
        for member in list(self._members.values()):
            member.completed(self._round)


class SimTraining:
    """A job's training, over all rounds."""

    def __init__(self, clock: Clock, total: int, step_time: float, save_every: int = SAVE_EVERY) -> None:
        self.clock = clock
        self.save_every = save_every
        self.total = total
        self.step_time = step_time
        self.store = Store()
        self.newest = NO_ROUND
        """The newest round in which a step was taken."""
        self._worlds: dict[Round, World] = {}

    def enter(self, round_: Round, place: RoundAssignment, member: Member) -> None:
        """A node's processes of a round are up."""
        world = self._worlds.get(round_)
        if world is None:
            world = self._worlds[round_] = World(self, round_, place.group_world_size)
        world.enter(place, member)

    def leave(self, round_: Round, member: Member) -> list[Member]:
        """A node's processes of a round are down. Returns the members that will notice."""
        world = self._worlds.get(round_)
        return world.leave(member) if world is not None else []
