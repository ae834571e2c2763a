"""`resile describe`: print everything that is known of one job, in sections."""

from __future__ import annotations

import time
from typing import Any

import click
import msgspec

from resile.api.ids import MiB
from resile.api.job_view import JobEvent, JobView
from resile.cli.common_options import jobs_of, output_option, print_json, target_options
from resile.cli.output import columns
from resile.cli.output.follow import clock, outage_table
from resile.cli.output.last_failure import failure_lines, failure_title
from resile.cli.output.tables import age, table, took
from resile.client.base import Listable
from resile.client.target import Target

LAST_ROUNDS = 10


@click.command()
@click.argument("job")
@target_options
@output_option("table", "json")
def describe(job: str, target: Target, output: str) -> None:
    """Print everything about JOB: phase, progress, nodes, rounds, interruptions, last failure, last events.

    A JOB of this machine comes before one of the cluster; --local and --cluster choose. For a job of a
    cluster, its conditions and the machines of its pods are printed, too. A cluster keeps Events for an hour.
    """
    with jobs_of(target, job) as jobs:
        told = jobs.describe(job)
    if output == "json":
        data = msgspec.to_builtins(told.job)
        print_json({**data, "master": told.master, **told.data, "events": told.events})
        return
    nodes = [columns.node_row(node) for node in told.nodes]
    events = [columns.event_row(event) for event in told.events]
    failure = told.failure
    sections = [
        _facts(told.job, told.facts),
        *([] if told.conditions is None else [_section("Conditions", _conditions(told.conditions))]),
        _section("Nodes", table(columns.HEADERS[Listable.NODES], nodes) if nodes else ""),
        *([] if told.rounds is None else [_section("Rounds", _rounds(told.rounds))]),
        _section("Interruptions", outage_table(told.job) if told.job.outages else ""),
        _section(f"Last failure{failure_title(failure)}", "\n".join(failure_lines(failure))),
        _section("Events", table(columns.HEADERS[Listable.EVENTS], events) if events else ""),
    ]
    click.echo("\n".join(sections))


def _facts(job: JobView, more: dict[str, str]) -> str:
    speed, goodput = columns.speeds(job)
    life = (job.ended_at or job.at) - (job.started_at or job.created_at)
    whole = {
        "Name": job.name,
        "Namespace": job.namespace,
        "Phase": job.phase,
        "Reason": job.reason or columns.NONE,
        "Message": job.message or columns.NONE,
        "Age": age(time.time() - job.created_at),
        "Ran for": took(life) if job.started_at else "not at all yet",
        "Round": f"{job.round} with {columns.count(job.members, 'node')}" if job.round else "none runs",
        "Nodes per round": f"{job.min_nodes} to {job.max_nodes}" if job.max_nodes else "not known yet",
        "Progress": f"{columns.steps(job)} steps" if job.step >= 0 else "no step yet",
        "Speed": speed,
        "Goodput": goodput,
        **more,
    }
    if standbys := sum(node.standbys for node in job.nodes):
        memory = sum(node.standby_memory for node in job.nodes) // MiB
        where = columns.count(sum(node.standbys > 0 for node in job.nodes), "node")
        whole["Standbys"] = f"{standbys} ready on {where}, {memory} MiB"
    for dataset in job.datasets:
        whole[f"Data set {dataset.name}"] = f"{dataset.done} of {dataset.total} done, {dataset.leased} shards held"
    width = max(map(len, whole)) + 3
    return "\n".join(f"{name + ':':<{width}}{value}" for name, value in whole.items())


def _conditions(conditions: list[dict[str, Any]]) -> str:
    keys = ("type", "status", "lastTransitionTime")
    rows = [[*(one.get(key, "") for key in keys), one.get("message") or columns.NONE] for one in conditions]
    return table(("TYPE", "STATUS", "SINCE", "MESSAGE"), rows) if rows else ""


def _rounds(rounds: list[JobEvent]) -> str:
    return "\n".join(f"{clock(event.at)}  {event.message}" for event in rounds[-LAST_ROUNDS:])


def _section(title: str, body: str) -> str:
    if not body:
        return f"{title}:  {columns.NONE}"
    return f"{title}:\n" + "\n".join(f"  {line}" for line in body.splitlines())
