"""The jobs of a cluster, read from its API server and written to it, with the rights of the kubeconfig's user.

Methods block, although the code below them is asynchronous: they run one event loop, which pauses between two calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from typing import TypeVar

from resile.api.job import JobSpec
from resile.api.kinds.base import BaseJobKind
from resile.api.kinds.registry import job_kind_of
from resile.chaos.faults import Fault, Injected
from resile.client.base import (
    Deleted,
    Description,
    Document,
    Failure,
    Found,
    Jobs,
    LogLine,
    Query,
    Say,
    Sign,
    SubmitOptions,
    Submitted,
)
from resile.client.cluster import changes, chaos, delete, describe, follow, listing, logs
from resile.client.cluster.connection import connect
from resile.client.cluster.follow import ClusterFollowing
from resile.client.cluster.jobs import find, find_pod
from resile.client.cluster.streams import end, take
from resile.client.errors import NotUsableError
from resile.client.target import Target
from resile.kube import kinds as kube
from resile.kube.kinds import Object

T = TypeVar("T")


class ClusterJobs(Jobs):
    is_local = False

    def __init__(self, target: Target, say: Say) -> None:
        self._say = say
        self._named = target.namespace
        """The namespace that the user named, if any."""
        self._submitted: dict[Submitted, Object] = {}
        self._cluster = connect(target)
        self._streams = ExitStack()
        self._runner = asyncio.Runner()
        self.namespace = self._cluster.namespace

    def __exit__(self, *_: object) -> None:
        with self._runner:
            self._streams.close()
            self._runner.run(self._cluster.close())

    def watch(self, query: Query) -> Iterator[Found]:
        return self._stream(listing.watch(self._cluster, query))

    def describe(self, job: str) -> Description:
        return self._runner.run(describe.describe(self._cluster, job))

    def spec(self, job: str) -> JobSpec:
        return self._runner.run(describe.spec(self._cluster, job))

    def kind_of(self, job: str) -> BaseJobKind:
        return job_kind_of(self._runner.run(find(self._cluster, job)))

    def logs(self, name: str, *, master: bool, tail: int | None, follow: bool) -> Iterator[list[LogLine]]:
        job, pod = self._runner.run(find_pod(self._cluster, name))
        if master:
            pod = job_kind_of(job).master_name(job["metadata"]["name"])
        return self._stream((logs.follow if follow else logs.read)(self._cluster, job, pod, tail))

    def submit(self, documents: Sequence[Document], options: SubmitOptions) -> Iterator[Submitted]:
        return map(self._apply, documents)

    def _apply(self, document: Document) -> Submitted:
        applied, how = self._runner.run(changes.apply(self._cluster, document, self._named))
        metadata = applied["metadata"]
        submitted = Submitted(kind=applied["kind"], name=metadata["name"], namespace=metadata["namespace"], how=how)
        self._submitted[submitted] = applied
        return submitted

    def follow(self, job: Submitted) -> ClusterFollowing:
        applied = self._submitted[job]
        moments = self._stream(follow.moments(self._cluster, applied))
        return ClusterFollowing(moments, lambda: self._runner.run(self._failure(applied)))

    def scale(self, job: str, replicas: Mapping[str, int]) -> None:
        self._runner.run(changes.scale(self._cluster, job, replicas))

    def suspend(self, job: str) -> bool:
        return self._runner.run(changes.set_suspended(self._cluster, job, True))

    def resume(self, job: str) -> bool:
        return self._runner.run(changes.set_suspended(self._cluster, job, False))

    def delete(self, jobs: Sequence[str], *, now: bool, wait: bool, keep_logs: bool) -> Iterator[Deleted]:
        if keep_logs:
            raise NotUsableError(f"--keep is for jobs of this machine; {jobs[0]} is none, and nothing was deleted")
        found = [self._runner.run(find(self._cluster, job)) for job in jobs]
        return self._stream(delete.delete(self._cluster, found, self._say, now=now, wait=wait))

    def inject(self, job: str, fault: Fault) -> tuple[Injected, Iterator[list[Sign]]]:
        injected, signs = self._runner.run(chaos.inject(self._cluster, job, fault))
        return injected, self._stream(signs)

    async def _failure(self, job: Object) -> Failure | None:
        now = await self._cluster.get(kube.of(job_kind_of(job)), job["metadata"]["name"], job["metadata"]["namespace"])
        return await describe.last_failure(self._cluster, now or job, await describe.journal(self._cluster, job))

    def _stream(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Iterate over an asynchronous generator from synchronous code.

        One task runs the whole generator, because a time-out or a watch must end in the task in which it began. The
        generator is closed at the latest when this object's context ends.
        """
        stream = self._taken(items)
        self._streams.callback(stream.close)
        return stream

    def _taken(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        queue: asyncio.Queue[T] = asyncio.Queue(1)

        async def produce() -> None:
            async with aclosing(items):
                async for item in items:
                    await queue.put(item)

        task = self._runner.get_loop().create_task(produce())
        try:
            while taken := self._runner.run(take(queue, task)):
                yield from taken
        finally:
            self._runner.run(end(task))
