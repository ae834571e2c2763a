"""From `kubectl apply` of a job of three workers to its first training step, images present, and where the time goes.

The parts follow each other: each ends with the last of its kind (the last worker's pod, the last import of torch). What
starts a pod and what imports torch is not ours; all the rest is counted as ours, kubectl and the first step included.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.harness import Row, say, wait_for
from benchmarks.kube import dlrover_figures
from benchmarks.kube.namespace import BenchNamespace
from benchmarks.kube.training import WORKERS, Training
from resile.api.kinds.elasticjob.names import master_name

BAR_SECONDS = 12.0
OURS_BAR_SECONDS = 2.0


class Parts(msgspec.Struct, frozen=True):
    """Seconds from one moment to the next."""

    kubectl: float
    """`kubectl apply` begins, to the job in the API."""
    operator: float
    """... to the master's pod."""
    master_pod: float
    """... to the master's process."""
    master: float
    """... to the last worker's pod."""
    worker_pods: float
    """... to the last worker's process."""
    agents: float
    """... to the last interpreter that imports torch: the agents start."""
    imports: float
    """... to the last import of torch ahead; agents find their master meanwhile, and it forms the round."""
    begin: float
    """... to the last script that begins: the rest of the round, and what it takes to become a training process."""
    imports_of_script: float
    """... to the end of what scripts import themselves, which is all of torch where nothing was imported ahead."""
    step: float
    """... to the first step of the whole world: the process group, DDP and the step itself."""

    @property
    def total(self) -> float:
        """From `kubectl apply` to the first step."""
        return float(sum(msgspec.structs.astuple(self)))

    @property
    def ours(self) -> float:
        """All but the start of pods and `import torch`."""
        return self.kubectl + self.operator + self.master + self.agents + self.begin + self.step


def run(quick: bool) -> list[Row]:
    runs = []
    with BenchNamespace("start") as namespace:
        for number in range(1 if quick else 3):
            runs.append(_start(namespace, f"start-{number}"))
    totals, ours = [parts.total for parts in runs], [parts.ours for parts in runs]
    medians = {
        "kubectl, to the job in the API": [parts.kubectl for parts in runs],
        "operator, to the master's pod": [parts.operator for parts in runs],
        "start of the master's pod": [parts.master_pod for parts in runs],
        "master, to the last worker's pod": [parts.master for parts in runs],
        "start of the workers' pods": [parts.worker_pods for parts in runs],
        "agents, to the last import's beginning": [parts.agents for parts in runs],
        "import torch": [parts.imports + parts.imports_of_script for parts in runs],
        "round and beginning of the last script": [parts.begin for parts in runs],
        "process group and first step": [parts.step for parts in runs],
    }
    return [
        Row(
            measure=f"apply of {WORKERS} workers, to the first step",
            value=max(totals),
            median=statistics.median(totals),
            unit="s",
            bar=BAR_SECONDS,
            peer=dlrover_figures.FIRST_STEP,
            note=f"of {len(runs)}, from the start of kubectl",
        ),
        Row(
            measure="… ours: all but pod starts and `import torch`",
            value=max(ours),
            median=statistics.median(ours),
            unit="s",
            bar=OURS_BAR_SECONDS,
        ),
        *(
            Row(measure=f"…   {name}", value=max(each), median=statistics.median(each), unit="s")
            for name, each in medians.items()
        ),
    ]


def _start(namespace: BenchNamespace, name: str) -> Parts:
    say(f"start: applying {name}")
    with Training(namespace, name) as training:
        applied = time.time()
        namespace.apply(training.manifest())
        firsts = training.whole(since=applied)
        created = training.pods.created
        workers = [created[step.pod] for step in firsts]
        moments = [
            applied,
            training.appeared,
            created[master_name(name)],
            _process_start("resile.master", namespace.name, name) or created[master_name(name)],
            max(workers),
            max(training.started[step.pod] for step in firsts),
            max(step.born for step in firsts),
            max(training.warm.get(step.pod, step.begun) for step in firsts),
            max(step.begun for step in firsts),
            max(step.imported for step in firsts),
            min(step.at for step in firsts),
        ]
        namespace.kubectl("delete", "elasticjob", name, "--wait=false")
        wait_for("the end of its processes", lambda: not training.pods.running())
        namespace.remove_jobs()  # a kubelet keeps what has ended for half a minute
    parts = parts_between(moments)
    say(f"start: first step after {parts.total:.2f} s, ours {parts.ours:.2f} s")
    return parts


def parts_between(moments: Sequence[float]) -> Parts:
    """The parts between moments; one that came before the moment in front of it took no time."""
    latest, parts = moments[0], []
    for moment in moments[1:]:
        parts.append(max(0.0, moment - latest))
        latest = max(latest, moment)
    return Parts(*parts)


def _process_start(*words: str) -> float | None:
    """When the process began whose command line has all these words; None if it is not on this machine."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if all(word in command for word in words):
                ticks = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[19])
                since_boot = ticks / os.sysconf("SC_CLK_TCK")
                return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    return None
