"""The names of the objects of an ElasticJob in a cluster, which are those of DLRover."""

from __future__ import annotations

import re

from resile.api.ids import NodeId, NodeKey
from resile.api.kinds.elasticjob.roles import MASTER_ROLE, ROLE_NAMES
from resile.api.manifests.errors import ManifestErrors, shown
from resile.api.manifests.name_rules import MAX_LABEL

MAX_JOB_NAME = MAX_LABEL - len(f"elasticjob--{MASTER_ROLE}")
"""The longest name of a job: with it, the name of its master's Service is as long as a DNS label may be."""

JOB_NAMES = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_NODE_NAME = re.compile(rf"(?P<job>.+)-edljob-(?P<role>{'|'.join(ROLE_NAMES)})-(?P<id>0|[1-9][0-9]{{0,8}})", re.ASCII)


def node_name(job: str, role: str, node_id: int) -> str:
    """The name of a node's pod. To get the name of a rank's Service, pass the rank as `node_id`."""
    return f"{job}-edljob-{role}-{node_id}"


def node_of(name: str, job: str) -> NodeKey | None:
    match = _NODE_NAME.fullmatch(name)
    if match is None or match["job"] != job:
        return None
    return NodeKey(match["role"], NodeId(int(match["id"])))


def master_name(job: str) -> str:
    return f"elasticjob-{job}-{MASTER_ROLE}"


def token_secret(job: str) -> str:
    return f"elasticjob-{job}-token"


def tls_secret(job: str) -> str:
    return f"elasticjob-{job}-tls"


def check_job_name(value: str, path: str, errors: ManifestErrors) -> None:
    """Add an error if `value` is too long for the name of a job, or has another form than the names of Services."""
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
