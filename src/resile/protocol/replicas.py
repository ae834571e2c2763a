"""What an agent and the agent that keeps the replicas of its checkpoints say to each other."""

from __future__ import annotations

from resile.api.ids import Round
from resile.protocol.message import Message


class ReplicaOffer(Message, frozen=True, kw_only=True):
    """A checkpoint to keep. Once it is accepted, its layout, checksums and data follow, in that many bytes."""

    round: Round
    """The newest round that the sender knows. A sender that was left behind in an older one overwrites nothing."""
    local_rank: int
    sequence: int
    step: int
    layout: int
    sums: int
    data: int


class ReplicaAnswer(Message, frozen=True, kw_only=True):
    """Sent twice: the offer is accepted; all bytes have arrived. `error` is empty, or one sentence of refusal."""

    error: str = ""
