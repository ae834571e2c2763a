"""Whatever of an elastic training is lost, and in the middle of whatever: it ends as if nothing had happened.

A failure prints its seed and the command that repeats it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from resile.checkpoint.storage import Storage
from resile.core.state import Waiting
from tests.local.elastic import kill_schedule, kill_schedule_script
from tests.local.elastic.kill_schedule import (
    BATCH,
    COME,
    EPOCHS,
    FROZEN,
    LEAVING,
    SHORT,
    SIZE,
    STEPS,
    STORE_EVERY,
    TARGETS,
    Schedule,
    Work,
    draw,
)
from tests.local.elastic.test_elastic import LONG
from tests.local.resile_run import Run, Runs, kill, opened, wait_until

pytestmark = pytest.mark.timeout(900)

FIRST = int(os.environ.get("RESILE_KILL_SEED", "100"))
LONG_FORM = range(FIRST, FIRST + (1 if "RESILE_KILL_SEED" in os.environ else 60))
PATIENT = "--recovery-budget=120"
"""Where nothing is frozen an agent that is silent for 24 s is one that a busy machine gives no time."""
WATCHFUL = "--recovery-budget=20"
"""Where something is, it is missed after 4 s."""
LONG_SECONDS = float(os.environ.get("RESILE_KILL_SECONDS", "2400"))
"""After which no further schedule of the long form is begun, so that all of `make soak` ends within the hour."""
REPEAT = "python -m pytest tests/local/elastic/test_kill_schedules.py -m soak"
STARTED = time.monotonic()
TOLERANCE = 1e-4
"""Of any number of the state, after all steps, where worlds of other sizes have summed gradients in another order."""


def environment(work: Work) -> dict[str, str]:
    settings = {"SIZE": SIZE, "BATCH": BATCH, "EPOCHS": EPOCHS, "STEPS": STEPS, "STORE_EVERY": STORE_EVERY}
    settings |= {"OPTIMIZER": work.optimizer, "DATA": work.data, "SHARDED": work.sharded, "NORM": work.norm}
    return {name: str(value) for name, value in (settings | {"WHOLE": work.world}).items()}


def script(work: Work) -> str:
    return kill_schedule_script.SHARDED if work.sharded else kill_schedule_script.TRAIN


class Undisturbed:
    """What training comes to if nobody is killed: the state after every step."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[Work, list[list[float]]] = {}

    def states(self, work: Work) -> list[list[float]]:
        """The state after each step; the one before the first is not among them."""
        if work not in self._known:
            self._known[work] = self._train(work)
        return self._known[work]

    def _train(self, work: Work) -> list[list[float]]:
        directory = self._directory / str(len(self._known))
        directory.mkdir()
        with opened(directory) as runs:
            runs.script(script(work))
            words = [sys.executable, runs.script(kill_schedule_script.UNDISTURBED, "undisturbed.py")]
            env = os.environ | environment(work)
            done = subprocess.run(words, cwd=directory, env=env, capture_output=True, timeout=LONG, check=False)
            assert done.returncode == 0, done.stderr.decode()
            return [note["numbers"] for note in runs.notes("state")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


def is_frozen(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class Struck:
    """A job that is struck by a schedule; nodes that end or freeze for good are started again, as a platform would."""

    def __init__(self, runs: Runs, schedule: Schedule) -> None:
        self.runs, self.schedule = runs, schedule
        self._ended: Counter[int] = Counter()
        self._kept_back: set[int] = set()
        self._seen_to: set[int] = set()
        self._ice: list[int] = []
        runs.script(script(schedule.work))
        self._nodes = [self._start(number) for number in range(schedule.shape.nodes)]

    def _start(self, number: int) -> Run:
        shape = self.schedule.shape
        env = environment(self.schedule.work) | {"NODE": str(number), "BLOWS": json.dumps(self.schedule.blows)}
        words = (
            f"--nproc-per-node={shape.processes}",
            "--max-restarts=100",
            "--rdzv-conf=last_call_timeout=1",
            WATCHFUL if self.schedule.freezes else PATIENT,
        )
        return self.runs.node(*words, "train.py", nnodes=f"{shape.fewest}:{shape.nodes}", env=env)

    def ends(self) -> None:
        """Every blow falls, and after all of them every node ends well."""

        def over() -> bool:
            for number, node in enumerate(self._nodes):
                if number not in self._kept_back and node.process.poll() in (-signal.SIGKILL, 128 + signal.SIGTERM):
                    self._ended[number] += 1
                    if self._comes_late(number):
                        self._kept_back.add(number)
                    else:
                        self._nodes[number] = self._start(number)
            for blow in self.runs.notes("blow"):
                if blow["number"] not in self._seen_to and self._see_to(blow):
                    self._seen_to.add(blow["number"])
            return not self._kept_back and not any(node.running for node in self._nodes)

        wait_until(over, "the end of all nodes", 3 * LONG)
        assert [node.process.returncode for node in self._nodes] == [0] * len(self._nodes), self._words()
        self._check_blows()
        for pid in self._ice:
            kill(pid)

    def _comes_late(self, number: int) -> bool:
        """Whether this node is kept back until others pass something on: of several, the one that is struck last."""
        blows = self.schedule.blows
        struck = {note["number"]: note["node"] for note in self.runs.notes("blow")}
        awaited = [n - 1 for n, blow in enumerate(blows) if blow.target == COME and n not in struck]
        return any(struck.get(before) == number for before in awaited)

    def _see_to(self, blow: dict[str, Any]) -> bool:
        """Do what a blow leaves to be done; whether that is done."""
        if blow["target"] == COME:
            while self._kept_back:
                number = self._kept_back.pop()
                self._nodes[number] = self._start(number)
            if not any(note["at"] > blow["at"] for note in self.runs.notes("ready")):
                return False
            nodes = self.runs.ledger().nodes.values()
            waits = any(node.agent is not None and isinstance(node.agent.phase, Waiting) for node in nodes)
            if waits:
                self.runs.release(f"came-{blow['number']}")
            return waits
        if blow["target"] not in FROZEN:
            return True
        frozen = [note for note in self.runs.notes("frozen") if note["number"] == blow["number"]]
        if not frozen or not self._is_missed(frozen[0]):
            return False
        pids = frozen[0]["pids"]
        if blow["target"] == "ice":
            self._ice += pids
            self._nodes[blow["node"]] = self._start(blow["node"])
        else:
            for pid in pids:
                kill(pid, signal.SIGCONT)
        return True

    def _is_missed(self, frozen: dict[str, Any]) -> bool:
        """Whether the others know that a node is frozen: the master has said so, and who can trains on without it."""
        said = [line.at for line in self.runs.story("NodeFailed") if line.at > frozen["at"]]
        if said and self.schedule.shape.fewest < self.schedule.shape.nodes:
            return any(note["at"] > said[0] for note in self.runs.notes("round"))
        return bool(said)

    def _check_blows(self) -> None:
        """Every blow fell once, hit what it was meant for, and those that were to fall together did."""
        notes = {note["number"]: note for note in self.runs.notes("blow")}
        assert sorted(note["number"] for note in self.runs.notes("blow")) == list(range(len(self.schedule.blows)))
        hit = {target: [n for n, blow in enumerate(self.schedule.blows) if blow.target == target] for target in TARGETS}
        ended = [number for target in LEAVING for number in hit[target]]
        assert Counter(notes[number]["node"] for number in ended) == self._ended, "agents that were to end"
        assert sorted(note["number"] for note in self.runs.notes("master")) == hit["master"], "masters that were killed"
        assert all(is_frozen(pid) for pid in self._ice), "who was frozen for good"
        assert len(self._ice) == len(hit["ice"]) * (1 + self.schedule.shape.processes)
        dead = {notes[number]["pid"] for number in (*hit["rank"], *ended)}
        assert not dead & {note["pid"] for note in self.runs.notes("end")}, "a process that was killed came to the end"
        for together in self.schedule.at_once:
            assert len({notes[number]["round"] for number in together}) == 1, f"blows {together} were not at once"

    def _words(self) -> str:
        return "\n".join(f"node {number}:\n{node.err}" for number, node in enumerate(self._nodes))

    def end(self) -> dict[str, Any]:
        """What every process has in the end; it is the same for all."""
        ends = self.runs.notes("end")
        assert len(ends) == self.schedule.shape.world
        assert all(each["numbers"] == ends[0]["numbers"] and each["seen"] == ends[0]["seen"] for each in ends)
        return ends[0]


def check_samples(notes: list[dict[str, Any]], seen: list[list[int]]) -> None:
    """Every sample of every epoch is in the model once: `seen` says which rounds' steps are in it.

    What a rank gives to a step is noted before the step, so also by a rank that dies in it; a step that was broken off
    is taken again in another round.
    """
    gave: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for note in notes:
        gave.setdefault((note["step"], note["round"]), []).append(note)
    counted: Counter[tuple[int, int]] = Counter()
    for step, (_, _, total, round_) in enumerate(seen):
        parts = gave[step, round_]
        assert len(parts) == parts[0]["world"], f"step {step} was taken by {len(parts)} of {parts[0]['world']}"
        samples = [(epoch, sample) for part in parts for epoch, batch in [part["samples"]] for sample in batch]
        assert len(samples) == total
        counted.update(samples)
    assert counted == {(epoch, sample): 1 for epoch in range(EPOCHS) for sample in range(SIZE)}


def check_stored(directory: Path, states: list[list[float]], tolerance: float) -> None:
    """Whatever was struck, what is in storage under a step's name is that step as a whole, and torch can read it.

    The newest is the last one, whether it was due or not.
    """
    storage = Storage(directory)
    steps = [step for step in storage.steps() if step]
    assert steps[-1:] == [STEPS], f"{steps} are stored"
    for step in steps:
        described = dcp.FileSystemReader(storage.path(step)).read_metadata().state_dict_metadata
        names = [name for part in ("model.", "optimizer.state.") for name in sorted(described) if name.startswith(part)]
        state = {name: torch.empty(described[name].size, dtype=described[name].properties.dtype) for name in names}
        with warnings.catch_warnings(action="ignore"):  # that it is one process which loads
            dcp.load(state, checkpoint_id=storage.path(step))
        stored = [number for tensor in state.values() for number in tensor.double().flatten().tolist()]
        assert len(stored) == len(states[step - 1]), f"step {step} in storage is not all of it"
        expected = pytest.approx(states[step - 1], rel=0, abs=tolerance)
        assert stored == expected, f"step {step} in storage is not step {step}"


def run_schedule(runs: Runs, undisturbed: Undisturbed, schedule: Schedule) -> None:
    job = Struck(runs, schedule)
    job.ends()
    end = job.end()
    assert end["steps"] == len(end["seen"]) == STEPS
    check_samples(runs.notes("gave"), end["seen"])
    states = undisturbed.states(schedule.work)
    if schedule.shape.fixed:
        assert end["numbers"] == states[-1], "it is not bit for bit what it would be without the blows"
    else:
        assert end["numbers"] == pytest.approx(states[-1], rel=0, abs=TOLERANCE)
    check_stored(runs.directory / "storage", states, 0.0 if schedule.shape.fixed else TOLERANCE)
    runs.nothing_is_left()


@pytest.mark.parametrize("name", SHORT)
def test_training_ends_as_if_nobody_had_been_killed(runs: Runs, undisturbed: Undisturbed, name: str) -> None:
    run_schedule(runs, undisturbed, SHORT[name])


@pytest.mark.soak
@pytest.mark.parametrize("seed", LONG_FORM)
def test_training_ends_as_if_nobody_had_been_killed_for_long(runs: Runs, undisturbed: Undisturbed, seed: int) -> None:
    if time.monotonic() - STARTED > LONG_SECONDS:
        pytest.skip("the time of the long form is over")
    schedule = draw(seed)
    print(f"seed {seed}: {schedule}\nto repeat it: RESILE_KILL_SEED={seed} {REPEAT}")
    run_schedule(runs, undisturbed, schedule)


def test_the_short_form_has_every_kind_of_blow_at_every_kind_of_moment() -> None:
    blows = [blow for schedule in SHORT.values() for blow in schedule.blows]
    assert {blow.target for blow in blows} == set(TARGETS)
    kinds = (
        kill_schedule.IN_STEP,
        kill_schedule.IN_SAVE,
        ("commit",),
        ("record",),
        (kill_schedule.STORING,),
        kill_schedule.RESTORING,
    )
    for kind in (*kinds, (kill_schedule.GIVING,)):
        assert any(blow.moment in kind for blow in blows), f"none is in {kind}"
    assert sum(bool(schedule.at_once) for schedule in SHORT.values()) >= 3
    assert STEPS % STORE_EVERY
    assert any(blow.step % STORE_EVERY for blow in blows)
    assert any(len(together) == schedule.shape.world for schedule in SHORT.values() for together in schedule.at_once)
    assert {schedule.sharded for schedule in SHORT.values()} == {False, True}
    assert {schedule.data for schedule in SHORT.values()} >= {"halves", "loader"}
    assert {schedule.optimizer for schedule in SHORT.values()} == {"SGD", "Adam"}
    assert {schedule.shape.fixed for schedule in SHORT.values()} == {False, True}, "the same world, and another one"


def test_the_long_form_has_every_blow_at_every_moment() -> None:
    drawn = [draw(seed) for seed in range(100, 160)]
    assert {schedule.optimizer for schedule in drawn} == {"SGD", "Adam"}
    assert {schedule.shape for schedule in drawn} == set(kill_schedule.SHAPES)
    kinds = {(schedule.data, schedule.sharded) for schedule in drawn}
    assert kinds == {(data, sharded) for data in kill_schedule.DATA for sharded in (False, True)}
    blows = {(blow.moment, blow.target) for schedule in drawn for blow in schedule.blows}
    assert blows >= {(moment, target) for moment in kill_schedule.MOMENTS for target in kill_schedule.KILLED}
    assert {moment for moment, _ in blows} >= set(kill_schedule.RESTORING)
    quiet = ("drain", *FROZEN)
    for target in quiet:
        for kind in (kill_schedule.IN_STEP, kill_schedule.IN_SAVE, (kill_schedule.STORING,)):
            assert any((moment, target) in blows for moment in kind), f"no {target} in {kind}"
    for kind in ((kill_schedule.GIVING,), kill_schedule.RESTORING):
        for target in ("rank", "node", COME, *quiet):
            assert any((moment, target) in blows for moment in kind), f"no {target} in {kind}"


def given(rounds: list[int]) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """The notes of a training by one rank, and which of its rounds is in the model at each step."""
    notes, seen = [], []
    for step in range(STEPS):
        epoch, begin = step // (STEPS // EPOCHS), step % (STEPS // EPOCHS) * BATCH
        batch = list(range(begin, min(begin + BATCH, SIZE)))
        for round_ in rounds:
            notes.append({"step": step, "round": round_, "world": 1, "samples": [epoch, batch]})
        seen.append([epoch, begin, len(batch), rounds[-1]])
    return notes, seen


def test_a_step_that_was_broken_off_counts_for_nothing() -> None:
    check_samples(*given([1, 2]))


def test_a_sample_that_is_missing_or_counted_twice_is_found() -> None:
    for change in (lambda batch: batch.pop(), lambda batch: batch.append(1), lambda batch: batch.__setitem__(0, 5)):
        notes, seen = given([1])
        change(notes[7]["samples"][1])
        with pytest.raises(AssertionError):
            check_samples(notes, seen)


def test_a_rank_whose_part_of_a_step_is_missing_is_found() -> None:
    notes, seen = given([1])
    notes[3]["world"] = 2
    with pytest.raises(AssertionError, match="step 3 was taken by 1 of 2"):
        check_samples(notes, seen)
