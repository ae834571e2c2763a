"""The cells of the rows that `resile get` prints, for jobs, nodes, events and plans, in kubectl's columns."""

from __future__ import annotations

import time

from resile.api.job_view import MASTER, JobView, NodeView
from resile.cli.output.tables import age
from resile.client.base import EventView, Item, Listable, PlanView

HEADERS = {
    Listable.JOBS: ("NAME", "PHASE", "AGE", "NODES", "ROUND", "STEP", "SPEED", "GOODPUT", "REASON"),
    Listable.NODES: ("NAME", "READY", "STATUS", "RESTARTS", "AGE", "RANK", "ADDRESS", "HOST", "MESSAGE"),
    Listable.EVENTS: ("LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"),
    Listable.PLANS: ("NAME", "PHASE", "AGE", "JOB", "MESSAGE"),
}
NARROW = {Listable.JOBS: 3, Listable.NODES: 5, Listable.EVENTS: 5, Listable.PLANS: 3}
"""How many of the columns are printed without `-o wide`."""
NONE = "<none>"


def row(item: Item) -> list[str]:
    """The cells of an item's row, without its namespace, but with those of `-o wide`."""
    match item.view:
        case JobView():
            return job_row(item.view)
        case NodeView():
            return node_row(item.view)
        case EventView():
            return event_row(item.view)
        case PlanView() as plan:
            return [plan.name, plan.phase or NONE, _age(plan.created_at), plan.job, plan.message or NONE]


def job_row(job: JobView) -> list[str]:
    running = sum(node.ready for node in job.nodes)
    wanted = sum(node.ended_at is None for node in job.nodes)
    cells = [job.name, job.phase, _age(job.created_at), f"{running}/{wanted}", str(job.round or "-")]
    return [*cells, steps(job), *speeds(job), job.reason or NONE]


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


def node_row(node: NodeView) -> list[str]:
    ready = f"{node.ready_containers}/{node.containers}"
    rank = "-" if node.role == MASTER else str(node.rank)
    cells = [node.name, ready, node.status, str(node.restarts), _age(node.launched_at), rank]
    return [*cells, node.address or NONE, node.host or NONE, node.message or NONE]


def event_row(event: EventView) -> list[str]:
    kind = "Warning" if event.warning else "Normal"
    return [_age(event.at), kind, event.reason, event.object, " ".join(event.message.split())]


def _age(since: float) -> str:
    return age(time.time() - since)
