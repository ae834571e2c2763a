"""What masters say to simulated agents.

The wire's messages with what a model needs of them. Words of agents are the core's events themselves, and answers to
shard requests the core's decisions: a production master translates those one to one.
"""

from __future__ import annotations

import msgspec

from resile.api.ids import NodeKey, Rank, Round
from resile.core.decisions import AnswerDataset, AnswerProgress, AnswerShard
from resile.core.events import AnyEvent
from resile.protocol.reports import RoundAssignment


class Heartbeat(msgspec.Struct, frozen=True):
    """An agent is alive and has nothing else to say."""


class Welcome(msgspec.Struct, frozen=True):
    """The master knows this agent."""

    node: NodeKey
    rank: Rank
    elastic: bool = False


class Refused(msgspec.Struct, frozen=True):
    """The master will not serve this agent."""

    because: str


class RoundFormed(msgspec.Struct, frozen=True):
    """Start your processes: this is your place."""

    round: Round
    place: RoundAssignment


class RoundOver(msgspec.Struct, frozen=True):
    """Stop the processes of this round and join again."""

    round: Round


class Leave(msgspec.Struct, frozen=True):
    """This node is no longer part of the job."""

    exit_code: int


class JobOver(msgspec.Struct, frozen=True):
    """The job has ended."""

    succeeded: bool


ToAgent = Welcome | Refused | RoundFormed | RoundOver | Leave | JobOver | AnswerDataset | AnswerProgress | AnswerShard
ToMaster = AnyEvent | Heartbeat
