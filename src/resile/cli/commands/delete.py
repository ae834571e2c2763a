"""`resile delete`: end jobs and remove them, by `client/local/delete.py` or `client/cluster/delete.py`."""

from __future__ import annotations

from contextlib import ExitStack

import click

from resile.cli.common_options import output_option, say, target_options, tell
from resile.client.target import Target


@click.command()
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True)
@target_options
@click.option("--keep", is_flag=True, help="keep the logs (on this machine)")
@click.option("--now", is_flag=True, help="kill everything at once instead of asking")
@click.option("--wait/--no-wait", default=True, show_default=True, help="return when it is gone (on a cluster)")
@output_option("table", "json")
def delete(jobs: tuple[str, ...], target: Target, keep: bool, now: bool, wait: bool, output: str) -> None:
    """End every JOB and remove it, its logs included.

    Jobs of this machine are removed from it, all others from the cluster, with everything that belongs to them.
    """
    places: dict[bool, list[str]] = {}
    for job in dict.fromkeys(jobs):
        places.setdefault(target.is_local(job), []).append(job)
    with ExitStack() as stack:
        ending = [
            stack.enter_context(target.jobs(say, local=local)).delete(names, now=now, wait=wait, keep_logs=keep)
            for local, names in sorted(places.items())
        ]  # all names are checked before the first job is deleted
        for deletions in ending:
            for deleted in deletions:
                how = "deleted" if deleted.gone else "is being deleted"
                kept = f"; its logs are in {deleted.logs}" if deleted.logs else ""
                sentence = f"{deleted.noun}/{deleted.name} {how}{kept}"
                tell(output, sentence, name=deleted.name, deleted=True, logs=deleted.logs)
