"""The output of `submit` while it follows a job: live on a terminal, line by line into a pipe or file."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import click

from resile.api.job_view import JobEvent, JobView
from resile.cli.output.tables import table, took
from resile.client.base import Following, Moment
from resile.core.completion import Reason

STOPPED = str(Reason.STOPPED)


class Screen:
    """Shows a job to the user while `submit` waits for its end. This one, for `-o json`, shows nothing of the job."""

    def show(self, job: JobView, news: Sequence[JobEvent]) -> None:
        """Show the job as it is now, and the job events since the last call."""

    def say(self, words: str) -> None:
        """Show a message that is no job event."""
        click.echo(words, err=True)

    def close(self) -> None:
        """Stop showing the job; its events stay visible."""


class PlainScreen(Screen):
    """Prints each job event on a line: `12:03:04.123  RoundFormed      round 1 runs with 3 nodes`."""

    def show(self, job: JobView, news: Sequence[JobEvent]) -> None:
        for told in news:
            mark = "!" if told.warning else " "
            click.echo(f"{clock(told.at)} {mark}{told.reason:<16} {told.message}")


def clock(at: float) -> str:
    """The local time of day at `at` (seconds since 1970), to the millisecond: `12:03:04.123`."""
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03d}"


def screen_for(interactive: bool) -> Screen:
    if not interactive:
        return PlainScreen()
    from resile.cli.output.live import LiveScreen  # rich takes a tenth of a second to import

    return LiveScreen()


class Dismissed(Exception):
    """Raised if a signal ends the command that follows a job. The job goes on."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Follower:
    def __init__(self, following: Following, screen: Screen) -> None:
        self.story: list[JobEvent] = []
        self.stopping = False
        """True after the user has pressed Ctrl-C to end the job."""
        self.asked = False
        """True after the master has got the request to stop the job."""
        self.over = False
        """True if the job is over; its nodes may still be ending."""
        self._following = following
        self._screen = screen
        self._dismissed = 0
        """The signal that has ended this command, but not the job; 0 for none."""

    def poll(self) -> Moment:
        """Get the job as it is now and show it; raises `Dismissed` if a signal has ended this command."""
        if self._dismissed:
            raise Dismissed(self._dismissed)
        moment = self._following.poll()
        self.story.extend(moment.news)
        self._screen.show(moment.job, moment.news)
        if moment.note:
            self._screen.say(moment.note)
        self.over = moment.job.ended_at is not None
        return moment

    def until_over(self) -> JobView:
        """Follow the job until it is over, and return its last view.

        If the job is on this machine, the first Ctrl-C asks it to stop; following goes on. The second raises
        `KeyboardInterrupt`. On a cluster, the first Ctrl-C raises it. SIGTERM and SIGHUP raise `Dismissed`.
        """
        with self._dismissable():
            while True:
                try:
                    moment = self.poll()
                    if moment.last:
                        return moment.job
                    if self.stopping and not self.asked and not self.over:
                        self.asked = self._following.stop()
                except KeyboardInterrupt:
                    if self.stopping or self.over or not self._following.interrupt_ends_job:
                        raise
                    self.stopping = True
                    self._screen.say("stopping the job; Ctrl-C again leaves it to end by itself")

    @contextlib.contextmanager
    def _dismissable(self) -> Iterator[None]:
        """Within this context, SIGTERM and SIGHUP make `poll` raise `Dismissed`. An ignored signal stays ignored."""

        def dismiss(number: int, _: FrameType | None) -> None:
            self._dismissed = number

        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        heeded = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        for number in heeded:
            signal.signal(number, dismiss)
        try:
            yield
        finally:
            for number, handler in heeded.items():
                signal.signal(number, handler)


def closing_words(job: JobView, story: Sequence[JobEvent]) -> str:
    """The summary of a job that is over: how it ended, its interruptions and its goodput."""
    ending = "was stopped" if job.reason == STOPPED else job.phase.lower()
    words = [f"job {job.name} {ending}: {job.message or job.reason}"]
    if job.outages:
        words += ["", outage_table(job)]
    failures = [told for told in story if told.reason in ("NodeFailed", "ProcessFailed")]
    if not job.outages and failures:
        words += ["", table(("WHAT FAILED", "NOTICED"), [(told.message, clock(told.at)) for told in failures])]
    life = (job.ended_at or job.at) - (job.started_at or job.created_at)
    if job.step >= 0:
        words += ["", f"{job.step} steps in {took(life)}, goodput {job.goodput:.1%}"]
    return "\n".join(words)


def outage_table(job: JobView) -> str:
    rows = []
    for outage in job.outages:
        step = outage.next_step_at
        recovery = (clock(step), took(step - outage.noticed_at)) if step else ("-", "-")
        rows.append((outage.because, clock(outage.noticed_at), *recovery))
    return table(("BECAUSE", "NOTICED", "NEXT STEP", "AFTER"), rows)
