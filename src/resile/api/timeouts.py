"""Every interval and time-out of the engine, derived from one setting: `recovery_budget`.

The budget is the longest that a job may stand still after losing a node while other nodes can go on. Each wait on the
way to the next step gets a share of it. The shares are checked to fit before a job starts, so that users need not find
out by experiment which time-out must exceed which. `resile explain timeouts` prints them with the texts below.
"""

from __future__ import annotations

import msgspec

from resile.api import defaults
from resile.api.defaults import DEFAULT_RECOVERY_BUDGET, LARGEST_RECOVERY_BUDGET, SMALLEST_RECOVERY_BUDGET
from resile.api.ids import Seconds


class BadTimeouts(ValueError):
    """Raised if time-outs do not fit together; the message names the field and what is allowed."""


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """All time-outs of a job. Build them with `derive`."""

    recovery_budget: Seconds
    """The longest a job may stand still after losing a node while others can go on."""
    heartbeat: Seconds
    """How often an agent sends a heartbeat when it has nothing else to send."""
    heartbeat_timeout: Seconds
    """How long an open connection may be silent before its node counts as lost."""
    reconnect: Seconds
    """How long an agent whose connection closed may take to come back before its node counts as lost."""
    master_recovery: Seconds
    """How long a restarted master waits for the agents that its journal knows."""
    straggler_wait: Seconds
    """How long a round that could close waits for nodes that are starting: a later join would restart every node."""
    last_call: Seconds
    """The same for the first round on bare machines, where it is not known which nodes may come."""
    kill_grace: Seconds
    """From SIGTERM to SIGKILL for processes whose round is over."""
    exit_grace: Seconds
    """From SIGTERM to SIGKILL for a node that is asked to leave: time to save."""
    join: Seconds
    """How long too few nodes wait for the rest before the job fails."""
    pend: Seconds
    """How long a node that the job needs may be unschedulable before the job fails."""
    connect: Seconds
    """How long a new agent tries to reach its master."""
    budget_window: Seconds
    """The training time after which a failure no longer counts against a budget."""

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
        waits = self.heartbeat_timeout + self.straggler_wait + self.kill_grace
        if waits > self.recovery_budget:
            raise BadTimeouts(
                f"recovery_budget: heartbeat_timeout + straggler_wait + kill_grace come to {waits:g} s, "
                f"more than the budget of {self.recovery_budget:g} s"
            )


def derive(recovery_budget: Seconds = DEFAULT_RECOVERY_BUDGET, **overrides: float | None) -> Timeouts:
    """Derive all time-outs from a recovery budget. `overrides` set single ones by name; None keeps the derived value.

    Raises `BadTimeouts` if a name is unknown, a value is out of range, or the waits of a recovery exceed the budget.
    """
    unknown = set(overrides) - set(Timeouts.__struct_fields__)
    if unknown:
        raise BadTimeouts(f"{sorted(unknown)[0]}: no such time-out; known are {', '.join(Timeouts.__struct_fields__)}")
    b = recovery_budget
    ladder: dict[str, float] = {
        "heartbeat": b / 16,  # three fit into heartbeat_timeout, even if one is late
        "heartbeat_timeout": b / 5,
        "reconnect": b / 50,  # a reconnect takes a few milliseconds; a dead agent must not cost more than this
        "master_recovery": b * 0.3,
        "straggler_wait": b * 0.3,  # about what a process restart costs, which is what a later join would cost
        "last_call": b * 0.5,
        "kill_grace": b * 0.1,
        "exit_grace": defaults.EXIT_GRACE,
        "join": defaults.JOIN_TIMEOUT,
        "pend": defaults.PEND_TIMEOUT,
        "connect": defaults.CONNECT_TIMEOUT,
        "budget_window": defaults.BUDGET_WINDOW,
    }
    ladder.update({name: value for name, value in overrides.items() if value is not None})
    return Timeouts(recovery_budget=b, **{name: Seconds(value) for name, value in ladder.items()})
