"""What a listing of this machine shows beside the views that the master gives: the master itself, and events."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from resile.api.job import JobSpec
from resile.api.job_event import JobEvent
from resile.api.job_view import MASTER, JobView, NodeView
from resile.api.kinds import registry
from resile.client.base import EventView

MASTER_CAME_BACK = "MasterReturned"


def master_node(spec: JobSpec, job: JobView, is_alive: bool, restarts: int) -> NodeView:
    """The master as a row among its nodes, as a listing of a job's pods shows it."""
    status = "Running" if is_alive else "Completed" if job.phase == "Succeeded" else "Error"
    return NodeView(
        name=registry.kind_of_job(spec).master_name(job.name),
        role=MASTER,
        id=0,
        rank=0,
        status=status,
        ready=is_alive,
        restarts=restarts,
        crashes=0,
        relaunch_count=0,
        launched_at=job.created_at,
        ended_at=None if is_alive else job.ended_at,
        host="",
        address="",
        message="",
        ready_containers=int(is_alive),
    )


def restarts_of_master(story: Sequence[JobEvent]) -> int:
    """How often the master came back."""
    return sum(event.reason == MASTER_CAME_BACK for event in story)


def event_view(event: JobEvent, spec: JobSpec) -> EventView:
    """An event with the pod it is about, or else the job."""
    from resile.api.kinds import registry  # only events need it, and it brings every kind

    if event.node:
        role, _, number = event.node.rpartition("-")
        about = f"pod/{registry.node_name(spec, role, int(number))}"
    else:
        about = f"{registry.kind_of_job(spec).noun}/{spec.name}"
    return EventView(**msgspec.structs.asdict(event), object=about, job=spec.name)
