"""The numbers that several packages share or that a user may want to know: each with its unit and its reason.

Times that follow from a job's `recovery_budget` are derived in `timeouts.py`. A number that only one module needs
stands in that module, and what the operator waits for in `resile.operator.settings`.
"""

from __future__ import annotations

from resile.api.ids import Seconds

MASTER_PORT = 50001
"""DLRover's: where the master of a job on a cluster listens."""

MAX_REPLICAS = 10_000
"""Nodes of one role: as many as one master is measured with; a greater number is a slip of the keyboard."""

DEFAULT_CRASH_BUDGET = 3
"""Crashes of one rank that are answered with a new node, as in DLRover."""

DEFAULT_RECOVERY_BUDGET = Seconds(10.0)
"""The longest that a job may stand still after losing a node: enough for a restart of its processes."""
SMALLEST_RECOVERY_BUDGET = Seconds(1.0)
"""Below it a busy machine would count as a lost one."""
LARGEST_RECOVERY_BUDGET = Seconds(3600.0)
"""Above it a job would seem to hang."""

EXIT_GRACE = Seconds(30.0)
"""Between SIGTERM and SIGKILL: Kubernetes' own default. Saving takes as long as it takes, whatever the budget."""
JOIN_TIMEOUT = Seconds(600.0)
"""For the nodes of a job to be enough: torchrun's and DLRover's default."""
PEND_TIMEOUT = Seconds(900.0)
"""For a node that cannot be scheduled and without which the job cannot run: DLRover's default."""
CONNECT_TIMEOUT = Seconds(60.0)
"""For a new agent to reach its master: longer than a cluster takes to start one."""
BUDGET_WINDOW = Seconds(1800.0)
"""Training time after which a failure no longer counts: a job that trained for half an hour in between is sound."""
