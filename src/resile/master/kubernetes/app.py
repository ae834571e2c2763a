"""A master in a cluster: the job comes from its resource, the journal is a ConfigMap, nodes are pods.

A job that was served before goes on even if its manifest was made invalid: then the job is read from the journal. If
the status writer or a watch fails, the master ends, and the operator starts another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from resile.api.defaults import TOKEN_FILE_VARIABLE
from resile.api.ids import Seconds
from resile.api.job import JobSpec
from resile.api.kinds import registry
from resile.api.kinds.base import JobKind
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.reader import read_manifest
from resile.kube.client import BlockingClient, Client
from resile.kube.config import NoCluster, from_environment
from resile.kube.errors import KubeError
from resile.kube.kinds import PODS, Object, of
from resile.kube.owner_references import is_owned_by
from resile.kube.retry import until_answered
from resile.master.app import Options, Serving, run_master
from resile.master.event_queue import end_master
from resile.master.journal.configmap import ConfigMapJournal
from resile.master.kubernetes.plans import PlanWatch
from resile.master.kubernetes.spec_watch import SpecWatch
from resile.master.kubernetes.status_writer import StatusWriter
from resile.platform.kubernetes.platform import KubernetesPlatform
from resile.protocol.job_changes import Stop
from resile.wire.job_directory import DirectoryError, JobDirectory

log = logging.getLogger("resile.master")

FIELD_MANAGER = "resile-master"
START_SECONDS = Seconds(60.0)
"""How long a new master waits for the API server before it ends. Then the operator starts another master."""


class NoJob(Exception):
    """Raised if the job does not exist, or cannot be read or run; the text is one sentence."""


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    namespace: str
    job: str
    kind: JobKind
    advertise: str = ""
    """The `host:port` where pods reach a master outside the cluster. If empty, pods use the master's Service."""


async def serve_on_kubernetes(directory: JobDirectory, options: Options, where: ClusterOptions) -> bool:
    """Serve a job of a cluster until it is over or deleted, and return True if it succeeded.

    Raises `NoJob` if the job cannot be read or run, and the errors of `run_master`.
    """
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it would tell of every call
    async with contextlib.AsyncExitStack() as cleanup:
        try:
            config = from_environment()
            client, blocking = Client(config, FIELD_MANAGER), BlockingClient(config, FIELD_MANAGER)
        except NoCluster as error:
            raise NoJob(f"there is no way to the cluster: {error}") from error
        cleanup.push_async_callback(client.close)
        cleanup.callback(blocking.close)
        try:
            found, served = await _find(client, where)
        except KubeError as error:
            raise NoJob(f"the job cannot be read: {error}") from error
        uid = found["metadata"]["uid"]
        bare = JobSpec(name=where.job, kind=where.kind.name, namespace=where.namespace, uid=uid)
        journal = ConfigMapJournal(bare, blocking, served=served)
        spec = _spec_of(where.kind, found, journal)
        directory.create(spec, _token())
        platform = KubernetesPlatform(
            spec,
            client,
            address=where.advertise,
            tls=options.tls is not None,
            broke=functools.partial(end_master, "the watch or the making of pods"),
        )

        @contextlib.asynccontextmanager
        async def accompany(serving: Serving) -> AsyncIterator[None]:
            reporter = StatusWriter(spec, client, serving, found, platform.hindrance)
            jobs = SpecWatch(spec, client, serving, journal, seen=reporter.seen)
            plan_kinds = [kind for kind in registry.PLAN_KINDS if kind.job_kind is where.kind]
            plans = [PlanWatch(kind, spec, client, serving) for kind in plan_kinds]
            tasks = [
                asyncio.create_task(work, name=name)
                for name, work in (
                    ("the status", reporter.run()),
                    ("the watch of the job", _until_deleted(where, jobs, client, serving, found)),
                    *(("the watch of plans", watch.run()) for watch in plans),
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

        return await run_master(directory, options, lambda _: platform, journal=journal, accompany=accompany)


async def _until_deleted(
    where: ClusterOptions, jobs: SpecWatch, client: Client, serving: Serving, found: Object
) -> None:
    there: Object | None = found
    uid = found["metadata"]["uid"]
    while there is not None:
        await jobs.run(there)
        # A list may lack a job that exists, since a starting API server may list nothing. So ask for the job itself.
        there = await until_answered(
            "whether the job was deleted cannot be asked",
            lambda: client.get_same(of(where.kind), where.namespace, where.job, uid),
        )
        if there is not None and there["metadata"].get("deletionTimestamp"):
            break
    log.info("the job was deleted")
    await serving.commands.change(Stop(because="the job was deleted"))


def _must_not_end(serving: Serving, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        serving.events.broke(task.get_name(), task.exception())


async def _find(client: Client, where: ClusterOptions) -> tuple[Object, str]:
    """Get the job's resource, and look for signs that the job had a master before.

    Returns the resource and a clause that names the sign; the clause is empty if there is no sign. Raises `NoJob` if
    the resource does not exist.
    """
    found = await until_answered(
        "the job cannot be read",
        lambda: client.get(of(where.kind), where.namespace, where.job),
        within=START_SECONDS,
    )
    if found is None:
        raise NoJob(f"there is no {where.kind.definition.kind} {where.job} in namespace {where.namespace}")
    if where.kind.report_of(found).nodes:
        return found, "the job's status tells of its nodes"
    pods, _ = await until_answered(
        "the job's pods cannot be read",
        lambda: client.list(PODS, where.namespace, labels=where.kind.job_selector(where.job)),
        within=START_SECONDS,
    )
    names = [pod["metadata"]["name"] for pod in pods if is_owned_by(pod, found["metadata"]["uid"])]
    nodes = [name for name in names if where.kind.node_of(name, where.job) is not None]
    return found, f"the job has the pod {nodes[0]}" if nodes else ""


def _spec_of(kind: JobKind, found: Object, journal: ConfigMapJournal) -> JobSpec:
    try:
        return kind.to_job_spec(read_manifest(found))
    except BadManifest as bad:
        history = journal.load()
        if history is None:
            raise NoJob(f"the job cannot be run: {bad}") from bad
        log.warning("the job was changed into something that cannot be run, and goes on as it was: %s", bad)
        return history.state.spec


def _token() -> str:
    path = os.environ.get(TOKEN_FILE_VARIABLE, "")
    if not path:
        raise DirectoryError(f"{TOKEN_FILE_VARIABLE} is not set: it must name the file with the job's token")
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise DirectoryError(f"the job's token {path} cannot be read: {os.strerror(error.errno or 0)}") from error
