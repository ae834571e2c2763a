"""The cells of the rows that `resile get` prints, for jobs, nodes, events and plans, in kubectl's columns."""

from __future__ import annotations

import time

from resile.api.job_view import MASTER, JobView, NodeView
from resile.cli.output.tables import age
from resile.client.base import EventView, Item, Listable, PlanView

NODE_HEADER = ("NAME", "READY", "STATUS", "RESTARTS", "AGE")
NODE_WIDE_HEADER = (*NODE_HEADER, "RANK", "ADDRESS", "HOST", "MESSAGE")
EVENT_HEADER = ("LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE")
HEADERS = {
    Listable.JOBS: ("NAME", "PHASE", "AGE"),
    Listable.NODES: NODE_HEADER,
    Listable.EVENTS: EVENT_HEADER,
    Listable.PLANS: ("NAME", "PHASE", "AGE"),
}
WIDE_HEADERS = {
    Listable.JOBS: ("NAME", "PHASE", "AGE", "NODES", "ROUND", "STEP", "SPEED", "GOODPUT", "REASON"),
    Listable.NODES: NODE_WIDE_HEADER,
    Listable.EVENTS: EVENT_HEADER,
    Listable.PLANS: ("NAME", "PHASE", "AGE", "JOB", "MESSAGE"),
}
NONE = "<none>"


def row(item: Item, *, wide: bool) -> list[str]:
    """The cells of an item's row, without its namespace; with `wide`, also those of `-o wide`."""
    match item.view:
        case JobView():
            return job_row(item.view, wide)
        case NodeView():
            return node_row(item.view, wide)
        case EventView():
            return event_row(item.view)
        case PlanView():
            return plan_row(item.view, wide)


def job_row(job: JobView, wide: bool) -> list[str]:
    cells = [job.name, job.phase, age(time.time() - job.created_at)]
    if not wide:
        return cells
    running = sum(node.ready for node in job.nodes)
    wanted = len([node for node in job.nodes if node.ended_at is None])
    return [*cells, f"{running}/{wanted}", str(job.round or "-"), steps(job), *speeds(job), job.reason or NONE]


def steps(job: JobView) -> str:
    """How many steps a job has taken: `120/468`, `120` if the total is not known, `-` before the first step."""
    if job.step < 0:
        return "-"
    return f"{min(job.step, job.total)}/{job.total}" if job.total else str(job.step)


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def speeds(job: JobView) -> tuple[str, str]:
    """A job's steps per second and its goodput as text; `-` for both before the first step."""
    if job.step < 0:
        return "-", "-"
    return f"{job.speed:.1f}/s", f"{job.goodput:.1%}"


def node_row(node: NodeView, wide: bool) -> list[str]:
    cells = [
        node.name,
        f"{node.ready_containers}/{node.containers}",
        node.status,
        str(node.restarts),
        age(time.time() - node.launched_at),
    ]
    if not wide:
        return cells
    rank = "-" if node.role == MASTER else str(node.rank)
    return [*cells, rank, node.address or NONE, node.host or NONE, node.message or NONE]


def event_row(event: EventView) -> list[str]:
    return [
        age(time.time() - event.at),
        "Warning" if event.warning else "Normal",
        event.reason,
        event.object,
        " ".join(event.message.split()),
    ]


def plan_row(plan: PlanView, wide: bool) -> list[str]:
    cells = [plan.name, plan.phase or NONE, age(time.time() - plan.created_at)]
    return [*cells, plan.job, plan.message or NONE] if wide else cells
