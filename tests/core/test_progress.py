"""Speed, goodput and outages."""

import pytest

from resile.core import events as ev
from resile.core.progress import Progress, goodput, on_round_over, on_step, on_steps_noted, speed
from resile.protocol.agent_to_master import StepReport
from tests.core.given import joins_again, key, running


def trained(*reports: tuple[float, int, int]) -> Progress:
    progress = Progress()
    for now, round_, step in reports:
        on_step(progress, round_, step, 100, now)
    return progress


def test_time_between_new_steps_is_training_time():
    assert trained((0, 1, 0), (2, 1, 1), (5, 1, 2)).trained == 5.0


def test_steps_that_are_done_again_are_not_training_time():
    progress = trained((0, 1, 0), (2, 1, 5), (10, 2, 3), (12, 2, 5), (13, 2, 6))
    assert progress.trained == 3.0


def test_goodput_is_training_time_over_time():
    progress = trained((10, 1, 0), (20, 1, 1))
    assert goodput(progress, 0.0, 20.0) == 0.5
    assert goodput(progress, None, 20.0) == goodput(progress, 20.0, 20.0) == 0.0


def test_speed_is_steps_per_second_of_the_last_minute():
    progress = Progress()
    for second in range(100):
        on_step(progress, 1, second * 3, 0, float(second))
    assert speed(progress, 99.0) == pytest.approx(3.0)
    assert speed(progress, 500.0) == 0.0


def test_an_outage_lasts_from_when_it_was_noticed_to_the_next_step():
    progress = trained((0, 1, 0), (1, 1, 4))
    on_round_over(progress, "worker-1 was lost", "worker-1", 2.0)
    on_round_over(progress, "the echo of it", "worker-0", 2.5)
    assert on_step(progress, 2, 3, 0, 6.0) is progress.outages[0]
    assert on_step(progress, 2, 5, 0, 7.0) is None
    (outage,) = progress.outages
    assert (outage.noticed_at, outage.next_step_at) == (2.0, 6.0)
    assert outage.because == "worker-1 was lost"


def test_there_is_no_outage_before_the_first_step():
    progress = Progress()
    on_round_over(progress, "a node was lost", "", 1.0)
    assert progress.outages == []


def test_a_long_life_does_not_fill_the_memory():
    progress = Progress()
    for number in range(1000):
        on_step(progress, number, number, 0, number * 2.0)
        on_round_over(progress, "again", "", number * 2.0 + 1)
    assert len(progress.marks) <= 120
    assert len(progress.outages) <= 100


def test_a_summary_closes_the_outage_that_a_step_report_closed():
    progress = trained((0, 1, 0))
    on_round_over(progress, "lost", "", 2.0)
    on_steps_noted(progress, ev.StepsNoted(step=1, total=0, round=2, trained=5.0, at=9.0))
    assert (progress.outages[0].next_step_at, progress.step, progress.trained) == (9.0, 1, 5.0)


def test_a_job_tells_when_training_starts_stops_and_resumes():
    job = running(2)
    job.now = 10.0
    job.engine.restart_silence_timers(10.0)
    job.steps(0, total=50)
    assert job.notes() == ["TrainingStarted"]
    job.now = 11.0
    job.steps(1)
    job.fails(1)
    joins_again(job, 0, 1)
    job.now = 12.5
    job.steps(1)
    assert job.notes() == ["TrainingResumed"]
    assert (job.state.progress.total, job.state.progress.outages[0].next_step_at) == (50, 12.5)


def test_step_reports_are_not_durable_and_a_summary_of_them_is():
    job = running(1)
    job.steps(0)
    (summary,) = job.engine.due(job.now)
    assert isinstance(summary, ev.StepsNoted)
    assert job.engine.durable(summary)
    assert not job.engine.durable(
        ev.AgentSaid(node=key(0), message=StepReport(round=job.state.rendezvous.last_round, step=1))
    )


def test_summaries_are_rare():
    job = running(1, timeouts={"budget_window": 600.0})
    summaries = 0
    for step in range(1000):
        job.now += 0.1
        job.heartbeats()
        job.steps(step)
        for event in job.engine.due(job.now):
            job.does(event)
            summaries += 1
    assert summaries <= 100 / 10 + 1


def test_a_step_of_somebody_who_is_no_member_does_not_count():
    job = running(2)
    job.says(9, StepReport(round=job.state.rendezvous.last_round, step=7))
    assert job.state.progress.step == -1
