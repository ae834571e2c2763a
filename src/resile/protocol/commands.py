"""What command lines ask of a master, and its answers."""

from __future__ import annotations

from typing import Any

import msgspec

from resile.protocol.agent_to_master import AgentMessage, Hello
from resile.protocol.master_to_agent import MasterMessage
from resile.protocol.message import Message


class Ask(Message, frozen=True, kw_only=True):
    """A command for the master; `what` is one of the verbs in `resile.master.commands`."""

    request: int
    what: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


class Answer(Message, frozen=True, kw_only=True):
    """The result of an Ask; `error` is empty or one sentence."""

    request: int
    error: str = ""
    result: Any = None


ToMaster = Hello | AgentMessage | Ask
"""What a master hears, from agents and from command lines."""

FromMaster = MasterMessage | Answer
"""What a master says, to agents and to command lines."""
