"""Finds the newest step that every rank can have, and loads it: all ranks come to the same answer or to none.

What is damaged is found before anything is changed by it, and the ranks then agree on the next best. Ranks compare
notes over their process group, in tensors.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from resile.checkpoint.buffer import Buffer, NotWhole, Record
from resile.checkpoint.layout import Layout
from resile.checkpoint.storage import Storage
from resile.torch.entries import Landing, Misfit, State
from resile.torch.image import Damaged, Image, copying_threads
from resile.torch.stored import check, load

log = logging.getLogger(__name__)

NONE = -1
MEMORY_STEPS = 2
STORED_STEPS = 8
"""How many steps of storage are considered, newest first."""
_BLOCK = 64 << 20
OK, DAMAGED, MISFIT = 0, 1, 2


class Agreement:
    """The ranks of this training, as far as they have to agree."""

    @property
    def rank(self) -> int:
        """This process's place."""
        return int(dist.get_rank()) if self._grouped else int(os.environ.get("RANK", "0"))

    @property
    def world(self) -> int:
        """How many there are."""
        return int(dist.get_world_size()) if self._grouped else int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def _grouped(self) -> bool:
        return bool(dist.is_available() and dist.is_initialized())

    @property
    def device(self) -> Any:
        """Where tensors must be for this group."""
        if dist.get_backend() == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def nonce(self) -> int:
        """A number that all ranks have and no earlier run had; without a process group it is 0 for several ranks."""
        if self.world > 1 and not self._grouped:
            return 0
        return self.gather([time.time_ns()])[0][0]

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row, all of one length.

        Raises:
            RuntimeError: there are other ranks, and no way to reach them.
        """
        if self.world == 1:
            return [list(row)]
        if not self._grouped:
            raise RuntimeError("restore() is for all ranks together: call it after init_process_group()")
        mine = torch.tensor(list(row), dtype=torch.int64, device=self.device)
        rows = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(rows, mine)
        return [[int(number) for number in each.tolist()] for each in rows]

    def send(self, data: Any, source: int) -> None:
        """Give every rank the bytes (a uint8 tensor) that `source` has in it."""
        for start in range(0, len(data), _BLOCK):
            block = data[start : start + _BLOCK]
            moved = block.to(self.device)
            dist.broadcast(moved, source)
            if moved.data_ptr() != block.data_ptr():
                block.copy_(moved)


class _Choice(NamedTuple):
    """Where to take a step from."""

    step: int
    order: int
    """Among equals the higher wins: this node's memory, another's, storage."""
    source: int
    """The rank that gives it to the others; NONE: each has its own."""


MEMORY, PEER, STORAGE = 3, 2, 1


class Restoring:
    """One call of `restore`."""

    def __init__(
        self, agreement: Agreement, own: Sequence[Buffer], leaders: Sequence[Buffer], storage: Storage | None
    ) -> None:
        """Look at what there is.

        Args:
            agreement: the ranks.
            own: this rank's buffers.
            leaders: those of the rank that keeps what all ranks of the node have alike.
            storage: what is on disk.
        """
        self._agreement = agreement
        self._own = own
        self._leaders = leaders
        self._storage = storage

    def run(self, state: State) -> int | None:
        """The step that was loaded."""
        refused: set[_Choice] = set()
        for _ in range(2 * MEMORY_STEPS + STORED_STEPS + 1):
            choice = self._choose(refused)
            if choice is None:
                return None
            landing = Landing(state)
            verdict, why = self._try(lambda: self._load(choice, landing))  # noqa: B023
            verdicts = [row[0] for row in self._agreement.gather([verdict])]
            if max(verdicts) == OK:
                landing.finish()
                self._drop_newer(choice.step)
                log.info("restored step %d from %s", choice.step, _place(choice))
                return choice.step
            if MISFIT in verdicts:
                raise Misfit(why or f"the checkpoint of step {choice.step} does not fit another rank's state")
            if verdict:
                log.warning("step %d in %s is not used: %s", choice.step, _place(choice), why)
            if choice.order == STORAGE and self._storage is not None and self._agreement.rank == 0:
                self._storage.set_aside(choice.step)
            refused.add(choice)
        return None

    def _choose(self, refused: set[_Choice]) -> _Choice | None:
        here = sorted(self._memory_steps(), reverse=True)[:MEMORY_STEPS]
        shared = [self._is_replicated(step) for step in here]
        stored = self._storage.steps()[-STORED_STEPS:] if self._storage is not None else []
        pad = [NONE] * (MEMORY_STEPS - len(here))
        row = [*here, *pad, *map(int, shared), *pad, *stored, *[NONE] * (STORED_STEPS - len(stored))]
        rows = self._agreement.gather(row)
        choices: list[_Choice] = []
        steps = {step for each in rows for step in each[:MEMORY_STEPS] if step != NONE}
        for step in steps:
            holders = [rank for rank, each in enumerate(rows) if step in each[:MEMORY_STEPS]]
            if len(holders) == len(rows):
                choices.append(_Choice(step, MEMORY, NONE))
            giver = rows[holders[0]]
            if giver[MEMORY_STEPS + giver.index(step)] == 1:
                choices += [_Choice(step, PEER, rank) for rank in holders[:2] if len(rows) > 1]
        choices += [_Choice(step, STORAGE, NONE) for step in rows[0][2 * MEMORY_STEPS :] if step != NONE]
        return max((choice for choice in choices if choice not in refused), default=None)

    # memory ----------------------------------------------------------------------------------------------------------

    def _memory_steps(self) -> set[int]:
        return {step for step in self._steps_of(self._leaders) if self._is_replicated(step) or self._is_ours(step)}

    @staticmethod
    def _steps_of(buffers: Sequence[Buffer]) -> set[int]:
        return {record.step for buffer in buffers if (record := buffer.record()) is not None}

    def _is_replicated(self, step: int) -> bool:
        found = _find(self._leaders, step)
        return found is not None and found[2].replicated

    def _is_ours(self, step: int) -> bool:
        found = _find(self._own, step)
        here = (self._agreement.rank, self._agreement.world)
        return found is not None and (found[2].rank, found[2].world) == here

    def _load(self, choice: _Choice, landing: Landing) -> None:
        if choice.order == STORAGE:
            self._from_storage(choice.step, landing)
        elif choice.order == PEER:
            self._from_peer(choice, landing)
        else:
            buffers = [self._leaders] if self._leaders is self._own else [self._leaders, self._own]
            if self._leaders is not self._own and self._is_replicated(choice.step):
                buffers = [self._leaders]
            images = [self._image(each, choice.step) for each in buffers]
            landing.check(item.path for image in images for item in image.layout.items)
            for image in images:
                image.read(landing, copying_threads(image.layout.length))

    def _from_storage(self, step: int, landing: Landing) -> None:
        storage, ranks = self._storage, self._agreement
        assert storage is not None
        found, why = self._try(lambda: check(storage, step, ranks.rank, ranks.world))
        if max(row[0] for row in ranks.gather([found])):
            raise Damaged(why or "another rank found it damaged")
        load(storage, step, landing)

    @staticmethod
    def _image(buffers: Sequence[Buffer], step: int) -> Image:
        """A checkpoint in memory, checked."""
        found = _find(buffers, step)
        if found is None:
            raise Damaged("it is not in memory any more")
        buffer, record, layout = found
        image = Image(buffer.map(), record.data_at, layout)
        try:
            sums = buffer.sums(record)
        except NotWhole as error:
            raise Damaged(str(error)) from None
        if sums is None:
            log.info("step %d in memory has no checksums: its process ended while they were made", step)
        else:
            image.check(sums, copying_threads(record.length))
        return image

    def _from_peer(self, choice: _Choice, landing: Landing) -> None:
        gives = self._agreement.rank == choice.source
        image: Image | None = None
        why = ""
        if gives:
            try:
                image = self._image(self._leaders, choice.step)
            except Damaged as error:
                why = str(error)
        text = msgspec.json.encode(image.layout) if image is not None else b""
        length = self._agreement.gather([len(text)])[choice.source][0]
        if not length:
            raise Damaged(why or f"rank {choice.source} found it damaged")
        head = torch.frombuffer(bytearray(text), dtype=torch.uint8) if gives else torch.empty(length, dtype=torch.uint8)
        self._agreement.send(head, choice.source)
        if image is None:
            layout = msgspec.json.decode(bytes(head.tolist()), type=Layout)
            image = Image(bytearray(max(layout.length, 1)), 0, layout)
        self._agreement.send(image.bytes, choice.source)
        landing.check(item.path for item in image.layout.items)
        image.read(landing, copying_threads(image.layout.length))

    def _drop_newer(self, step: int) -> None:
        """What came after the step that all go on from never was."""
        for buffer in self._own:
            record = buffer.record()
            if record is not None and record.step > step:
                buffer.void()

    @staticmethod
    def _try(work: Callable[[], None]) -> tuple[int, str]:
        try:
            work()
        except Damaged as error:
            return DAMAGED, str(error)
        except Misfit as error:
            return MISFIT, str(error)
        return OK, ""


def _find(buffers: Sequence[Buffer], step: int) -> tuple[Buffer, Record, Layout] | None:
    for buffer in buffers:
        record = buffer.record()
        if record is not None and record.step == step:
            try:
                return buffer, record, buffer.layout(record)
            except NotWhole as error:
                log.warning("step %d in memory is not used: %s", step, error)
    return None


def _place(choice: _Choice) -> str:
    return {MEMORY: "memory", PEER: f"the memory of rank {choice.source}", STORAGE: "storage"}[choice.order]
