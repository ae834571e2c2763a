"""A master in a cluster: the job comes from its ElasticJob, the journal is a ConfigMap, nodes are pods."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import msgspec
from lightkube import AsyncClient

from resile.api.elasticjob import ElasticJob
from resile.api.ids import Seconds
from resile.api.job import JobSpec
from resile.api.manifest import read_manifest
from resile.api.mistakes import BadManifest
from resile.api.translate import to_job_spec
from resile.master.app import Options, Serving, run_master
from resile.master.kubernetes_journal import KubernetesJournal
from resile.master.reporter import Reporter
from resile.master.wishes import JobWatch, PlanWatch, ask
from resile.platform.kubernetes import client as kube
from resile.platform.kubernetes.platform import KubernetesPlatform
from resile.wire.directory import DirectoryError, JobDirectory

log = logging.getLogger("resile.master")

TOKEN_FILE = "RESILE_TOKEN_FILE"
START_SECONDS = Seconds(60.0)
"""How long a new master waits for the API server before it ends; the operator starts another."""


class NoJob(Exception):
    """There is no such job to serve; the text is one sentence."""


class ApiSilent(NoJob):
    """The API server could not be asked; trying again may help."""


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """Which job to serve, and how its nodes reach this master."""

    namespace: str
    job: str
    advertise: str = ""
    """`host:port`, for a master outside the cluster; the master's Service unless given."""


async def serve_on_kubernetes(directory: JobDirectory, options: Options, where: Where) -> bool:
    """Serve a job of the cluster until it is over or deleted; whether it succeeded.

    Raises:
        NoJob: there is no such ElasticJob, or it cannot be run.
        ApiSilent: the API server could not be asked for it.
        DirectoryError: the token is missing.
        JournalError, JournalDamaged, CannotListen: as `run_master`.
    """
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it would tell of every call
    async with contextlib.AsyncExitStack() as cleanup:
        try:
            client = kube.async_client(where.namespace)
        except (*kube.CannotReach, OSError) as error:
            raise ApiSilent(f"there is no way to the cluster: {error}") from error
        cleanup.push_async_callback(client.close)
        found = await _fetch(client, where)
        spec = _spec_of(found)
        directory.create(spec, _token())
        platform = KubernetesPlatform(spec, client, address=where.advertise, tls=options.tls is not None)
        journal = KubernetesJournal(spec, kube.sync_client(where.namespace))

        @contextlib.asynccontextmanager
        async def accompany(serving: Serving) -> AsyncIterator[None]:
            reporter = Reporter(spec, client, serving, found, platform.hindrance)
            jobs = JobWatch(spec, client, serving, journal, seen=reporter.seen)
            plans = PlanWatch(spec, client, serving)
            tasks = [
                asyncio.create_task(work, name=name)
                for name, work in (
                    ("the status", reporter.run()),
                    ("the watch of the job", _until_deleted(jobs, serving, found)),
                    ("the watch of plans", plans.run()),
                )
            ]
            for task in tasks:
                task.add_done_callback(_complain)
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


async def _until_deleted(jobs: JobWatch, serving: Serving, found: dict[str, Any]) -> None:
    await jobs.run(found)
    log.info("the job was deleted")
    await ask(serving, "stop", because="the job was deleted")


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("%s broke", task.get_name(), exc_info=task.exception())


async def _fetch(client: AsyncClient, where: Where) -> dict[str, Any]:
    until = time.monotonic() + START_SECONDS
    attempt = 0
    while True:
        try:
            found = await client.get(kube.JOBS, where.job, namespace=where.namespace)
            return cast(dict[str, Any], found)
        except kube.CannotReach as error:
            if kube.code_of(error) == kube.NOT_FOUND:
                raise NoJob(f"there is no ElasticJob {where.job} in namespace {where.namespace}") from error
            if time.monotonic() > until:
                raise ApiSilent(f"the ElasticJob {where.job} cannot be read: {kube.sentence(error)}") from error
            log.warning("the ElasticJob cannot be read now: %s", kube.sentence(error))
        attempt += 1
        await asyncio.sleep(kube.pause(attempt))


def _spec_of(found: dict[str, Any]) -> JobSpec:
    try:
        job = read_manifest(found)
    except BadManifest as bad:
        raise NoJob(f"the job cannot be run: {bad}") from bad
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
