"""`resile submit` on a cluster: the manifest is applied, and its job followed by what the cluster tells of it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence

import click

from resile.api.job_event import JobEvent
from resile.api.kinds.base import Resource
from resile.api.kinds.elasticjob import ElasticJob, Phase
from resile.cli.cluster.describe import failure_lines, journal_view
from resile.cli.common_options import print_json
from resile.cli.exit_codes import FAILED, INTERRUPTED, SIGNALLED
from resile.cli.output.follow import Dismissed, Screen, closing_words, screen_for
from resile.client.cluster import view
from resile.client.cluster.connection import INSTALL, Cluster, Manifest, Wanted, Watch, on
from resile.client.errors import CommandError, NotUsableError
from resile.client.target import Target
from resile.platform.kubernetes import client as kube

TAKE_UP_SECONDS = 10.0
"""For the operator to take a job up; then it is probably not there."""
REST_SECONDS = 1.0
"""After which a job is drawn again although nothing changed."""
LAST_WORDS_SECONDS = 5.0
"""For the last Events of a job that is over."""
LAST_REASONS = (Phase.SUCCEEDED.reason, Phase.FAILED.reason)


def submit_there(target: Target, documents: Sequence[tuple[Manifest, Resource]], *, detach: bool, output: str) -> int:
    """Apply everything and, unless `detach`, follow the one job; the command's exit code.

    Raises:
        CommandError: the cluster refuses, or a job of the name is over.
    """
    try:
        return on(target, lambda cluster: _submit(cluster, target, documents, detach=detach, output=output))
    except Dismissed as dismissed:
        return SIGNALLED + dismissed.number


async def _submit(
    cluster: Cluster, target: Target, documents: Sequence[tuple[Manifest, Resource]], *, detach: bool, output: str
) -> int:
    jobs = []
    for document, resource in documents:
        item = _in_namespace(document, target, cluster)
        applied, how = await _apply(cluster, item, kube.JOBS if isinstance(resource, ElasticJob) else kube.PLANS)
        if isinstance(resource, ElasticJob):
            jobs.append(applied)
        _tell(applied, how, output)
    if not jobs or detach:
        return 0
    return await _stay(cluster, jobs[0], quiet=output == "json")


def _in_namespace(document: Manifest, target: Target, cluster: Cluster) -> Manifest:
    metadata = document["metadata"]
    own = metadata.get("namespace")
    if own and target.namespace and own != target.namespace:
        raise NotUsableError(f"the manifest says namespace {own}, and -n says {target.namespace}")
    kept = {key: metadata[key] for key in ("name", "labels", "annotations", "finalizers") if metadata.get(key)}
    rest = {key: value for key, value in document.items() if key != "status"}
    return {**rest, "metadata": {**kept, "namespace": own or cluster.namespace}}


async def _apply(cluster: Cluster, item: Manifest, kind: kube.Kind) -> tuple[Manifest, str]:
    metadata = item["metadata"]
    before = await cluster.get(kind, metadata["name"], metadata["namespace"])
    if before is not None and kind is kube.JOBS and view.over(before):
        raise CommandError(
            f"job {metadata['name']} is over ({view.phase(before)}) and will not run again; "
            f"`resile delete {metadata['name']}` removes it, with its logs, and makes room"
        )
    applied = await cluster.apply(kind, item)
    if before is None:
        return applied, "created"
    same = before["metadata"].get("generation") == applied["metadata"].get("generation")
    return applied, "unchanged" if same else "configured"


def _tell(applied: Manifest, how: str, output: str) -> None:
    metadata = applied["metadata"]
    if output == "json":
        print_json({"kind": applied["kind"], "name": metadata["name"], "namespace": metadata["namespace"], "how": how})
    else:
        click.echo(f"{applied['kind'].lower()}/{metadata['name']} {how}")


async def _stay(cluster: Cluster, job: Manifest, *, quiet: bool) -> int:
    """Follow a job to its end."""
    metadata = job["metadata"]
    space, name = metadata["namespace"], metadata["name"]
    screen: Screen | None = None if quiet else screen_for(sys.stdout.isatty())
    wanted = (
        Wanted(kube.JOBS, space, fields={"metadata.name": name}),
        Wanted(kube.PODS, space, labels=view.pod_labels(name)),
        Wanted(kube.EVENTS, space, fields={"involvedObject.uid": metadata["uid"]}),
    )
    leaving = f"job {name} goes on; `resile get jobs {name}` shows it, `resile delete {name}` ends it"
    try:
        async with cluster.watch(*wanted) as watching:
            with _dismissable() as dismissed:
                follower = _Follower(watching, metadata["uid"], screen, dismissed)
                last = await follower.until_over()
    except asyncio.CancelledError:  # Ctrl-C
        _close(screen)
        click.echo(f"\nleft it: {leaving}", err=True)
        return INTERRUPTED
    except Dismissed as end:
        _close(screen)
        click.echo(f"resile: {end}: {leaving}", err=True)
        raise
    except CommandError:
        _close(screen)
        raise
    _close(screen)
    told = await journal_view(cluster, last)
    seen = view.job_view(last, [], time.time(), told[1] if told else None)
    if screen is not None:
        click.echo("\n" + closing_words(seen, follower.story))
    if seen.phase == Phase.SUCCEEDED:
        return 0
    if screen is not None:
        click.echo("\n".join(["", *await failure_lines(cluster, last, told[0] if told else None)]))
    return FAILED


def _close(screen: Screen | None) -> None:
    if screen is not None:
        screen.close()


class _Follower:
    """Shows a job as news of it come."""

    def __init__(self, watching: Watch, uid: str, screen: Screen | None, dismissed: list[int]) -> None:
        self.story: list[JobEvent] = []
        self._watching = watching
        self._uid = uid
        self._screen = screen
        self._dismissed = dismissed
        self._told: set[str] = set()

    async def until_over(self) -> Manifest:
        """Follow to the end; the job as it is then.

        Raises:
            CommandError: somebody deleted it, or the cluster cannot be seen any more.
            Dismissed: somebody ended this command.
        """
        began, warned = time.monotonic(), False
        while not view.over(job := self._show()):
            if not warned and not job.get("status") and time.monotonic() - began > TAKE_UP_SECONDS:
                warned = True
                self._say(f"nobody has taken the job up yet: does the operator run? {INSTALL}")
            await self._watching.change(REST_SECONDS)
            if self._dismissed:
                raise Dismissed(self._dismissed[0])
        until = time.monotonic() + LAST_WORDS_SECONDS
        while time.monotonic() < until and not any(told.reason in LAST_REASONS for told in self.story):
            await self._watching.change(REST_SECONDS)
            job = self._show()
        return job

    def _show(self) -> Manifest:
        job = next((one for one in self._watching.all(kube.JOBS) if one["metadata"]["uid"] == self._uid), None)
        if job is None:
            raise CommandError("somebody deleted the job")
        fresh = [
            event
            for event in view.in_order(self._watching.all(kube.EVENTS))
            if event["metadata"]["uid"] not in self._told
        ]
        self._told.update(event["metadata"]["uid"] for event in fresh)
        news = view.story(fresh)
        self.story.extend(news)
        if self._screen is not None:
            self._screen.show(view.job_view(job, self._watching.all(kube.PODS), time.time()), news)
        return job

    def _say(self, words: str) -> None:
        if self._screen is not None:
            self._screen.say(words)
        else:
            click.echo(words, err=True)


@contextlib.contextmanager
def _dismissable() -> Iterator[list[int]]:
    """While inside, signals that end this command are noted, so that it can say that the job goes on."""
    loop, noted = asyncio.get_running_loop(), list[int]()
    heeded = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    for number in heeded:
        loop.add_signal_handler(number, noted.append, number)
    try:
        yield noted
    finally:
        for number in heeded:
            loop.remove_signal_handler(number)
