"""The roles of an ElasticJob, with their traits.

A new role is a `Role` here, a field of `ReplicaSpecs` in `resource`, and a value of `Role` in `scaleplan.resource`.
"""

from __future__ import annotations

from resile.api.job import Loss
from resile.api.kinds.base import Role

MASTER_ROLE = "dlrover-master"
LEGACY_MASTER_ROLE = "master"

_TASK_PORT = 3333

CHIEF = Role(name="chief", loss=Loss.FATAL, port=_TASK_PORT)
WORKER = Role(name="worker", port=_TASK_PORT)
PS = Role(
    name="ps",
    trains=False,
    decides_end=False,
    loss=Loss.FATAL,
    failure="PSError",
    oom_failure="PSError",
    cannot_migrate="is a parameter server, and those cannot be migrated in this version",
    port=2222,
)
EVALUATOR = Role(
    name="evaluator",
    trains=False,
    decides_end=False,
    loss=Loss.FATAL,
    failure="EvaluatorError",
    oom_failure="EvaluatorError",
    port=_TASK_PORT,
)

ROLES = (CHIEF, WORKER, PS, EVALUATOR)
ROLE_NAMES = tuple(role.name for role in ROLES)
