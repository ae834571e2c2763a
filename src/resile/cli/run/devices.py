"""How many processes a machine can feed, found without importing torch (which takes longer than a recovery).

A GPU is counted as the driver shows it: by the variable that narrows the choice if it is set, else by device files,
which a container has only for the devices it was given. A device that is there but broken is counted all the same;
the training process finds out.
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
"""By the word that `--nproc-per-node` takes: the variable that narrows the choice, and the device files."""

DEVICE_OF_ACCELERATOR = {
    "nvidia.com/gpu": "gpu",
    "ascend-npu": "npu",
    "mthreads.com/gpu": "musa",
    "metax-tech.com/gpu": "gpu",
}
DEVICE_KINDS = tuple(_VISIBLE)


def count_devices(kind: str, environ: Mapping[str, str], dev: str = "/dev") -> int:
    """How many devices of a kind this machine shows; 0 if none. Costs one directory listing at most.

    As the driver reads it, a list of visible devices ends at the first entry that is empty or negative.
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
    """CPUs that this process may use; a container or `taskset` may leave fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
