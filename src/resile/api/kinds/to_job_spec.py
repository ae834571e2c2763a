"""Moved to `resile.api.kinds.elasticjob.to_job_spec`."""

from resile.api.kinds.elasticjob.to_job_spec import *  # noqa: F403
