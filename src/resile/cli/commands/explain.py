"""`resile explain`: print the values that the engine derives from the settings of a job."""

from __future__ import annotations

import click

from resile.api.crd.descriptions import of_fields
from resile.api.defaults import DEFAULT_RECOVERY_BUDGET
from resile.api.ids import Seconds
from resile.api.timeouts import BadTimeouts, Timeouts, derive
from resile.cli.common_options import jobs_of, output_option, print_json, target_options
from resile.cli.output.tables import table
from resile.client.errors import NotUsableError
from resile.client.target import Target


@click.group()
def explain() -> None:
    """Print what the engine derived from your settings."""


@explain.command("timeouts", short_help="Print every interval and time-out.")
@click.argument("job", required=False)
@target_options
@click.option("--recovery-budget", type=float, metavar="SECONDS", help="those that follow from this budget")
@output_option("table", "json")
def timeouts(job: str | None, target: Target, recovery_budget: float | None, output: str) -> None:
    """Print every interval and time-out: the defaults, those of a budget, or those of JOB.

    Those with a percentage in the column OF BUDGET follow from --recovery-budget; those with a dash are fixed.
    """
    ladder = _ladder(job, target, recovery_budget)
    usual, doubled = derive(), derive(Seconds(2.0 * DEFAULT_RECOVERY_BUDGET))
    told = {}
    for name, purpose in of_fields(Timeouts).items():
        seconds, is_fixed = getattr(ladder, name), getattr(usual, name) == getattr(doubled, name)
        share = None if is_fixed else seconds / ladder.recovery_budget
        told[name] = {"seconds": seconds, "share": share, "purpose": purpose}
    if output == "json":
        print_json(told)
        return
    rows = [
        (name, f"{one['seconds']:g}", "-" if one["share"] is None else f"{one['share']:.0%}", one["purpose"])
        for name, one in told.items()
    ]
    click.echo(table(("NAME", "SECONDS", "OF BUDGET", "WHAT IT IS FOR"), rows))


def _ladder(job: str | None, target: Target, budget: float | None) -> Timeouts:
    if job is not None and budget is not None:
        raise NotUsableError("give either a job or --recovery-budget, not both")
    if job is not None:
        with jobs_of(target, job) as jobs:
            return jobs.spec(job).timeouts
    try:
        return derive(DEFAULT_RECOVERY_BUDGET if budget is None else Seconds(budget))
    except BadTimeouts as error:
        raise NotUsableError(str(error)) from error
