"""Choosing between the jobs of this machine and those of a cluster. Imports no Kubernetes library until needed.

The flags `--local` and `--cluster` (or `--kubeconfig`, `--context`) decide. Without them, a job of this machine comes
before a job of the cluster: a name means the job of this machine that has it, and a listing shows the jobs of this
machine if there are any. If no cluster is configured, every command means this machine. `submit` alone never guesses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from resile.client.local.jobs import DEFAULT_NAMESPACE, all_jobs
from resile.kube.config import config_files, in_a_pod

if TYPE_CHECKING:
    from resile.client.base import Jobs, Say


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The flags by which a user chooses this machine or a cluster, and a namespace."""

    namespace: str | None = None
    local: bool = False
    cluster: bool = False
    kubeconfig: str = ""
    context: str = ""

    @property
    def names_cluster(self) -> bool:
        return self.cluster or bool(self.kubeconfig or self.context)

    def is_local(self, name: str = "", *, everywhere: bool = False) -> bool:
        """True if a command with these flags means the jobs of this machine, False if it means those of a cluster.

        `name` is the name of a job or pod, empty for a listing. `everywhere` is True for a listing of all namespaces.
        """
        if self.local or self.names_cluster:
            return self.local
        if not configured():
            return True
        if name:
            return any(name == job.name or job.has_pod(name) for job in all_jobs(self.namespace))
        return bool(all_jobs(None if everywhere else self.namespace or DEFAULT_NAMESPACE))

    def jobs(self, say: Say, *, local: bool) -> Jobs:
        if local:
            from resile.client.local.backend import LocalJobs

            return LocalJobs(self.namespace, say)
        from resile.client.cluster.backend import ClusterJobs

        return ClusterJobs(self, say)


def configured() -> bool:
    return any(path.is_file() for path in config_files()) or in_a_pod()
