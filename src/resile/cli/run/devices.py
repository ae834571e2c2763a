"""Counting the GPUs and CPUs of this machine without importing torch, which takes longer than a recovery.

GPUs are counted as the driver shows them: by the variable that limits the visible devices if it is set, else by device
files, which a container has only for its own devices. A broken device is counted, too; the training process finds out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_VISIBLE: dict[str, tuple[str, str]] = {
    "gpu": ("CUDA_VISIBLE_DEVICES", r"nvidia\d+"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES", r"davinci\d+"),
    "musa": ("MUSA_VISIBLE_DEVICES", r"mtgpu\.?\d+"),
}
"""By the word that `--nproc-per-node` takes: the variable that limits the visible devices, and their device files."""

DEVICE_OF_ACCELERATOR = {
    "nvidia.com/gpu": "gpu",
    "ascend-npu": "npu",
    "mthreads.com/gpu": "musa",
    "metax-tech.com/gpu": "gpu",
}
DEVICE_KINDS = tuple(_VISIBLE)


def count_devices(kind: str, environ: Mapping[str, str], dev: str = "/dev") -> int:
    """Count the visible devices of a kind: `gpu`, `npu` or `musa`.

    If the kind's variable (such as CUDA_VISIBLE_DEVICES) is set, its entries are counted. As in the driver, the count
    ends at an empty or negative entry. Without the variable, the kind's device files in the folder `dev` are counted.
    """
    variable, pattern = _VISIBLE[kind]
    chosen = environ.get(variable)
    if chosen is None:
        try:
            return sum(1 for name in os.listdir(dev) if re.fullmatch(pattern, name))
        except OSError:
            return 0
    count = 0
    for entry in chosen.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        count += 1
    return count


def usable_cpus() -> int:
    """How many CPUs this process may use; a container or `taskset` may allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
