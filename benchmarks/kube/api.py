"""The cluster as the benchmarks see it: through lightkube's own client, not through the one that is measured."""

from __future__ import annotations

import httpx2
from lightkube import Client
from lightkube.core.exceptions import ConfigError
from lightkube.generic_resource import create_namespaced_resource

from resile.api.kinds.elasticjob.kind import ELASTIC_JOB

PODS = create_namespaced_resource("", "v1", "Pod", "pods")
_JOB = ELASTIC_JOB.definition
JOBS = create_namespaced_resource(_JOB.group, _JOB.version, _JOB.kind, _JOB.plural)

CALL_SECONDS = 10.0
CANNOT_REACH = (httpx2.HTTPError, httpx2.StreamError, ConfigError, LookupError, ValueError, TypeError, AttributeError)
"""What the client raises where the API server does not answer, or not as an API server does."""


def connect(namespace: str) -> Client:
    """A client of the cluster that KUBECONFIG names.

    Raises:
        CANNOT_REACH: it names none.
    """
    return Client(namespace=namespace, timeout=httpx2.Timeout(CALL_SECONDS), field_manager="resile-bench")
