"""What happens to the pods of a namespace and what they say, each with the moment it was seen.

Watches and logs come on threads; what they have seen is only ever added to. Times are those of `time.time`: training
processes stamp their lines with the same clock where the nodes are on this machine, as those of `make cluster` are.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from lightkube.generic_resource import GenericNamespacedResource

from benchmarks.kube import api
from benchmarks.kube.namespace import PODS_PER_NODE, BenchNamespace

AGAIN_SECONDS = 0.1
"""Between two attempts to open a stream that ended."""


def watch(
    namespace: BenchNamespace,
    kind: type[GenericNamespacedResource],
    over: threading.Event,
    take: Callable[[float, str, dict[str, Any]], None],
) -> None:
    """Have `take` called, on a thread, with every change of a kind and its moment, until `over` is set."""

    def follow() -> None:
        version = None
        with contextlib.closing(api.connect(namespace.name)) as client:
            while not over.is_set():
                with contextlib.suppress(*api.CANNOT_REACH):
                    for change, item in client.watch(kind, namespace=namespace.name, resource_version=version):
                        if over.is_set():
                            return
                        version = item["metadata"]["resourceVersion"]
                        take(time.time(), change, item)
                time.sleep(AGAIN_SECONDS)

    threading.Thread(target=follow, daemon=True).start()


class Pods:
    """Every pod of a namespace since this was entered, by name."""

    def __init__(self, namespace: BenchNamespace, on_running: Callable[[str], None] = lambda name: None) -> None:
        """Nothing is seen before it is entered; `on_running` is called once for every pod that runs."""
        self._namespace = namespace
        self._on_running = on_running
        self._over = threading.Event()
        self._running: set[str] = set()
        self.created: dict[str, float] = {}
        """When each was first seen."""
        self.newest: dict[str, dict[str, Any]] = {}
        """Each as it was seen last; not those that are gone."""

    def __enter__(self) -> Self:
        watch(self._namespace, api.PODS, self._over, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def workers(self, job: str) -> list[str]:
        """The job's nodes that are not on their way out."""
        return [
            name
            for name, pod in list(self.newest.items())
            if "deletionTimestamp" not in pod["metadata"] and name.startswith(f"{job}-edljob-")
        ]

    def running(self) -> list[str]:
        """Pods with a container that runs."""
        return [
            name
            for name, pod in list(self.newest.items())
            if any("running" in each["state"] for each in pod["status"].get("containerStatuses") or ())
        ]

    def _take(self, at: float, change: str, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        if change == "DELETED":
            self.newest.pop(name, None)
            return
        self.created.setdefault(name, at)
        self.newest[name] = pod
        if name not in self._running and pod.get("status", {}).get("phase") == "Running":
            self._running.add(name)
            self._on_running(name)


@contextlib.contextmanager
def api_only(purpose: str, pods: int) -> Iterator[tuple[BenchNamespace, Pods]]:
    """A namespace with Node objects without kubelets for so many pods, and sight of them."""
    with BenchNamespace(purpose) as namespace:
        namespace.api_only_nodes(pods // PODS_PER_NODE + 1)
        with Pods(namespace) as seen:
            yield namespace, seen
