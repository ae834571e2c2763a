"""A real training job over gloo, and every step it takes: of plain DDP, which knows nothing of resile, or elastic.

The script comes in an environment variable, so that any image with torch will do, and each of its lines has what a
benchmark needs: when the process was started, when the script began and had imported all, when the step was complete,
whose it was.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import msgspec

from benchmarks.harness import wait_for
from benchmarks.kube import api
from benchmarks.kube.namespace import IMAGE, BenchNamespace, elastic_job
from benchmarks.kube.pod_timeline import AGAIN_SECONDS, Pods, watch

WORKERS = 3
FEWEST = 2
"""Workers that train on without the others."""
START_SECONDS = 120.0
"""For pods to start and torch to be imported on a machine that has other work."""
STEADY = 10
"""Steps of a world before it counts as trained in."""
BEGIN = """
import os, time
begun = time.time()
with open("/proc/self/stat") as file:
    ticks = int(file.read().rpartition(")")[2].split()[19])
born = begun - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
"""
PLAIN = (
    f"{BEGIN}"
    """
import torch, torch.distributed as dist
import torch._dynamo  # the first optimizer would import it: half of torch comes only then
from torch.nn.parallel import DistributedDataParallel
imported = time.time()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ddp = DistributedDataParallel(model)
while True:
    loss = torch.nn.functional.cross_entropy(ddp(torch.randn(32, 256)), torch.randint(10, (32,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    now = time.time()
    line = f"bench-step {rank} {world} 0 {os.getpid()}"
    print(f"{line} {born:.4f} {begun:.4f} {imported:.4f} {now:.4f}", flush=True)
    time.sleep(0.05)
"""
)
ELASTIC = (
    f"{BEGIN}"
    """
import torch
from resile.torch import Elastic
imported = time.time()

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
elastic = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
for step in elastic.steps(10**9):
    with elastic.step():
        torch.nn.functional.cross_entropy(model(torch.randn(32, 256)), torch.randint(10, (32,))).backward()
    if elastic.stepped:
        line, now = f"bench-step {elastic.rank} {elastic.world} {elastic.round} {os.getpid()}", time.time()
        print(f"{line} {born:.4f} {begun:.4f} {imported:.4f} {now:.4f}", flush=True)
    time.sleep(0.02)
"""
)
COMMAND = (
    'echo "bench-started $EPOCHREALTIME"; printf %s "$BENCH_SCRIPT" > /tmp/train.py; '
    f"exec dlrover-run --nnodes={FEWEST}:$NODE_NUM --nproc_per_node=1 --max_restarts=100 /tmp/train.py"
)
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
STARTED = re.compile(r"bench-started ([\d.]+)")
WARM = re.compile(r"\[([^\]]+),(\d{3})\] .*torch imported ahead in")
STEPPED = re.compile(r"bench-step (\d+) (\d+) (\d+) (\d+) ([\d.]+) ([\d.]+) ([\d.]+) ([\d.]+)")


class Step(msgspec.Struct, frozen=True):
    """One completed optimizer step of one process."""

    pod: str
    rank: int
    world: int
    round: int
    """Of an elastic training; 0 of a plain one."""
    pid: int
    """In its pod."""
    born: float
    """When its process was started, perhaps as an interpreter that imports ahead."""
    begun: float
    """When the script began in it."""
    imported: float
    """When that had imported all that it needs."""
    at: float


class Training:
    """A job in training: its pods, and every step that they report."""

    def __init__(self, namespace: BenchNamespace, name: str, script: str = PLAIN) -> None:
        self.name = name
        self._script = script
        self._namespace = namespace
        self._over = threading.Event()
        self.pods = Pods(namespace, on_running=self._listen)
        self.appeared = 0.0
        """When the job was first seen."""
        self.started: dict[str, float] = {}
        """When each worker's container began, by its own first line."""
        self.steps: list[Step] = []
        self.warm: dict[str, float] = {}
        """When each worker's agent said first that torch was imported ahead."""

    def __enter__(self) -> Self:
        self.pods.__enter__()
        watch(self._namespace, api.JOBS, self._over, self._see)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.pods.__exit__()

    def manifest(self, resources: dict[str, Any] | None = None) -> dict[str, Any]:
        """The job."""
        environment = {"BENCH_SCRIPT": self._script, **ENVIRONMENT}
        main = {
            "name": "main",
            "image": IMAGE,
            "imagePullPolicy": "IfNotPresent",
            "command": ["/bin/bash", "-c", COMMAND],
            "env": [{"name": name, "value": value} for name, value in environment.items()],
            "resources": resources or {},
        }
        return elastic_job(self.name, {"containers": [main], "terminationGracePeriodSeconds": 5}, WORKERS)

    def first(self, wanted: Callable[[Step], bool], seconds: float = START_SECONDS, what: str = "a step") -> Step:
        """The earliest step that is `wanted`, once there is one; looked for in what every log has shown by then."""
        wait_for(what, lambda: any(map(wanted, tuple(self.steps))), seconds, 0.05)
        time.sleep(0.2)  # the other logs may be a moment behind
        return min(filter(wanted, tuple(self.steps)), key=lambda step: step.at)

    def whole(self, since: float, world: int = WORKERS) -> list[Step]:
        """The first step of every rank of a world of this size whose processes began after `since`."""

        def found() -> list[Step] | None:
            of_world = [step for step in tuple(self.steps) if step.begun > since and step.world == world]
            firsts = {step.rank: step for step in reversed(of_world)}
            steady = all(sum(step.rank == rank for step in of_world) >= STEADY for rank in range(world))
            return [firsts[rank] for rank in range(world)] if steady else None

        return wait_for(f"training by {world}", found, START_SECONDS, 0.05)

    def _see(self, at: float, change: str, job: dict[str, Any]) -> None:
        if job["metadata"]["name"] == self.name and not self.appeared:
            self.appeared = at

    def _listen(self, pod: str) -> None:
        if pod.startswith(f"{self.name}-edljob-"):
            threading.Thread(target=self._follow, args=(pod,), daemon=True).start()

    def _follow(self, pod: str) -> None:
        with contextlib.closing(api.connect(self._namespace.name)) as client:
            while not self._over.is_set():
                with contextlib.suppress(*api.CANNOT_REACH):
                    for line in client.log(pod, namespace=self._namespace.name, follow=True):
                        self._take(pod, line)
                    return
                time.sleep(AGAIN_SECONDS)

    def _take(self, pod: str, line: str) -> None:
        if stepped := STEPPED.search(line):
            numbers, times = stepped.groups()[:4], stepped.groups()[4:]
            self.steps.append(Step(pod, *map(int, numbers), *map(float, times)))
        elif started := STARTED.search(line):
            self.started[pod] = float(started[1])
        elif warm := WARM.search(line):
            at = time.mktime(time.strptime(warm[1], "%Y-%m-%d %H:%M:%S")) + int(warm[2]) / 1000
            self.warm.setdefault(pod, at)
