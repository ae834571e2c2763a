"""`make demo`: train on three local nodes while a training process and then a whole node are killed.

Shows the job live (line by line when the output is no terminal) and ends with a table of what was killed, how soon
it was noticed and how soon the next step was taken. Exit code 0 only if all of that happened and the model is good.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from pathlib import Path

from resile.api.ids import Seconds
from resile.api.job_view import JobEvent, JobView, OutageView
from resile.api.kinds.elasticjob.resource import ElasticJob
from resile.api.kinds.elasticjob.to_job_spec import to_job_spec
from resile.chaos.faults import Injected, KillNode, KillProcess, NothingToInjectError
from resile.chaos.inject_local import inject
from resile.cli.commands.submit import read_manifest_file
from resile.cli.output.follow import Follower, Screen, clock, screen_for
from resile.cli.output.tables import table
from resile.client.errors import CommandError
from resile.client.local.follow import LocalFollowing
from resile.client.local.jobs import LocalJob
from resile.client.local.master_process import end_by_force
from resile.client.local.submit import start_job
from resile.platform.local import files

REPOSITORY = Path(__file__).resolve().parents[1]
MANIFEST = "examples/pytorch/mnist/demo_job.yaml"
DATA = Path(".cache/mnist_png")
PLACE = Path(".cache/demo")

STEPS_BEFORE_A_STRIKE = 40
GOOD_ACCURACY = 0.9
LONGEST = 300.0
"""Seconds after which something must be wrong."""
CLOCK_DRIFT = 0.5
"""Seconds by which the wall clock may have been corrected since the master started, whose own clock never jumps."""


class DemoError(Exception):
    """The demo did not go as it should; the text is one sentence."""


def main() -> int:
    """Run the demo; the process's exit code."""
    os.chdir(REPOSITORY)
    if not DATA.exists():
        print(f"the demo: {DATA} is missing; `make data` writes it", file=sys.stderr)
        return 2
    os.environ["RESILE_STATE_DIR"] = str(PLACE / "state")
    [document] = read_manifest_file(MANIFEST)
    manifest = document.resource
    assert isinstance(manifest, ElasticJob)
    spec = to_job_spec(manifest)
    job = LocalJob(spec.namespace, spec.name)
    if job.directory.exists:  # left by a demo that was interrupted
        end_by_force(job.directory, Seconds(0.0))
    shutil.rmtree(PLACE, ignore_errors=True)
    screen = screen_for(sys.stdout.isatty())
    try:
        start_job(spec, [], screen.say)
        with LocalFollowing(job) as following:
            strikes, view = perform(Follower(following, screen), job, screen)
        screen.close()
        return report(job, strikes, view)
    except (DemoError, CommandError, NothingToInjectError) as error:
        screen.close()
        print(f"the demo failed: {error}\nlogs: {job.directory.path}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        screen.close()
        return 130
    finally:
        end_by_force(job.directory, Seconds(0.0))


def perform(follower: Follower, job: LocalJob, screen: Screen) -> tuple[list[Injected], JobView]:
    """Follow the job to its end; strike twice on the way."""
    directory = job.directory
    started = time.monotonic()
    strikes: list[Injected] = []
    calm_since = 0
    while True:
        moment = follower.poll()
        view = moment.job
        if moment.last:
            return strikes, view
        if view.ended_at is not None:
            continue
        if time.monotonic() - started > LONGEST:
            raise DemoError(f"the job is not over after {LONGEST:g} s")
        if not steady(view, strikes):
            calm_since = view.step
        elif view.step - max(calm_since, 0) >= STEPS_BEFORE_A_STRIKE and len(strikes) < 2:
            fault = KillNode(running_node(directory.path)) if strikes else KillProcess()
            strike = inject(directory, fault)
            strikes.append(strike)
            announce(screen, view, strike)


def steady(view: JobView, strikes: list[Injected]) -> bool:
    """Whether training goes on, with all three nodes, after everything that was done to it."""
    return bool(view.round) and view.members == 3 and all(recovery(view, strike) for strike in strikes)


def recovery(view: JobView, strike: Injected) -> OutageView | None:
    """What a strike led to, once the next step has been taken."""
    ended = [o for o in view.outages if o.noticed_at >= strike.at - CLOCK_DRIFT and o.next_step_at is not None]
    return ended[0] if ended else None


def running_node(directory: Path) -> str:
    """A node to be killed: not the first, whose log is easiest to follow."""
    running = [record for record in files.read_nodes(directory) if record.pid]
    return str(running[len(running) // 2].node)


def announce(screen: Screen, view: JobView, strike: Injected) -> None:
    """Put what we did among the lines of the story."""
    screen.show(view, [JobEvent(number=0, at=strike.at, reason="Chaos", message=strike.what, warning=True)])


def report(job: LocalJob, strikes: list[Injected], view: JobView) -> int:
    """Print what happened; the exit code."""
    rows = []
    for strike in strikes:
        outage = recovery(view, strike)
        noticed = f"{max(0.0, outage.noticed_at - strike.at) * 1000:.0f} ms" if outage else "never"
        resumed = f"{outage.next_step_at - strike.at:.2f} s" if outage and outage.next_step_at else "never"
        rows.append((strike.what, clock(strike.at), noticed, resumed))
    accuracy = accuracy_in(job.directory.path / "logs")
    life = (view.ended_at or view.at) - (view.started_at or view.created_at)
    print()
    print(table(("WHAT WAS DONE", "AT", "NOTICED AFTER", "NEXT STEP AFTER"), rows))
    print()
    print(f"job {view.phase.lower()}: {view.message}")
    print(f"{view.step} steps in {life:.1f} s, goodput {view.goodput:.1%}, accuracy {accuracy or 0:.4f}")
    if view.phase != "Succeeded":
        raise DemoError(f"the job ended as {view.phase}: {view.message}")
    if len(strikes) < 2 or not all(recovery(view, strike) for strike in strikes):
        raise DemoError("not everything that was killed was noticed and recovered from")
    if accuracy is None or accuracy < GOOD_ACCURACY:
        raise DemoError(f"the accuracy is {accuracy}, and at least {GOOD_ACCURACY} was expected")
    return 0


def accuracy_in(logs: Path) -> float | None:
    """The accuracy that the training printed at its end."""
    for log in logs.glob("*.log"):
        found = re.search(r"training finished: .*accuracy = ([0-9.]+)", log.read_text(errors="replace"))
        if found:
            return float(found[1])
    return None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CommandError as error:
        print(f"the demo: {error}", file=sys.stderr)
        sys.exit(1)
