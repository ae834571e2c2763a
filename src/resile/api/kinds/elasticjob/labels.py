"""The labels of the pods of an ElasticJob, with the names of both generations of DLRover.

The first generation (`elasticjob-name`, …) is used by selectors in early tutorials, the second
(`elasticjob.dlrover/name`, …) by later ones. Every pod has both, so that either selector finds it.
"""

from __future__ import annotations

from resile.api.ids import NodeId, Rank
from resile.api.kinds.elasticjob.roles import MASTER_ROLE

JOB_NAME = "elasticjob-name"
REPLICA_INDEX = "replica-index"

PREFIX = "elasticjob.dlrover/"
PREFIXED_JOB_NAME = f"{PREFIX}name"
PREFIXED_REPLICA_TYPE = f"{PREFIX}replica-type"
PREFIXED_REPLICA_INDEX = f"{PREFIX}replica-index"
PREFIXED_RANK_INDEX = f"{PREFIX}rank-index"
PREFIXED_RELAUNCH_COUNT = f"{PREFIX}relaunch-count"

MASTERS = {"app.kubernetes.io/name": "elasticjob"}

JOB_LABELS = (JOB_NAME, PREFIXED_JOB_NAME)
"""The labels by which a pod or a plan names its job."""

SCALE_TYPE = "scale-type"
"""The label of a ScalePlan that says who wrote it: `manual` (a user) or `auto` (a master)."""


def role_selector(job: str, role: str) -> dict[str, str]:
    return {PREFIXED_JOB_NAME: job, PREFIXED_REPLICA_TYPE: role}


def node_labels(job: str, *, role: str, node_id: NodeId, rank: Rank, relaunch_count: int = 0) -> dict[str, str]:
    return {
        **_pod_labels(job, role, node_id),
        "rank-index": str(rank),
        PREFIXED_RANK_INDEX: str(rank),
        "restart-count": str(relaunch_count),
        PREFIXED_RELAUNCH_COUNT: str(relaunch_count),
    }


def master_labels(job: str, index: int = 0) -> dict[str, str]:
    return {**MASTERS, **_pod_labels(job, MASTER_ROLE, index)}


def _pod_labels(job: str, role: str, index: int) -> dict[str, str]:
    first_generation = {JOB_NAME: job, "replica-type": role, REPLICA_INDEX: str(index)}
    return {"app": "dlrover", **first_generation, **role_selector(job, role), PREFIXED_REPLICA_INDEX: str(index)}
