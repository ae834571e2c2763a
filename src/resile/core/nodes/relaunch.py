"""Relaunch policy: why a node ended, what that costs, and whether its place is filled again.

Each cause has its own budget, so a preemption never costs a crash. Budgets are counted in training time: a loss more
than `budget_window` seconds of training ago is forgotten, so a job that makes progress for months is not ended by its
fourth crash. A job that makes no progress spends its budget and ends with a reason.
"""

from __future__ import annotations

import enum

import msgspec

from resile.api.ids import Bytes, GiB
from resile.protocol.reports import NodeEnd, NodeStatus


class Cause(enum.StrEnum):
    CRASH = "crash"
    OOM = "oom"
    PREEMPTION = "preemption"
    INFRASTRUCTURE = "infrastructure"


OWN_FAULTS = frozenset({Cause.CRASH, Cause.OOM})
"""Causes that are the script's fault."""
OOM_EXIT_CODES = frozenset({247})
HARDWARE_EXIT_CODES = frozenset({201, 202, 14})
KILLED_EXIT_CODES = frozenset({137, 143})
OOM_REASONS = frozenset({"OOMKilled"})
PREEMPTION_REASONS = frozenset(
    {"Evicted", "Preempted", "Preempting", "Terminated", "NodeShutdown", "TaintManagerEviction"}
)
UNSTARTABLE = "StartError"
NOT_FOUND = 127
LOST = "Lost"
"""The reason given to a node that fell silent."""

INFRASTRUCTURE_BUDGET = 20
PREEMPTION_BUDGET = 100
"""Per place and per `budget_window` seconds of training. Neither is the script's fault, so both are generous; both are
bounded, so a place that is lost again and again does not spin for ever."""

SUSPECT_SECONDS = 120.0
"""How long a machine that fell silent is avoided. A cluster needs about 40 s to notice that a machine is gone, and
takes it out of use until it is back."""
MAX_SUSPECTS = 50
"""How many machines are avoided at a time: more than fail by themselves, and few enough to be part of every launch."""

QUICK_SECONDS = 10.0
"""A node that crashes sooner than this may only need its surroundings to settle. Unless it was the first
crash of its place, its replacement is held back."""
FIRST_DELAY = 1.0
LONGEST_DELAY = 30.0

LARGEST_MEMORY = Bytes(64 * GiB)
LARGEST_MEMORY_STEP = Bytes(8 * GiB)


class Spent(msgspec.Struct, kw_only=True):
    """What one place has used of its budgets: the training time at each loss, by cause."""

    losses: dict[Cause, list[float]] = {}

    def count(self, cause: Cause, trained: float, budget_window: float) -> int:
        return sum(1 for at in self.losses.get(cause, ()) if trained - at < budget_window)

    def add(self, cause: Cause, trained: float, budget_window: float) -> None:
        """Add a loss, and drop the losses that are forgotten."""
        self.losses[cause] = [at for at in self.losses.get(cause, ()) if trained - at < budget_window] + [trained]

    def move(self, wrong: Cause, right: Cause) -> bool:
        """Charge the newest loss of one cause to another; False if there is none."""
        if not self.losses.get(wrong):
            return False
        self.losses.setdefault(right, []).append(self.losses[wrong].pop())
        return True


class Relaunch(msgspec.Struct, frozen=True):
    """Fill the place again. With `memory` None the new node gets as much as the old one."""

    memory: Bytes | None = None
    delay: float = 0.0
    """Seconds to hold the new node back."""


class GiveUp(msgspec.Struct, frozen=True):
    """Leave the place empty; `because` completes the sentence "worker-1 is not replaced: …"."""

    because: str


def cause_of(status: NodeStatus, end: NodeEnd) -> Cause:
    if end.reason in OOM_REASONS or end.exit_code in OOM_EXIT_CODES:
        return Cause.OOM
    if end.reason == LOST or end.exit_code in HARDWARE_EXIT_CODES:
        return Cause.INFRASTRUCTURE
    if status is NodeStatus.DELETED or end.reason in PREEMPTION_REASONS or end.exit_code in KILLED_EXIT_CODES:
        return Cause.PREEMPTION
    return Cause.CRASH


def is_unstartable(end: NodeEnd) -> bool:
    """Whether the platform could not find the program, which another launch would not change."""
    return end.reason == UNSTARTABLE and end.exit_code == NOT_FOUND


def decide(
    cause: Cause,
    used: int,
    crash_budget: int,
    memory: Bytes | None,
    lived: float = QUICK_SECONDS,
    most: Bytes | None = None,
) -> Relaunch | GiveUp:
    """Whether a place that was lost `used` times before (for this cause) is filled again.

    Args:
        cause: why it was lost this time.
        used: how many earlier losses of this cause still count.
        crash_budget: the role's `restartCount`.
        memory: what the lost node was given, if that is known.
        lived: seconds from its launch to its end.
        most: the memory that the job's resourceLimits leave this place, if there are any. A node that ran out of memory
            gets no more than that, and never less than it had.
    """
    match cause:
        case Cause.CRASH:
            if used >= crash_budget:
                return GiveUp(f"it crashed {used + 1} times and restartCount is {crash_budget}")
            again = used and lived < QUICK_SECONDS
            return Relaunch(delay=min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** (used - 1)) if again else 0.0)
        case Cause.OOM:
            if used >= crash_budget:
                return GiveUp(f"it ran out of memory {used + 1} times and restartCount is {crash_budget}")
            if memory is None:
                return Relaunch()
            if memory >= LARGEST_MEMORY:
                return GiveUp(f"it ran out of {memory // GiB} GiB of memory, the most a node is given")
            grown = min(memory * 2, memory + LARGEST_MEMORY_STEP, LARGEST_MEMORY)
            if most is not None:
                grown = min(grown, most)
            return Relaunch(Bytes(grown) if grown > memory else None)
        case Cause.INFRASTRUCTURE:
            if used >= INFRASTRUCTURE_BUDGET:
                return GiveUp(f"its machine or network failed {used + 1} times")
            return Relaunch()
        case Cause.PREEMPTION:
            if used >= PREEMPTION_BUDGET:
                return GiveUp(f"it was preempted {used + 1} times")
            return Relaunch()
