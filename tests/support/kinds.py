"""The registered kinds, as tests of one of them name them."""

from resile.api.kinds.elasticjob.kind import ELASTIC_JOB
from resile.api.kinds.scaleplan.kind import SCALE_PLAN
from resile.kube.kinds import of

__all__ = ["ELASTIC_JOB", "ELASTIC_JOBS", "SCALE_PLAN", "SCALE_PLANS"]

ELASTIC_JOBS, SCALE_PLANS = of(ELASTIC_JOB), of(SCALE_PLAN)
