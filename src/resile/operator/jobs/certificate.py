"""The certificate of one job's master: it vouches for itself, holds the master's names, and only its nodes trust it.

It is valid for longer than any job runs, so that nothing has to be renewed under way.
"""

from __future__ import annotations

from resile.api.manifests.names import master_host, master_name
from resile.common.certificates import Pair, self_signed


def new_pair(job: str, namespace: str) -> Pair:
    """A new key, and a certificate for the master of this job."""
    return self_signed(master_name(job), names(job, namespace))


def names(job: str, namespace: str) -> list[str]:
    """All names of the master's Service; nodes ask for the first."""
    host = master_host(job, namespace)
    return [host, f"{host}.cluster.local", f"{master_name(job)}.{namespace}", master_name(job)]
