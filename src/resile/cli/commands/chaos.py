"""`resile chaos`: break something of a job on purpose; what it does to local ones is in `resile.chaos.local`."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from resile.chaos import local
from resile.cli.common_options import F, namespace_option, output_option, print_json, target_options
from resile.cli.output.follow import POLL_SECONDS, clock
from resile.cli.output.rows import MASTER_CAME_BACK
from resile.cli.output.tables import took
from resile.client.errors import CommandError
from resile.client.local.job_reader import JobReader
from resile.client.local.jobs import find
from resile.client.local.master_client import wait_until
from resile.client.target import Target
from resile.wire.job_directory import JobDirectory

BEYOND_BUDGET = 20.0
"""Seconds beyond the recovery budget for a program to start again; then it is for others to watch."""
CLOCK_DRIFT = 0.5
"""Seconds by which the wall clock may have been corrected since the master started, whose own clock never jumps."""


def wait_option(command: F) -> F:
    """`--no-wait`."""
    words = "after the strike, wait for the next step and say how long it took"
    return click.option("--wait/--no-wait", default=True, show_default=True, help=words)(command)


@click.group()
def chaos() -> None:
    """Break something on purpose and watch the job recover."""


@chaos.command("kill-process", short_help="SIGKILL one training process of JOB.")
@click.argument("job")
@click.option("--node", metavar="NODE", help="of this node, as in worker-1")
@click.option("--rank", type=click.IntRange(min=0), metavar="RANK", help="the process with this global rank")
@namespace_option
@wait_option
@output_option("table", "json")
def kill_process(job: str, node: str | None, rank: int | None, namespace: str | None, wait: bool, output: str) -> None:
    """SIGKILL one training process of JOB: any, or that of a node or of a rank."""
    _strike(job, namespace, output, lambda directory: local.kill_process(directory, node, rank), wait)


@chaos.command("kill-node", short_help="SIGKILL every process of NODE.")
@click.argument("job")
@click.argument("node")
@target_options
@wait_option
@output_option("table", "json")
def kill_node(job: str, node: str, target: Target, wait: bool, output: str) -> None:
    """SIGKILL every process of NODE, as in worker-1; on a cluster, delete its pod without grace."""
    if not target.here(job):
        _kill_there(target, job, node, output, wait=wait)
        return
    _strike(job, target.namespace, output, lambda directory: local.kill_node(directory, node), wait)


@chaos.command("freeze-node", short_help="SIGSTOP every process of NODE.")
@click.argument("job")
@click.argument("node")
@namespace_option
@wait_option
@output_option("table", "json")
def freeze_node(job: str, node: str, namespace: str | None, wait: bool, output: str) -> None:
    """SIGSTOP every process of NODE: it keeps its connections and says nothing.

    It counts as lost when nothing was heard of it for about two seconds; thawed later, it is told to end.
    """
    _strike(job, namespace, output, lambda directory: local.freeze_node(directory, node), wait)


@chaos.command("thaw-node")
@click.argument("job")
@click.argument("node")
@namespace_option
@output_option("table", "json")
def thaw_node(job: str, node: str, namespace: str | None, output: str) -> None:
    """SIGCONT every process of NODE."""
    _strike(job, namespace, output, lambda directory: local.thaw_node(directory, node))


@chaos.command("kill-master", short_help="SIGKILL the master of JOB.")
@click.argument("job")
@target_options
@click.option("--wait/--no-wait", default=True, show_default=True, help="wait until the master is back")
@output_option("table", "json")
def kill_master(job: str, target: Target, wait: bool, output: str) -> None:
    """SIGKILL the master of JOB, or delete its pod without grace; its supervisor or the operator starts another."""
    if not target.here(job):
        _kill_there(target, job, "", output, wait=wait)
        return
    struck = _strike(job, target.namespace, output, local.kill_master)
    if wait and output != "json":
        with JobReader(find(job, target.namespace)) as look:
            click.echo(_return(look, struck))


def _kill_there(target: Target, job: str, node: str, output: str, *, wait: bool) -> None:
    from resile.cli.cluster.chaos import kill_there

    kill_there(target, job, node, output, wait=wait)


def _strike(
    job: str, namespace: str | None, output: str, strike: Callable[[JobDirectory], local.Injected], wait: bool = False
) -> local.Injected:
    found = find(job, namespace)
    with JobReader(found) as look:
        trained = wait and output != "json" and look.status().step >= 0
        try:
            struck = strike(found.directory)
        except local.NothingToInjectError as error:
            raise CommandError(str(error)) from error
        if output == "json":
            print_json(struck)
            return struck
        pids = " ".join(map(str, struck.pids))
        click.echo(f"{clock(struck.at)} {struck.what} (pid{'s' if len(struck.pids) > 1 else ''} {pids})")
        if trained:
            click.echo(_recovery(look, struck))
    return struck


def _recovery(look: JobReader, struck: local.Injected) -> str:
    """What the strike led to, as soon as training goes on again; how to watch if that takes long."""
    patience = look.directory.spec().timeouts.recovery_budget + BEYOND_BUDGET
    until = time.monotonic() + patience
    noticed = ""
    while time.monotonic() < until:
        view = look.status()
        outage = next((one for one in view.outages if one.noticed_at >= struck.at - CLOCK_DRIFT), None)
        if outage is not None:
            noticed = f"noticed after {took(max(0.0, outage.noticed_at - struck.at))}"
            if outage.next_step_at is not None:
                return f"{noticed}, next step after {took(outage.next_step_at - struck.at)}"
        if view.ended_at is not None:
            return f"{noticed or 'not noticed'}; the job is over ({view.phase})"
        time.sleep(POLL_SECONDS)
    watch = f"`resile get events {look.job.name}` and `resile describe {look.job.name}` tell how it goes on"
    return f"{noticed or 'not noticed'}, no step within {patience:g} s; {watch}"


def _return(look: JobReader, struck: local.Injected) -> str:
    """When the master was back."""
    back: list[float] = []

    def returned() -> bool:
        story = look.events()
        back[:] = [line.at for line in story if line.reason == MASTER_CAME_BACK and line.at >= struck.at - CLOCK_DRIFT]
        return bool(back)

    if wait_until(returned, BEYOND_BUDGET):
        return f"the master was back after {took(max(0.0, back[-1] - struck.at))}"
    return f"the master is not back after {BEYOND_BUDGET:g} s; see {look.directory.log}"
