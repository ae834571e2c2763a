"""The jobs of this machine: their masters are asked, or their journals read while a master is down.

A command calls one method only, and its user waits for its start-up. So each method imports the modules that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from resile.api.job import JobSpec
from resile.chaos.faults import Fault, Injected
from resile.client.base import (
    Deleted,
    Description,
    Document,
    Found,
    Jobs,
    Listable,
    LogLine,
    Query,
    Say,
    Sign,
    SubmitOptions,
    Submitted,
)
from resile.client.errors import CommandError, NotUsableError, check_roles
from resile.client.local.job_reader import JobReader
from resile.client.local.jobs import DEFAULT_NAMESPACE, LocalJob, all_jobs, find, find_pod
from resile.client.local.master_client import MasterClient, MasterUnreachable
from resile.core.state import Phase
from resile.protocol.job_changes import Scale, Suspend

if TYPE_CHECKING:
    from resile.api.kinds.base import BaseJobKind
    from resile.client.local.follow import LocalFollowing


class LocalJobs(Jobs):
    is_local = True

    def __init__(self, namespace: str | None, say: Say) -> None:
        self.namespace = namespace or DEFAULT_NAMESPACE
        self._named = namespace
        """The namespace that the user named; if None, jobs are found in every namespace."""
        self._say = say

    def watch(self, query: Query) -> Iterator[Found]:
        if query.what is Listable.PLANS:
            raise NotUsableError(
                "scale plans are kept on a cluster only; `resile get events JOB` tells of changes here"
            )
        from resile.client.local import listing

        namespace = None if query.everywhere else self.namespace
        return listing.watch([self._find(query.job)] if query.job else all_jobs(namespace), query)

    def describe(self, job: str) -> Description:
        from resile.client.local import describe

        with JobReader(self._find(job)) as reader:
            return describe.describe(reader)

    def spec(self, job: str) -> JobSpec:
        return self._find(job).spec_and_kind()[0]

    def kind_of(self, job: str) -> BaseJobKind:
        return self._find(job).spec_and_kind()[1]

    def logs(self, name: str, *, master: bool, tail: int | None, follow: bool) -> Iterator[list[LogLine]]:
        from resile.client.local import logs

        job, pod = find_pod(name, self._named)
        kind = job.kind
        is_master = master or (kind is not None and pod == kind.master_name(job.name))
        return logs.read(job, pod, tail, master=is_master, follow=follow)

    def submit(self, documents: Sequence[Document], options: SubmitOptions) -> Iterator[Submitted]:
        from resile.client.local import submit

        return submit.submit(documents, options, self._named, self._say)

    def follow(self, job: Submitted) -> LocalFollowing:
        from resile.client.local.follow import LocalFollowing

        return LocalFollowing(LocalJob(job.namespace, job.name))

    def scale(self, job: str, replicas: Mapping[str, int]) -> None:
        found = self._find(job)
        spec, _ = found.spec_and_kind()
        if spec.managed:  # the master tells how other jobs are scaled
            check_roles(job, replicas, spec.roles)
        for role, number in replicas.items():
            self._ask(found, Scale(role=role, replicas=number))

    def suspend(self, job: str) -> bool:
        found = self._find(job)
        before = self._phase(found)
        self._ask(found, Suspend(on=True))
        return before != Phase.SUSPENDED

    def resume(self, job: str) -> bool:
        """Resume a suspended job, and start its master if the master is gone; False if there was nothing to do."""
        from resile.client.local.master_process import restart_master, served

        found = self._find(job)
        is_interrupted = not served(found.directory) and self._phase(found) not in (Phase.SUCCEEDED, Phase.FAILED)
        if is_interrupted:
            restart_master(found.directory)
            self._say(f"{self.kind_of(job).noun}/{found.name} has a master again")
        before = self._phase(found)
        self._ask(found, Suspend(on=False))
        return is_interrupted or before == Phase.SUSPENDED

    def delete(self, jobs: Sequence[str], *, now: bool, wait: bool, keep_logs: bool) -> Iterator[Deleted]:
        from resile.client.local import delete

        found = [self._find(job) for job in jobs]
        return (delete.delete(job, self._say, now=now, keep_logs=keep_logs) for job in found)

    def inject(self, job: str, fault: Fault) -> tuple[Injected, Iterator[list[Sign]]]:
        from resile.client.local import chaos

        return chaos.inject(self._find(job), fault)

    def _find(self, job: str) -> LocalJob:
        return find(job, self._named)

    def _phase(self, job: LocalJob) -> str:
        with JobReader(job) as reader:
            return reader.status().phase

    def _ask(self, job: LocalJob, change: Scale | Suspend) -> None:
        from resile.client.local.master_process import served

        with MasterClient(job.directory) as client:
            try:
                if served(job.directory):
                    client.insist(change)
                    return
            except MasterUnreachable as error:
                raise CommandError(f"the master of {job} does not answer: {error}") from error
        phase = self._phase(job)
        ending = "is over" if phase in (Phase.SUCCEEDED, Phase.FAILED) else "has lost its master"
        raise CommandError(f"job {job} {ending} ({phase}); nothing was changed")
