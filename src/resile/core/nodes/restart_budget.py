"""The restart budget: what the loss of a node costs its rank, and when a rank has no restart left.

Each cause (`failure_causes`) has its own budget, so a preemption never costs a crash. Budgets are counted in training
time: a loss more than `budget_window` seconds of training ago is forgotten, so a job that makes progress for months is
not ended by its fourth crash. A job that makes no progress spends its budget and ends with a reason. Failures of single
processes (`max_restarts`) are counted in `core/agents`.
"""

from __future__ import annotations

import msgspec

from resile.core.nodes.failure_causes import Cause

INFRASTRUCTURE_BUDGET = 20
PREEMPTION_BUDGET = 100
"""How many losses by infrastructure and by preemption a rank may have per `budget_window` seconds of training. Neither
is the script's fault, so both budgets are generous. But a rank that is lost again and again is given up some day."""


class Spent(msgspec.Struct, kw_only=True):
    """The losses of one rank that count against its budgets: the training time at each loss, by cause."""

    losses: dict[Cause, list[float]] = {}

    def count(self, cause: Cause, trained: float, budget_window: float) -> int:
        return sum(1 for at in self.losses.get(cause, ()) if trained - at < budget_window)

    def add(self, cause: Cause, trained: float, budget_window: float) -> None:
        self.losses[cause] = [at for at in self.losses.get(cause, ()) if trained - at < budget_window] + [trained]

    def move(self, wrong: Cause, right: Cause) -> bool:
        """Charge the newest loss of cause `wrong` to cause `right`; False if `wrong` has no loss."""
        if not self.losses.get(wrong):
            return False
        self.losses.setdefault(right, []).append(self.losses[wrong].pop())
        return True


def why_exhausted(cause: Cause, used: int, crash_budget: int) -> str:
    """Why a rank that was lost by `cause`, after `used` earlier losses, is given up; empty if it is not given up."""
    match cause:
        case Cause.CRASH if used >= crash_budget:
            return f"it crashed {used + 1} times and restartCount is {crash_budget}"
        case Cause.OOM if used >= crash_budget:
            return f"it ran out of memory {used + 1} times and restartCount is {crash_budget}"
        case Cause.INFRASTRUCTURE if used >= INFRASTRUCTURE_BUDGET:
            return f"its machine or network failed {used + 1} times"
        case Cause.PREEMPTION if used >= PREEMPTION_BUDGET:
            return f"it was preempted {used + 1} times"
    return ""
