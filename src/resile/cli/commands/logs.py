"""`resile logs`: print the log of one pod, or the logs of all nodes of a job."""

from __future__ import annotations

import sys

import click
import msgspec

from resile.cli.common_options import jobs_of, output_option, target_options
from resile.client.base import LogLine
from resile.client.pod_names import pod_name
from resile.client.target import Target


@click.command()
@click.argument("name", metavar="JOB|POD")
@click.argument("node", required=False)
@target_options
@click.option("-f", "--follow", is_flag=True, help="go on until the job (or the pod) has ended")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="begin with the last N lines of each log")
@click.option("--master", is_flag=True, help="the master's log instead of the nodes'")
@output_option("text", "json")
def logs(
    name: str, node: str | None, target: Target, follow: bool, tail: int | None, master: bool, output: str
) -> None:
    """Print the log of a pod, or of a NODE of a job such as worker-1, or the logs of all nodes of a job.

    With several nodes each line begins with its pod's name. With `-o json` each line is an object of its own. On a
    cluster the logs of finished pods stay until the job is deleted; those of deleted pods are gone.

    \b
    resile logs torch-mnist -f                          all nodes, later ones included
    resile logs torch-mnist worker-1 --tail 20          one of them
    resile logs torch-mnist --master                    why the job did what it did
    """  # noqa: D301
    shown = _as_json if output == "json" else _as_text
    with jobs_of(target, name) as jobs:
        if node:
            name = pod_name(jobs.kind_of(name), name, node) or node
        for batch in jobs.logs(name, master=master, tail=tail, follow=follow):
            sys.stdout.buffer.writelines(map(shown, batch))
            sys.stdout.buffer.flush()


def _as_json(line: LogLine) -> bytes:
    return msgspec.json.encode({"pod": line.pod, "line": line.text.decode(errors="replace")}) + b"\n"


def _as_text(line: LogLine) -> bytes:
    return line.text + b"\n" if line.alone else f"[{line.pod}] ".encode() + line.text + b"\n"
