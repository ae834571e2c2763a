"""Why a node ended: sorts exit codes and the platform's reasons into causes. `restart_budget` says what each costs."""

from __future__ import annotations

import enum

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
LOST = "Lost"
"""The reason (`NodeEnd.reason`) of a node that the core counts as lost."""


def cause_of(status: NodeStatus, end: NodeEnd) -> Cause:
    if end.reason in OOM_REASONS or end.exit_code in OOM_EXIT_CODES:
        return Cause.OOM
    if end.reason == LOST or end.exit_code in HARDWARE_EXIT_CODES:
        return Cause.INFRASTRUCTURE
    if status is NodeStatus.DELETED or end.reason in PREEMPTION_REASONS or end.exit_code in KILLED_EXIT_CODES:
        return Cause.PREEMPTION
    return Cause.CRASH
