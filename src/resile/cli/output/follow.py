"""Following a job from start to end: what `submit` shows, live on a terminal and line by line elsewhere."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Protocol

import click

from resile.api.job_event import JobEvent
from resile.api.job_view import JobView
from resile.cli.output.tables import table, took
from resile.client.errors import CommandError
from resile.client.local.job_reader import JobReader
from resile.client.local.master_client import MasterUnreachable, wait_until
from resile.client.local.supervision import served
from resile.core.completion import Reason
from resile.protocol.changes import Stop

POLL_SECONDS = 0.1
"""Between two looks; a look costs the master well under a millisecond."""
STOPPED = str(Reason.STOPPED)
"""The reason of a job that a person ended."""
FAREWELL_SECONDS = 45.0
"""For the master of a job that is over to let its nodes end and to go."""


class Screen(Protocol):
    """Where a job's life is shown."""

    def show(self, job: JobView, news: Sequence[JobEvent]) -> None:
        """Show the job as it is, and the lines of its story that are new."""

    def say(self, words: str) -> None:
        """Tell the user something that is no part of the story."""

    def close(self) -> None:
        """Leave the screen as the user should find it."""


class PlainScreen:
    """One line per line of the story, with the time: for pipes, files and CI."""

    def show(self, job: JobView, news: Sequence[JobEvent]) -> None:
        """Print what is new."""
        for told in news:
            click.echo(story_line(told))

    def say(self, words: str) -> None:
        """Print it beside the output, which may be read by a program."""
        click.echo(words, err=True)

    def close(self) -> None:
        """Nothing to leave."""


def story_line(told: JobEvent) -> str:
    """`12:03:04.123  RoundFormed      round 1 runs with 3 nodes`."""
    mark = "!" if told.warning else " "
    return f"{clock(told.at)} {mark}{told.reason:<16} {told.message}"


def clock(at: float) -> str:
    """The time of day, to the millisecond."""
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03d}"


def screen_for(interactive: bool) -> Screen:
    """The live view on a terminal, plain lines elsewhere."""
    if not interactive:
        return PlainScreen()
    from resile.cli.output.live import LiveScreen  # rich takes a tenth of a second to import

    return LiveScreen()


class Dismissed(Exception):
    """Somebody ended the command that follows a job, by this signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Follower:
    """Looks at a job and shows it; `poll` once per turn of the caller's loop."""

    def __init__(self, look: JobReader, screen: Screen) -> None:
        self.look = look
        self.screen = screen
        self.story: list[JobEvent] = []
        self.stopping = False
        """The user pressed Ctrl-C."""
        self.asked = False
        """The master was asked to stop the job, and heard it."""
        self.over = False
        """The job is over; its nodes may still be ending."""
        self.dismissed = 0
        """The signal by which somebody ended this command, which is no reason to end the job."""

    def poll(self) -> JobView:
        """Look once and show it; the job as it is now.

        Raises:
            Dismissed: somebody ended this command.
        """
        if self.dismissed:
            raise Dismissed(self.dismissed)
        job = self.look.status()  # before the story: a job that is over has told everything
        news = self.look.events(self.story[-1].number if self.story else 0)
        self.story.extend(news)
        self.screen.show(job, news)
        self.over = job.ended_at is not None
        return job

    def until_over(self) -> JobView:
        """Follow until the job is over and its master is gone.

        The first Ctrl-C asks the master to stop the job; at the second this raises.

        Raises:
            KeyboardInterrupt: the user wants to leave; `asked` says whether the job ends without us.
            Dismissed: somebody ended this command; the job goes on.
            CommandError: the job cannot be seen any more.
        """
        while True:
            try:
                job = self.poll()
                if job.ended_at is not None:
                    break
                if self.stopping and not self.asked:
                    self.asked = self._ask_to_stop()
                if not self.look.answered and not served(self.look.directory):
                    job = self.poll()
                    if job.ended_at is not None:
                        break
                    raise CommandError(f"the master of {self.look.job} is gone; see {self.look.directory.log}")
                time.sleep(POLL_SECONDS)
            except KeyboardInterrupt:
                if self.stopping:
                    raise
                self.stopping = True
                self.screen.say("stopping the job; Ctrl-C again leaves it to end by itself")
        return self.farewell()

    def farewell(self) -> JobView:
        """Show how the nodes of a job that is over end, until its master is gone; the job as it is then."""

        def gone() -> bool:
            last = not served(self.look.directory)
            self.poll()
            return last

        wait_until(gone, FAREWELL_SECONDS)
        return self.poll()

    def _ask_to_stop(self) -> bool:
        try:
            self.look.client.ask(Stop(because="its user pressed Ctrl-C"))
        except MasterUnreachable:
            return False
        return True


def closing_words(job: JobView, story: Sequence[JobEvent]) -> str:
    """What remains to be said when a job is over: its end, every time that training stood still, and goodput."""
    ending = "was stopped" if job.reason == STOPPED else job.phase.lower()
    words = [f"job {job.name} {ending}: {job.message or job.reason}"]
    if job.outages:
        words += ["", outage_table(job)]
    failures = [told for told in story if told.reason in ("NodeFailed", "ProcessFailed")]
    if not job.outages and failures:
        words += ["", table(("WHAT FAILED", "NOTICED"), [(told.message, clock(told.at)) for told in failures])]
    life = (job.ended_at or job.at) - (job.started_at or job.created_at)
    if job.step >= 0:
        words += ["", f"{job.step + 1} steps in {took(life)}, goodput {job.goodput:.1%}"]
    return "\n".join(words)


def outage_table(job: JobView) -> str:
    """Every time that training stood still."""
    rows = [
        (
            outage.because,
            clock(outage.noticed_at),
            clock(outage.next_step_at) if outage.next_step_at else "-",
            took(outage.next_step_at - outage.noticed_at) if outage.next_step_at else "-",
        )
        for outage in job.outages
    ]
    return table(("BECAUSE", "NOTICED", "NEXT STEP", "AFTER"), rows)
