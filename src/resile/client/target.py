"""Which jobs a command means: those of this machine, or those of a cluster. Imports no Kubernetes library until needed.

`--local` and `--cluster` (or `--kubeconfig`, `--context`) say it. Otherwise a job of this machine comes before one of
the cluster: a name that a job of this machine has means that job, and a listing shows this machine's jobs if there are
any. Where no cluster is configured, everything means this machine. `submit` alone never guesses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from resile.client.local.jobs import DEFAULT_NAMESPACE, all_jobs
from resile.kube.config import config_files, in_a_pod

if TYPE_CHECKING:
    from resile.client.base import Jobs, Say


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where the user says the jobs are."""

    namespace: str | None = None
    local: bool = False
    cluster: bool = False
    kubeconfig: str = ""
    context: str = ""

    @property
    def names_cluster(self) -> bool:
        """Whether the flags say that the cluster is meant."""
        return self.cluster or bool(self.kubeconfig or self.context)

    def is_local(self, name: str = "", *, everywhere: bool = False) -> bool:
        """Whether this machine is meant.

        Args:
            name: of a job or a pod; without one, a listing is meant.
            everywhere: the listing is one of all namespaces.
        """
        if self.local or self.names_cluster:
            return self.local
        if not configured():
            return True
        if name:
            return any(name == job.name or job.has_pod(name) for job in all_jobs(self.namespace))
        return bool(all_jobs(None if everywhere else self.namespace or DEFAULT_NAMESPACE))

    def jobs(self, say: Say, *, local: bool) -> Jobs:
        """The jobs of this machine, or of the cluster; `say` is told what a waiting person should know.

        Raises:
            CommandError: nothing says where the cluster is, or what says so cannot be used.
        """
        if local:
            from resile.client.local.backend import LocalJobs

            return LocalJobs(self.namespace, say)
        from resile.client.cluster.backend import ClusterJobs

        return ClusterJobs(self, say)


def configured() -> bool:
    """Whether anything says where a cluster is."""
    return any(path.is_file() for path in config_files()) or in_a_pod()
