"""Reading a job of this machine: its master is asked, and if no master answers, its journal is read.

Master and journal give the same view, so a master that is killed while it is asked costs a moment and causes no error.
The journal lacks the newest second of step reports.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import msgspec

from resile.api.job import JobSpec
from resile.api.job_view import MASTER, JobEvent, JobView, NodeView
from resile.api.kinds import registry
from resile.client.base import EventView
from resile.client.errors import CommandError
from resile.client.local.jobs import LocalJob
from resile.client.local.master_client import MasterClient, MasterUnreachable
from resile.core.engine import Engine
from resile.core.state import JobState, new_state
from resile.master.job_view import view
from resile.master.journal.base import JournalError
from resile.master.journal.sqlite import SQLiteJournal
from resile.protocol.commands import MAX_EVENTS as PAGE
from resile.protocol.commands import Events, Status

JOURNAL_TRIES = 5
JOURNAL_RETRY_SECONDS = 0.1
"""Time between two tries to read a journal, which may be in the course of being created or compacted."""
MASTER_CAME_BACK = "MasterReturned"


class JobReader:
    """Reads one job. The connection to its master stays open until the context ends."""

    def __init__(self, job: LocalJob) -> None:
        self.job = job
        self.directory = job.directory
        self.client = MasterClient(self.directory)
        self.answered = False
        """True if the newest answer came from the master, False if it came from the journal."""
        self._newest = 0
        """The number of the newest event that `news` has returned."""
        self._master_restarts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def status(self) -> JobView:
        """The view of the job as it is now, from its master, or from its journal if no master answers."""
        try:
            job = self.client.ask(Status()).job
        except MasterUnreachable:
            self.answered = False
            return view(self.state(), time.time())
        self.answered = True
        return job

    def events(self, after: int = 0) -> list[JobEvent]:
        story: list[JobEvent] = []
        while page := self._page(story[-1].number if story else after):
            story.extend(page)
            if len(page) < PAGE:
                break
        return story

    def news(self) -> list[JobEvent]:
        """The job events since the last call; the first call returns all of them."""
        events = self.events(self._newest)
        if events:
            self._newest = events[-1].number
        self._master_restarts += sum(event.reason == MASTER_CAME_BACK for event in events)
        return events

    def state(self) -> JobState:
        """The state of the core as the journal has it; the initial state if there is no journal yet."""
        spec, _ = self.job.spec_and_kind()
        with self._journal() as journal:
            history = journal.load() if journal is not None else None
        if history is None:
            return new_state(spec, self._submitted_at())
        return Engine.replay(history.state, history.events).state

    def master_node(self, job: JobView) -> NodeView:
        """The view of the master, for listings of nodes. Call `news` first, because it counts the master's restarts."""
        is_alive = self.answered or self.directory.master_lives()
        return NodeView(
            name=self.job.spec_and_kind()[1].master_name(job.name),
            role=MASTER,
            id=0,
            rank=0,
            status="Running" if is_alive else "Completed" if job.phase == "Succeeded" else "Error",
            ready=is_alive,
            restarts=self._master_restarts,
            crashes=0,
            relaunch_count=0,
            launched_at=job.created_at,
            ended_at=None if is_alive else job.ended_at,
            host="",
            address="",
            message="",
            ready_containers=int(is_alive),
        )

    def _submitted_at(self) -> float:
        try:
            return (self.directory.path / "job.json").stat().st_mtime
        except OSError as error:  # the job is being deleted
            raise CommandError(f"job {self.job} cannot be read: {error.strerror}") from None

    def _page(self, after: int) -> list[JobEvent]:
        try:
            return self.client.ask(Events(after=after, limit=PAGE)).events
        except MasterUnreachable:
            pass
        with self._journal() as journal:
            return journal.story(after, PAGE) if journal is not None else []

    @contextmanager
    def _journal(self) -> Iterator[SQLiteJournal | None]:
        """Open the journal for reading; None if there is none. Tries again while a master is creating the file."""
        path = self.directory.journal
        journal: SQLiteJournal | None = None
        try:
            for left in reversed(range(JOURNAL_TRIES if path.exists() else 0)):
                try:
                    journal = SQLiteJournal(path, read_only=True)
                    break
                except (JournalError, TypeError) as error:
                    if not left:
                        raise CommandError(str(error)) from error
                    time.sleep(JOURNAL_RETRY_SECONDS)
            yield journal
        except JournalError as error:
            raise CommandError(str(error)) from error
        finally:
            if journal is not None:
                journal.close()


def event_view(event: JobEvent, spec: JobSpec) -> EventView:
    if event.node:
        role, _, number = event.node.rpartition("-")
        about = f"pod/{registry.node_name(spec, role, int(number))}"
    else:
        about = f"{registry.kind_of_job(spec).noun}/{spec.name}"
    return EventView(**msgspec.structs.asdict(event), object=about, job=spec.name)
