"""Tells the agent how far training is, which gives speed, goodput and the time to the next step after a fault.

Reporting must never harm a training script. Outside resile it does nothing, and a missing agent costs only the report.
"""

from __future__ import annotations

import os

from resile.wire.env import AGENT_SOCKET

__all__ = ["report_step"]


def report_step(step: int, total: int = 0) -> None:
    """Report that training has completed `step` steps.

    It never raises if there is no agent and never waits for one. Call it at every step. Under plain torchrun or python
    it costs about a microsecond; under resile it sends at most 20 messages a second.

    Args:
        step: steps completed since the training began, including those before a restart.
        total: steps of the whole training as far as known now; 0 if unknown.
    """
    if not os.environ.get(AGENT_SOCKET):
        return
    from resile.wire.agent_client import AgentClient  # imported here to cost nothing outside resile

    channel = AgentClient.from_environment()
    if channel is not None:
        channel.report_step(step, total)
