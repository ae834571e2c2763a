"""Names that Kubernetes must accept: checked before anything is made, because later they fail one object at a time."""

from __future__ import annotations

import re
from typing import Any

from resile.api.ids import NodeId, NodeKey
from resile.api.job import ROLES
from resile.api.manifests.errors import ManifestErrors, shown, under

MAX_LABEL = 63
"""Of a DNS label and of a label's value (RFC 1123)."""

MAX_OBJECT_NAME = 253
"""Of objects whose names become no label."""

MASTER_ROLE = "dlrover-master"
MAX_JOB_NAME = MAX_LABEL - len(f"elasticjob--{MASTER_ROLE}")
"""A job's longest derived name is its master's Service; `<job>-edljob-evaluator-123456` fits as well."""

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", re.ASCII)
JOB_NAMES = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)
OBJECT_NAMES = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", re.ASCII)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", re.ASCII)
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", re.ASCII)
_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*", re.ASCII)
_POD_NAME = re.compile(rf"(?P<job>.+)-edljob-(?P<role>{'|'.join(ROLES)})-(?P<id>0|[1-9][0-9]{{0,8}})", re.ASCII)


def master_name(job: str) -> str:
    """The name of a job's master: of its pod and of its Service."""
    return f"elasticjob-{job}-{MASTER_ROLE}"


def master_host(job: str, namespace: str) -> str:
    """The name by which nodes call their job's master, and which its certificate must hold: its Service."""
    return f"{master_name(job)}.{namespace}.svc"


def token_secret(job: str) -> str:
    """The name of the Secret that every node of a job mounts: the token, and the certificate of its master."""
    return f"elasticjob-{job}-token"


def tls_secret(job: str) -> str:
    """The name of the Secret that a job's master alone mounts: its certificate and the key of it."""
    return f"elasticjob-{job}-tls"


def node_of_pod(name: str, job: str) -> NodeKey | None:
    """Which node of `job` a pod of this name is, or None if it is none of them."""
    match = _POD_NAME.fullmatch(name)
    if match is None or match["job"] != job:
        return None
    return NodeKey(match["role"], NodeId(int(match["id"])))


def check_job_name(value: str, path: str, errors: ManifestErrors) -> None:
    """A job's name starts the names of Services, which must start with a letter and fit a DNS label."""
    if not JOB_NAMES.fullmatch(value):
        errors.add(
            path,
            "must be lower-case letters, digits and '-', starting with a letter and ending with a letter or digit, "
            f"not {shown(value)}",
        )
    elif len(value) > MAX_JOB_NAME:
        errors.add(
            path,
            f"must be at most {MAX_JOB_NAME} characters so that {master_name('<name>')} fits into {MAX_LABEL}, "
            f"not {len(value)}",
        )


def check_dns_label(value: str, path: str, errors: ManifestErrors) -> None:
    """Names of namespaces and containers."""
    if not _DNS_LABEL.fullmatch(value) or len(value) > MAX_LABEL:
        errors.add(
            path,
            f"must be at most {MAX_LABEL} lower-case letters, digits and '-', "
            f"starting and ending with a letter or digit, not {shown(value)}",
        )


def check_object_name(value: str, path: str, errors: ManifestErrors) -> None:
    """Names of objects from which no other name is made."""
    if not OBJECT_NAMES.fullmatch(value) or len(value) > MAX_OBJECT_NAME:
        errors.add(
            path,
            f"must be at most {MAX_OBJECT_NAME} lower-case letters, digits, '-' and '.', "
            f"starting and ending with a letter or digit, not {shown(value)}",
        )


def check_labels(value: dict[str, Any], path: str, errors: ManifestErrors) -> None:
    """Keys and values that Kubernetes takes as labels."""
    for key, item in value.items():
        if not _LABEL_KEY.fullmatch(key) or len(key.rpartition("/")[2]) > MAX_LABEL:
            errors.add(
                under(path, key), "is not a label's key: letters, digits, '-', '_', '.', after an optional prefix/"
            )
        if isinstance(item, str) and (not _LABEL_VALUE.fullmatch(item) or len(item) > MAX_LABEL):
            errors.add(
                under(path, key),
                f"must be at most {MAX_LABEL} letters, digits, '-', '_' and '.', "
                f"starting and ending with a letter or digit, not {shown(item)}",
            )


def check_env_name(value: str, path: str, errors: ManifestErrors) -> None:
    """Names of environment variables that Kubernetes takes."""
    if not _ENV_NAME.fullmatch(value):
        errors.add(path, f"must be letters, digits, '_', '-' and '.', not starting with a digit, not {shown(value)}")
