"""DLRover's ScalePlan: a change to the nodes of a running ElasticJob."""

from resile.api.kinds.base import PlanPhase as PlanPhase
from resile.api.kinds.scaleplan.resource import *  # noqa: F403

PLURAL = "scaleplans"
