"""Changes to a running job, as the core decides on them: granted, or refused with one sentence.

Command lines ask for them, and on a cluster so do plans and edits of the job's manifest.
"""

from __future__ import annotations

from resile.api.plan import Plan
from resile.protocol.message import Message


class Scale(Message, frozen=True, kw_only=True):
    role: str
    replicas: int


class Suspend(Message, frozen=True, kw_only=True):
    """Delete the job's nodes if `on` is True; launch them again if it is False."""

    on: bool


class Stop(Message, frozen=True, kw_only=True):
    """End the job as failed, with the reason `Stopped`."""

    because: str = "a person stopped it"


Change = Scale | Suspend | Stop | Plan
