"""Five hundred pods of one job on Node objects without kubelets: what the master and the API server can do.

The master is real and runs on a real node; the pods are bound and never start. All decisions are done when every pod is
there and the job's status counts every one of them.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.harness import Row, say, wait_for
from benchmarks.kube import api, dlrover_figures
from benchmarks.kube.namespace import IDLE, BenchNamespace, elastic_job
from benchmarks.kube.pod_timeline import Pods, api_only

PODS = 500
CREATED_BAR_SECONDS = 15.0
DELETED = 30
RECREATED_BAR_SECONDS = 2.0
JOB = "crowd"


def run(quick: bool) -> list[Row]:
    pods, deleted = (50, 5) if quick else (PODS, DELETED)
    created: list[float] = []
    recreated: list[float] = []
    for _ in range(1 if quick else 2):
        with api_only("crowd", pods) as (namespace, seen):
            created.append(_create(namespace, seen, pods))
            recreated += [_recreate(namespace, seen, deleted) for _ in range(1 if quick else 3)]
    return [
        Row(
            measure=f"{pods} pods of one job created and counted",
            value=max(created),
            median=statistics.median(created),
            unit="s",
            bar=CREATED_BAR_SECONDS,
            note=f"of {len(created)}, from the start of kubectl apply, the start of the master's pod included",
        ),
        Row(
            measure=f"{deleted} of them deleted at once, to all recreated",
            value=max(recreated),
            median=statistics.median(recreated),
            unit="s",
            bar=RECREATED_BAR_SECONDS,
            peer=dlrover_figures.RECREATED,
            note=f"of {len(recreated)}, from the first of as many requests sent at once",
        ),
    ]


def _create(namespace: BenchNamespace, seen: Pods, pods: int) -> float:
    begun = time.time()
    namespace.apply(elastic_job(JOB, {**IDLE, **namespace.on_api_only_nodes()}, pods))
    wait_for(f"{pods} pods", lambda: len(seen.workers(JOB)) >= pods, every=0.02)
    last = max(seen.created[name] for name in seen.workers(JOB))

    def counted() -> bool:
        replicas = (namespace.status(JOB).get("status") or {}).get("replicaStatuses") or {}
        return (replicas.get("worker") or {}).get("pending") == pods

    wait_for("the count of the pods", counted, every=0.05)
    took = time.time() - begun
    say(f"crowd: {pods} pods after {last - begun:.2f} s, counted in the status after {took:.2f} s")
    return took


def _recreate(namespace: BenchNamespace, seen: Pods, number: int) -> float:
    before = seen.workers(JOB)
    begun = time.time()
    with ThreadPoolExecutor(number) as pool:  # not kubectl, which sends ten requests and then five a second
        pool.map(lambda name: namespace.client.delete(api.PODS, name, namespace=namespace.name), before[:number])

    def new() -> list[float] | None:
        found = [at for at in tuple(seen.created.values()) if at > begun]
        return found if len(found) >= number else None

    took = max(wait_for(f"{number} new pods", new, every=0.01)) - begun
    say(f"crowd: {number} deleted pods were all recreated after {took:.2f} s")
    wait_for("their count", lambda: len(seen.workers(JOB)) == len(before))
    return took
