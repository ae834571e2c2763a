"""Reading a job of this machine, whether its master lives or not: the master is asked, else its journal is read.

Both give the same view, so a master that is killed in the middle of a question costs a moment, not an error. The
journal lacks the newest second of step reports.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Self

from resile.api.job_event import JobEvent
from resile.api.job_view import JobView
from resile.client.errors import CommandError
from resile.client.local.jobs import LocalJob
from resile.client.local.master_client import MasterClient, MasterUnreachable
from resile.core.engine import Engine
from resile.core.state import JobState, new_state
from resile.master.job_view import view
from resile.master.journal.sqlite import JournalError, SQLiteJournal
from resile.protocol.commands import MAX_EVENTS as PAGE
from resile.protocol.commands import Events, Status
from resile.wire.job_directory import DirectoryError

JOURNAL_TRIES = 5
JOURNAL_RETRY_SECONDS = 0.1
"""A journal that is being made, or compacted, can be read a moment later."""


class JobReader:
    """One job. Keeps its connection to the master between two questions."""

    def __init__(self, job: LocalJob) -> None:
        self.job = job
        self.directory = job.directory
        self.client = MasterClient(self.directory)
        self.answered = False
        """Whether the newest answer was the master's own and not the journal's."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    def status(self) -> JobView:
        """The job as it is now.

        Raises:
            CommandError: the token is wrong, or the job cannot be read; one sentence.
        """
        try:
            job = self.client.ask(Status()).job
        except MasterUnreachable:
            self.answered = False
            return view(self.state(), time.time())
        self.answered = True
        return job

    def events(self, after: int = 0) -> list[JobEvent]:
        """The job's story from the line behind `after` on, all of it.

        Raises:
            CommandError: as for `status`.
        """
        story: list[JobEvent] = []
        while page := self._page(story[-1].number if story else after):
            story.extend(page)
            if len(page) < PAGE:
                break
        return story

    def state(self) -> JobState:
        """What the journal knows, read without its master.

        Raises:
            CommandError: the job cannot be read.
        """
        try:
            spec = self.directory.spec()
        except DirectoryError as error:
            raise CommandError(str(error)) from error
        if not self.directory.journal.exists():
            return new_state(spec, (self.directory.path / "job.json").stat().st_mtime)
        with _Reader(self.directory.journal) as journal:
            try:
                history = journal.load()
            except JournalError as error:
                raise CommandError(str(error)) from error
        if history is None:
            return new_state(spec, (self.directory.path / "job.json").stat().st_mtime)
        return Engine.replay(history.state, history.events).state

    @property
    def master_lives(self) -> bool:
        """Whether a master serves the job: it answered just now, or holds the lock."""
        return self.answered or self.directory.master_lives()

    def _page(self, after: int) -> list[JobEvent]:
        try:
            return self.client.ask(Events(after=after, limit=PAGE)).events
        except MasterUnreachable:
            pass
        if not self.directory.journal.exists():
            return []
        with _Reader(self.directory.journal) as journal:
            try:
                return journal.story(after, PAGE)
            except JournalError as error:
                raise CommandError(str(error)) from error


class _Reader:
    """The journal, open for reading; tried a few times, because a master may be making it just now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._journal: SQLiteJournal | None = None

    def __enter__(self) -> SQLiteJournal:
        for left in reversed(range(JOURNAL_TRIES)):
            try:
                self._journal = SQLiteJournal(self._path, read_only=True)
                return self._journal
            except (JournalError, TypeError) as error:
                if not left:
                    raise CommandError(str(error)) from error
                time.sleep(JOURNAL_RETRY_SECONDS)
        raise AssertionError("unreachable")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._journal is not None:
            self._journal.close()
