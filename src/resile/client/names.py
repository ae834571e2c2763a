"""Names that users write: of pods, of masters, and what was probably meant by one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from resile.api.manifests.names import MASTER_ROLE, master_name, node_of_pod


def pod_name(job: str, node: str) -> str:
    """The name of the pod that `worker-0` of a job has; empty if that is no node's name."""
    return pod if node_of_pod(pod := f"{job}-edljob-{node}", job) is not None else ""


def is_master(pod: str) -> bool:
    """Whether a pod's name is a master's."""
    return pod.endswith(f"-{MASTER_ROLE}")


def is_pod_of(name: str, job: str) -> bool:
    """Whether a pod of this name is the job's master or one of its nodes."""
    return name == master_name(job) or node_of_pod(name, job) is not None


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A hint for the user who wrote a name that does not exist; empty if nothing is known."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"known are {', '.join(known[:8])}{', …' if len(known) > 8 else ''}" if known else ""
