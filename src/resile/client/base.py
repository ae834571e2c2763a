"""`Jobs`, the protocol through which jobs are read and changed wherever they run, and the types that it returns.

`resile.client.target` chooses between its two implementations, `resile.client.local` and `resile.client.cluster`.
Every method blocks until it has its answer, with a deadline; a caller with an event loop of its own calls it from a
thread. Every function of this package raises `CommandError` with one sentence if it cannot do what it is asked, and
`NotUsableError` if the user's own words are at fault. No function prints: messages for a waiting person go to the `Say`
of the caller.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from resile.api.job import JobSpec
from resile.api.job_view import JobEvent, JobView, NodeView
from resile.chaos.faults import Fault, Injected
from resile.protocol.reports import WorkerFailure

if TYPE_CHECKING:
    from resile.api.kinds.base import BaseJobKind, Resource
    from resile.core.state import JobState

Say = Callable[[str], None]
"""Shows one sentence to a person who waits."""

POD, EVENT = "pod", "event"
"""The nouns that kubectl puts before the names of nodes and of events."""

LAST_EVENTS = 20
"""How many events a description holds."""
LAST_LINES = 10
"""How many lines of the log of a failed node a description holds."""


class Listable(enum.StrEnum):
    JOBS = "jobs"
    NODES = "nodes"
    EVENTS = "events"
    PLANS = "plans"


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """What a command lists (jobs, nodes, events or plans), of which job, and whether in all namespaces."""

    what: Listable
    job: str = ""
    """List only this job and what belongs to it; if empty, everything in the namespace."""
    everywhere: bool = False
    with_nodes: bool = True
    """List jobs with their nodes, which costs one more request to a cluster."""
    deleted: bool = False
    """List deleted nodes, too; without effect on a cluster, which does not remember them."""


class EventView(JobEvent, frozen=True, kw_only=True):
    object: str
    """A pod or the job, in kubectl's form: `pod/…`."""
    job: str


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    namespace: str
    job: str
    phase: str
    reason: str
    message: str
    created_at: float
    ended_at: float | None


class Item(msgspec.Struct, frozen=True):
    """A job, node, event or plan in a listing. Its name is unique in its namespace, and the same in later listings."""

    namespace: str
    name: str
    view: JobView | NodeView | EventView | PlanView
    noun: str
    """The noun that kubectl puts before the name: `pod`, or the kind of the job."""


class Found(msgspec.Struct, frozen=True):
    items: list[Item]
    unreadable: list[str] = []
    """A sentence for each job that could not be read."""
    nothing: bool = False
    """True if there is no job at all (for a list of plans, no plan): the command prints a sentence and no table."""
    hint: str = ""
    """A sentence that names other namespaces with jobs; empty if there are none."""


class ProcessFailure(msgspec.Struct, frozen=True):
    """The training process that failed first in the newest round with a failure. Later failures follow from it."""

    node: str
    failure: WorkerFailure
    round: int


class NodeFailure(msgspec.Struct, frozen=True):
    """The node that failed last. It is shown only if no training process has failed."""

    sentence: str
    log: list[str] | None
    """The last lines of the node's log; None if it cannot be read any more."""


Failure = ProcessFailure | NodeFailure


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `resile describe` shows of one job."""

    job: JobView
    master: NodeView | None
    nodes: list[NodeView]
    """All nodes and the master, in the order in which they are shown."""
    facts: dict[str, str]
    """Further facts by their titles; they differ between this machine and a cluster."""
    failure: Failure | None
    events: list[EventView]
    rounds: list[JobEvent] | None = None
    """The job events about rounds that formed or ended; None on a cluster, which keeps Events for an hour only."""
    conditions: list[dict[str, Any]] | None = None
    """The conditions in the job's status; None on this machine, where a job has no conditions."""
    data: dict[str, Any] = {}
    """Further fields for `resile describe -o json`."""


def facts_of(spec: JobSpec, replicas: Mapping[str, int]) -> dict[str, str]:
    """Strategy, replicas and recovery budget of a job, by title. `replicas` has the wanted number of nodes by role."""
    return {
        "Strategy": spec.strategy.value,
        "Replicas": ", ".join(f"{role}={number}" for role, number in replicas.items()) or "<none>",
        "Recovery budget": f"{spec.timeouts.recovery_budget:g} s",
    }


def first_failure(state: JobState) -> ProcessFailure | None:
    """The process that failed first in the newest round with a failure; None if no process has failed."""
    first = state.rendezvous.failures.first
    return ProcessFailure(str(first[0]), first[1], state.rendezvous.failures.round) if first is not None else None


class LogLine(msgspec.Struct, frozen=True):
    pod: str
    text: bytes
    alone: bool
    """True if no log of another pod is read yet, so that the pod's name need not be shown."""


class Document(msgspec.Struct, frozen=True):
    written: dict[str, Any]
    """The document as plain data, before it was read into `resource`."""
    resource: Resource


class SubmitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `Jobs.submit` for jobs of this machine; jobs of a cluster ignore them."""

    enforce_memory: bool = False
    metrics_port: int | None = None


class Submitted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    kind: str
    name: str
    namespace: str
    how: str
    """`created`, `configured`, `unchanged`, or the changes of a plan."""
    directory: str = ""
    """The job directory, on this machine."""


class Deleted(msgspec.Struct, frozen=True):
    """A job that was deleted, or whose deletion was asked for."""

    name: str
    noun: str
    gone: bool = True
    logs: str = ""
    """The directory of the logs, if they were kept."""


class Sign(msgspec.Struct, frozen=True):
    """One observation after a fault. `what` says what happened, or what did not happen in time."""

    what: str
    after: float | None = None
    """Seconds from the fault to what happened; None if not measured, as for what did not happen."""


class Moment(msgspec.Struct, frozen=True):
    """A followed job at one moment, as `Following.poll` returns it."""

    job: JobView
    news: list[JobEvent]
    last: bool
    """True if no moment follows, because the job is over."""
    note: str = ""
    """A sentence to show to the person who waits; empty if there is none."""


class Following(Protocol):
    """Follows one job for a command. Leaving the context does not end the job."""

    interrupt_ends_job: bool
    """True if Ctrl-C ends the job; False if it ends only the command."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def poll(self) -> Moment:
        """Wait a short time for a change, then return the job as it is."""

    def stop(self) -> bool:
        """Ask the master to stop the job; False if no master was reached."""

    def failure(self) -> Failure | None:
        """The newest failure; None if nothing failed."""


class Jobs(Protocol):
    """The jobs of this machine or of a cluster. Leaving the context closes the connections."""

    is_local: bool
    namespace: str
    """The namespace that a command means if the user named none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def watch(self, query: Query) -> Iterator[Found]:
        """Yield the listing as it is now, and again after each change, until all jobs are over.

        A listing of events may hold only the events that are new since the listing before it.
        """

    def describe(self, job: str) -> Description: ...

    def spec(self, job: str) -> JobSpec: ...

    def kind_of(self, job: str) -> BaseJobKind:
        """Return the kind of a job. The kind knows how pods are named, and which role `resile scale JOB 3` scales."""

    def logs(self, name: str, *, master: bool, tail: int | None, follow: bool) -> Iterator[list[LogLine]]:
        """Yield the log lines of one pod, or of all nodes of a job. With `master`, yield those of the job's master.

        Begins with the last `tail` lines of each log, or with the first line if `tail` is None. With `follow`, also
        yields later lines, and those of new pods, until the job or the pod ends.
        """

    def submit(self, documents: Sequence[Document], options: SubmitOptions) -> Iterator[Submitted]:
        """Start the job or apply the plan of each document, in order, and yield each result."""

    def follow(self, job: Submitted) -> Following:
        """Follow a job that `submit` has returned."""

    def scale(self, job: str, replicas: Mapping[str, int]) -> None:
        """Change the number of nodes of each role in `replicas`."""

    def suspend(self, job: str) -> bool:
        """End all nodes of a job until `resume`; False if it was suspended already."""

    def resume(self, job: str) -> bool:
        """Launch the nodes of a suspended job again; False if it was not suspended."""

    def delete(self, jobs: Sequence[str], *, now: bool, wait: bool, keep_logs: bool) -> Iterator[Deleted]:
        """Check that all jobs exist, then end and remove them.

        With `now`, processes are killed without a grace period. With `wait`, on a cluster, a job is yielded only after
        it and its pods are gone. With `keep_logs`, on this machine, the logs stay.
        """

    def inject(self, job: str, fault: Fault) -> tuple[Injected, Iterator[list[Sign]]]:
        """Inject a fault. Returns what was done, and an iterator that waits for signs of recovery and yields them."""
