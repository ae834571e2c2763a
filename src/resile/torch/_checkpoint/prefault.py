"""Maps the pages of a buffer before they are used, because the first access to each would cost a page fault."""

from __future__ import annotations

import ctypes

import torch

from resile.checkpoint.buffer import PAGE, Buffer

READ, WRITE = 22, 23
"""MADV_POPULATE_READ and MADV_POPULATE_WRITE of the kernel."""
_BLOCK = 64 << 20


def populate(buffer: Buffer, how: int) -> None:
    """Map a whole buffer now, allocating missing pages. Other threads run meanwhile."""
    size = buffer.size
    if not size:
        return
    memory = torch.frombuffer(buffer.map(), dtype=torch.uint8)
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start in range(0, size, _BLOCK):
        if madvise(memory.data_ptr() + start, min(_BLOCK, size - start), how):
            memory[start : start + _BLOCK : PAGE].sum()  # an older kernel; reading each page is nearly as good
