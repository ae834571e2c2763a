"""`resile explain`: print the values that the engine derives from the settings of a job."""

from __future__ import annotations

import click

from resile.api.crd.descriptions import of_fields
from resile.api.defaults import DEFAULT_RECOVERY_BUDGET, LARGEST_RECOVERY_BUDGET, SMALLEST_RECOVERY_BUDGET
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
    ladder, purposes = _ladder(job, target, recovery_budget), of_fields(Timeouts)
    if output == "json":
        print_json({name: _row(ladder, name, what) for name, what in purposes.items()})
        return
    rows = [(name, f"{getattr(ladder, name):g}", _share(ladder, name), what) for name, what in purposes.items()]
    click.echo(table(("NAME", "SECONDS", "OF BUDGET", "WHAT IT IS FOR"), rows))


def _ladder(job: str | None, target: Target, budget: float | None) -> Timeouts:
    if job is not None and budget is not None:
        raise NotUsableError("give either a job or --recovery-budget, not both")
    if job is not None:
        with jobs_of(target, job) as jobs:
            return jobs.spec(job).timeouts
    if budget is not None and not SMALLEST_RECOVERY_BUDGET <= budget <= LARGEST_RECOVERY_BUDGET:
        bounds = f"between {SMALLEST_RECOVERY_BUDGET:g} and {LARGEST_RECOVERY_BUDGET:g} seconds"
        raise NotUsableError(f"recovery_budget: must be {bounds}, not {budget:g}")
    try:
        return derive(DEFAULT_RECOVERY_BUDGET if budget is None else Seconds(budget))
    except BadTimeouts as error:
        raise NotUsableError(str(error)) from error


def _row(ladder: Timeouts, name: str, purpose: str) -> dict[str, object]:
    seconds = getattr(ladder, name)
    share = seconds / ladder.recovery_budget if _is_share(ladder, name) else None
    return {"seconds": seconds, "share": share, "purpose": purpose}


def _share(ladder: Timeouts, name: str) -> str:
    return f"{getattr(ladder, name) / ladder.recovery_budget:.0%}" if _is_share(ladder, name) else "-"


def _is_share(ladder: Timeouts, name: str) -> bool:
    """True if the time-out `name` is derived from the recovery budget; False if it is fixed."""
    doubled = derive(Seconds(2.0 * DEFAULT_RECOVERY_BUDGET))
    return bool(getattr(doubled, name) != getattr(derive(), name))
