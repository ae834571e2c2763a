"""Names that users write: of pods, of masters, and what was probably meant by one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resile.api.kinds.base import BaseJobKind


def pod_name(kind: BaseJobKind, job: str, node: str) -> str:
    """The name of the pod that `worker-0` of a job has; empty if that is no node's name."""
    role, _, number = node.rpartition("-")
    if not number.isascii() or not number.isdigit():
        return ""
    pod = kind.node_name(job, role, int(number))
    return pod if kind.node_of(pod, job) is not None else ""


def is_pod_of(kind: BaseJobKind, name: str, job: str) -> bool:
    """Whether a pod of this name is the job's master or one of its nodes."""
    return name == kind.master_name(job) or kind.node_of(name, job) is not None


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A hint for the user who wrote a name that does not exist; empty if nothing is known."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"known are {', '.join(known[:8])}{', …' if len(known) > 8 else ''}" if known else ""
