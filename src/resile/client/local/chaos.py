"""Injecting faults into jobs of this machine, and waiting for the signs of recovery."""

from __future__ import annotations

import time
from collections.abc import Iterator

from resile.chaos import inject_local
from resile.chaos.faults import Fault, Injected, KillMaster, NothingToInjectError
from resile.client.base import Sign
from resile.client.errors import CommandError
from resile.client.local.job_reader import MASTER_CAME_BACK, JobReader
from resile.client.local.jobs import LocalJob
from resile.client.local.master_client import wait_until
from resile.core.state import Phase

POLL_SECONDS = 0.1
BEYOND_BUDGET = 20.0
"""Seconds to wait for recovery beyond the recovery budget, while programs start again."""
CLOCK_DRIFT = 0.5
"""Seconds by which the wall clock may have been corrected since the start of the master, whose clock never jumps."""


def inject(job: LocalJob, fault: Fault) -> tuple[Injected, Iterator[list[Sign]]]:
    """Inject a fault.

    Returns what was done, and an iterator that waits for signs of recovery and yields them. The iterator is empty if
    the job has not taken a step yet, except after a kill of the master.
    """
    with JobReader(job) as reader:
        before = reader.status()
    try:
        injected = inject_local.inject(job.directory, fault)
    except NothingToInjectError as error:
        if before.phase in (Phase.SUCCEEDED, Phase.FAILED):
            raise CommandError(f"job {job} is over ({before.phase}); `resile submit` starts it again") from error
        raise CommandError(str(error)) from error
    if isinstance(fault, KillMaster):
        return injected, _return_of_master(job, injected)
    over = {outage.noticed_at for outage in before.outages if outage.next_step_at is not None}
    return injected, _next_step(job, injected, over) if before.step >= 0 else iter(())


def _next_step(job: LocalJob, injected: Injected, over: set[float]) -> Iterator[list[Sign]]:
    """Wait for the first step after a fault, and yield one list of two signs.

    The first sign says when the fault was noticed. The second says when the step was taken, or that the job is over, or
    that no step came in time. `over` has the `noticed_at` of each outage that ended before the fault.
    """
    with JobReader(job) as reader:
        patience = job.spec_and_kind()[0].timeouts.recovery_budget + BEYOND_BUDGET
        until = time.monotonic() + patience
        noticed = Sign("not noticed")
        while time.monotonic() < until:
            view = reader.status()
            # Not by comparing its time with that of the fault: clocks may drift.
            outage = next((one for one in view.outages if one.noticed_at not in over), None)
            if outage is not None:
                noticed = Sign("noticed", max(0.0, outage.noticed_at - injected.at))
                if outage.next_step_at is not None:
                    yield [noticed, Sign("next step", outage.next_step_at - injected.at)]
                    return
            if view.ended_at is not None:
                yield [noticed, Sign(f"the job is over ({view.phase})")]
                return
            time.sleep(POLL_SECONDS)
    how = f"`resile get events {job.name}` and `resile describe {job.name}` tell how it goes on"
    yield [noticed, Sign(f"no step within {patience:g} s; {how}")]


def _return_of_master(job: LocalJob, injected: Injected) -> Iterator[list[Sign]]:
    since = injected.at - CLOCK_DRIFT
    returns: list[float] = []

    def is_back() -> bool:
        told = reader.events()
        returns[:] = [event.at for event in told if event.reason == MASTER_CAME_BACK and event.at >= since]
        return bool(returns)

    with JobReader(job) as reader:
        if wait_until(is_back, BEYOND_BUDGET):
            yield [Sign("the master was back", max(0.0, returns[-1] - injected.at))]
        else:
            yield [Sign(f"the master is not back after {BEYOND_BUDGET:g} s; see {reader.directory.log}")]
