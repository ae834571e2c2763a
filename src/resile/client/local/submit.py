"""Starting jobs on this machine, and sending plans to their masters."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from resile.api.ids import Seconds
from resile.api.job import JobSpec, Strategy
from resile.api.kinds import registry
from resile.api.kinds.base import JobKind, PlanKind
from resile.api.plan import Plan
from resile.client.base import Document, Say, SubmitOptions, Submitted
from resile.client.errors import CommandError, NotUsableError
from resile.client.local.job_reader import JobReader
from resile.client.local.jobs import DEFAULT_NAMESPACE, LocalJob, find
from resile.client.local.master_client import MasterClient, MasterUnreachable, wait_until
from resile.client.local.master_process import end_by_force, end_nodes, served, start_master
from resile.wire.job_directory import DirectoryError

ENDING_SECONDS = 10.0
"""How long to wait until the processes of a finished job have ended, before a new job gets its name."""


def submit(
    documents: Sequence[Document], options: SubmitOptions, namespace: str | None, say: Say
) -> Iterator[Submitted]:
    words = ["--enforce-memory"] if options.enforce_memory else []
    words += ["--metrics-port", str(options.metrics_port)] if options.metrics_port else []
    for document in documents:
        match registry.kind_of_resource(document.resource):
            case JobKind() as kind:
                job = start_job(_in_namespace(kind.to_job_spec(document.resource), namespace), words, say)
                yield _submitted(kind, job, "created", str(job.directory.path))
            case PlanKind() as plan_kind:
                job, how = apply_plan(plan_kind, document, namespace)
                yield _submitted(plan_kind.job_kind, job, how)


def _submitted(kind: JobKind, job: LocalJob, how: str, directory: str = "") -> Submitted:
    return Submitted(kind=kind.definition.kind, name=job.name, namespace=job.namespace, how=how, directory=directory)


def start_job(spec: JobSpec, master_options: list[str], say: Say) -> LocalJob:
    """Create a job directory, start a master in it, and return the job.

    If a job of the same name is over, its directory is moved to `LocalJob.previous`; if it is not over, `CommandError`
    is raised. If the master does not start, the new directory is removed and `CommandError` is raised.
    """
    for role, declared in spec.roles.items():
        if declared.replicas and not declared.command:
            raise NotUsableError(f"role {role} has no command: a node on this machine needs one in its template")
    if spec.strategy is Strategy.PARAMETER_SERVER:
        say(
            "resile: warning: parameter servers come in a later version; here every role's command runs as a plain "
            "program"
        )
    job = LocalJob(spec.namespace, spec.name)
    directory = job.directory
    if directory.exists:
        _make_room(job)
        say(f"the job {job} that ran before was moved to {job.previous}")
    if not spec.uid:
        spec = msgspec.structs.replace(spec, uid=str(uuid.uuid4()))
    try:
        directory.create(spec)
    except DirectoryError as error:
        raise CommandError(str(error)) from error
    try:
        start_master(directory, Path.cwd(), master_options)
    except (CommandError, KeyboardInterrupt):  # no node has run, so the directory holds nothing of value
        end_by_force(directory, Seconds(0.0))
        shutil.rmtree(directory.path, ignore_errors=True)
        raise
    return job


def _in_namespace(spec: JobSpec, namespace: str | None) -> JobSpec:
    if namespace is None or spec.namespace == namespace:
        return spec
    if spec.namespace != DEFAULT_NAMESPACE:
        raise NotUsableError(f"the manifest says namespace {spec.namespace}, and -n says {namespace}")
    return msgspec.structs.replace(spec, namespace=namespace)


def apply_plan(kind: PlanKind, document: Document, namespace: str | None) -> tuple[LocalJob, str]:
    """Send a plan to its job's master. Returns the job and a summary of the plan, without waiting for its execution."""
    metadata = document.resource.metadata
    name, home = metadata.name, metadata.namespace
    later = kind.not_supported(document.resource)
    if later:
        raise CommandError(f"scale plan {name}: {later}")
    plan = kind.to_plan(document.resource, uid=str(uuid.uuid4()))  # a plan that is submitted twice is executed twice
    job = find(kind.job_of(document.written), namespace or (home if home != DEFAULT_NAMESPACE else None))
    with MasterClient(job.directory) as client:
        try:
            client.insist(plan)
        except MasterUnreachable as error:
            raise CommandError(f"{job} was not scaled: {error}") from error
        except CommandError as refused:
            raise CommandError(f"scale plan {name}: {refused}") from refused
    return job, f"scaled: {_summary(plan)}"


def _summary(plan: Plan) -> str:
    words = [f"{role}={change.replicas}" for role, change in plan.roles.items() if change.replicas is not None]
    words += [f"other resources for new nodes of {role}" for role, c in plan.roles.items() if c.replicas is None]
    words += [f"one more {new.role}" for new in plan.create]
    words += [f"without {node}" for node in plan.remove]
    words += [f"{migration.node} moves" for migration in plan.migrate]
    return ", ".join(words)


def _make_room(job: LocalJob) -> None:
    directory = job.directory
    with JobReader(job) as reader:
        is_over = reader.status().ended_at is not None
    if not is_over and served(directory):
        raise CommandError(f"job {job} is running already; `resile delete {job.name}` ends it")
    if not is_over:
        raise CommandError(
            f"job {job} was interrupted: it has lost its master and is not over; "
            f"`resile resume {job.name}` goes on with it, `resile delete {job.name}` removes it"
        )
    if not wait_until(lambda: not served(directory), ENDING_SECONDS):
        raise CommandError(f"job {job} is over, but its nodes are still ending; try again in a moment")
    end_nodes(directory.path, directory.spec().timeouts.kill_grace)
    try:
        shutil.rmtree(job.previous, ignore_errors=True)
        job.previous.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.path.rename(job.previous)
    except OSError as error:
        raise CommandError(f"cannot move the old job {job} aside: {os.strerror(error.errno or 0)}") from error
