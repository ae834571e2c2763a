"""Moved to `resile.api.kinds.elasticjob.master_options`."""

from resile.api.kinds.elasticjob.master_options import *  # noqa: F403
