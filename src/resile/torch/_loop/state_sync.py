"""Members of a new round agree on the most advanced step and receive its state from a member that has it. No disk.

A step is atomic: parameters, optimizer, sampler and the rest change together, after the last collective of the step. So
after a loss some survivors may be one step ahead of others, never more, and a survivor that is ahead has a whole state.
Survivors of the same round at the same step have the same state, bit by bit, and then nothing is sent. A digest of some
parameters verifies that they do, because a script can make ranks differ in many ways without noticing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from resile.torch._loop import state_codec
from resile.torch._loop.collectives import Collectives
from resile.torch._support.error_file import recorded_in_error_file

log = logging.getLogger(__name__)

FROM_CHECKPOINT = -1
PARCEL = 4 << 20
"""The most bytes of a message with several tensors."""


class MemberState(NamedTuple):
    """How many steps a process's model has taken, and the round in which the process last agreed on a state."""

    step: int
    holds: int
    """The round of the agreement; NO_ROUND for a process that never agreed, whose state is untrained."""


class SyncMessage(NamedTuple):
    """What a process tells the other members of a new round."""

    state: MemberState
    identity: int
    """A random number that identifies the process."""
    loops: int
    """How many of its script's loops the process has finished."""
    digest: int
    """The digest of its parameters; 0 if they are not to be compared."""


class StateSync(NamedTuple):
    """The messages of all members of a round, by rank. Properties such as `source` are computed from them."""

    messages: list[SyncMessage]

    @property
    def members(self) -> frozenset[int]:
        return frozenset(message.identity for message in self.messages)

    @property
    def loops(self) -> int:
        return max(message.loops for message in self.messages)

    @property
    def source(self) -> int:
        """The rank of the most advanced member; the lowest rank if several are equal."""
        return max(range(len(self.messages)), key=lambda rank: (self.messages[rank].state, -rank))

    @property
    def takers(self) -> list[int]:
        """Ranks that need the state of `source`. All other ranks already have exactly that state."""
        source = self.source
        best = self.messages[source]
        have = [best.state.holds and (each.state, each.digest) == (best.state, best.digest) for each in self.messages]
        return [rank for rank, has_it in enumerate(have) if not has_it and rank != source]

    @property
    def strays(self) -> list[int]:
        """Ranks that took the same steps as `source` in the same rounds, but have other parameters."""
        best = self.messages[self.source].state
        return [rank for rank in self.takers if best.holds and self.messages[rank].state == best]

    @property
    def trained(self) -> bool:
        return any(message.state.holds for message in self.messages)


class SyncResult(NamedTuple):
    """The state from which the members of a round go on."""

    step: int
    source: int
    """The rank whose state counts; FROM_CHECKPOINT if a checkpoint's state counts."""
    received: Any = None
    """The state that this process received because it had another one; None if it received none."""
    takers: Sequence[int] = ()
    """The ranks that had another state and received this one."""
    sent: int = 0
    """Bytes that this process sent or received."""


def exchange(mine: SyncMessage, ranks: Collectives) -> StateSync:
    """Send `mine` to all members of the round, and return the messages of all members. A collective.

    Rank 0 logs an error if some ranks took the same steps, but have different parameters.
    """
    rows = ranks.gather([*mine.state, *mine[1:]])
    sync = StateSync([SyncMessage(MemberState(row[0], row[1]), *row[2:]) for row in rows])
    if sync.strays and mine == sync.messages[0]:  # one rank logs it
        log.error(
            "at step %d ranks %s have other parameters than rank %d, although they took the same steps: something "
            "changed them, or their gradients, on some ranks alone",
            sync.messages[sync.source].state.step,
            ", ".join(map(str, sync.strays)),
            sync.source,
        )
    return sync


@recorded_in_error_file(state_codec.BadState)
def send_newest(sync: StateSync, state: Callable[[], Any], ranks: Collectives) -> SyncResult:
    """Send the state of the most advanced member to the members that have another state. A collective.

    Returns the step from which all members go on. On a rank that received the state, the result also has that state,
    complete and in the host's memory. No model changes here, so nothing has to be undone if the group breaks in the
    middle. A rank that neither sends nor receives has at most one block of the state in memory.

    `state` returns this process's own state. It is called only on the rank that sends. If its result cannot be
    described or sent, all members raise BadState.
    """
    source, takers = sync.source, sync.takers
    step = sync.messages[source].state.step
    if not takers:
        return SyncResult(step, source)
    text, tensors, length = _described(state, ranks, source)
    takes, gives = ranks.rank in takers, ranks.rank == source
    if not takes and not gives and len(takers) == 1:
        return SyncResult(step, source, None, takers)
    words = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(length, dtype=torch.uint8)
    ranks.hand_over(words, length, source, takers)
    description = state_codec.shapes_of(text or words.numpy().tobytes())
    shapes = description.shapes
    if takes:  # into host memory, because a device may not hold a second state beside model and optimizer
        tensors = [shape.empty(torch.device("cpu")) for shape in shapes]
    for parcel in _parcels(shapes):
        parts = [_bytes_of(tensors[number]) for number in parcel] if tensors else []
        _hand_over(parts, sum(shapes[number].nbytes for number in parcel), ranks, source, takers)
    received = state_codec.rebuild(description, tensors) if takes else None
    sent = length + sum(shape.nbytes for shape in shapes) if takes or gives else 0
    return SyncResult(step, source, received, takers, sent)


def _described(state: Callable[[], Any], ranks: Collectives, source: int) -> tuple[bytes, list[torch.Tensor], int]:
    """Return the encoded description of `source`'s state, its tensors and the description's length. A collective.

    On other ranks the description and the tensors are empty. If the state cannot be described, all ranks raise the same
    BadState. If `source` runs out of memory, it alone raises that error.
    """
    text, words, cause = b"", "", None
    tensors: list[torch.Tensor] = []
    if ranks.rank == source:
        try:
            text, tensors = state_codec.describe(state())
        except Exception as error:
            if _lacks_memory(error):
                raise  # another member may have enough memory
            cause, words = error, str(error)
            if not isinstance(error, state_codec.BadState):
                words = f"{type(error).__name__}: {words}"
    failed, length = ranks.gather([len(words), len(text)])[source]
    if failed:
        told = ranks.tell(words)[source]
        raise state_codec.BadState(f"the state of rank {source} cannot be given to others: {told}") from cause
    if not 0 < length <= state_codec.MAX_DESCRIPTION:
        raise state_codec.BadState(f"rank {source} announced a description of {length} bytes")
    return text, tensors, length


def _lacks_memory(error: Exception) -> bool:
    """True if an error means that memory ran out. For the host's memory torch raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _hand_over(parts: list[torch.Tensor], size: int, ranks: Collectives, source: int, takers: Sequence[int]) -> None:
    takes = ranks.rank in takers
    data: torch.Tensor | None = None
    if len(parts) == 1:
        data = parts[0]
    elif parts:
        data = torch.empty(size, dtype=torch.uint8) if takes else torch.cat([part.to(ranks.device) for part in parts])
    ranks.hand_over(data, size, source, takers)
    if takes and data is not None and len(parts) > 1:
        for part, values in zip(parts, data.split([len(part) for part in parts]), strict=True):
            part.copy_(values)


def _parcels(shapes: Sequence[state_codec.Shape]) -> Iterator[list[int]]:
    """Yield for each message the indices of the tensors in it. Tensors without elements are in no message.

    Small tensors share a message, up to PARCEL bytes, because every message costs time.
    """
    parcel: list[int] = []
    length = 0
    for number, shape in enumerate(shapes):
        if not shape.nbytes:
            continue
        if parcel and length + shape.nbytes > PARCEL:
            yield parcel
            parcel, length = [], 0
        parcel.append(number)
        length += shape.nbytes
    if parcel:
        yield parcel


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
