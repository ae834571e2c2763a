"""Moved to `resile.api.kinds.elasticjob.labels`."""

from resile.api.kinds.elasticjob.labels import *  # noqa: F403
from resile.api.kinds.elasticjob.labels import PREFIXED_JOB_NAME


def job_selector(job: str) -> str:
    """The selector that finds everything of a job."""
    return f"{PREFIXED_JOB_NAME}={job}"
