"""Jobs of this machine by their names, and the directories in which they are kept.

The state root is `$RESILE_STATE_DIR`, else `$XDG_STATE_HOME/resile`, else `~/.local/state/resile`. Below it:

    jobs/<namespace>/<name>/       the job's directory (see `resile.wire.job_directory`)
    previous/<namespace>/<name>/   the directory of an earlier job of the same name
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from resile.client.errors import CommandError
from resile.client.pod_names import did_you_mean, is_pod_of, pod_owner
from resile.wire.job_directory import DirectoryError, JobDirectory

if TYPE_CHECKING:
    from resile.api.job import JobSpec
    from resile.api.kinds.base import BaseJobKind

DEFAULT_NAMESPACE = "default"


def state_root() -> Path:
    """The directory in which resile keeps the directories of present and earlier jobs of this machine.

    This is `RESILE_STATE_DIR` if set, else `resile` in `XDG_STATE_HOME` or `~/.local/state`.
    """
    own = os.environ.get("RESILE_STATE_DIR")
    if own:
        return Path(own).absolute()
    shared = os.environ.get("XDG_STATE_HOME")
    return (Path(shared).absolute() if shared else Path.home() / ".local" / "state") / "resile"


class LocalJob(msgspec.Struct, frozen=True):
    """The namespace and name of a job of this machine. The job need not exist."""

    namespace: str
    name: str

    @property
    def directory(self) -> JobDirectory:
        return JobDirectory(state_root() / "jobs" / self.namespace / self.name)

    @property
    def previous(self) -> Path:
        """The path to which the job directory is moved when a new job of the same name is submitted."""
        return state_root() / "previous" / self.namespace / self.name

    @property
    def kind(self) -> BaseJobKind | None:
        """The kind of the job; None if the job cannot be read or its kind is unknown to this version."""
        try:
            return self.spec_and_kind()[1]
        except CommandError:
            return None

    def spec_and_kind(self) -> tuple[JobSpec, BaseJobKind]:
        """The submitted spec, and its kind; raises `CommandError` if the spec is unreadable or the kind unknown."""
        from resile.api.kinds import registry

        try:
            spec = self.directory.spec()
        except DirectoryError as error:
            raise CommandError(str(error)) from error
        try:
            return spec, registry.kind_of_job(spec)
        except KeyError:
            raise CommandError(f"this version of resile does not know jobs of kind {spec.kind!r}") from None

    def has_pod(self, name: str) -> bool:
        kind = self.kind
        return kind is not None and is_pod_of(kind, name, self.name)

    def __str__(self) -> str:
        return self.name if self.namespace == DEFAULT_NAMESPACE else f"{self.namespace}/{self.name}"


def all_jobs(namespace: str | None = None) -> list[LocalJob]:
    """Every job of `namespace`, or of all namespaces if it is None, sorted by namespace and name."""
    root = state_root() / "jobs"
    namespaces = [namespace] if namespace is not None else _names(root)
    jobs = [LocalJob(space, name) for space in namespaces for name in _names(root / space)]
    return [job for job in jobs if job.directory.exists]


def find(name: str, namespace: str | None) -> LocalJob:
    """Find a job in `namespace`. If that is None, look in the namespace `default`, and then in all others.

    Raises `CommandError` if there is no such job (the message suggests a name), or if several of the others have one.
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
    """Find a job by its own name or by the name of one of its pods.

    Returns the job and the name of the pod, or the job and "" if `name` is the job's own name. If a job and a pod have
    this name, the job is meant. Raises `CommandError` if neither has it.
    """
    jobs = all_jobs(namespace)
    if any(job.name == name for job in jobs):
        return find(name, namespace), ""
    owner = pod_owner(name, [(job, kind, job.name) for job in jobs if (kind := job.kind) is not None])
    if owner is None:
        raise _unknown(name, namespace, jobs)
    return owner, name


def _unknown(name: str, namespace: str | None, jobs: list[LocalJob]) -> CommandError:
    where = f" in namespace {namespace}" if namespace else ""
    near = difflib.get_close_matches(name, [job.name for job in jobs], n=1, cutoff=0.5)
    hint = (
        did_you_mean(name, near or list(map(str, jobs)))
        or "there are no jobs; start one with `resile submit --local job.yaml`"
    )
    return CommandError(f"there is no job {name!r}{where}; {hint}")


def _names(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir() if entry.is_dir())
    except OSError:
        return []
