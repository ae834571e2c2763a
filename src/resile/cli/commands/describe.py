"""`resile describe`: everything that is known of one job, in sections."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click
import msgspec

from resile.api.ids import MiB
from resile.api.job_event import JobEvent
from resile.api.job_view import JobView
from resile.cli.commands.logs import Log
from resile.cli.common_options import output_option, print_json, target_options
from resile.cli.output import rows
from resile.cli.output.follow import clock, outage_table
from resile.cli.output.tables import age, table, took
from resile.client.local.job_reader import JobReader
from resile.client.local.jobs import find
from resile.client.target import Target
from resile.core import completion
from resile.core.state import JobState
from resile.protocol.reports import WorkerFailure

LAST_EVENTS = 20
LAST_ROUNDS = 10
LAST_LINES = 10
"""Of the log of a node that failed."""
ROUND_REASONS = ("RoundFormed", "RoundOver")


class Failure(msgspec.Struct):
    """The process failure that came first in the newest broken round."""

    node: str
    failure: WorkerFailure
    round: int = 0


@click.command()
@click.argument("job")
@target_options
@output_option("table", "json")
def describe(job: str, target: Target, output: str) -> None:
    """Tell everything about JOB: phase, progress, nodes, rounds, interruptions, last failure, last events.

    A JOB of this machine comes before one of the cluster; --local and --cluster choose. Of a cluster's job the
    conditions and the places of its pods are told, too, and its Events, which a cluster keeps for an hour.
    """
    if not target.here(job):
        from resile.cli.cluster.describe import describe_there

        describe_there(target, job, output)
        return
    with JobReader(find(job, target.namespace)) as look:
        view = look.status()
        story = look.events()
        lives = look.master_lives
        state = look.state()
    first = first_failure(state)
    master = rows.master_node(view, lives, rows.restarts_of_master(story))
    if output == "json":
        data = msgspec.to_builtins(view)
        data["master"] = msgspec.to_builtins(master)
        data["targets"] = state.targets
        data["first_failure"] = msgspec.to_builtins(first)
        data["events"] = [rows.event_data(told, state.spec) for told in story[-LAST_EVENTS:]]
        print_json(data)
        return
    sections = [
        _facts(view, state, str(look.directory.path)),
        section("Nodes", table(rows.NODE_WIDE_HEADER, [rows.node_row(n, wide=True) for n in [master, *view.nodes]])),
        section("Rounds", _rounds(story)),
        section("Interruptions", outage_table(view) if view.outages else ""),
        _last_failure(first, look, view),
        section("Events", _events(story[-LAST_EVENTS:], state)),
    ]
    click.echo("\n".join(sections))


def first_failure(state: JobState) -> Failure | None:
    """What came first in the newest broken round; what followed is collateral."""
    first = completion.first_failure(state)
    return Failure(str(first[0]), first[1], state.round_failures.round) if first is not None else None


def failed_node_text(look: JobReader, job: JobView) -> str:
    """What the node said that failed last, for a job in which no round broke; empty if no node failed."""
    failed = [node for node in job.nodes if node.ended_at is not None and node.status not in ("Completed", "Deleted")]
    if not failed:
        return ""
    node = max(failed, key=lambda one: one.ended_at or 0.0)
    log = Log(look.directory.path / "logs" / f"{node.name}.log", tail=LAST_LINES)
    lines = [line.decode(errors="replace") for line in log.lines(all_of_it=True)]
    said = ["the last lines of its log:", *lines] if lines else ["its log is empty"]
    return "\n".join([f"{node.name} ({node.status}): {node.message or 'it gave no reason'}", *said])


def _last_failure(first: Failure | None, look: JobReader, job: JobView) -> str:
    if first is not None:
        return section(f"Last failure (first of round {first.round})", failure_text(first))
    return section("Last failure", failed_node_text(look, job) if job.phase == "Failed" else "")


def facts(job: JobView, more: dict[str, str]) -> str:
    """What is known of a job wherever it runs, and `more`, as names with values."""
    speed, goodput = rows.speeds(job)
    life = (job.ended_at or job.at) - (job.started_at or job.created_at)
    whole = {
        "Name": job.name,
        "Namespace": job.namespace,
        "Phase": job.phase,
        "Reason": job.reason or rows.NONE,
        "Message": job.message or rows.NONE,
        "Age": age(time.time() - job.created_at),
        "Ran for": took(life) if job.started_at else "not at all yet",
        "Round": f"{job.round} with {rows.count(job.members, 'node')}" if job.round else "none runs",
        "Nodes per round": f"{job.min_nodes} to {job.max_nodes}" if job.max_nodes else "not known yet",
        "Progress": f"{rows.steps(job)} steps" if job.step >= 0 else "no step yet",
        "Speed": speed,
        "Goodput": goodput,
        **more,
    }
    if standbys := sum(node.standbys for node in job.nodes):
        memory = sum(node.standby_memory for node in job.nodes) // MiB
        where = rows.count(sum(node.standbys > 0 for node in job.nodes), "node")
        whole["Standbys"] = f"{standbys} ready on {where}, {memory} MiB"
    for dataset in job.datasets:
        whole[f"Data set {dataset.name}"] = f"{dataset.done} of {dataset.total} done, {dataset.leased} shards held"
    width = max(map(len, whole)) + 3
    return "\n".join(f"{name + ':':<{width}}{value}" for name, value in whole.items())


def _facts(job: JobView, state: JobState, directory: str) -> str:
    more = {
        "Strategy": state.spec.strategy.value,
        "Replicas": ", ".join(f"{role}={number}" for role, number in state.targets.items()) or rows.NONE,
        "Recovery budget": f"{state.spec.timeouts.recovery_budget:g} s",
        "Directory": directory,
    }
    return facts(job, more)


def _rounds(story: Sequence[JobEvent]) -> str:
    told = [line for line in story if line.reason in ROUND_REASONS]
    return "\n".join(f"{clock(line.at)}  {line.message}" for line in told[-LAST_ROUNDS:])


def failure_text(first: Failure) -> str:
    """A failure with all that its process said."""
    parts = [f"on {first.node} at {clock(first.failure.at)}: {first.failure}"]
    parts += [text.rstrip() for text in (first.failure.traceback, first.failure.log_tail) if text.strip()]
    return "\n".join(parts)


def _events(story: Sequence[JobEvent], state: JobState) -> str:
    return table(rows.EVENT_HEADER, [rows.event_row(told, state.spec) for told in story]) if story else ""


def section(title: str, body: str) -> str:
    """A part of the description; `<none>` where there is nothing to say."""
    if not body:
        return f"{title}:  {rows.NONE}"
    return f"{title}:\n" + "\n".join(f"  {line}" for line in body.splitlines())
