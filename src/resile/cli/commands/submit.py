"""`resile submit`: start the job of a manifest, or apply a plan to a running job, and follow the job to its end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from resile.api.kinds import registry
from resile.api.kinds.base import JobKind
from resile.api.manifests.documents import load_documents
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.reader import load_manifests
from resile.cli.common_options import output_option, print_json, say, target_options
from resile.cli.output.follow import STOPPED, Dismissed, Follower, Screen, closing_words, screen_for
from resile.cli.output.last_failure import failure_lines, failure_title
from resile.cli.process_exit import FAILED, INTERRUPTED, SIGNALLED
from resile.client.base import Document, Following, Jobs, NodeFailure, SubmitOptions, Submitted
from resile.client.errors import CommandError, NotUsableError
from resile.client.target import Target


@click.command()
@click.argument("manifest", metavar="FILE")
@target_options
@click.option("--detach", is_flag=True, help="return as soon as the job runs, and leave it running")
@click.option("--enforce-memory", is_flag=True, help="hold every node to its memory limit (needs a memory cgroup)")
@click.option("--metrics-port", type=click.IntRange(1, 65535), metavar="PORT", help="serve Prometheus metrics here")
@output_option("table", "json")
def submit(
    manifest: str, target: Target, detach: bool, enforce_memory: bool, metrics_port: int | None, output: str
) -> int:
    """Run the job in FILE (- reads standard input), or apply the plan in it to a running job.

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
    jobs = sum(map(_is_job, documents))
    if jobs > 1 and not detach:
        raise NotUsableError(f"{manifest} holds {jobs} jobs: only one can be followed, so add --detach")
    if not target.local and (enforce_memory or metrics_port):
        raise NotUsableError("--enforce-memory and --metrics-port are for this machine; add --local")
    options = SubmitOptions(enforce_memory=enforce_memory, metrics_port=metrics_port)
    with target.jobs(say, local=target.local) as place:
        to_follow = None
        for document, submitted in zip(documents, place.submit(documents, options), strict=True):
            is_followed = _is_job(document) and not detach
            if is_followed:
                to_follow = submitted
            if output == "json":
                print_json(submitted)
            elif not (is_followed and place.is_local):  # the story of a job of this machine begins at once
                where = f" in {submitted.directory}" if submitted.directory else ""
                click.echo(f"{submitted.kind.lower()}/{submitted.name} {submitted.how}{where}")
        return _follow(place, to_follow, quiet=output == "json") if to_follow is not None else 0


def read_manifest_file(path: str) -> list[Document]:
    """All documents of a manifest file; raises `NotUsableError` with one line for each error in it."""
    try:
        text = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise NotUsableError(f"cannot read {path}: {os.strerror(error.errno or 0)}") from error
    try:
        resources = load_manifests(text)
    except BadManifest as bad:
        raise NotUsableError("\n".join(f"{path}: {error}" for error in bad.errors)) from bad
    return [Document(*pair) for pair in zip(load_documents(text), resources, strict=True)]


def _is_job(document: Document) -> bool:
    return isinstance(registry.kind_of_resource(document.resource), JobKind)


def _follow(jobs: Jobs, job: Submitted, *, quiet: bool) -> int:
    with jobs.follow(job) as following:
        screen = Screen() if quiet else screen_for(sys.stdout.isatty())
        follower = Follower(following, screen)
        try:
            view = follower.until_over()
        except KeyboardInterrupt:
            screen.close()
            say(_left(job.name, follower, following))
            return INTERRUPTED
        except Dismissed as dismissed:
            _part(screen, f"{dismissed}: {_goes_on(job.name)}")
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
            _tell_failure(following)
        return INTERRUPTED if follower.stopping else FAILED


def _tell_failure(following: Following) -> None:
    failure = following.failure()
    if failure is not None:
        title = [] if isinstance(failure, NodeFailure) else [f"the last failure{failure_title(failure)}:"]
        click.echo("\n".join(["", *title, *failure_lines(failure)]))


def _left(job: str, follower: Follower, following: Following) -> str:
    watch = f"`resile get jobs {job}` shows it"
    if follower.over:
        return f"left {job}, which is over; {watch}"
    if not following.interrupt_ends_job:
        return f"\nleft it: {_goes_on(job)}"
    if follower.asked:
        return f"left {job}, which is being stopped; {watch}"
    return f"left {job}, which was not stopped, as its master did not answer; {watch}, `resile delete {job}` ends it"


def _goes_on(job: str) -> str:
    return f"job {job} goes on; `resile get jobs {job}` shows it, `resile delete {job}` ends it"


def _part(screen: Screen, sentence: str) -> None:
    """Close the screen and print a last message; no error is raised if the terminal is closed already."""
    try:
        screen.close()
        say(f"resile: {sentence}")
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)  # otherwise the interpreter prints an error at its end
        os.dup2(nowhere, sys.stdout.fileno())
        os.dup2(nowhere, sys.stderr.fileno())
