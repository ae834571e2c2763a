"""One rendezvous as a value: its rules, the round that forms or runs, and what is remembered of the last one.

A job has one for its training. Every function of this package takes the rendezvous that it acts on, so a job could hold
others for nodes that meet for another purpose.
"""

from __future__ import annotations

import enum

import msgspec

from resile.api.ids import NO_ROUND, NodeKey, Round
from resile.protocol.reports import RendezvousConfig, RoundAssignment, WorkerFailure


class RoundForming(msgspec.Struct, kw_only=True, tag=True):
    """No round runs; nodes join the next one."""

    since: float
    first: bool = False
    """No round ever ran."""
    lost: bool = False
    """A node or process was lost: this is a recovery."""


class RoundRunning(msgspec.Struct, kw_only=True, tag=True):
    """A round runs."""

    round: Round
    since: float
    assignments: dict[NodeKey, RoundAssignment]
    """Its members."""
    done: set[NodeKey] = set()
    """Members whose processes ended well."""
    changed: dict[NodeKey, int] = {}
    """Members that can start more or fewer processes than they have in this round, and how many: the next one fits."""
    stepped: bool = False
    """A step was taken in it, as far as the journal knows: its members have met and agreed on their state."""
    complete: bool = False
    """Its members have taken the last step: they end, or meet again in another loop of the script."""

    @property
    def is_ending(self) -> bool:
        """Whether it is about to end well: some members have finished, or all have taken the last step."""
        return bool(self.done) or self.complete


class RoundEnd(enum.StrEnum):
    """How far the members of a round had come when it ended."""

    INTERRUPTED = "interrupted"
    """They have steps left to take."""
    COMPLETE = "complete"
    """They had taken the last step, and no script of them failed since."""
    FAILED = "failed"
    """A script failed: if others had ended well in its last lines, all of them come again."""


class PreviousRound(msgspec.Struct, kw_only=True):
    """The newest round that is over, as far as its processes may still finish in it."""

    round: Round = NO_ROUND
    end: RoundEnd = RoundEnd.INTERRUPTED
    members: set[NodeKey] = set()
    done: set[NodeKey] = set()
    """Elastic members whose processes ended well: they took the last step there is, and so did all others."""

    @property
    def unfinished(self) -> set[NodeKey]:
        """Members that have not ended well."""
        return self.members - self.done


class RoundFailures(msgspec.Struct, kw_only=True):
    """The process failures of the newest broken round, in the order in which they were reported."""

    round: Round = NO_ROUND
    failures: list[tuple[NodeKey, WorkerFailure]] = []

    @property
    def first(self) -> tuple[NodeKey, WorkerFailure] | None:
        """The failure that happened first; the others are its echo."""
        return min(self.failures, key=lambda pair: pair[1].at, default=None)


class Rendezvous(msgspec.Struct, kw_only=True):
    """How nodes meet in rounds."""

    config: RendezvousConfig | None = None
    """The agents' rules; None before the first agent came."""
    last_round: Round = NO_ROUND
    current: RoundForming | RoundRunning
    previous: PreviousRound = msgspec.field(default_factory=PreviousRound)
    failures: RoundFailures = msgspec.field(default_factory=RoundFailures)

    @property
    def running(self) -> RoundRunning | None:
        """The round that runs, if one does."""
        return self.current if isinstance(self.current, RoundRunning) else None

    @property
    def forming(self) -> RoundForming | None:
        """The round that is being formed, if none runs."""
        return self.current if isinstance(self.current, RoundForming) else None

    def has_member(self, key: NodeKey) -> bool:
        """Whether a node is a member of the round that runs."""
        return self.running is not None and key in self.running.assignments

    def needs(self, key: NodeKey) -> bool:
        """Whether the round that runs ends with this node: it is a member and has not finished."""
        running = self.running
        return running is not None and key in running.assignments and key not in running.done

    def has_taken_last_step(self, key: NodeKey) -> bool:
        """Whether a node's processes have nothing left to train, and have not ended: no node can take its place."""
        if self.running is not None:
            return key in self.running.assignments and self.running.is_ending
        return self.previous.end is RoundEnd.COMPLETE and key in self.previous.unfinished
