"""Step speed, goodput and outages: how much of the job's life went into steps that count.

Training time is the time between reports of steps that were never reached before. A step done again after a restore,
and the time without any step, are not training time. Goodput is training time over the time since the first node was
launched.
"""

from __future__ import annotations

import msgspec

from resile.api.ids import NO_ROUND, Round
from resile.core.events import StepsNoted

SPEED_WINDOW = 60.0
MAX_MARKS = 120
MAX_OUTAGES = 100


class Outage(msgspec.Struct, kw_only=True):
    """A time in which training stood still, from the moment at which the core noticed to the next step."""

    because: str
    noticed_at: float
    node: str = ""
    symptom: bool = False
    """True if `because` says only that a healthy node missed a peer; the failure behind it may be reported later."""
    next_step_at: float | None = None


class Progress(msgspec.Struct, kw_only=True):
    step: int = -1
    """How many steps are completed; -1 before the first report."""
    total: int = 0
    trained: float = 0.0
    round: Round = NO_ROUND
    reported_at: float | None = None
    marks: list[tuple[float, int]] = []
    """(time, step) of the last minutes, at most one a second."""
    outages: list[Outage] = []


def on_step(progress: Progress, round_: Round, step: int, total: int, now: float) -> Outage | None:
    """Take over a report that `step` steps are completed. Returns the outage that ended with this report, or None.

    `total` is how many steps the training has; 0 if the report does not say.
    """
    outage = _open_outage(progress)
    if outage is not None:
        outage.next_step_at = now
    if total > 0:
        progress.total = total
    if step > progress.step:
        if progress.round == round_ and progress.reported_at is not None:
            progress.trained += max(0.0, now - progress.reported_at)
        progress.step = step
        if not progress.marks or now - progress.marks[-1][0] >= 1.0:
            progress.marks = [*progress.marks[-MAX_MARKS + 1 :], (now, step)]
    progress.round = round_
    progress.reported_at = now
    return outage


def summary(progress: Progress) -> StepsNoted:
    at, trained = progress.reported_at or 0.0, progress.trained
    return StepsNoted(trained=trained, step=progress.step, total=progress.total, round=progress.round, at=at)


def on_steps_noted(progress: Progress, noted: StepsNoted) -> None:
    """Take over a summary of step reports. The journal has these summaries as events, but not the reports.

    So a replay learns the progress from the summaries. Outside a replay, a summary changes nothing, because the reports
    were taken over before.
    """
    outage = _open_outage(progress)
    if outage is not None and outage.noticed_at <= noted.at:
        outage.next_step_at = noted.at
    progress.step = max(progress.step, noted.step)
    progress.total = noted.total or progress.total
    progress.trained = max(progress.trained, noted.trained)
    if progress.reported_at is None or progress.reported_at < noted.at:
        progress.round, progress.reported_at = noted.round, noted.at


def on_round_over(progress: Progress, because: str, node: str, now: float, *, symptom: bool = False) -> None:
    if progress.step >= 0 and _open_outage(progress) is None:
        outage = Outage(because=because, noticed_at=now, node=node, symptom=symptom)
        progress.outages = [*progress.outages[-MAX_OUTAGES + 1 :], outage]


def on_cause_found(progress: Progress, because: str, node: str) -> None:
    outage = _open_outage(progress)
    if outage is not None and outage.symptom:
        outage.because, outage.node, outage.symptom = because, node, False


def speed(progress: Progress, now: float) -> float:
    """Steps per second over the last minute; 0 if fewer than two step reports of that minute are known."""
    recent = [mark for mark in progress.marks if now - mark[0] <= SPEED_WINDOW]
    if len(recent) < 2:
        return 0.0
    (begun, first), (_, last) = recent[0], recent[-1]
    until = progress.reported_at if progress.reported_at is not None else now
    return (max(last, progress.step) - first) / max(until - begun, 1e-9)


def goodput(progress: Progress, started_at: float | None, until: float) -> float:
    if started_at is None or until <= started_at:
        return 0.0
    return min(1.0, progress.trained / (until - started_at))


def _open_outage(progress: Progress) -> Outage | None:
    """The outage that lasts, if there is one: only the newest can."""
    newest = progress.outages[-1:]
    return newest[0] if newest and newest[0].next_step_at is None else None
