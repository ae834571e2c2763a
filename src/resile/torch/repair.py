"""Members of a new round agree on the most advanced step, and take its state from whoever has it. No disk.

A step is atomic: parameters, optimizer, sampler and the rest change together, after the last collective of the step. So
some survivors of a loss may be one step ahead of others, and never more; whoever is ahead has a whole state. Survivors
that were in the same round at the same step have the same state, bit by bit, and then nothing is sent. A digest of some
of their parameters shows whether that is so: a script can make ranks differ in many ways, and would not hear of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from resile.torch import states
from resile.torch.agreement import Agreement
from resile.torch.group import Group, wait

log = logging.getLogger(__name__)

NOBODY = -1


class Standing(NamedTuple):
    """How far a process is, and in which round it last agreed with others on that."""

    step: int
    agreed_in: int
    """NO_ROUND for one that never did: what it has is a beginning, not the outcome of training."""


class Word(NamedTuple):
    """What a process says about itself when it meets others."""

    standing: Standing
    identity: int
    """A number that no other process has."""
    loops: int
    """How many of its script's loops are behind it."""
    digest: int
    """Of its parameters; 0: they are not to be compared."""


class Meeting(NamedTuple):
    """What the members of a round told each other, by rank."""

    words: list[Word]

    @property
    def standings(self) -> list[Standing]:
        """How far each of them is."""
        return [word.standing for word in self.words]

    @property
    def members(self) -> frozenset[int]:
        """The identities of all of them."""
        return frozenset(word.identity for word in self.words)

    @property
    def loops(self) -> int:
        """How many loops are behind the furthest."""
        return max(word.loops for word in self.words)

    @property
    def source(self) -> int:
        """The rank of the most advanced, the first of several."""
        return max(range(len(self.words)), key=lambda rank: (self.words[rank].standing, -rank))

    @property
    def strays(self) -> list[int]:
        """Ranks that took the same steps in the same rounds as the most advanced, and have other parameters."""
        best = self.words[self.source]
        if not best.standing.agreed_in:
            return []
        alike = (rank for rank, word in enumerate(self.words) if word.standing == best.standing)
        return [rank for rank in alike if self.words[rank].digest != best.digest]

    @property
    def trained(self) -> bool:
        """Whether some state is the outcome of training, and not a beginning."""
        return any(standing.agreed_in for standing in self.standings)


class Found(NamedTuple):
    """The state from which the members of a round go on."""

    step: int
    source: int
    """The rank whose state counts; NOBODY: it is a checkpoint's."""
    received: Any = None
    """That state, for a process that had another one; None for those that have it."""
    sent: int = 0
    """Bytes that went over the group from `source`; 0 where all had the same state already."""


def meet(mine: Word, ranks: Agreement) -> Meeting:
    """Hear how far everybody is. Nobody returns before all have come; ranks that have gone astray are named.

    Args:
        mine: this process's word.
        ranks: the members of the group.

    Raises:
        RuntimeError: the group broke.
    """
    rows = ranks.gather([*mine.standing, *mine[1:]])
    meeting = Meeting([Word(Standing(row[0], row[1]), *row[2:]) for row in rows])
    if meeting.strays and mine == meeting.words[0]:  # one of them is enough to say it
        log.error(
            "at step %d ranks %s have other parameters than rank %d, although they took the same steps: something "
            "changed them, or their gradients, on some ranks alone",
            meeting.words[meeting.source].standing.step,
            ", ".join(map(str, meeting.strays)),
            meeting.source,
        )
    return meeting


def agree(meeting: Meeting, state: Callable[[], Any], rank: int, device: torch.device, group: Group | None) -> Found:
    """Find the most advanced state of a group, and give it to everybody else.

    What was received is complete when this returns; a group that breaks in the middle leaves everybody as it was.

    Args:
        meeting: what everybody said.
        state: gives this process's state, if it is the one that counts.
        rank: in the group.
        device: where tensors of the group's backend live.
        group: of the round, if there are rounds.

    Raises:
        RuntimeError: the group broke.
        BadState: the state cannot be sent.
    """
    standings = meeting.standings
    source = meeting.source
    best = standings[source]
    same = best.agreed_in and all(standing == best for standing in standings) and not meeting.strays
    if len(standings) == 1 or same:
        return Found(best.step, source)
    if rank == source:
        description, tensors = states.describe(state())
        sent = _give(description, tensors, source, device, group)
        return Found(best.step, source, None, sent)
    received, sent = _take(source, device, group)
    return Found(best.step, source, received, sent)


def _give(
    description: bytes, tensors: list[torch.Tensor], source: int, device: torch.device, group: Group | None
) -> int:
    def send(tensor: torch.Tensor) -> None:
        wait(dist.broadcast(tensor, source, async_op=True), group)

    send(torch.tensor([len(description)], dtype=torch.int64, device=device))
    send(torch.frombuffer(bytearray(description), dtype=torch.uint8).to(device))
    for tensor in tensors:
        if tensor.numel():
            send(_bytes_of(tensor.to(device).contiguous()))
    return len(description) + states.nbytes(tensors)


def _take(source: int, device: torch.device, group: Group | None) -> tuple[Any, int]:
    size = torch.zeros(1, dtype=torch.int64, device=device)
    wait(dist.broadcast(size, source, async_op=True), group)
    if not 0 < int(size) <= states.MAX_DESCRIPTION:
        raise states.BadState(f"rank {source} announced a description of {int(size)} bytes")
    buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    wait(dist.broadcast(buffer, source, async_op=True), group)
    description = states.shapes_of(bytes(buffer.cpu().numpy()))
    tensors = [shape.empty(device) for shape in description.shapes]
    for tensor in tensors:
        if tensor.numel():
            wait(dist.broadcast(_bytes_of(tensor), source, async_op=True), group)
    return states.rebuild(description, tensors), int(size) + states.nbytes(tensors)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, which every backend can send, whatever the tensor's type."""
    return tensor.reshape(-1).view(torch.uint8)
