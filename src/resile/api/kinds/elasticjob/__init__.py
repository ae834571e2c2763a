"""DLRover's ElasticJob: its fields, and the names, labels, environment and status that its users rely on."""

from resile.api.job_phase import INVALID_SPEC as INVALID_SPEC
from resile.api.job_phase import JOURNAL_GONE as JOURNAL_GONE
from resile.api.job_phase import JobPhase
from resile.api.kinds.elasticjob.resource import *  # noqa: F403

Phase = JobPhase
PLURAL = "elasticjobs"
