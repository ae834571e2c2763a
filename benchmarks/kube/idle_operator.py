"""The operator at rest: two hundred jobs that run, whose masters report their progress as real ones do.

Two hundred masters would need a machine of their own. So their pods are bound to Node objects without kubelets, and
what kubelets and masters write to the API server is written here, at the intervals of the real ones.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from typing import Any

from lightkube import Client
from lightkube.types import PatchType

from benchmarks.harness import Row, cpu_seconds, memory_mb, say, wait_for
from benchmarks.kube import api
from benchmarks.kube.namespace import IDLE, IMAGE, BenchNamespace, elastic_job
from benchmarks.kube.pod_timeline import Pods, api_only
from resile.api.kinds.elasticjob.names import master_name
from resile.api.timestamps import stamp
from resile.master.kubernetes.status_writer import STEPS_SECONDS

JOBS = 200
CPU_BAR = 5.0
MEMORY_BAR_MB = 120.0
MASTERS_SECONDS = 180.0


def run(quick: bool) -> list[Row]:
    jobs, windows, seconds = (20, 2, 3.0) if quick else (JOBS, 3, 15.0)
    names = [f"rest-{index}" for index in range(jobs)]
    with api_only("rest", jobs) as (namespace, seen):
        took = _start(namespace, seen, names)
        with contextlib.closing(Reports(namespace, names)) as reports:
            say(f"rest: {jobs} jobs report every {STEPS_SECONDS:g} s; measuring {windows} times {seconds:g} s")
            pid = namespace.operator.pid
            shares, sizes, sent = [], [], reports.sent
            begun = time.monotonic()
            for _ in range(windows):
                before, start = cpu_seconds(pid), time.monotonic()
                time.sleep(seconds)
                shares.append(100 * (cpu_seconds(pid) - before) / (time.monotonic() - start))
                sizes.append(memory_mb(pid, "VmRSS"))
            rate = (reports.sent - sent) / (time.monotonic() - begun)
            most = memory_mb(pid, "VmHWM")
    return [
        Row(
            measure=f"{jobs} jobs applied at once, to the last master's pod",
            value=took,
            unit="s",
        ),
        Row(
            measure=f"operator at rest with {jobs} jobs: share of a core",
            value=max(shares),
            median=statistics.median(shares),
            unit="%",
            bar=CPU_BAR,
            note=f"{windows} times {seconds:g} s, while {rate:.0f} reports a second come in",
        ),
        Row(
            measure="… its memory",
            value=max(sizes),
            median=statistics.median(sizes),
            unit="MB",
            bar=MEMORY_BAR_MB,
            note=f"{most:.0f} MB at most, while the jobs were started",
        ),
    ]


def _start(namespace: BenchNamespace, seen: Pods, names: list[str]) -> float:
    """Apply all jobs at once and make their masters run; the seconds to the last master's pod."""
    master = {"template": {"spec": namespace.on_api_only_nodes()}}
    begun = time.time()
    namespace.apply(*(elastic_job(name, IDLE, 2, **{"dlrover-master": master}) for name in names))
    masters = [master_name(name) for name in names]
    wait_for("the masters", lambda: all(name in seen.created for name in masters), MASTERS_SECONDS, 0.05)
    took = max(seen.created[name] for name in masters) - begun
    say(f"rest: {len(names)} jobs have their masters after {took:.1f} s")
    now = stamp(time.time())
    for name in masters:
        state = {"name": "main", "ready": True, "state": {"running": {"startedAt": now}}, "restartCount": 0}
        container = {**state, "image": IMAGE, "imageID": IMAGE, "started": True}
        status = {"phase": "Running", "startTime": now, "containerStatuses": [container]}
        namespace.client.patch(
            api.PODS.Status, name, {"status": status}, patch_type=PatchType.MERGE, namespace=namespace.name
        )
    return took


class Reports:
    """Plays what masters write: every job's progress, once in `STEPS_SECONDS`, evenly spread."""

    def __init__(self, namespace: BenchNamespace, names: list[str]) -> None:
        self._namespace = namespace
        self._names = names
        self._client: Client = api.connect(namespace.name)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)
        self.sent = 0
        for name in names:
            self._patch(name, _running(0))
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._over.set()
        self._thread.join()
        self._client.close()

    def _report(self) -> None:
        number, begun = 0, time.monotonic()
        every = STEPS_SECONDS / len(self._names)
        while not self._over.wait(max(0.0, begun + number * every - time.monotonic())):
            with contextlib.suppress(*api.CANNOT_REACH):
                self._patch(self._names[number % len(self._names)], _progress(number))
            number += 1

    def _patch(self, name: str, status: dict[str, Any]) -> None:
        self._client.patch(
            api.JOBS.Status, name, {"status": status}, patch_type=PatchType.MERGE, namespace=self._namespace.name
        )
        self.sent += 1


def _progress(step: int) -> dict[str, Any]:
    return {"progress": {"step": step, "speed": 20.0 + step % 7 / 10}, "goodput": 0.95 + step % 5 / 100}


def _running(step: int) -> dict[str, Any]:
    """What a master writes once its nodes train."""
    counts = {"initial": 0, "pending": 0, "active": 2, "succeeded": 0, "failed": 0}
    return {
        "phase": "Running",
        "reason": "JobRunning",
        "status": {"replicaStatuses": {"worker": counts}, "startTime": stamp(time.time())},
        **_progress(step),
    }
