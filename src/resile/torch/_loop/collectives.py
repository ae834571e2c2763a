"""Lets the ranks of a training agree and exchange data over their process group.

Within a round no wait is gloo's own, because a peer frozen in the middle of a message would block this rank, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from resile.torch._loop.group import Group, wait

_BLOCK = 64 << 20


class Collectives:
    """Exchanges numbers, texts and tensors between the ranks of a training. Several ranks need a process group."""

    def __init__(self, group: Group | None = None) -> None:
        self.group = group
        """The group of this round, which the rendezvous sets; None without rounds and after the last one."""

    @property
    def rank(self) -> int:
        return int(dist.get_rank()) if self._grouped else int(os.environ.get("RANK", "0"))

    @property
    def world(self) -> int:
        return int(dist.get_world_size()) if self._grouped else int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def _grouped(self) -> bool:
        return bool(dist.is_available() and dist.is_initialized())

    @property
    def device(self) -> Any:
        if dist.get_backend() == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def pause(self, seconds: float) -> None:
        """Sleep. Raises GroupLost as soon as the round is over."""
        if self.group is None:
            time.sleep(seconds)
        else:
            self.group.pause(seconds)

    def meet(self, row: Sequence[int]) -> list[list[int]] | None:
        """Like `gather`, but return None if there are several ranks and no process group."""
        return None if self.world > 1 and not self._grouped else self.gather(row)

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """Return every rank's row, by rank. All rows must have the same length. A collective.

        Raises RuntimeError if there are several ranks and no process group.
        """
        if self.world == 1:
            return [list(row)]
        if not self._grouped:
            raise RuntimeError("restore() is for all ranks together: call it after init_process_group()")
        mine = torch.tensor(list(row), dtype=torch.int64, device=self.device)
        return [each.tolist() for each in self.gather_alike(mine)]

    def gather_alike(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, by rank. The world must have at least two ranks. A collective.

        All tensors must have the same shape and type, on `self.device`.
        """
        rows = [torch.empty_like(mine) for _ in range(self.world)]
        wait(dist.all_gather(rows, mine, async_op=True), self.group)
        return rows

    def gather_all(self, row: Sequence[int]) -> list[list[int]]:
        """Like `gather`, for rows that may have different lengths."""
        longest = max(length for (length,) in self.gather([len(row)]))
        rows = self.gather([len(row), *row, *[0] * (longest - len(row))])
        return [each[1 : 1 + each[0]] for each in rows]

    def tell(self, words: str) -> list[str]:
        """Send `words` to all ranks. Returns every rank's words, by rank, cut to 2000 bytes. A collective."""
        return [bytes(row).decode(errors="replace") for row in self.gather_all(words.encode()[:2000])]

    def hand_over(self, data: Any, length: int, source: int, takers: Sequence[int]) -> None:
        """Send `length` bytes from the rank `source` to the ranks `takers`. A collective.

        `data` is a uint8 tensor: on the source, the bytes to send; on a taker, the memory to fill. None on other ranks.
        """
        alone = len(takers) == 1
        if not length or not takers or (alone and self.rank not in (source, *takers)):
            return
        gives, device = self.rank == source, self.device
        here = data is not None and data.device == device
        scratch = None if here or gives else torch.empty(min(length, _BLOCK), dtype=torch.uint8, device=device)
        for start in range(0, length, _BLOCK):
            size = min(_BLOCK, length - start)
            block: Any = None if data is None else data[start : start + size]
            moved = block.to(device) if scratch is None else scratch[:size]
            if not alone:
                wait(dist.broadcast(moved, source, async_op=True), self.group)
            elif gives:
                wait(dist.isend(moved, takers[0]), self.group)
            else:
                wait(dist.irecv(moved, source), self.group)
            if block is not None and scratch is not None:
                block.copy_(moved)
