"""`resile suspend` and `resile resume`: let go of a job's nodes for a while, and take them back."""

from __future__ import annotations

import click

from resile.cli.common_options import jobs_of, output_option, target_options, tell
from resile.client.target import Target


@click.command()
@click.argument("job")
@target_options
@output_option("table", "json")
def suspend(job: str, target: Target, output: str) -> None:
    """End all nodes of JOB until `resile resume`; ids, budgets and the data ledger are kept."""
    with jobs_of(target, job) as jobs:
        name = f"{jobs.kind_of(job).noun}/{job}"
        how = "suspended" if jobs.suspend(job) else "is suspended already"
    tell(output, f"{name} {how}", name=job, suspended=True)


@click.command()
@click.argument("job")
@target_options
@output_option("table", "json")
def resume(job: str, target: Target, output: str) -> None:
    """Launch the nodes of a suspended JOB again.

    A JOB of this machine that has lost its master, as after a restart of the machine, gets a new one.
    """
    with jobs_of(target, job) as jobs:
        name = f"{jobs.kind_of(job).noun}/{job}"
        how = "resumed" if jobs.resume(job) else "was not suspended"
    tell(output, f"{name} {how}", name=job, suspended=False)
