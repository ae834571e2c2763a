"""The certificate of one job's master: it vouches for itself, holds the master's names, and only its nodes trust it.

It is valid for longer than any job runs, so that nothing has to be renewed under way.
"""

from __future__ import annotations

from resile.api.kinds.base import JobKind
from resile.common.certificates import Pair, self_signed


def new_pair(kind: JobKind, job: str, namespace: str) -> Pair:
    """A new key, and a certificate for the master of this job."""
    return self_signed(kind.master_name(job), names(kind, job, namespace))


def names(kind: JobKind, job: str, namespace: str) -> list[str]:
    """All names of the master's Service; nodes ask for the first."""
    host, name = kind.master_host(job, namespace), kind.master_name(job)
    return [host, f"{host}.cluster.local", f"{name}.{namespace}", name]
