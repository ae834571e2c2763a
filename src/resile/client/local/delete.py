"""Ending and removing jobs of this machine: their masters are asked, or their processes killed by their records."""

from __future__ import annotations

import os
import shutil

from resile.api.ids import Seconds
from resile.client.base import Deleted, Say
from resile.client.errors import CommandError
from resile.client.local.follow import FAREWELL_SECONDS
from resile.client.local.jobs import LocalJob
from resile.client.local.master_client import MasterClient, MasterUnreachable, wait_until
from resile.client.local.master_process import end_by_force, served
from resile.platform.local import files
from resile.protocol.job_changes import Stop
from resile.wire.job_directory import DirectoryError

DEFAULT_GRACE = Seconds(30.0)
"""The grace period of nodes if the settings of their job cannot be read."""


def delete(job: LocalJob, say: Say, *, now: bool, keep_logs: bool) -> Deleted:
    directory = job.directory
    kind = job.kind
    noun = kind.noun if kind is not None else "job"
    try:
        spec = directory.spec()
        grace, short = spec.longest_exit_grace, spec.timeouts.kill_grace
    except DirectoryError:
        grace = short = DEFAULT_GRACE
    if not now and _stop(job):
        say(f"stopping {job} ...")
        if not wait_until(lambda: not served(directory), grace + FAREWELL_SECONDS):
            say("it takes too long; what is left is killed")
    elif not now and any(not record.status.ended for record in files.read_nodes(directory.path)):
        say("the job has no master; its nodes are ended by their records")
    end_by_force(directory, Seconds(0.0) if now else short)
    _remove(job, keep_logs)
    return Deleted(job.name, noun, logs=str(directory.path) if keep_logs else "")


def _stop(job: LocalJob) -> bool:
    if not served(job.directory):
        return False
    with MasterClient(job.directory) as client:
        try:
            client.insist(Stop(because="a person deleted it"))
        except MasterUnreachable:
            return False
    return True


def _remove(job: LocalJob, keep_logs: bool) -> None:
    path = job.directory.path
    try:
        if not keep_logs:
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
