"""Everything that is known of a job of this machine: from its master or journal, and from the logs of its nodes."""

from __future__ import annotations

from resile.api.job_view import JobView
from resile.client.base import LAST_EVENTS, Description, Failure, NodeFailure, ProcessFailure
from resile.client.local.job_reader import JobReader
from resile.client.local.job_view import event_view, master_node, restarts_of_master
from resile.client.local.logs import Log
from resile.core.state import JobState

LAST_LINES = 10
"""Of the log of a node that failed."""
ROUND_REASONS = ("RoundFormed", "RoundOver")


def describe(reader: JobReader) -> Description:
    """The job of a reader, with its whole story behind it.

    Raises:
        CommandError: the job cannot be read.
    """
    view, story = reader.status(), reader.events()
    state = reader.state()
    spec = state.spec
    master = master_node(spec, view, reader.master_lives, restarts_of_master(story))
    first = first_failure(state)
    failure: Failure | None = first
    if first is None and view.phase == "Failed":
        failure = last_failed_node(reader, view)
    return Description(
        job=view,
        master=master,
        nodes=[master, *view.nodes],
        facts={
            "Strategy": spec.strategy.value,
            "Replicas": ", ".join(f"{role}={number}" for role, number in state.targets.items()) or "<none>",
            "Recovery budget": f"{spec.timeouts.recovery_budget:g} s",
            "Directory": str(reader.directory.path),
        },
        failure=failure,
        events=[event_view(event, spec) for event in story[-LAST_EVENTS:]],
        rounds=[event for event in story if event.reason in ROUND_REASONS],
        data={"targets": state.targets, "first_failure": first},
    )


def last_failure(reader: JobReader, job: JobView) -> Failure | None:
    """The process that failed first in the newest broken round, else the node that failed last, else None."""
    return first_failure(reader.state()) or last_failed_node(reader, job)


def first_failure(state: JobState) -> ProcessFailure | None:
    """The process that failed first in the newest broken round."""
    first = state.training.failures.first
    return ProcessFailure(str(first[0]), first[1], state.training.failures.round) if first is not None else None


def last_failed_node(reader: JobReader, job: JobView) -> NodeFailure | None:
    """The node that failed last, with the end of its log; None if no node failed."""
    failed = [node for node in job.nodes if node.ended_at is not None and node.status not in ("Completed", "Deleted")]
    if not failed:
        return None
    node = max(failed, key=lambda one: one.ended_at or 0.0)
    log = Log(reader.directory.path / "logs" / f"{node.name}.log", tail=LAST_LINES)
    return NodeFailure(
        f"{node.name} ({node.status}): {node.message or 'it gave no reason'}",
        [line.decode(errors="replace") for line in log.lines(to_the_end=True)],
    )
