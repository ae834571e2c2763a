"""What the rows of `get` hold: jobs, nodes and events in the columns of kubectl."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from resile.api.job import JobSpec, node_name
from resile.api.job_event import JobEvent
from resile.api.job_view import JobView, NodeView
from resile.api.kinds import registry
from resile.api.manifests.names import master_name
from resile.cli.output.tables import age

JOB_HEADER = ("NAME", "PHASE", "AGE")
JOB_WIDE_HEADER = ("NAME", "PHASE", "AGE", "NODES", "ROUND", "STEP", "SPEED", "GOODPUT", "REASON")
NODE_HEADER = ("NAME", "READY", "STATUS", "RESTARTS", "AGE")
NODE_WIDE_HEADER = (*NODE_HEADER, "RANK", "ADDRESS", "HOST", "MESSAGE")
PLAN_HEADER = ("NAME", "PHASE", "AGE")
PLAN_WIDE_HEADER = (*PLAN_HEADER, "JOB", "MESSAGE")
EVENT_HEADER = ("LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE")

MASTER_CAME_BACK = "MasterReturned"
DELETED = "Deleted"
NONE = "<none>"


def job_row(job: JobView, wide: bool) -> list[str]:
    """One line of `get jobs`."""
    row = [job.name, job.phase, age(time.time() - job.created_at)]
    if not wide:
        return row
    running = sum(node.ready for node in job.nodes)
    wanted = len([node for node in job.nodes if node.ended_at is None])
    return [*row, f"{running}/{wanted}", str(job.round or "-"), steps(job), *speeds(job), job.reason or NONE]


def steps(job: JobView) -> str:
    """How many steps were taken: `120/468`, `120` where the end is not known, `-` before the first step."""
    if job.step < 0:
        return "-"
    taken = job.step + 1  # steps are numbered from 0
    return f"{min(taken, job.total)}/{job.total}" if job.total else str(taken)


def count(number: int, what: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def speeds(job: JobView) -> tuple[str, str]:
    """Steps per second and goodput; `-` before the first step."""
    if job.step < 0:
        return "-", "-"
    return f"{job.speed:.1f}/s", f"{job.goodput:.1%}"


def master_node(job: JobView, lives: bool, restarts: int) -> NodeView:
    """The master as a row among its nodes, as a listing of a job's pods shows it."""
    status = "Running" if lives else "Completed" if job.phase == "Succeeded" else "Error"
    return NodeView(
        name=master_name(job.name),
        role="master",
        id=0,
        rank=0,
        status=status,
        ready=lives,
        restarts=restarts,
        crashes=0,
        relaunch_count=0,
        launched_at=job.created_at,
        ended_at=None if lives else job.ended_at,
        host="",
        address="",
        message="",
    )


def restarts_of_master(story: Sequence[JobEvent]) -> int:
    """How often the master came back."""
    return sum(told.reason == MASTER_CAME_BACK for told in story)


def node_row(node: NodeView, wide: bool) -> list[str]:
    """One line of `get nodes`."""
    row = [
        node.name,
        "1/1" if node.ready else "0/1",
        node.status,
        str(node.restarts),
        age(time.time() - node.launched_at),
    ]
    if not wide:
        return row
    rank = "-" if node.role == "master" else str(node.rank)
    return [*row, rank, node.address or NONE, node.host or NONE, node.message or NONE]


def event_row(told: JobEvent, spec: JobSpec) -> list[str]:
    """One line of `get events`."""
    return [
        age(time.time() - told.at),
        "Warning" if told.warning else "Normal",
        told.reason,
        event_object(told, spec),
        told.message,
    ]


def event_object(told: JobEvent, spec: JobSpec) -> str:
    """What a line of the story is about: `pod/…`, or the job."""
    if not told.node:
        return f"{registry.front_door(spec.front_door).noun}/{spec.name}"
    role, _, number = told.node.rpartition("-")
    return f"pod/{node_name(spec, role, int(number))}"


def event_data(told: JobEvent, spec: JobSpec) -> dict[str, object]:
    """A line of the story as data."""
    return {**msgspec.to_builtins(told), "object": event_object(told, spec), "job": spec.name}
