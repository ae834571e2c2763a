"""Numbers that several packages share or that a user may want to know, with their reasons.

Times that depend on a job's `recovery_budget` are derived in `timeouts.py`. A number that only one module needs is in
that module, and the intervals of the operator are in `resile.operator.intervals`.
"""

from __future__ import annotations

from resile.api.ids import Seconds

MASTER_PORT = 50001
"""The port of a job's master on a cluster, as in DLRover."""

MAX_REPLICAS = 10_000
"""The most nodes of one role. A master was measured with this many; a higher number is probably a typing error."""

DEFAULT_CRASH_BUDGET = 3
"""How many crashes of a rank are answered with a new node, as in DLRover."""

DEFAULT_RECOVERY_BUDGET = Seconds(10.0)
"""The longest a job may stand still after losing a node: enough for a restart of its processes."""
SMALLEST_RECOVERY_BUDGET = Seconds(1.0)
"""The smallest recovery budget that is allowed: with a smaller one, a busy machine would count as lost."""
LARGEST_RECOVERY_BUDGET = Seconds(3600.0)
"""The largest recovery budget that is allowed: with a larger one, a job would seem to hang."""

EXIT_GRACE = Seconds(30.0)
"""From SIGTERM to SIGKILL: the default of Kubernetes. It does not depend on the recovery budget: saving takes time."""
JOIN_TIMEOUT = Seconds(600.0)
"""How long too few nodes wait for the rest: the default of torchrun and DLRover."""
PEND_TIMEOUT = Seconds(900.0)
"""How long a node that the job needs may be unschedulable: the default of DLRover."""
CONNECT_TIMEOUT = Seconds(60.0)
"""How long a new agent tries to reach its master: longer than a cluster takes to start a master."""
BUDGET_WINDOW = Seconds(1800.0)
"""The training time after which a failure no longer counts: a job that trained for half an hour is healthy."""

TOKEN_FILE_VARIABLE = "RESILE_TOKEN_FILE"
"""The environment variable with the path of the job's token, for masters and agents."""
LOCAL_NODE_VARIABLE = "RESILE_LOCAL_NODE"
"""The environment variable with a local node's directory. By it, processes that outlive their shim are found."""
