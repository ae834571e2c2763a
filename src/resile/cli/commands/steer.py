"""What people want of a running job: another size, a pause, an end.

Each wish for a job of this machine is answered by the job's master; `resile.cli.cluster.wishes` has the cluster's part.
"""

from __future__ import annotations

import os
import shutil

import click

from resile.api.ids import Seconds
from resile.api.job import MAX_REPLICAS, WORKER
from resile.cli.common_options import output_option, target_options, tell
from resile.cli.output.follow import FAREWELL_SECONDS
from resile.client.errors import CommandError, NotUsableError
from resile.client.local.job_reader import JobReader
from resile.client.local.jobs import LocalJob, find
from resile.client.local.master_client import MasterClient, MasterUnreachable, wait_until
from resile.client.local.supervision import end_by_force, restart_master, served
from resile.client.target import Target
from resile.core.state import Phase
from resile.platform.local import files
from resile.protocol.changes import Scale, Stop, Suspend
from resile.wire.job_directory import DirectoryError

SUSPENDED = str(Phase.SUSPENDED)
DEFAULT_GRACE = Seconds(30.0)
"""For nodes of a job whose own settings cannot be read any more."""


@click.command()
@click.argument("job")
@click.argument("sizes", nargs=-1, required=True, metavar="N|ROLE=N...")
@target_options
@output_option("table", "json")
def scale(job: str, sizes: tuple[str, ...], target: Target, output: str) -> None:
    """Change how many nodes JOB has, as in `resile scale demo worker=3`; a number alone is one of workers.

    On a cluster this is what `kubectl scale elasticjob/JOB --replicas=N` does.
    """
    wanted: dict[str, int] = {}
    for size in sizes:
        role, _, number = (size if "=" in size or not size.isdigit() else f"{WORKER}={size}").partition("=")
        if not role or not number.isascii() or not number.isdigit():
            raise NotUsableError(f"{size!r} is not ROLE=NUMBER, as in worker=3")
        if len(number.lstrip("0")) > len(str(MAX_REPLICAS)) or int(number) > MAX_REPLICAS:
            raise NotUsableError(f"{size!r} is too many: a role has at most {MAX_REPLICAS} nodes")
        wanted[role] = int(number)
    if not target.here(job):
        from resile.cli.cluster.wishes import scale_there

        scale_there(target, job, wanted, output)
        return
    found = find(job, target.namespace)
    for role, replicas in wanted.items():
        _wish(found, Scale(role=role, replicas=replicas))
    words = " ".join(f"{role}={replicas}" for role, replicas in wanted.items())
    tell(output, f"elasticjob/{found.name} scaled: {words}", name=found.name, replicas=wanted)


@click.command()
@click.argument("job")
@target_options
@output_option("table", "json")
def suspend(job: str, target: Target, output: str) -> None:
    """Let go of the nodes of JOB; ids, budgets and the data ledger are kept."""
    if not target.here(job):
        _suspend_there(target, job, output, on_hold=True)
        return
    found = find(job, target.namespace)
    before = _phase(found)
    _wish(found, Suspend(on=True))
    how = "is suspended already" if before == SUSPENDED else "suspended"
    tell(output, f"elasticjob/{found.name} {how}", name=found.name, suspended=True)


@click.command()
@click.argument("job")
@target_options
@output_option("table", "json")
def resume(job: str, target: Target, output: str) -> None:
    """Take the nodes of a suspended JOB back.

    A JOB of this machine that lost its master (a restart of the machine) gets one again.
    """
    if not target.here(job):
        _suspend_there(target, job, output, on_hold=False)
        return
    found = find(job, target.namespace)
    interrupted = _interrupted(found)
    if interrupted:
        restart_master(found.directory)
        click.echo(f"elasticjob/{found.name} has a master again", err=True)
    before = _phase(found)
    _wish(found, Suspend(on=False))
    how = "resumed" if interrupted or before == SUSPENDED else "was not suspended"
    tell(output, f"elasticjob/{found.name} {how}", name=found.name, suspended=False)


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
    here = [job for job in dict.fromkeys(jobs) if target.here(job)]
    there = [job for job in dict.fromkeys(jobs) if job not in here]
    if there and keep:
        raise NotUsableError(f"--keep is for jobs of this machine; {there[0]} is none, and nothing was deleted")
    found = [find(job, target.namespace) for job in here]  # all names are good before the first one goes
    if there:
        from resile.cli.cluster.wishes import delete_there

        delete_there(target, there, output, now=now, wait=wait)
    for job in found:
        _delete(job, keep=keep, now=now, output=output)


def _suspend_there(target: Target, job: str, output: str, *, on_hold: bool) -> None:
    from resile.cli.cluster.wishes import suspend_there

    suspend_there(target, job, output, on_hold=on_hold)


def _delete(found: LocalJob, *, keep: bool, now: bool, output: str) -> None:
    directory = found.directory
    try:
        timeouts = directory.spec().timeouts
        grace, short = timeouts.exit_grace, timeouts.regroup_grace
    except DirectoryError:
        grace = short = DEFAULT_GRACE
    if not now and _stop(found):
        if not wait_until(lambda: not served(directory), grace + FAREWELL_SECONDS):
            click.echo("it takes too long; what is left is killed", err=True)
    elif not now and any(not record.status.ended for record in files.read_nodes(directory.path)):
        click.echo("the job has no master; its nodes are ended by their records", err=True)
    end_by_force(directory, Seconds(0.0) if now else short)
    _remove(found, keep)
    kept = str(directory.path) if keep else ""
    sentence = f"elasticjob/{found.name} deleted" + (f"; its logs are in {kept}" if keep else "")
    tell(output, sentence, name=found.name, deleted=True, logs=kept)


def _wish(job: LocalJob, change: Scale | Suspend) -> None:
    """Bring a wish to the master, also to one that is just being started again.

    Raises:
        CommandError: the master says no, or there is none.
    """
    directory = job.directory
    with MasterClient(directory) as client:
        try:
            if served(directory):
                client.insist(change)
                return
        except MasterUnreachable as error:
            raise CommandError(f"the master of {job} does not answer: {error}") from error
    with JobReader(job) as look:
        phase = look.status().phase
    ending = "is over" if phase in ("Succeeded", "Failed") else "has lost its master"
    raise CommandError(f"job {job} {ending} ({phase}); nothing was changed")


def _phase(job: LocalJob) -> str:
    with JobReader(job) as look:
        return look.status().phase


def _interrupted(job: LocalJob) -> bool:
    """Whether a job is not over and has nobody who serves it."""
    if served(job.directory):
        return False
    with JobReader(job) as look:
        return look.status().ended_at is None


def _stop(job: LocalJob) -> bool:
    """Ask the master to stop the job; False if there is no master to ask."""
    if not served(job.directory):
        return False
    with MasterClient(job.directory) as client:
        try:
            client.insist(Stop(because="a person deleted it"))
        except MasterUnreachable:
            return False
    click.echo(f"stopping {job} ...", err=True)
    return True


def _remove(job: LocalJob, keep: bool) -> None:
    path = job.directory.path
    try:
        if not keep:
            shutil.rmtree(path)
            shutil.rmtree(job.previous, ignore_errors=True)  # no command would find it any more
            return
        for entry in path.iterdir():
            if entry.is_dir() and entry.name != "logs":
                shutil.rmtree(entry)
            elif not entry.is_dir() and entry != job.directory.log:
                entry.unlink()
    except OSError as error:
        raise CommandError(f"cannot remove {path}: {os.strerror(error.errno or 0)}") from error
