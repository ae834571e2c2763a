"""Makes copies between a state and its buffers fast, because training stands still meanwhile.

Several threads copy, since one thread is slower than memory. Pages are mapped beforehand, since the first access to
each page would cost a page fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from resile.checkpoint.buffer import PAGE, Buffer

PIECE = 16 << 20
"""Bytes that one thread copies at a time."""
THREADS = 4
POPULATE_READ, POPULATE_WRITE = 22, 23
"""The kernel's MADV_POPULATE_READ and MADV_POPULATE_WRITE."""
_POPULATED = 64 << 20
"""Bytes that are mapped at a time."""
memcpy = ctypes.CDLL(None).memcpy  # unlike ctypes.memmove it lets other threads run
memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
memcpy.restype = None


def memcpies(target: int, source: int, nbytes: int) -> list[Callable[[], None]]:
    """Split the copy of `nbytes` bytes from `source` to `target` into functions that several threads can share."""
    return [
        functools.partial(memcpy, target + at, source + at, min(PIECE, nbytes - at)) for at in range(0, nbytes, PIECE)
    ]


def copying_threads(nbytes: int) -> int:
    """How many threads should copy this many bytes: one for each idle core, at least 1 and at most `THREADS`.

    A core is not idle if another process runs on it at this moment (a load average would include past work). Cores with
    this process's threads count as idle, because training waits for the copy and torch's threads only spin after work.
    """
    if nbytes <= PIECE:
        return 1
    cores = len(os.sched_getaffinity(0))
    try:
        others = _running() - _running_here()
    except (OSError, ValueError, IndexError):
        return 1
    return max(1, min(THREADS, cores, cores - others))


def _running() -> int:
    with open("/proc/loadavg") as file:
        return int(file.read().split()[3].partition("/")[0])


def _running_here() -> int:
    running = 0
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{thread}/stat") as file:
            running += file.read().rpartition(")")[2].split()[0] == "R"
    return running


def run_jobs(threads: int, jobs: Iterable[Callable[[], None]]) -> None:
    """Run all jobs on `threads` threads, including this one, and raise the error of a job that failed.

    Each free thread takes the next job. If several calls run at once and have the same list iterator as `jobs`, they
    share the jobs, and each job runs once.
    """
    rest = iter(jobs)

    def do() -> None:
        for job in rest:
            job()

    if threads <= 1:
        do()
        return
    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(do) for _ in range(threads - 1)]
        do()
        for other in others:
            other.result()


def populate(buffer: Buffer, how: int) -> None:
    """Map a buffer and allocate its missing pages. `how` is POPULATE_READ for reading, POPULATE_WRITE for writing."""
    size = buffer.size
    if not size:
        return
    memory = torch.frombuffer(buffer.map(), dtype=torch.uint8)
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start in range(0, size, _POPULATED):
        if madvise(memory.data_ptr() + start, min(_POPULATED, size - start), how):
            memory[start : start + _POPULATED : PAGE].sum()  # an older kernel; reading each page is nearly as good
