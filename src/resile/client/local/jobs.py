"""Jobs on this machine: where they are kept, and how one is found by its name.

The state root is `$RESILE_STATE_DIR`, else `$XDG_STATE_HOME/resile`, else `~/.local/state/resile`. Below it:

    jobs/<namespace>/<name>/       the job's directory (see `resile.wire.job_directory`)
    previous/<namespace>/<name>/   the directory of the job of that name that ran before
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from resile.api.manifests.names import MASTER_ROLE, master_name, node_of_pod
from resile.client.errors import CommandError
from resile.wire.job_directory import JobDirectory

DEFAULT_NAMESPACE = "default"


def state_root() -> Path:
    """Where everything is kept that outlives a command."""
    own = os.environ.get("RESILE_STATE_DIR")
    if own:
        return Path(own).absolute()
    shared = os.environ.get("XDG_STATE_HOME")
    return (Path(shared).absolute() if shared else Path.home() / ".local" / "state") / "resile"


class LocalJob(msgspec.Struct, frozen=True):
    """A job's name and place; it need not be there (yet)."""

    namespace: str
    name: str

    @property
    def directory(self) -> JobDirectory:
        """Where the job is, or would be."""
        return JobDirectory(state_root() / "jobs" / self.namespace / self.name)

    @property
    def previous(self) -> Path:
        """Where the directory goes when another job of this name takes its place."""
        return state_root() / "previous" / self.namespace / self.name

    def __str__(self) -> str:
        return self.name if self.namespace == DEFAULT_NAMESPACE else f"{self.namespace}/{self.name}"


def all_jobs(namespace: str | None = None) -> list[LocalJob]:
    """Every job of a namespace, or of all of them, by namespace and name."""
    root = state_root() / "jobs"
    namespaces = [namespace] if namespace is not None else _names(root)
    jobs = [LocalJob(space, name) for space in namespaces for name in _names(root / space)]
    return [job for job in jobs if job.directory.exists]


def find(name: str, namespace: str | None) -> LocalJob:
    """The job of this name: in the namespace if one is given, else in `default`, else in the only one that has it.

    Raises:
        CommandError: there is none, or there are several; the sentence names what was probably meant.
    """
    jobs = all_jobs(namespace)
    same = [job for job in jobs if job.name == name]
    default = [job for job in same if job.namespace == DEFAULT_NAMESPACE]
    if len(same) == 1 or default:
        return (default or same)[0]
    if same:
        raise CommandError(f"several jobs are called {name}: {', '.join(map(str, same))}; say which with -n")
    raise _unknown(name, namespace, jobs)


def find_pod(name: str, namespace: str | None) -> tuple[LocalJob, str]:
    """The job that a pod's name belongs to, and the pod; the pod is empty when `name` is a job's own.

    Raises:
        CommandError: no job has such a name or such a pod.
    """
    jobs = all_jobs(namespace)
    if any(job.name == name for job in jobs):
        return find(name, namespace), ""
    for job in jobs:
        if name == master_name(job.name) or node_of_pod(name, job.name) is not None:
            return job, name
    pods = [pod for job in jobs if (pod := pod_name(job.name, name))]
    if pods:
        raise CommandError(f"{name} is a node of a job; its log is that of a pod: `resile logs {pods[0]}`")
    raise _unknown(name, namespace, jobs)


def pod_name(job: str, node: str) -> str:
    """The name of the pod that `worker-0` of a job has; empty if that is no node's name."""
    return pod if node_of_pod(pod := f"{job}-edljob-{node}", job) is not None else ""


def is_master(pod: str) -> bool:
    """Whether a pod's name is a master's."""
    return pod.endswith(f"-{MASTER_ROLE}")


def meant(name: str, known: Sequence[str]) -> str:
    """What somebody who wrote a name that does not exist may have meant; empty if there are none."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"known are {', '.join(known[:8])}{', …' if len(known) > 8 else ''}" if known else ""


def _unknown(name: str, namespace: str | None, jobs: list[LocalJob]) -> CommandError:
    where = f" in namespace {namespace}" if namespace else ""
    near = difflib.get_close_matches(name, [job.name for job in jobs], n=1, cutoff=0.5)
    hint = (
        meant(name, near or list(map(str, jobs)))
        or "there are no jobs; start one with `resile submit --local job.yaml`"
    )
    return CommandError(f"there is no job {name!r}{where}; {hint}")


def _names(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir() if entry.is_dir())
    except OSError:
        return []
