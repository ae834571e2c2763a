"""Kill -9 of the master in the middle of a local job: does training notice, how soon is the master whole, is data lost?

The job is started as `resile submit --local` starts one. Its script steps every 10 ms on records that a loader thread
takes from the job's shard ledger ahead of time, as data loaders do, and stamps every step. Whole means that the new
master has its journal back and every agent has registered again, by the times in that journal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec

from benchmarks.harness import GaveUp, Row, Workplace, asking, say, wait_for
from resile.api.job import JobSpec, RoleSpec
from resile.client.local.master_process import end_by_force, start_master
from resile.core.engine import Engine
from resile.core.events import AgentConnected, MasterReturned
from resile.core.shard_ledger import Dataset
from resile.master.journal.base import History, JournalError
from resile.master.journal.sqlite import SQLiteJournal
from resile.wire.job_directory import JobDirectory

WORKERS = 3
WHOLE_SECONDS = 3.0
PAUSE_MS = 100.0
"""More than this beyond the longest usual step would be a pause."""
BETWEEN_KILLS = 4.0
STEP_SECONDS = 0.01
SHARD = 50
SCRIPT = f"""
import os, queue, sys, threading, time
from resile.torch.progress import report_step
from resile.torch.shards import ElasticShards

records = int(sys.argv[1])
ahead = queue.Queue(maxsize=2 * {SHARD})

def take():
    for shard in ElasticShards("records", records, {SHARD}):
        for record in shard:
            ahead.put((shard, record))
    ahead.put(None)

def tell():
    while (shard := over.get()) is not None:
        shard.done()

over = queue.Queue()
threads = [threading.Thread(target=take), threading.Thread(target=tell)]
for thread in threads:
    thread.start()
step = 0
with open(f"{{sys.argv[2]}}/steps.{{os.environ['RANK']}}", "a", buffering=1) as steps:
    while (item := ahead.get()) is not None:
        shard, record = item
        time.sleep({STEP_SECONDS})
        step += 1
        steps.write(f"{{time.time()}} {{record}}\\n")
        report_step(step)
        if record == shard.end - 1:
            over.put(shard)
over.put(None)
for thread in threads:
    thread.join()
"""


class Steps(msgspec.Struct, frozen=True):
    """What the training processes wrote."""

    times: list[list[float]]
    records: Counter[int]


def run(quick: bool) -> list[Row]:
    kills = 1 if quick else 3
    say(f"master_loss: a local job of {WORKERS} nodes whose master is killed {kills} times")
    with Workplace() as place:
        directory = JobDirectory(place.path / "jobs" / "default" / "loss")
        seconds = BETWEEN_KILLS * (kills + 1)
        records = int(seconds / STEP_SECONDS * WORKERS * 0.8)
        script = place.script("train.py", SCRIPT)
        words = (
            "resile",
            "run",
            f"--nnodes={WORKERS}",
            "--nproc_per_node=1",
            str(script),
            str(records),
            str(place.path),
        )
        directory.create(
            JobSpec(name="loss", kind="elasticjob", roles={"worker": RoleSpec(replicas=WORKERS, command=words)})
        )
        supervisor = start_master(directory, place.path, [])
        try:
            wait_for("the first steps", lambda: all(len(each) > 100 for each in _steps(place.path).times), every=0.2)
            whole, killed = [], []
            for _ in range(kills):
                time.sleep(BETWEEN_KILLS / 2)
                killed.append(time.time())
                whole.append(_kill(directory))
                say(f"the master was back and whole after {whole[-1]:.2f} s")
                time.sleep(BETWEEN_KILLS / 2)
            say("waiting for the job's end")
            supervisor.wait(timeout=120.0)
            ledger = _ledger(directory)
        finally:
            end_by_force(directory, directory.spec().timeouts.kill_grace)
            supervisor.wait()
        steps = _steps(place.path)
    return _rows(steps, killed, whole, ledger, records)


def _kill(directory: JobDirectory) -> float:
    """Kill the master; the seconds until every agent has registered with the next one."""
    address = directory.address()
    assert address is not None
    with asking(directory) as story:
        round_ = story.status()["round"]
    at = time.time()
    os.kill(address.pid, signal.SIGKILL)

    def whole() -> float | None:
        with contextlib.suppress(JournalError):
            came = _came_since(_history(directory), at)
            return max(came) if len(came) >= WORKERS else None
        return None

    last = wait_for("the master's return", whole, 30.0, every=0.05)
    with asking(directory) as story:
        status = story.status()
    if status["round"] != round_ or status["members"] != WORKERS:
        raise GaveUp(f"the new master knows round {status['round']}, and {round_} was running")
    return last - at


def _history(directory: JobDirectory) -> History:
    journal = SQLiteJournal(directory.journal, read_only=True)
    with contextlib.closing(journal):
        history = journal.load()
        assert history is not None
        return history


def _came_since(history: History, at: float) -> list[float]:
    """When each agent came that came to the newest master, if that one started after `at`."""
    times: dict[str, float] = {}
    returned = False
    for when, event in history.events:
        if isinstance(event, MasterReturned) and when >= at:
            times, returned = {}, True
        elif isinstance(event, AgentConnected) and returned and event.hello.running:
            times.setdefault(event.hello.incarnation, when)
    return list(times.values())


def _ledger(directory: JobDirectory) -> Dataset:
    history = _history(directory)
    return Engine.replay(history.state, history.events).state.ledger.datasets["records"]


def _steps(path: Path) -> Steps:
    times: list[list[float]] = []
    records: Counter[int] = Counter()
    for rank in range(WORKERS):
        file = path / f"steps.{rank}"
        whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
        pairs = [line.split() for line in whole]
        times.append([float(at) for at, _ in pairs])
        records.update(int(record) for _, record in pairs)
    return Steps(times, records)


def _rows(steps: Steps, killed: list[float], whole: list[float], ledger: Dataset, records: int) -> list[Row]:
    around, usual = _gaps(steps.times, killed)
    wrong = sum(count != 1 for count in (steps.records[record] for record in range(records)))
    wrong += abs(records - ledger.done) + len(ledger.leases)
    return [
        Row(
            measure="master killed: longest step around it beyond the usual longest",
            value=max(0.0, max(around) - max(usual)) * 1000,
            unit="ms",
            bar=PAUSE_MS,
            note=f"longest {max(around) * 1000:.0f} ms around a kill and {max(usual) * 1000:.0f} ms elsewhere, "
            f"median {statistics.median(usual) * 1000:.1f} ms",
        ),
        Row(
            measure="master killed: back and whole, longest",
            value=max(whole),
            unit="s",
            bar=WHOLE_SECONDS,
            note=", ".join(f"{seconds:.2f} s" for seconds in whole),
        ),
        Row(
            measure="master killed: records lost or repeated",
            value=wrong,
            bar=0,
            note=f"of {records:,}; {ledger.done:,} done in the ledger",
        ),
    ]


def _gaps(times: list[list[float]], killed: list[float]) -> tuple[list[float], list[float]]:
    """Seconds between two steps of a rank: within half the time between kills after one, and elsewhere."""
    around: list[float] = []
    usual: list[float] = []
    for stamps in times:
        for before, after in pairwise(stamps):
            near = any(at <= after and before <= at + BETWEEN_KILLS / 2 for at in killed)
            (around if near else usual).append(after - before)
    return around, usual
