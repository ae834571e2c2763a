"""The one protocol through which jobs are read and steered, wherever they run: `Jobs`, and what its methods return.

`resile.client.target` chooses between its two implementations, `resile.client.local` and `resile.client.cluster`.
Every method blocks until it has its answer, with a deadline; a caller with an event loop of its own calls it from a
thread. What cannot be done raises `CommandError`. Nothing here prints: what a waiting person should know goes to the
`Say` that the caller gave.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from resile.api.job import JobSpec
from resile.api.job_event import JobEvent
from resile.api.job_view import JobView, NodeView
from resile.chaos.faults import Fault, Injected
from resile.protocol.reports import WorkerFailure

if TYPE_CHECKING:
    from resile.api.kinds.base import BaseJobKind, Resource

Say = Callable[[str], None]
"""Takes one sentence for a person who waits."""

POD, EVENT = "pod", "event"
"""What kubectl puts before the names of nodes and of events."""

LAST_EVENTS = 20
"""How many events a description holds."""


class Listable(enum.StrEnum):
    """What can be listed."""

    JOBS = "jobs"
    NODES = "nodes"
    EVENTS = "events"
    PLANS = "plans"


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """What to list."""

    what: Listable
    job: str = ""
    """Only what belongs to this job; everything in the namespace if empty."""
    everywhere: bool = False
    """Of every namespace."""
    with_nodes: bool = True
    """Whether listed jobs hold their nodes, which costs a cluster one more request."""
    deleted: bool = False
    """Also nodes that were deleted, where they are still known: on this machine."""


class EventView(JobEvent, frozen=True, kw_only=True):
    """An event with what it is about."""

    object: str
    """As kubectl names it: `pod/…`, or the job."""
    job: str


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that changes a job."""

    name: str
    namespace: str
    job: str
    phase: str
    reason: str
    message: str
    created_at: float
    ended_at: float | None


class Item(msgspec.Struct, frozen=True):
    """One thing of a listing. Its name is unique in its namespace, and the same in every look."""

    namespace: str
    name: str
    view: JobView | NodeView | EventView | PlanView
    noun: str
    """What kubectl puts before the name: `pod`, or the kind of the job."""


class Found(msgspec.Struct, frozen=True):
    """What one look found."""

    items: list[Item]
    unreadable: list[str] = []
    """A sentence for each job that could not be read."""
    nothing: bool = False
    """Whether there is no job at all (of plans: no plan), so that a table would be no answer."""
    hint: str = ""
    """Where other jobs are."""


class ProcessFailure(msgspec.Struct, frozen=True):
    """The training process that failed first in the newest broken round; what followed it is collateral."""

    node: str
    failure: WorkerFailure
    round: int


class NodeFailure(msgspec.Struct, frozen=True):
    """The node that failed last, for a job in which no round broke."""

    sentence: str
    log: list[str] | None
    """The last lines it wrote; None if they cannot be had any more."""


Failure = ProcessFailure | NodeFailure


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known of one job."""

    job: JobView
    master: NodeView | None
    nodes: list[NodeView]
    """With the master, in the order in which they are shown."""
    facts: dict[str, str]
    """What else this place tells of the job, as names with values."""
    failure: Failure | None
    events: list[EventView]
    """The newest of them."""
    rounds: list[JobEvent] | None = None
    """Which rounds were formed and ended; None on a cluster, whose Events do not last."""
    conditions: list[dict[str, Any]] | None = None
    """Those of the job's status; None on this machine, where a job has none."""
    data: dict[str, Any] = {}
    """What programs get beside all this."""


class LogLine(msgspec.Struct, frozen=True):
    """One line of a pod's log."""

    pod: str
    text: bytes
    alone: bool
    """Whether no other pod's lines were read so far."""


class Document(msgspec.Struct, frozen=True):
    """One document of a manifest: as it is written, and what it means."""

    written: dict[str, Any]
    resource: Resource


class SubmitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the nodes and the master of a job of this machine are run; nothing to a cluster."""

    enforce_memory: bool = False
    metrics_port: int | None = None


class Submitted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one document."""

    kind: str
    name: str
    namespace: str
    how: str
    """`created`, `configured`, `unchanged`, or what a plan changed."""
    directory: str = ""
    """Where the job is kept, on this machine."""


class Deleted(msgspec.Struct, frozen=True):
    """A job that was deleted, or whose deletion was asked for."""

    name: str
    noun: str
    """What kubectl puts before the name."""
    gone: bool = True
    logs: str = ""
    """Where its logs are, if they were kept."""


class Sign(msgspec.Struct, frozen=True):
    """A sign of recovery from a fault, and how long after the fault it came; None for what did not happen in time."""

    what: str
    after: float | None = None


class Moment(msgspec.Struct, frozen=True):
    """A followed job as it is now."""

    job: JobView
    news: list[JobEvent]
    last: bool
    """Whether nothing more will come."""
    note: str = ""
    """A sentence for the person who waits."""


class Following(Protocol):
    """A job that is followed from its start to its end; a context that lets go of it."""

    interrupt_ends_job: bool
    """Whether Ctrl-C is to end the job, and not only the command that follows it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def poll(self) -> Moment:
        """The job as it is now and what is new of its story, after a short wait for news.

        Raises:
            CommandError: the job cannot be seen any more.
        """

    def stop(self) -> bool:
        """Ask for the end of the job; False if the question did not arrive."""

    def failure(self) -> Failure | None:
        """What failed last."""


class Jobs(Protocol):
    """The jobs of one place. A context: leaving it closes its connections."""

    is_local: bool
    """Whether they are this machine's."""
    namespace: str
    """The one that is meant where none is named."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def watch(self, query: Query) -> Iterator[Found]:
        """What there is now, and again whenever that may have changed, until every job is over.

        The first look comes at once. Later looks may hold only new events.
        """

    def describe(self, job: str) -> Description:
        """Everything that is known of a job."""

    def spec(self, job: str) -> JobSpec:
        """What a job asks for, as the engine reads it."""

    def kind_of(self, job: str) -> BaseJobKind:
        """The kind of a job, which knows its noun, the names of its pods and the role that a bare number means."""

    def logs(self, name: str, *, master: bool, tail: int | None, follow: bool) -> Iterator[list[LogLine]]:
        """Lines of one pod, or of all nodes of a job, as they are read; with `follow`, until the job or pod has ended.

        Args:
            name: a job's, or a pod's.
            master: read the master's log instead.
            tail: begin with so many last lines of each log.
            follow: go on with what is written later, by pods that come later, too.
        """

    def submit(self, documents: Sequence[Document], options: SubmitOptions) -> Iterator[Submitted]:
        """Run jobs and carry out scale plans, one document after the other."""

    def follow(self, job: Submitted) -> Following:
        """Follow a job that was submitted just now."""

    def scale(self, job: str, replicas: Mapping[str, int]) -> None:
        """Change how many nodes some roles have."""

    def suspend(self, job: str) -> bool:
        """Let go of a job's nodes; False if it was suspended already."""

    def resume(self, job: str) -> bool:
        """Take a job's nodes back; False if it was not suspended."""

    def delete(self, jobs: Sequence[str], *, now: bool, wait: bool, keep_logs: bool) -> Iterator[Deleted]:
        """End jobs and remove them; every name is checked at once, before the first job goes.

        Args:
            jobs: their names.
            now: kill at once instead of asking.
            wait: on a cluster, return only when a job and its pods are gone.
            keep_logs: on this machine, leave the logs.
        """

    def inject(self, job: str, fault: Fault) -> tuple[Injected, Iterator[list[Sign]]]:
        """Break something of a job on purpose: what was done, and the signs of recovery, waited for as they are read.

        Signs of one list belong together.
        """
