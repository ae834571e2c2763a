"""`resile submit`: a manifest becomes a running job on this machine, or a change to one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import click
import msgspec

from resile.api.ids import Seconds
from resile.api.job import JobSpec, Strategy
from resile.api.job_view import JobView
from resile.api.kinds.base import Resource
from resile.api.kinds.elasticjob import ElasticJob
from resile.api.kinds.scaleplan import ScalePlan
from resile.api.kinds.to_job_spec import to_job_spec
from resile.api.manifests.documents import load_documents
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.reader import load_manifests
from resile.cli.commands.describe import failed_node_text, failure_text, first_failure
from resile.cli.common_options import output_option, print_json, target_options
from resile.cli.exit_codes import FAILED, INTERRUPTED, SIGNALLED
from resile.cli.output.follow import STOPPED, Dismissed, Follower, PlainScreen, Screen, closing_words, screen_for
from resile.client.errors import CommandError, NotUsableError
from resile.client.local.job_reader import JobReader
from resile.client.local.jobs import DEFAULT_NAMESPACE, LocalJob, find
from resile.client.local.master_client import MasterClient, MasterUnreachable, wait_until
from resile.client.local.supervision import end_by_force, end_nodes, served, start_master
from resile.client.target import Target
from resile.protocol.changes import Scale
from resile.wire.job_directory import DirectoryError

ENDING_SECONDS = 10.0
"""For a job that is over to be gone, when another of its name is to take its place."""


@click.command()
@click.argument("manifest", metavar="FILE")
@target_options
@click.option("--detach", is_flag=True, help="return as soon as the job runs, and leave it running")
@click.option("--enforce-memory", is_flag=True, help="hold every node to its memory limit (needs a memory cgroup)")
@click.option("--metrics-port", type=click.IntRange(1, 65535), metavar="PORT", help="serve Prometheus metrics here")
@output_option("table", "json")
def submit(
    manifest: str,
    target: Target,
    detach: bool,
    enforce_memory: bool,
    metrics_port: int | None,
    output: str,
) -> None:
    """Run the ElasticJob in FILE (- reads standard input), or apply its ScalePlan to a running job.

    With --local its nodes are processes on this machine. Without it the manifest is applied to the cluster that
    KUBECONFIG (or --kubeconfig, --context) names: a job that runs there already is changed by it.

    Stays with the job until it is over: exit code 0 if it succeeded, 1 if it failed. Ctrl-C stops a job of this
    machine and leaves one of a cluster running: exit code 130. SIGTERM or SIGHUP (a closed terminal) end this command
    alone, with 128 and the signal's number, and the job goes on; `resile delete JOB` ends it.

    \b
    resile submit --local job.yaml            here, with a live view
    resile submit -n dlrover job.yaml         on the cluster, followed to its end
    resile submit -n dlrover --detach job.yaml    only apply it
    """  # noqa: D301
    documents = read_manifest_file(manifest)
    resources = [resource for _, resource in documents]
    jobs = [resource for resource in resources if isinstance(resource, ElasticJob)]
    if len(jobs) > 1 and not detach:
        raise NotUsableError(f"{manifest} holds {len(jobs)} jobs: only one can be followed, so add --detach")
    if not target.local:
        if enforce_memory or metrics_port:
            raise NotUsableError("--enforce-memory and --metrics-port are for this machine; add --local")
        from resile.cli.cluster.submit import submit_there

        sys.exit(submit_there(target, documents, detach=detach, output=output))
    namespace = target.namespace
    options = ["--enforce-memory"] if enforce_memory else []
    options += ["--metrics-port", str(metrics_port)] if metrics_port else []
    started: list[LocalJob] = []
    for resource in resources:
        if isinstance(resource, ElasticJob):
            started.append(start_job(_in_namespace(to_job_spec(resource), namespace), options))
            if detach or output == "json":
                _tell_started(started[-1], output)
        else:
            assert isinstance(resource, ScalePlan)
            apply_plan(resource, namespace)
    if started and not detach:
        sys.exit(follow(started[0], quiet=output == "json"))


def read_manifest_file(path: str) -> list[tuple[dict[str, Any], Resource]]:
    """Everything in a manifest file: each document as it is written, and what it means.

    Raises:
        CommandError: it cannot be read, or is wrong; one sentence per mistake.
    """
    try:
        text = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise NotUsableError(f"cannot read {path}: {os.strerror(error.errno or 0)}") from error
    try:
        resources = load_manifests(text)
    except BadManifest as bad:
        raise NotUsableError("\n".join(f"{path}: {error}" for error in bad.errors)) from bad
    return list(zip(load_documents(text), resources, strict=True))


def start_job(spec: JobSpec, options: list[str]) -> LocalJob:
    """Put a job into its directory and start its master; a job of that name that is over makes room.

    Raises:
        CommandError: a job of that name runs, or the master does not come up.
    """
    for role, declared in spec.roles.items():
        if declared.replicas and not declared.command:
            raise NotUsableError(f"role {role} has no command: a node on this machine needs one in its template")
    if spec.strategy is Strategy.PARAMETER_SERVER:
        click.echo(
            "resile: warning: parameter servers come in a later version; here every role's command runs as a plain "
            "program",
            err=True,
        )
    job = LocalJob(spec.namespace, spec.name)
    directory = job.directory
    if directory.exists:
        _make_room(job)
    if not spec.uid:
        spec = msgspec.structs.replace(spec, uid=str(uuid.uuid4()))
    try:
        directory.create(spec)
    except DirectoryError as error:
        raise CommandError(str(error)) from error
    try:
        start_master(directory, Path.cwd(), options)
    except (CommandError, KeyboardInterrupt):  # nothing ran, so nothing is to be kept
        end_by_force(directory, Seconds(0.0))
        shutil.rmtree(directory.path, ignore_errors=True)
        raise
    return job


def apply_plan(plan: ScalePlan, namespace: str | None) -> None:
    """Carry out a ScalePlan on the running job that it names.

    Raises:
        CommandError: there is no such job, or it refuses.
    """
    spec = plan.spec
    later = {"createPods": spec.create_pods, "removePods": spec.remove_pods, "migratePods": spec.migrate_pods}
    named = [field for field, value in {**later, "psHosts": spec.ps_hosts}.items() if value]
    sizes = {
        role: wanted.replicas for role, wanted in spec.replica_resource_specs.items() if wanted.replicas is not None
    }
    if any(wanted.resource for wanted in spec.replica_resource_specs.values()):
        named.append("replicaResourceSpecs.<role>.resource")
    if named:
        raise CommandError(
            f"scale plan {plan.metadata.name}: {', '.join(named)} will come in a later version; "
            "this one carries out replicaResourceSpecs.<role>.replicas, and nothing was changed"
        )
    space = namespace or (plan.metadata.namespace if plan.metadata.namespace != DEFAULT_NAMESPACE else None)
    job = find(plan.job, space)
    with MasterClient(job.directory) as client:
        for role, replicas in sizes.items():
            try:
                client.insist(Scale(role=role, replicas=replicas))
            except MasterUnreachable as error:
                raise CommandError(f"{job} was not scaled: {error}") from error
            click.echo(f"{job} scaled: {role}={replicas}")


def follow(job: LocalJob, *, quiet: bool) -> int:
    """Stay with a job until it is over; the command's exit code."""
    with JobReader(job) as look:
        screen: Screen = _Silent() if quiet else screen_for(sys.stdout.isatty())
        follower = Follower(look, screen)
        try:
            with _dismissable(follower):
                view = follower.until_over()
        except KeyboardInterrupt:
            screen.close()
            click.echo(_left(job, follower), err=True)
            return INTERRUPTED
        except Dismissed as dismissed:
            _part(screen, f"{dismissed}: {job} goes on; `resile delete {job.name}` ends it")
            return SIGNALLED + dismissed.number
        except CommandError:
            screen.close()
            raise
        screen.close()
        if not quiet:
            click.echo("\n" + closing_words(view, follower.story))
        if view.phase == "Succeeded":
            return 0
        if not quiet and view.reason != STOPPED:
            click.echo(last_words(look, view))
        return INTERRUPTED if follower.stopping else FAILED


def last_words(look: JobReader, view: JobView) -> str:
    """What the process said that failed first, or else the node that failed last; empty if nobody said anything."""
    first = first_failure(look.state())
    if first is not None:
        return f"\nthe last failure (first of round {first.round}):\n{failure_text(first)}"
    text = failed_node_text(look, view)
    return f"\n{text}" if text else ""


def _left(job: LocalJob, follower: Follower) -> str:
    """What becomes of a job whose user did not wait for its end."""
    watch = f"`resile get jobs {job.name}` shows it"
    if follower.over:
        return f"left {job}, which is over; {watch}"
    if follower.asked:
        return f"left {job}, which is being stopped; {watch}"
    return (
        f"left {job}, which was not stopped, as its master did not answer; {watch}, `resile delete {job.name}` ends it"
    )


@contextlib.contextmanager
def _dismissable(follower: Follower) -> Iterator[None]:
    """While inside, signals that end this command let it say that the job goes on."""

    def dismiss(number: int, _: FrameType | None) -> None:
        follower.dismissed = number

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heeded = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in heeded:
        signal.signal(number, dismiss)
    try:
        yield
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)


def _part(screen: Screen, sentence: str) -> None:
    """The last words to a terminal that may be gone."""
    try:
        screen.close()
        click.echo(f"resile: {sentence}", err=True)
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)  # or the interpreter complains at its end
        os.dup2(nowhere, sys.stdout.fileno())
        os.dup2(nowhere, sys.stderr.fileno())


class _Silent(PlainScreen):
    """Shows nothing of the job: the output is for a program."""

    def show(self, job: object, news: object) -> None:
        """Show nothing."""


def _make_room(job: LocalJob) -> None:
    directory = job.directory
    with JobReader(job) as look:
        over = look.status().ended_at is not None
    if not over and served(directory):
        raise CommandError(f"job {job} is running already; `resile delete {job.name}` ends it")
    if not over:
        raise CommandError(
            f"job {job} was interrupted: it has lost its master and is not over; "
            f"`resile resume {job.name}` goes on with it, `resile delete {job.name}` removes it"
        )
    if not wait_until(lambda: not served(directory), ENDING_SECONDS):
        raise CommandError(f"job {job} is over, but its nodes are still ending; try again in a moment")
    timeouts = directory.spec().timeouts
    end_nodes(directory.path, timeouts.regroup_grace)
    try:
        shutil.rmtree(job.previous, ignore_errors=True)
        job.previous.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.path.rename(job.previous)
    except OSError as error:
        raise CommandError(f"cannot move the old job {job} aside: {os.strerror(error.errno or 0)}") from error
    click.echo(f"the job {job} that ran before was moved to {job.previous}", err=True)


def _in_namespace(spec: JobSpec, namespace: str | None) -> JobSpec:
    if namespace is None or spec.namespace == namespace:
        return spec
    if spec.namespace != DEFAULT_NAMESPACE:
        raise NotUsableError(f"the manifest says namespace {spec.namespace}, and -n says {namespace}")
    return msgspec.structs.replace(spec, namespace=namespace)


def _tell_started(job: LocalJob, output: str) -> None:
    if output == "json":
        print_json({"name": job.name, "namespace": job.namespace, "directory": str(job.directory.path)})
    else:
        click.echo(f"elasticjob/{job.name} created in {job.directory.path}")
