"""One rendezvous as a value: its rules, the round that forms or runs, and what is known of the previous one.

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
    """A node or process was lost, so this is a recovery."""


class RoundRunning(msgspec.Struct, kw_only=True, tag=True):
    round: Round
    since: float
    assignments: dict[NodeKey, RoundAssignment]
    """Its members."""
    done: set[NodeKey] = set()
    """Members whose processes ended well."""
    changed: dict[NodeKey, int] = {}
    """Members that can start more or fewer processes than they have in this round, and how many."""
    stepped: bool = False
    """The journal knows of a step in it, so its members have met and agreed on their state."""
    complete: bool = False
    """Its members have taken the last step. They end, or meet again in another loop of the script."""

    @property
    def is_ending(self) -> bool:
        """Whether some members have finished, or all have taken the last step."""
        return bool(self.done) or self.complete


class RoundEnd(enum.StrEnum):
    """How far the members of a round had come when it ended."""

    INTERRUPTED = "interrupted"
    """They have steps left to take."""
    COMPLETE = "complete"
    """They had taken the last step, and no script has failed since."""
    FAILED = "failed"
    """A script failed. Members that had ended well join again."""


class PreviousRound(msgspec.Struct, kw_only=True):
    """The newest round that is over. Its processes may still finish in it."""

    round: Round = NO_ROUND
    end: RoundEnd = RoundEnd.INTERRUPTED
    members: set[NodeKey] = set()
    done: set[NodeKey] = set()
    """Elastic members whose processes ended well, after all members had taken the last step."""

    @property
    def unfinished(self) -> set[NodeKey]:
        return self.members - self.done


class RoundFailures(msgspec.Struct, kw_only=True):
    """The process failures of the newest broken round, in the order in which they were reported."""

    round: Round = NO_ROUND
    failures: list[tuple[NodeKey, WorkerFailure]] = []

    @property
    def first(self) -> tuple[NodeKey, WorkerFailure] | None:
        """The failure that happened first; the others follow from it."""
        return min(self.failures, key=lambda pair: pair[1].at, default=None)


class Rendezvous(msgspec.Struct, kw_only=True):
    """How nodes meet in rounds."""

    config: RendezvousConfig | None = None
    """The agents' rules; None before the first agent connects."""
    last_round: Round = NO_ROUND
    current: RoundForming | RoundRunning
    previous: PreviousRound = msgspec.field(default_factory=PreviousRound)
    failures: RoundFailures = msgspec.field(default_factory=RoundFailures)

    @property
    def running(self) -> RoundRunning | None:
        return self.current if isinstance(self.current, RoundRunning) else None

    @property
    def forming(self) -> RoundForming | None:
        return self.current if isinstance(self.current, RoundForming) else None

    def has_member(self, key: NodeKey) -> bool:
        return self.running is not None and key in self.running.assignments

    def needs(self, key: NodeKey) -> bool:
        """Whether losing this node ends the running round: it is a member and has not finished."""
        running = self.running
        return running is not None and key in running.assignments and key not in running.done

    def has_taken_last_step(self, key: NodeKey) -> bool:
        """Whether a node's processes have nothing left to train and have not ended, so no node can replace it."""
        if self.running is not None:
            return key in self.running.assignments and self.running.is_ending
        return self.previous.end is RoundEnd.COMPLETE and key in self.previous.unfinished
