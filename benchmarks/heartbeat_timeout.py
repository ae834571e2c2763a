"""Silent agents: how soon a frozen one is declared lost, and whether a loaded machine is ever mistaken for one.

Frozen means SIGSTOP to the agent and everything it started: its connection stays open and no message comes, as
with a dead host. The second part is the price of a short time-out: every core busy, and not one verdict allowed.
"""

from __future__ import annotations

import signal
import time

from benchmarks.harness import Row, Run, Story, Workplace, descendants, load, say, signal_all

BAR_SECONDS = 2.5
LOADED_SECONDS = 600.0
LOADED_AGENTS = 4
VERDICTS = ("NodeFailed", "NodeDeleted", "ProcessFailed", "RoundOver")
"""None of these has a cause on a machine that is only busy."""
SCRIPT = "import signal\nsignal.pause()\n"


def run(quick: bool, loaded: bool = True) -> list[Row]:
    rows = [_frozen(2 if quick else 5)]
    return [*rows, _loaded(30.0 if quick else LOADED_SECONDS)] if loaded else rows


def _frozen(times: int) -> Row:
    say(f"silence: {times} times SIGSTOP of an agent and its processes")
    seconds: list[float] = []
    with Workplace() as place:
        job = Run(place, "1:3", ["--rdzv-conf", "lastcall_timeout=1", place.script("idle.py", SCRIPT)])
        job.agent()  # hosts the master and is left alone
        with job.story() as story:
            story.set_clock()
            for number in range(1, times + 1):
                agent = job.agent()
                story.wait("NodeCame", number + 1)
                _wait_for_members(story, 2)
                frozen = time.monotonic()
                tree = descendants(agent.pid)
                signal_all(tree, signal.SIGSTOP)
                seconds.append(story.on_our_clock(story.wait("NodeFailed", number)["at"]) - frozen)
                say(f"declared lost after {seconds[-1]:.2f} s")
                signal_all(tree, signal.SIGKILL)
                place.end(agent)
    note = f"shortest {min(seconds):.2f} s, of {times}"
    return Row(measure="frozen agent declared lost, longest", value=max(seconds), unit="s", bar=BAR_SECONDS, note=note)


def _wait_for_members(story: Story, members: int) -> None:
    while story.status()["members"] != members:
        time.sleep(0.02)


def _loaded(seconds: float) -> Row:
    with Workplace() as place:
        job = Run(place, str(LOADED_AGENTS), [place.script("idle.py", SCRIPT)])
        for _ in range(LOADED_AGENTS):
            job.agent()
        with job.story() as story:
            _wait_for_members(story, LOADED_AGENTS)
            busy = load(place)
            say(f"silence: {LOADED_AGENTS} agents beside {len(busy)} busy processes for {seconds:g} s")
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                time.sleep(min(30.0, max(0.0, until - time.monotonic())))
                say(f"{story.count(*VERDICTS)} verdicts, {max(0.0, until - time.monotonic()):.0f} s to go")
            verdicts = story.count(*VERDICTS)
            for process in busy:
                place.end(process)
    return Row(measure=f"false verdicts in {seconds / 60:g} min, all cores busy", value=verdicts, bar=0)
