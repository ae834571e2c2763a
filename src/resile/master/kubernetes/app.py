"""A master in a cluster: the job comes from its ElasticJob, the journal is a ConfigMap, nodes are pods.

A job that was served before goes on whatever is done to its manifest: if that cannot be read, the journal knows how the
job was. Whatever accompanies the master (the status, the watches) must not end before it does: a master that is blind
in one eye ends, and the operator starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from lightkube import AsyncClient

from resile.api.ids import Seconds
from resile.api.job import JobSpec
from resile.api.kinds.elasticjob import ElasticJob
from resile.api.kinds.labels import PREFIXED_JOB_NAME
from resile.api.kinds.to_job_spec import to_job_spec
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.names import node_of_pod
from resile.api.manifests.reader import read_manifest
from resile.master.app import Options, Serving, run_master
from resile.master.journal.configmap import ConfigMapJournal
from resile.master.kubernetes.scaleplans import ScalePlanWatch
from resile.master.kubernetes.spec_watch import SpecWatch
from resile.master.kubernetes.status_writer import StatusWriter
from resile.platform.kubernetes import client as kube
from resile.platform.kubernetes.platform import KubernetesPlatform
from resile.platform.kubernetes.pods import owned
from resile.protocol.changes import Stop
from resile.wire.job_directory import DirectoryError, JobDirectory

log = logging.getLogger("resile.master")

Manifest = dict[str, Any]
Answer = TypeVar("Answer")

TOKEN_FILE = "RESILE_TOKEN_FILE"
START_SECONDS = Seconds(60.0)
"""How long a new master waits for the API server before it ends; the operator starts another."""


class NoJob(Exception):
    """There is no such job to serve now, or it cannot be asked for; the text is one sentence."""


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which job to serve, and how its nodes reach this master."""

    namespace: str
    job: str
    advertise: str = ""
    """`host:port`, for a master outside the cluster; the master's Service unless given."""


async def serve_on_kubernetes(directory: JobDirectory, options: Options, where: ClusterOptions) -> bool:
    """Serve a job of the cluster until it is over or deleted; whether it succeeded.

    Raises:
        NoJob: there is no such ElasticJob, it cannot be run, or the API server could not be asked for it.
        DirectoryError: the token is missing.
        JournalError, JournalDamaged, CannotListen: as `run_master`.
    """
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it would tell of every call
    async with contextlib.AsyncExitStack() as cleanup:
        try:
            client = kube.async_client(where.namespace)
        except (*kube.CannotReach, OSError) as error:
            raise NoJob(f"there is no way to the cluster: {error}") from error
        cleanup.push_async_callback(client.close)
        found = await _ask("the ElasticJob", lambda: _fetch(client, where))
        bare = JobSpec(name=where.job, front_door="elasticjob", namespace=where.namespace, uid=found["metadata"]["uid"])
        served = _status_of_served(found) or await _ask("the job's pods", lambda: _pods_of_served(client, bare))
        journal = ConfigMapJournal(bare, kube.sync_client(where.namespace), served=served)
        spec = _spec_of(found, journal)
        directory.create(spec, _token())
        platform = KubernetesPlatform(spec, client, address=where.advertise, tls=options.tls is not None)

        @contextlib.asynccontextmanager
        async def accompany(serving: Serving) -> AsyncIterator[None]:
            platform.broke = functools.partial(serving.shell.broke, "the watch or the making of pods")
            reporter = StatusWriter(spec, client, serving, found, platform.hindrance)
            jobs = SpecWatch(spec, client, serving, journal, seen=reporter.seen)
            plans = ScalePlanWatch(spec, client, serving)
            tasks = [
                asyncio.create_task(work, name=name)
                for name, work in (
                    ("the status", reporter.run()),
                    ("the watch of the job", _until_deleted(jobs, client, serving, found)),
                    ("the watch of plans", plans.run()),
                )
            ]
            for task in tasks:
                task.add_done_callback(functools.partial(_must_not_end, serving))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        return await run_master(
            directory,
            options,
            lambda _: platform,
            journal=journal,
            accompany=accompany,
        )


async def _until_deleted(jobs: SpecWatch, client: AsyncClient, serving: Serving, found: Manifest) -> None:
    there: Manifest | None = found
    while there is not None:
        await jobs.run(there)
        there = await _still_there(client, found)
    log.info("the job was deleted")
    await serving.commands.change(Stop(because="the job was deleted"))


async def _still_there(client: AsyncClient, job: Manifest) -> Manifest | None:
    """The job, if it is there after all: its end is for ever, and a list may come from a server that starts up."""
    attempt = 0
    while True:
        attempt += 1
        try:
            found = await kube.same(client, kube.JOBS, job["metadata"]["name"], job["metadata"]["uid"])
            return found if found and not found["metadata"].get("deletionTimestamp") else None
        except kube.CannotReach as error:
            log.warning("whether the job was deleted cannot be asked now: %s", kube.sentence(error))
        await asyncio.sleep(kube.pause(attempt))


def _must_not_end(serving: Serving, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        serving.shell.broke(task.get_name(), task.exception())


async def _ask(what: str, question: Callable[[], Awaitable[Answer]]) -> Answer:
    """Ask the API server until it answers, for `START_SECONDS`."""
    until = time.monotonic() + START_SECONDS
    attempt = 0
    while True:
        try:
            return await question()
        except kube.CannotReach as error:
            if time.monotonic() > until:
                raise NoJob(f"{what} cannot be read: {kube.sentence(error)}") from error
            log.warning("%s cannot be read now: %s", what, kube.sentence(error))
        attempt += 1
        await asyncio.sleep(kube.pause(attempt))


async def _fetch(client: AsyncClient, where: ClusterOptions) -> Manifest:
    try:
        return cast(Manifest, await client.get(kube.JOBS, where.job, namespace=where.namespace))
    except kube.CannotReach as error:
        if kube.absent(error):
            raise NoJob(f"there is no ElasticJob {where.job} in namespace {where.namespace}") from error
        raise


def _status_of_served(found: Manifest) -> str:
    """Whether the status was written by a master, in words for `ConfigMapJournal`."""
    written = (found.get("status") or {}).get("status") or {}
    return "the job's status tells of its nodes" if written.get("replicaStatuses") else ""


async def _pods_of_served(client: AsyncClient, spec: JobSpec) -> str:
    """Whether a master has launched nodes, in words for `ConfigMapJournal`."""
    pods, _ = await kube.list_all(client, kube.PODS, labels={PREFIXED_JOB_NAME: spec.name})
    nodes = [pod for pod in pods if owned(spec, pod) and node_of_pod(pod["metadata"]["name"], spec.name) is not None]
    return f"the job has the pod {nodes[0]['metadata']['name']}" if nodes else ""


def _spec_of(found: Manifest, journal: ConfigMapJournal) -> JobSpec:
    """The job as its manifest has it now, or as the journal knows it if that cannot be understood."""
    try:
        job = read_manifest(found)
    except BadManifest as bad:
        history = journal.load()
        if history is None:
            raise NoJob(f"the job cannot be run: {bad}") from bad
        log.warning("the job was changed into something that cannot be run, and goes on as it was: %s", bad)
        return history.state.spec
    if not isinstance(job, ElasticJob):
        raise NoJob("this is not an ElasticJob")
    return to_job_spec(job)


def _token() -> str:
    path = os.environ.get(TOKEN_FILE, "")
    if not path:
        raise DirectoryError(f"{TOKEN_FILE} is not set: it must name the file with the job's token")
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise DirectoryError(f"the job's token {path} cannot be read: {os.strerror(error.errno or 0)}") from error
