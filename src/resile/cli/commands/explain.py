"""`resile explain`: print the values that the engine derives from the settings of a job."""

from __future__ import annotations

import click
import msgspec

from resile.api.defaults import DEFAULT_RECOVERY_BUDGET, LARGEST_RECOVERY_BUDGET, SMALLEST_RECOVERY_BUDGET
from resile.api.ids import Seconds
from resile.api.timeouts import BadTimeouts, Timeouts, derive
from resile.cli.common_options import jobs_of, output_option, print_json, target_options
from resile.cli.output.tables import table
from resile.client.errors import NotUsableError
from resile.client.target import Target

PURPOSES = {
    "recovery_budget": "the longest a job may stand still after losing a node while others can go on",
    "heartbeat": "how often an agent speaks when it has nothing to say",
    "heartbeat_timeout": "an open connection that is silent for so long has lost its node",
    "reconnect": "a closed connection that stays away for so long has lost its node",
    "master_recovery": "how long a restarted master waits for the agents its journal knows",
    "straggler_wait": "how long a round that could close waits for nodes that are starting",
    "last_call": "the same for the first round on bare machines, where it is not known which nodes may come",
    "regroup_grace": "from SIGTERM to SIGKILL for processes whose round is over",
    "exit_grace": "from SIGTERM to SIGKILL for a node that is asked to leave: time to save",
    "join": "how long too few nodes wait for the rest before the job fails",
    "pend": "how long a node the job needs may be unschedulable before the job fails",
    "connect": "how long a new agent tries to reach its master",
    "budget_window": "a failure so much training time ago no longer counts against a budget",
}
"""What each rung of the ladder is for, in the order in which they are printed."""


@click.group()
def explain() -> None:
    """Print what the engine derived from your settings."""


@explain.command("timeouts", short_help="Print every interval and time-out.")
@click.argument("job", required=False)
@target_options
@click.option("--recovery-budget", type=float, metavar="SECONDS", help="those that follow from this budget")
@output_option("table", "json")
def timeouts(job: str | None, target: Target, recovery_budget: float | None, output: str) -> None:
    """Print every interval and time-out: the defaults, those of a budget, or those of JOB."""
    ladder = _ladder(job, target, recovery_budget)
    if output == "json":
        print_json({name: _row(ladder, name) for name in PURPOSES})
        return
    rows = [(name, f"{getattr(ladder, name):g}", _share(ladder, name), what) for name, what in PURPOSES.items()]
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


def _row(ladder: Timeouts, name: str) -> dict[str, object]:
    seconds = getattr(ladder, name)
    share = seconds / ladder.recovery_budget if _is_share(ladder, name) else None
    return {"seconds": seconds, "share": share, "purpose": PURPOSES[name]}


def _share(ladder: Timeouts, name: str) -> str:
    """A time-out as a percentage of the recovery budget; a dash if it does not depend on the budget."""
    return f"{getattr(ladder, name) / ladder.recovery_budget:.0%}" if _is_share(ladder, name) else "-"


def _is_share(ladder: Timeouts, name: str) -> bool:
    """True if a time-out depends on the recovery budget: a larger budget changes it."""
    doubled = derive(Seconds(2.0 * DEFAULT_RECOVERY_BUDGET))
    return bool(getattr(doubled, name) != getattr(derive(), name))


assert set(PURPOSES) == set(msgspec.structs.asdict(derive())), "every rung has a purpose"
