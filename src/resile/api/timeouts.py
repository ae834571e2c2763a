"""Every interval and time-out of the engine, derived from one knob: `recovery_budget`.

The budget is the longest that a job may stand still after losing a node while other nodes can go on. Each wait on the
way to the next step gets a share of it; the shares are checked to fit before anything starts, so no user has to
find out by experiment which time-out must exceed which. `resile explain timeouts` prints the ladder.
"""

from __future__ import annotations

import msgspec

from resile.api import defaults
from resile.api.defaults import DEFAULT_RECOVERY_BUDGET, LARGEST_RECOVERY_BUDGET, SMALLEST_RECOVERY_BUDGET
from resile.api.ids import Seconds


class BadTimeouts(ValueError):
    """The ladder does not hold; the message names the field and what is allowed."""


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The ladder. Build it with `derive`; change single rungs with its keyword arguments."""

    recovery_budget: Seconds
    heartbeat: Seconds
    """How often an agent speaks when it has nothing to say."""
    heartbeat_timeout: Seconds
    """How long an open connection may be silent before its node is declared lost."""
    reconnect: Seconds
    """How long a closed connection may take to come back before its node is declared lost."""
    master_recovery: Seconds
    """How long a restarted master waits for the agents that its journal knows."""
    straggler_wait: Seconds
    """How long a round that could close waits for nodes that are starting: a later join would restart every node."""
    last_call: Seconds
    """The same for the first round of a job on bare machines, where more nodes may come at any time."""
    regroup_grace: Seconds
    """Between SIGTERM and SIGKILL for training processes whose round is over; their collective is dead already."""
    exit_grace: Seconds
    """Between SIGTERM and SIGKILL when a person or the platform asks a node to leave: long enough to save."""
    join: Seconds
    """How long fewer than the minimum may wait for the rest before the job fails."""
    pend: Seconds
    """How long a node may be unschedulable, while the job lacks its minimum, before the job fails."""
    connect: Seconds
    """How long a new agent tries to reach its master."""
    budget_window: Seconds
    """A failure this much training time ago no longer counts against a budget."""

    def __post_init__(self) -> None:
        if not SMALLEST_RECOVERY_BUDGET <= self.recovery_budget <= LARGEST_RECOVERY_BUDGET:
            raise BadTimeouts(
                f"recovery_budget: must be between {SMALLEST_RECOVERY_BUDGET:g} and {LARGEST_RECOVERY_BUDGET:g} "
                f"seconds, not {self.recovery_budget:g}"
            )
        for field in self.__struct_fields__:
            if not getattr(self, field) > 0:
                raise BadTimeouts(f"{field}: must be more than 0 seconds, not {getattr(self, field)}")
        if self.heartbeat_timeout < 3 * self.heartbeat:
            raise BadTimeouts(
                f"heartbeat_timeout: {self.heartbeat_timeout:g} s leaves room for fewer than 3 heartbeats of "
                f"{self.heartbeat:g} s; allowed is {3 * self.heartbeat:g} s or more"
            )
        waits = self.heartbeat_timeout + self.straggler_wait + self.regroup_grace
        if waits > self.recovery_budget:
            raise BadTimeouts(
                f"recovery_budget: heartbeat_timeout + straggler_wait + regroup_grace come to {waits:g} s, "
                f"more than the budget of {self.recovery_budget:g} s"
            )


def derive(recovery_budget: Seconds = DEFAULT_RECOVERY_BUDGET, **overrides: float | None) -> Timeouts:
    """The ladder for a budget; an override that is None keeps the derived value.

    Raises:
        BadTimeouts: when a rung is out of range or the rungs do not fit into the budget.
    """
    unknown = set(overrides) - set(Timeouts.__struct_fields__)
    if unknown:
        raise BadTimeouts(f"{sorted(unknown)[0]}: no such time-out; known are {', '.join(Timeouts.__struct_fields__)}")
    b = recovery_budget
    ladder: dict[str, float] = {
        "heartbeat": b / 16,  # three fit into the silence with room for a late one
        "heartbeat_timeout": b / 5,
        "reconnect": b / 50,  # a reconnect takes a few milliseconds; a dead agent must not cost more than this
        "master_recovery": b * 0.3,
        "straggler_wait": b * 0.3,  # about what a process restart costs, which is what a later join would cost
        "last_call": b * 0.5,
        "regroup_grace": b * 0.1,
        "exit_grace": defaults.EXIT_GRACE,
        "join": defaults.JOIN_TIMEOUT,
        "pend": defaults.PEND_TIMEOUT,
        "connect": defaults.CONNECT_TIMEOUT,
        "budget_window": defaults.BUDGET_WINDOW,
    }
    ladder.update({name: value for name, value in overrides.items() if value is not None})
    return Timeouts(recovery_budget=b, **{name: Seconds(value) for name, value in ladder.items()})
