"""What the core wants done. Decisions are values: the shell executes them, tests compare them."""

from __future__ import annotations

import msgspec

from resile.api.ids import NodeKey, Rank, Round
from resile.protocol.reports import NodeResources, RoundAssignment, WorkerFailure


class Decision(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all decisions."""


class LaunchNode(Decision, frozen=True, kw_only=True):
    """Start a node. Repeating it for the same node is harmless."""

    node: NodeKey
    rank: Rank
    replicas: int
    relaunch_count: int = 0
    resources: NodeResources = NodeResources()
    avoid: tuple[str, ...] = ()
    """Machines that fell silent a moment ago; not to be used as long as there is room on others."""


class DeleteNode(Decision, frozen=True, kw_only=True):
    """End a node, after `grace` seconds by force."""

    node: NodeKey
    grace: float
    because: str


class Admit(Decision, frozen=True, kw_only=True):
    """Connection `session` is this node's agent."""

    session: int
    node: NodeKey
    rank: Rank
    elastic: bool = False
    """The job's processes meet without restarts."""


class Refuse(Decision, frozen=True, kw_only=True):
    """Connection `session` gets one sentence and is closed."""

    session: int
    because: str


class FormRound(Decision, frozen=True, kw_only=True):
    """Tell every member its place."""

    round: Round
    places: dict[NodeKey, RoundAssignment]


class EndRound(Decision, frozen=True, kw_only=True):
    """Tell these members that the round is over and to join again."""

    round: Round
    because: str
    nodes: tuple[NodeKey, ...]
    elastic: bool = False
    """The job's processes meet without restarts."""
    lost: bool = False
    """A member was lost, or leaves."""


class TellStateHeld(Decision, frozen=True, kw_only=True):
    """Tell this node that another one has the state of `round`: a process of its own that stays there is not needed."""

    node: NodeKey
    round: Round


class SendAway(Decision, frozen=True, kw_only=True):
    """Tell this node's agent to stop its processes and exit."""

    node: NodeKey
    because: str
    exit_code: int


class Drop(Decision, frozen=True, kw_only=True):
    """Close the connection of this node's agent without a word; an agent that lives will come again and be told."""

    node: NodeKey


class Finish(Decision, frozen=True, kw_only=True):
    """The job has ended: tell every agent, or the one on `session` that came after the end."""

    succeeded: bool
    reason: str
    message: str
    failure: WorkerFailure | None = None
    failed_node: str = ""
    session: int = 0


class AnswerDataset(Decision, frozen=True, kw_only=True):
    """Answer to DatasetOpened; `error` is empty or one sentence."""

    node: NodeKey
    worker: str
    request: int
    error: str = ""


class AnswerShard(Decision, frozen=True, kw_only=True):
    """Answer to ShardWanted; lease 0 means there is no more, unless `error` says that it cannot be answered."""

    node: NodeKey
    worker: str
    request: int
    lease: int = 0
    epoch: int = 0
    start: int = 0
    end: int = 0
    error: str = ""


class AnswerProgress(Decision, frozen=True, kw_only=True):
    """Answer to ShardAdvanced."""

    node: NodeKey
    worker: str
    request: int
    counted: bool


class Reply(Decision, frozen=True, kw_only=True):
    """Answer to a person's wish; `error` is empty or one sentence."""

    request: int
    error: str = ""


class Note(Decision, frozen=True, kw_only=True):
    """One line of the job's story, for people, metrics and pages. `reason` is stable; `message` is a sentence."""

    reason: str
    message: str
    node: NodeKey | None = None
    warning: bool = False


AnyDecision = (
    LaunchNode
    | DeleteNode
    | Admit
    | Refuse
    | FormRound
    | EndRound
    | TellStateHeld
    | SendAway
    | Drop
    | Finish
    | AnswerDataset
    | AnswerShard
    | AnswerProgress
    | Reply
    | Note
)
