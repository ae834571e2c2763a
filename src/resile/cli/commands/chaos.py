"""`resile chaos`: inject a fault into a job, and watch the job recover."""

from __future__ import annotations

import click

from resile.chaos.faults import Fault, FreezeNode, KillMaster, KillNode, KillProcess, ThawNode
from resile.cli.common_options import F, jobs_of, namespace_option, output_option, print_json, target_options
from resile.cli.output.follow import clock
from resile.cli.output.tables import took
from resile.client.base import Sign
from resile.client.target import Target


def wait_option(command: F) -> F:
    words = "after the fault, wait for the next step and say how long it took"
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
    """SIGKILL one training process of JOB: any, or one on the node of --node, or the one with --rank."""
    _inject(Target(namespace=namespace, local=True), job, KillProcess(node, rank), output, wait=wait)


@chaos.command("kill-rank", short_help="SIGKILL the training process of RANK.")
@click.argument("job")
@click.argument("rank", type=click.IntRange(min=0))
@namespace_option
@wait_option
@output_option("table", "json")
def kill_rank(job: str, rank: int, namespace: str | None, wait: bool, output: str) -> None:
    """SIGKILL the training process with global rank RANK: short for `kill-process JOB --rank RANK`."""
    _inject(Target(namespace=namespace, local=True), job, KillProcess(None, rank), output, wait=wait)


@chaos.command("kill-node", short_help="SIGKILL every process of NODE.")
@click.argument("job")
@click.argument("node")
@target_options
@wait_option
@output_option("table", "json")
def kill_node(job: str, node: str, target: Target, wait: bool, output: str) -> None:
    """SIGKILL every process of NODE, as in worker-1; on a cluster, delete its pod without grace."""
    _inject(target, job, KillNode(node), output, wait=wait)


@chaos.command("freeze-node", short_help="SIGSTOP every process of NODE.")
@click.argument("job")
@click.argument("node")
@namespace_option
@wait_option
@output_option("table", "json")
def freeze_node(job: str, node: str, namespace: str | None, wait: bool, output: str) -> None:
    """SIGSTOP every process of NODE: the node keeps its connections and sends nothing.

    The node counts as lost after about two seconds of silence. If it is thawed later, it is told to end.
    """
    _inject(Target(namespace=namespace, local=True), job, FreezeNode(node), output, wait=wait)


@chaos.command("thaw-node")
@click.argument("job")
@click.argument("node")
@namespace_option
@output_option("table", "json")
def thaw_node(job: str, node: str, namespace: str | None, output: str) -> None:
    """SIGCONT every process of NODE."""
    _inject(Target(namespace=namespace, local=True), job, ThawNode(node), output, wait=False)


@chaos.command("kill-master", short_help="SIGKILL the master of JOB.")
@click.argument("job")
@target_options
@click.option("--wait/--no-wait", default=True, show_default=True, help="wait until the master is back")
@output_option("table", "json")
def kill_master(job: str, target: Target, wait: bool, output: str) -> None:
    """SIGKILL the master of JOB, or delete its pod without grace; its supervisor or the operator starts another."""
    _inject(target, job, KillMaster(), output, wait=wait)


def _inject(target: Target, job: str, fault: Fault, output: str, *, wait: bool) -> None:
    with jobs_of(target, job) as jobs:
        injected, signs = jobs.inject(job, fault)
        if output == "json":
            print_json(injected)
            return
        pids = f" (pid{'s' if len(injected.pids) > 1 else ''} {' '.join(map(str, injected.pids))})"
        click.echo(f"{clock(injected.at)} {injected.what}{pids if injected.pids else ''}")
        for together in signs if wait else ():
            click.echo(", ".join(map(_told, together)))


def _told(sign: Sign) -> str:
    return sign.what if sign.after is None else f"{sign.what} after {took(sign.after)}"
