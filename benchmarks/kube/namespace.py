"""A namespace of the cluster with an operator of its own, and what a benchmark adds to the cluster for a while.

Leaving a `BenchNamespace` removes all of it by force, whatever happened: pods on Node objects without kubelets would
otherwise stay for ever.
"""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from lightkube.resources.core_v1 import Node, Pod
from lightkube.types import PatchType

from benchmarks.harness import BIN, GaveUp, Workplace, say, wait_for
from benchmarks.kube import api
from resile.api.kinds.elasticjob.kind import ELASTIC_JOB
from resile.api.timestamps import stamp

ROOT = Path(__file__).resolve().parents[2]
IMAGE = os.environ.get("RESILE_IMAGE") or "resile:dev"
"""Of masters and workers."""
COMMAND_SECONDS = 120.0
API_ONLY = "resile.dev/bench"
"""Label and taint of Node objects without kubelets; its value is the namespace they are for."""
IDLE = {"containers": [{"name": "main", "image": IMAGE, "command": ["true"]}]}
"""The spec of a pod that is only there to be made."""
PODS_PER_NODE = 100
NODE_CAPACITY = {"cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "1Ti"}
BEAT_SECONDS = 10.0
"""Between two signs of life of a Node object, a kubelet's own interval."""


class BenchNamespace:
    """A namespace and an operator that serves it alone. Enter it to make both, leave it to remove all."""

    def __init__(self, purpose: str) -> None:
        self.name = f"bench-{purpose}-{uuid.uuid4().hex[:6]}"
        try:
            self.client = api.connect(self.name)
        except api.CANNOT_REACH as error:
            raise GaveUp(f"there is no cluster: {error}; run `make cluster` or set KUBECONFIG") from None
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with self._cleanup:
            self._cleanup.callback(self.client.close)
            place = self._cleanup.enter_context(Workplace())
            _ready()
            kubectl("create", "namespace", self.name)
            self._cleanup.callback(self._remove)
            words = ["operator", "--namespace", self.name, "--no-leader-elect", "--health-port=0"]
            self.operator = place.start([BIN / "resile", *words, "--master-image", IMAGE])
            log = place.path / "output.log"
            wait_for("the operator's start", lambda: "watching" in log.read_text())
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(self, *trouble: Any) -> None:
        with _undisturbed():
            self._cleanup.__exit__(*trouble)

    def kubectl(self, *words: str, stdin: str = "") -> str:
        """Run kubectl in this namespace."""
        return kubectl("-n", self.name, *words, stdin=stdin)

    def apply(self, *documents: dict[str, Any]) -> None:
        """What a user does."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))

    def delete_pod(self, pod: str) -> float:
        """What a user does to a worker; when it began."""
        begun = time.time()
        self.kubectl("delete", "pod", pod, "--wait=false")
        return begun

    def status(self, job: str) -> dict[str, Any]:
        """The status of a job as it is now."""
        found: dict[str, Any] = self.client.get(api.JOBS, job, namespace=self.name)
        return found.get("status") or {}

    def api_only_nodes(self, number: int) -> None:
        """Add Node objects without kubelets, where only pods that ask for them are put; removed with this namespace."""
        names = [f"{self.name}-{index}" for index in range(number)]
        taint = {"key": API_ONLY, "value": self.name, "effect": "NoSchedule"}
        over = threading.Event()
        beat = threading.Thread(target=self._keep_ready, args=(names, over), daemon=True)

        def remove() -> None:
            over.set()
            beat.join()
            try:
                self.remove_jobs()
            finally:
                kubectl("delete", "node", "--ignore-not-found", "--wait=false", *names)

        self._cleanup.callback(remove)
        for name in names:
            metadata = {"name": name, "labels": {API_ONLY: self.name}}
            node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": [taint]}}
            kubectl("create", "-f", "-", stdin=json.dumps(node))
            self._set_ready(name)
        beat.start()

    def on_api_only_nodes(self) -> dict[str, Any]:
        """The part of a pod's spec that asks for them."""
        toleration = {"key": API_ONLY, "operator": "Equal", "value": self.name, "effect": "NoSchedule"}
        return {"nodeSelector": {API_ONLY: self.name}, "tolerations": [toleration]}

    def _keep_ready(self, names: Sequence[str], over: threading.Event) -> None:
        while not over.wait(BEAT_SECONDS):
            for name in names:
                with contextlib.suppress(*api.CANNOT_REACH):
                    self._set_ready(name)

    def _set_ready(self, name: str) -> None:
        now = stamp(time.time())
        ready = {"type": "Ready", "status": "True", "reason": "Bench", "lastHeartbeatTime": now}
        status = {"capacity": NODE_CAPACITY, "allocatable": NODE_CAPACITY, "conditions": [ready]}
        self.client.patch(Node.Status, name, {"status": status}, patch_type=PatchType.STRATEGIC)

    @contextlib.contextmanager
    def room(self, resource: str, each: int) -> Iterator[FreeRoom]:
        """A resource that every real node offers for a while: pods that ask for it find room only while it is there."""
        nodes = [
            item["metadata"]["name"]
            for item in json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
            if API_ONLY not in item["metadata"].get("labels", {})
        ]
        made = FreeRoom(self, resource, nodes)
        try:
            made.offer(each)
            yield made
        finally:
            with _undisturbed():
                made.offer(None)

    def remove_jobs(self) -> None:
        """All jobs and pods of this namespace, by force: no kubelet removes what is on these Node objects."""

        def gone() -> bool:
            # Jobs first, or masters would replace the pods; not by kubectl, which would take 40 s for 200 of them. The
            # server answers only when all are deleted, which for 200 takes longer than one call may: so ask again.
            with contextlib.suppress(*api.CANNOT_REACH):
                self.client.deletecollection(api.JOBS, namespace=self.name)
                self.client.deletecollection(Pod, namespace=self.name, grace_period=0)
                return not any(
                    True for kind in (api.JOBS, api.PODS) for _ in self.client.list(kind, namespace=self.name)
                )
            return False

        wait_for("the removal of jobs and pods", gone, every=0.2)

    def _remove(self) -> None:
        say(f"removing {self.name}")
        try:
            self.remove_jobs()
        finally:
            kubectl("delete", "namespace", self.name, "--wait=false")


class FreeRoom:
    """How much there is of a resource on the real nodes."""

    def __init__(self, namespace: BenchNamespace, resource: str, nodes: Sequence[str]) -> None:
        self._namespace = namespace
        self._resource = resource
        self._nodes = nodes

    def offer(self, each: int | None) -> None:
        """So much on every node; None for none of the kind."""
        much = {self._resource: None if each is None else str(each)}
        for node in self._nodes:
            status = {"status": {"capacity": much, "allocatable": much}}
            self._namespace.client.patch(Node.Status, node, status, patch_type=PatchType.MERGE)


def elastic_job(name: str, worker: dict[str, Any], replicas: int, **roles: Any) -> dict[str, Any]:
    """A job of workers with this pod spec."""
    role = {"replicas": replicas, "restartCount": 100, "template": {"spec": worker}}
    return {
        "apiVersion": ELASTIC_JOB.definition.api_version,
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {"distributionStrategy": "AllreduceStrategy", "replicaSpecs": {"worker": role, **roles}},
    }


def kubectl(*words: str, stdin: str = "") -> str:
    """Run kubectl.

    Raises:
        GaveUp: it did not succeed.
    """
    try:
        done = subprocess.run(
            ["kubectl", *words], input=stdin, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except FileNotFoundError:
        raise GaveUp("there is no kubectl; `make cluster` brings one") from None
    except subprocess.TimeoutExpired:
        raise GaveUp(f"kubectl {' '.join(words)} took more than {COMMAND_SECONDS:g} s") from None
    if done.returncode != 0:
        raise GaveUp(f"kubectl {' '.join(words[:6])}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait meanwhile: what is being removed would stay for ever."""
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if asked:
            signal.raise_signal(asked[0])


def _ready() -> None:
    """The definitions are there, and no other operator serves our jobs."""
    deployed = kubectl("get", "deployments", "-A", "--field-selector=metadata.name=resile-operator", "-o", "name")
    if deployed.strip():
        raise GaveUp("an operator is deployed and would serve the same jobs; remove it first (make undeploy)")
    compileall.compile_dir(ROOT / "src", quiet=2)  # as in an image: pods that run this checkout cannot write to it
    kubectl("apply", "-k", str(ROOT / "config/crd"))
    kubectl("wait", "--for=condition=Established", "crd/elasticjobs.elastic.iml.github.io", "--timeout=30s")
