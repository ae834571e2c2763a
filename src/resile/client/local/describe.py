"""Describing a job of this machine, from its master or journal and from the logs of its nodes."""

from __future__ import annotations

from resile.api.job_view import JobView
from resile.client.base import LAST_EVENTS, LAST_LINES, Description, Failure, NodeFailure, facts_of, first_failure
from resile.client.local.job_reader import JobReader, event_view
from resile.client.local.logs import Log

ROUND_REASONS = ("RoundFormed", "RoundOver")


def describe(reader: JobReader) -> Description:
    view, story = reader.status(), reader.news()
    state = reader.state()
    spec = state.spec
    master = reader.master_node(view)
    first = first_failure(state)
    failure: Failure | None = first
    if first is None and view.phase == "Failed":
        failure = last_failed_node(reader, view)
    return Description(
        job=view,
        master=master,
        nodes=[master, *view.nodes],
        facts={**facts_of(spec, state.targets), "Directory": str(reader.directory.path)},
        failure=failure,
        events=[event_view(event, spec) for event in story[-LAST_EVENTS:]],
        rounds=[event for event in story if event.reason in ROUND_REASONS],
        data={"targets": state.targets, "first_failure": first},
    )


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
