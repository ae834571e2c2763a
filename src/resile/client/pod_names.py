"""Names that users write, of jobs, pods and nodes, and suggestions for names that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from resile.client.errors import CommandError

if TYPE_CHECKING:
    from resile.api.kinds.base import BaseJobKind

T = TypeVar("T")


def pod_name(kind: BaseJobKind, job: str, node: str) -> str:
    """The name of a node's pod. `node` is a name such as `worker-0`; if no node can have this name, returns ""."""
    role, _, number = node.rpartition("-")
    if not number.isascii() or not number.isdigit():
        return ""
    pod = kind.node_name(job, role, int(number))
    return pod if kind.node_of(pod, job) is not None else ""


def is_pod_of(kind: BaseJobKind, name: str, job: str) -> bool:
    """True if `name` is the name of the master's pod or of a node's pod of this job. The pod need not exist."""
    return name == kind.master_name(job) or kind.node_of(name, job) is not None


def pod_owner(pod: str, jobs: Sequence[tuple[T, BaseJobKind, str]]) -> T | None:
    """The job that has a pod of this name; None if no job has. Each of `jobs` is a job, its kind and its name.

    Raises `CommandError` if `pod` is the name of a node, such as `worker-0`, and not of a pod.
    """
    for job, kind, name in jobs:
        if is_pod_of(kind, pod, name):
            return job
    for _, kind, name in jobs:
        if meant := pod_name(kind, name, pod):
            raise CommandError(f"{pod} is a node of a job; its log is that of a pod: `resile logs {meant}`")
    return None


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A hint for a user who wrote a name that does not exist; empty if `known` is empty."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"known are {', '.join(known[:8])}{', …' if len(known) > 8 else ''}" if known else ""
