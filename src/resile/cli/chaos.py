"""`resile chaos`: break something of a local job on purpose; what it does is in `resile.chaos.local`."""

from __future__ import annotations

from collections.abc import Callable

import click

from resile.chaos import local
from resile.cli.attach import clock
from resile.cli.errors import CommandError
from resile.cli.jobs import find
from resile.cli.options import namespace_option, output_option, print_json
from resile.wire.directory import JobDirectory


@click.group()
def chaos() -> None:
    """Break something on purpose and watch the job recover."""


@chaos.command("kill-process")
@click.argument("job")
@click.option("--node", metavar="NODE", help="of this node, as in worker-1")
@click.option("--rank", type=click.IntRange(min=0), metavar="RANK", help="the process with this global rank")
@namespace_option
@output_option("table", "json")
def kill_process(job: str, node: str | None, rank: int | None, namespace: str | None, output: str) -> None:
    """SIGKILL one training process of JOB: any, or that of a node or of a rank."""
    _strike(job, namespace, output, lambda directory: local.kill_process(directory, node, rank))


@chaos.command("kill-node")
@click.argument("job")
@click.argument("node")
@namespace_option
@output_option("table", "json")
def kill_node(job: str, node: str, namespace: str | None, output: str) -> None:
    """SIGKILL every process of NODE, as in worker-1."""
    _strike(job, namespace, output, lambda directory: local.kill_node(directory, node))


@chaos.command("freeze-node")
@click.argument("job")
@click.argument("node")
@namespace_option
@output_option("table", "json")
def freeze_node(job: str, node: str, namespace: str | None, output: str) -> None:
    """SIGSTOP every process of NODE: it keeps its connections and says nothing."""
    _strike(job, namespace, output, lambda directory: local.freeze_node(directory, node))


@chaos.command("thaw-node")
@click.argument("job")
@click.argument("node")
@namespace_option
@output_option("table", "json")
def thaw_node(job: str, node: str, namespace: str | None, output: str) -> None:
    """SIGCONT every process of NODE."""
    _strike(job, namespace, output, lambda directory: local.thaw_node(directory, node))


@chaos.command("kill-master")
@click.argument("job")
@namespace_option
@output_option("table", "json")
def kill_master(job: str, namespace: str | None, output: str) -> None:
    """SIGKILL the master of JOB; its supervisor starts it again."""
    _strike(job, namespace, output, local.kill_master)


def _strike(job: str, namespace: str | None, output: str, strike: Callable[[JobDirectory], local.Strike]) -> None:
    found = find(job, namespace)
    try:
        struck = strike(found.directory)
    except local.NothingStruckError as error:
        raise CommandError(str(error)) from error
    if output == "json":
        print_json(struck)
    else:
        pids = " ".join(map(str, struck.pids))
        click.echo(f"{clock(struck.at)} {struck.what} (pid{'s' if len(struck.pids) > 1 else ''} {pids})")
