"""One rendezvous as a value: its rules, the round that forms or runs, and the end of the previous round.

A job has one rendezvous, for its training. Every function of this package takes the rendezvous that it acts on, so a
job could have others, for nodes that meet for another purpose.
"""

from __future__ import annotations

import enum

import msgspec

from resile.api.ids import NO_ROUND, NodeKey, Round
from resile.protocol.reports import RendezvousConfig, RoundAssignment, WorkerFailure


class RoundForming(msgspec.Struct, kw_only=True, tag=True):
    first: bool = False
    """True until a round has run."""
    lost: bool = False
    """True if a node or process was lost, so this is a recovery."""


class RoundRunning(msgspec.Struct, kw_only=True, tag=True):
    round: Round
    since: float
    assignments: dict[NodeKey, RoundAssignment]
    done: set[NodeKey] = set()
    """Members whose processes ended well."""
    changed: dict[NodeKey, int] = {}
    """Members that can start more or fewer processes than they have in this round, and how many."""
    stepped: bool = False
    """True once the journal has a step of this round, so its members have met and agreed on their state."""
    complete: bool = False
    """True once its members have taken the last step. They end, or meet again in another loop of the script."""

    @property
    def is_ending(self) -> bool:
        return bool(self.done) or self.complete


class RoundEnd(enum.StrEnum):
    INTERRUPTED = "interrupted"
    """The members have steps left to take."""
    COMPLETE = "complete"
    """The members had taken the last step, and no script has failed since."""
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
    """The failures of training processes in the newest round that had any, in the order of the reports."""

    round: Round = NO_ROUND
    failures: list[tuple[NodeKey, WorkerFailure]] = []

    @property
    def first(self) -> tuple[NodeKey, WorkerFailure] | None:
        return min(self.failures, key=lambda pair: pair[1].at, default=None)


class Rendezvous(msgspec.Struct, kw_only=True):
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
        """True if this node is a member of the running round and has not finished. Then its loss ends the round."""
        running = self.running
        return running is not None and key in running.assignments and key not in running.done

    def has_taken_last_step(self, key: NodeKey) -> bool:
        """True if the node's processes took the last step and have not ended. Then no node can replace this one."""
        if self.running is not None:
            return key in self.running.assignments and self.running.is_ending
        return self.previous.end is RoundEnd.COMPLETE and key in self.previous.unfinished
