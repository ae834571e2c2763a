"""`resile scale`: change how many nodes a running job has."""

from __future__ import annotations

import click

from resile.api.defaults import MAX_REPLICAS
from resile.cli.common_options import jobs_of, output_option, target_options, tell
from resile.client.errors import NotUsableError
from resile.client.target import Target


@click.command()
@click.argument("job")
@click.argument("sizes", nargs=-1, required=True, metavar="N|ROLE=N...")
@target_options
@output_option("table", "json")
def scale(job: str, sizes: tuple[str, ...], target: Target, output: str) -> None:
    """Change how many nodes JOB has, as in `resile scale demo worker=3`; a number without a role means workers.

    On a cluster this is what `kubectl scale` does.
    """
    given = dict(map(_size, sizes))
    with jobs_of(target, job) as jobs:
        kind = jobs.kind_of(job)
        replicas = {role or kind.scaled_role: number for role, number in given.items()}
        jobs.scale(job, replicas)
    words = " ".join(f"{role}={number}" for role, number in replicas.items())
    tell(output, f"{kind.noun}/{job} scaled: {words}", name=job, replicas=replicas)


def _size(word: str) -> tuple[str, int]:
    role, sign, number = word.partition("=") if "=" in word else ("", "", word)
    if (sign and not role) or not number.isascii() or not number.isdigit():
        raise NotUsableError(f"{word!r} is not ROLE=NUMBER, as in worker=3")
    if len(number.lstrip("0")) > len(str(MAX_REPLICAS)) or int(number) > MAX_REPLICAS:
        raise NotUsableError(f"{word!r} is too many: a role has at most {MAX_REPLICAS} nodes")
    return role, int(number)
