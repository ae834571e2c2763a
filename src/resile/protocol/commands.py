"""What command lines ask of a master, and its answers.

A new question is one struct here and one case in `resile.master.commands`. A new change to the job is one struct in
`job_changes` and one case in the core.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from resile.api.job_view import JobEvent, JobView
from resile.protocol.agent_to_master import AgentMessage, Hello
from resile.protocol.job_changes import Change
from resile.protocol.master_to_agent import MasterMessage
from resile.protocol.message import Message

MAX_EVENTS = 1000


class Status(Message, frozen=True, kw_only=True):
    """Show the job as it is now; the answer is a `JobStatus`."""


class Events(Message, frozen=True, kw_only=True):
    """Show at most `limit` job events with a number above `after`, oldest first; the answer is `JobEvents`."""

    after: int = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_EVENTS)] = MAX_EVENTS


Command = Status | Events | Change


class Ask(Message, frozen=True, kw_only=True):
    """A command that a command line sends to a master. Its Answer has the same `request` number."""

    request: int
    command: Command


class JobStatus(Message, frozen=True, kw_only=True):
    job: JobView


class JobEvents(Message, frozen=True, kw_only=True):
    events: list[JobEvent]


class Done(Message, frozen=True, kw_only=True):
    """Answer to a command that asks for a change: the change is granted."""


class Failed(Message, frozen=True, kw_only=True):
    """Answer to a command that is refused; `error` says why in one sentence."""

    error: str


Result = JobStatus | JobEvents | Done | Failed


class Answer(Message, frozen=True, kw_only=True):
    request: int
    result: Result


ToMaster = Hello | AgentMessage | Ask
FromMaster = MasterMessage | Answer
