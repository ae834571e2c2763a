"""What an agent and the agent that keeps the replicas of its checkpoints say to each other."""

from __future__ import annotations

from resile.api.ids import Round
from resile.protocol.message import Message


class ReplicaOffer(Message, frozen=True, kw_only=True):
    """Offers a checkpoint to the partner, which answers with ReplicaAnswer.

    If the partner accepts, the layout, the checksums and the data follow. `layout`, `sums` and `data` are their lengths
    in bytes.
    """

    round: Round
    """The newest round that the sender knows. A sender that was left behind in an older round overwrites nothing."""
    local_rank: int
    sequence: int
    step: int
    layout: int
    sums: int
    data: int


class ReplicaAnswer(Message, frozen=True, kw_only=True):
    """Accepts an offer, or refuses it with an `error`. If accepted, a second answer says that all bytes arrived."""

    error: str = ""
