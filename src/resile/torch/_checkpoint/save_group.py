"""The ranks that save together: how they number their saves, and which buffer each overwrites next.

The number of a save is its sequence. It is the same on all ranks and only grows, also from group to group.
A sharded step is usable only if every rank has its part. Before each save the ranks exchange which saves they have and
which they may overwrite. All keep the newest save that all have and overwrite the other buffer, or all skip the step.
If any rank is killed during the save, the kept step is complete.
"""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from resile.checkpoint.buffer import IncompleteBuffer
from resile.checkpoint.layout import attempt_name, made_at
from resile.checkpoint.memory_client import MemoryClient, copied_within
from resile.checkpoint.torchrun_buffers import ProcessBuffers
from resile.common.log_once import LogOnce
from resile.torch._loop.collectives import Collectives
from resile.torch._loop.waits import LOOK
from resile.wire.env import ROUND

HOLD = 600.0
"""Seconds for which a save that waits for storage is not overwritten: saves of a sharded state are skipped then."""


class Copied(enum.IntEnum):
    """Whether another node has a replica of a rank's last save."""

    READY = 0
    """The replica exists, or none is to be made."""
    BUSY = 1
    FAILED = 2


class SaverHello(NamedTuple):
    """What a rank tells the other ranks of a new group."""

    made: int
    """The rank's proposal for the number of the group, greater than those of all earlier groups that the rank knows."""
    in_memory: int
    """1 if the rank's saves survive its process."""
    partnered: int
    """1 if another node keeps replicas for the rank's node."""
    highest: int
    """The highest sequence number of a save that the rank knows of."""


class SaveStatus(NamedTuple):
    """What a rank tells the others before a save of a sharded state."""

    highest: int
    """The highest sequence number of a save that the rank has used."""
    copied: int
    has_room: int
    first: int
    """The sequence number of the save in the rank's first buffer, if this group made the save; otherwise 0."""
    first_wanted: int
    """1 if the first buffer is on its way to storage."""
    second: int
    second_wanted: int
    older_wanted: int
    """1 if the buffer with the lower sequence number is on its way to storage."""


class BufferChoice(NamedTuple):
    """The buffer that a rank overwrites with its next save."""

    number: int
    busy: bool
    """True if some rank is still storing its other buffer, so that this save cannot go to storage now."""


def to_keep(statuses: Sequence[SaveStatus], *, partnered: bool) -> int | None:
    """Choose the save in memory that the next save must not overwrite, and return its sequence number.

    Memory holds two saves. The newest save that all ranks have is kept. But if storage is still reading the older one,
    the older one is kept. With `partnered`, other nodes hold replicas of both saves: then only the newest is ever kept.
    Returns None if no save may be overwritten; all ranks skip the next save then. Returns 0 if this group has saved
    nothing yet; each rank overwrites its older buffer then.
    """
    common = set.intersection(*({each.first, each.second} for each in statuses)) - {0}
    if not common:  # this group has saved nothing yet
        return None if any(each.older_wanted for each in statuses) else 0
    for sequence in sorted(common, reverse=True)[: 1 if partnered else 2]:
        if not any(each.second_wanted if each.first == sequence else each.first_wanted for each in statuses):
            return sequence
    return None


class LeftOut(enum.Enum):
    """Why all ranks skip the save of a step."""

    NO_ROOM = enum.auto()
    COPYING = enum.auto()
    """Some node has not finished the replica of the previous save."""
    STORING = enum.auto()
    """Storage has not taken a save that must not be overwritten."""


class SaveGroup:
    """The ranks that save together with this rank, in one process group after another."""

    def __init__(self, collectives: Collectives, memory: MemoryClient | ProcessBuffers, once: LogOnce) -> None:
        self.collectives = collectives
        self._memory = memory
        self._log_once = once
        self.sequence = 0
        """The highest sequence number of a save that this process knows of."""
        self.everywhere = False
        """True if every rank's saves survive its process."""
        self.partnered = False
        """True if another node keeps replicas for every rank's node."""
        self._nonce: int | None = None
        """The number of this group, which all its ranks agreed on; None before `meet`."""
        self._floor = 0
        """The highest sequence number of a save before this group."""
        self._sent = 0
        """The sequence number of this group's last save that is to be copied to another node; 0 if there is none."""
        self._answer_by = 0.0
        """When the agent should have said whether the copy of save `_sent` succeeded, by the monotonic clock."""
        self._waiting: dict[int, tuple[int, float]] = {}
        """By buffer: the sequence number of the save that waits for storage, and since when it does."""

    @property
    def attempt(self) -> str:
        """The name of this group's attempt. Only parts of one attempt belong together. Call `meet` first."""
        times = os.environ.get(ROUND) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return attempt_name(self._nonce or 0, times, self.collectives.world, self._floor)

    def leave(self) -> None:
        """Forget the group, so that `meet` agrees with the ranks of another group."""
        self._nonce = None

    def meet(self) -> None:
        """Agree with all ranks of a new group on the group's number and on the highest sequence number so far.

        The first call in a group is a collective. Later calls do nothing.
        """
        if self._nonce is not None:
            return
        client = self._memory if isinstance(self._memory, MemoryClient) and self._memory.buffers else None
        highest, made = self._known()
        self.sequence = max(self.sequence, highest)
        mine = SaverHello(
            max(made + 1, time.time_ns()),  # a clock may have been set back
            int(client is not None),
            int(client is not None and client.has_partner()),
            self.sequence,
        )
        rows = self.collectives.meet(mine)
        if rows is None:  # several ranks without a process group cannot agree
            self._nonce, self.everywhere, self.partnered = 0, False, False
        else:
            met = [SaverHello(*row) for row in rows]
            self._nonce = max(each.made for each in met)
            self.everywhere = all(each.in_memory for each in met)
            self.partnered = all(each.partnered for each in met)
            self.sequence = max(each.highest for each in met)
        self._floor, self._sent = self.sequence, 0

    def _known(self) -> tuple[int, int]:
        highest = made = 0
        for buffer in self._memory.buffers:
            record = buffer.record()
            highest = max(highest, buffer.stored, record.sequence if record is not None else 0)
            if record is not None:
                with contextlib.suppress(IncompleteBuffer):
                    made = max(made, made_at(buffer.layout(record).attempt))
        return highest, made

    def free(self) -> BufferChoice | None:
        """Choose the buffer for the next save of a state that is not sharded; None if both buffers wait for storage.

        If neither buffer waits for storage, this chooses the one with the older save.
        """
        buffers = self._memory.buffers
        ages = [(each.sequence, number) for number, each in enumerate(buffers) if not each.sequence or not each.wanted]
        if not ages:
            return None
        number = min(ages)[1]
        return BufferChoice(number, isinstance(self._memory, MemoryClient) and buffers[1 - number].wanted)

    def sent(self, sequence: int, length: int, local_world: int) -> None:
        """Note that the agent is copying the save `sequence` to another node, and set a deadline for its answer.

        The deadline allows for the saves of all `local_world` ranks of the node, in turn, each of `length` bytes.
        """
        self._sent = sequence
        self._answer_by = time.monotonic() + copied_within(length, local_world)

    def copied(self, patience: float) -> tuple[Copied, str]:
        """The state of the replica of this rank's last save, and the reason if it failed.

        Waits at most `patience` seconds for the replica. Raises GroupLost as soon as the round is over.
        """
        if not self.partnered or not self._sent or not isinstance(self._memory, MemoryClient):
            return Copied.READY, ""
        until = time.monotonic() + patience
        while (why := self._memory.copied(self._sent, min(patience, LOOK))) is None and time.monotonic() < until:
            self.collectives.pause(0.0)
        if why is None and time.monotonic() > self._answer_by:
            why = "the agent does not say what became of the last one"
        return (Copied.BUSY, "") if why is None else (Copied.FAILED if why else Copied.READY, why)

    def agree(self, copied: tuple[Copied, str], *, has_room: bool, due: bool) -> BufferChoice | LeftOut:
        """Agree on the buffer to overwrite, so that all ranks keep the same steps. A collective.

        Returns the buffer, or why all ranks skip the step. `copied` is the result of the method `copied`. `has_room` is
        False if this rank's memory has no room for the save. Then all ranks skip a step that is not `due` for storage.
        """
        saved = [buffer.sequence for buffer in self._memory.buffers]
        first, second = (sequence if sequence > self._floor else 0 for sequence in saved)
        wanted = [int(self._waits_for_storage(number, sequence)) for number, sequence in enumerate(saved)]
        older = saved.index(min(saved))
        mine = SaveStatus(self.sequence, copied[0], int(has_room), first, wanted[0], second, wanted[1], wanted[older])
        statuses = [SaveStatus(*row) for row in self.collectives.gather(mine)]
        self.sequence = max(each.highest for each in statuses)
        worst = max(each.copied for each in statuses)
        if worst == Copied.FAILED:
            self.partnered = False  # until the next group: saves then survive lost processes but not lost nodes
            self._log_once.say(
                f"checkpoints are not copied to other nodes any more: {copied[1] or 'another rank could not'}"
            )
        if worst == Copied.BUSY:
            return LeftOut.COPYING
        if not due and not all(each.has_room for each in statuses):
            return LeftOut.NO_ROOM
        kept = to_keep(statuses, partnered=self.partnered)
        if kept is None:
            return LeftOut.STORING
        busy = self.everywhere and any(each.first_wanted or each.second_wanted for each in statuses)
        return BufferChoice(older if not kept else int(first == kept), busy)

    def _waits_for_storage(self, number: int, sequence: int) -> bool:
        if not sequence or not self._memory.buffers[number].wanted:
            self._waiting.pop(number, None)
            return False
        now = time.monotonic()
        known, since = self._waiting.setdefault(number, (sequence, now))
        if known != sequence:
            self._waiting[number] = (sequence, now)
        return known != sequence or now - since < HOLD
