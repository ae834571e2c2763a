"""What every test on a real cluster needs: kubectl, waits with a deadline, a namespace with an operator of its own.

An operator started here serves only its namespace, so tests can be run side by side, kill theirs, and disturb no other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
from benchmarks.kube import api
from lightkube import ApiError, Client, KubeConfig
from lightkube.generic_resource import GenericNamespacedResource, create_namespaced_resource
from lightkube.models.authentication_v1 import TokenRequestSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Namespace, NodeStatus, Pod, ServiceAccountToken
from lightkube.types import PatchType

from tests.support.paths import ROOT

STATE = Path(os.environ.get("RESILE_CLUSTER_STATE") or "/var/lib/resile-cluster")
KUBECONFIG = os.environ.get("KUBECONFIG") or str(STATE / "kubeconfig")
IMAGE = os.environ.get("RESILE_IMAGE") or "resile:dev"
DEADLINE = 60.0
COMMAND_DEADLINE = 90.0
PAUSE = 0.15
"""Seconds between two looks at the cluster. After one that took long, such as a command, it is three times as long:
those that are waited for have the cores first."""
LONGEST_PAUSE = 1.0
GROUP = "elastic.iml.github.io/v1alpha1"
JOBS = "elasticjobs.elastic.iml.github.io"
T = TypeVar("T")
WAITED_FOR = {
    "pod": api.PODS,
    "elasticjob": api.JOBS,
    "scaleplan": create_namespaced_resource(*GROUP.split("/"), "ScalePlan", "scaleplans"),
}
"""What tests wait for, many times a second: a kubectl for each look would take the cores that the cluster needs."""


def environment() -> dict[str, str]:
    """What a command needs to find the cluster."""
    return {**os.environ, "KUBECONFIG": KUBECONFIG}


def run(*words: str | Path, stdin: str | None = None, check: bool = True, deadline: float = COMMAND_DEADLINE) -> str:
    """Run a command at the root of the checkout and return what it printed; the test fails with its complaint.

    Without `check` the complaint is a part of what is returned.
    """
    done = subprocess.run(
        words, input=stdin, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=deadline, check=False
    )
    if check and done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, words))}: {done.stdout}{done.stderr}".strip())
    return done.stdout if check else done.stdout + done.stderr


def kubectl(*words: str, stdin: str | None = None, check: bool = True, deadline: float = COMMAND_DEADLINE) -> str:
    return run("kubectl", *words, stdin=stdin, check=check, deadline=deadline)


def patch_node(node: str, *operations: Mapping[str, str]) -> None:
    """Change the status of a Kubernetes node by JSON patches, which no old kubectl can."""
    with _client() as client:
        client.patch(NodeStatus, node, [dict(operation) for operation in operations], patch_type=PatchType.JSON)


def token_of(account: str, namespace: str) -> str:
    """A token of a ServiceAccount, as its pods have one; old kubectl cannot ask for it."""
    with _client() as client:
        wanted = ServiceAccountToken(metadata=ObjectMeta(), spec=TokenRequestSpec(audiences=[]))
        given = client.create(wanted, account, namespace=namespace)
    assert given.status is not None
    return str(given.status.token)


@contextmanager
def _client() -> Iterator[Client]:
    client = Client(config=KubeConfig.from_file(KUBECONFIG))
    try:
        yield client
    finally:
        client.close()


def in_the_way() -> str:
    """Why tests must not be run on this cluster, in one sentence; nothing if they may.

    They deploy an operator that serves every namespace, and remove it, all jobs of `dlrover` and the PriorityClasses
    afterwards. The cluster of hack/cluster is theirs; on another one that may be a user's work.
    """
    if _is_ours():
        return ""
    found = kubectl("get", "deployments", "-A", "--field-selector=metadata.name=resile-operator", "-o", "name")
    if found.strip():
        return f"{KUBECONFIG}: an operator of resile is deployed there, which the tests would remove; they did nothing"
    if kubectl("get", "crd", JOBS, "--ignore-not-found", "-o", "name").strip():
        listed = json.loads(kubectl("get", JOBS, "-A", "-o", "json"))["items"]
        names = [f"{one['metadata']['namespace']}/{one['metadata']['name']}" for one in listed]
        if names:
            return f"{KUBECONFIG}: there are ElasticJobs ({', '.join(names[:3])}), which the tests would disturb"
    return ""


def _is_ours() -> bool:
    """Whether the cluster is the one that hack/cluster brings up."""
    ours = STATE / "kubeconfig"
    return ours.exists() and _server(KUBECONFIG) == _server(ours)


def _server(path: str | Path) -> str:
    return str(KubeConfig.from_file(path).get().cluster.server)


def until(
    what: str,
    look: Callable[[], Any],
    deadline: float = DEADLINE,
    instead: Callable[[], str] | None = None,
    pause: float = PAUSE,
) -> Any:
    """Return the first true answer of `look`, which is asked after pauses; a failure shows what there is `instead`."""
    end = (began := time.monotonic()) + deadline
    while not (answer := look()):
        now = time.monotonic()
        if now > end:
            pytest.fail(
                f"{what} did not come within {deadline:.0f} s" + (f"; instead:\n{instead()}" if instead else "")
            )
        time.sleep(min(max(pause, 3 * (now - began)), LONGEST_PAUSE))
        began = time.monotonic()
    return answer


def measured(what: str, seconds: float) -> None:
    """Show a figure; `pytest -rP` prints it."""
    print(f"{what}: {seconds:.2f}")


def master(job: str) -> str:
    return f"elasticjob-{job}-dlrover-master"


def job(name: str, command: str, replicas: int = 2, **container: Any) -> dict[str, Any]:
    """A job of workers that run a line of shell; `container` adds to their container."""
    main = {"name": "main", "image": IMAGE, "command": ["/bin/bash", "-c", command], **container}
    worker = {"replicas": replicas, "restartCount": 1, "template": {"spec": {"containers": [main]}}}
    return {
        "apiVersion": GROUP,
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {"distributionStrategy": "AllreduceStrategy", "replicaSpecs": {"worker": worker}},
    }


def plan(name: str, owner: str, **spec: Any) -> dict[str, Any]:
    """A manual ScalePlan for a job."""
    return {
        "apiVersion": GROUP,
        "kind": "ScalePlan",
        "metadata": {"name": name, "labels": {"elasticjob-name": owner, "scale-type": "manual"}},
        "spec": {"ownerJob": owner, **spec},
    }


def training(steps: int) -> str:
    """The command of a worker that takes so many quick steps, without torch."""
    return f"dlrover-run --nnodes=1:$NODE_NUM --nproc_per_node=1 {ROOT}/examples/hello.py --steps {steps}"


class KubeNamespace:
    """A namespace, the operators that serve it, and what is asked of it."""

    def __init__(self, name: str, logs: Path) -> None:
        self.name = name
        self._logs = logs
        self._started: list[subprocess.Popen[bytes]] = []
        patience = httpx2.Timeout(COMMAND_DEADLINE)
        self._api = Client(config=KubeConfig.from_file(KUBECONFIG), namespace=name, timeout=patience)

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True) -> str:
        return kubectl("-n", self.name, *words, stdin=stdin, check=check)

    def apply(self, *documents: Mapping[str, Any]) -> None:
        self._send("apply", documents)

    def create(self, *documents: Mapping[str, Any]) -> None:
        self._send("create", documents)

    def _send(self, verb: str, documents: Sequence[Mapping[str, Any]]) -> None:
        """The API server alone judges: kubectl would fetch all its schemas each time, and read them, to judge first."""
        listed = {"apiVersion": "v1", "kind": "List", "items": documents}
        self.kubectl(verb, "--validate=false", "-f", "-", stdin=json.dumps(listed))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """An object, or nothing."""
        if kind in WAITED_FOR:
            return self._seen(WAITED_FOR[kind], name)
        text = self.kubectl("get", kind, name, "-o", "json", "--ignore-not-found")
        return dict(json.loads(text)) if text.strip() else {}

    def _seen(self, kind: type[GenericNamespacedResource], name: str) -> dict[str, Any]:
        try:
            return dict(_asked(lambda: self._api.get(kind, name)))
        except ApiError as error:
            if error.status.code == 404 and error.status.details and error.status.details.name:
                return {}
            raise

    def uid(self, kind: str, name: str) -> str:
        return str(self.get(kind, name).get("metadata", {}).get("uid", ""))

    def status(self, name: str, kind: str = "elasticjob") -> dict[str, Any]:
        """The status of a job (or of another kind), or nothing."""
        return dict(self.get(kind, name).get("status") or {})

    def progress(self, name: str) -> dict[str, Any]:
        return dict(self.status(name).get("progress") or {})

    def pods(self, name: str, role: str = "worker") -> dict[str, dict[str, Any]]:
        """The job's nodes that are not on their way out, by name."""
        labels = {"elasticjob-name": name, "replica-type": role}
        items = _asked(lambda: [dict(pod) for pod in self._api.list(api.PODS, labels=labels)])
        return {i["metadata"]["name"]: i for i in items if "deletionTimestamp" not in i["metadata"]}

    def logs(self, pod: str) -> str:
        """Everything a pod has written so far; nothing while it has not begun."""
        return self.kubectl("logs", pod, "--tail=-1", check=False)

    def events(self, name: str) -> str:
        return self.kubectl("get", "events", "--field-selector", f"involvedObject.name={name}")

    def until(self, what: str, look: Callable[[], Any], deadline: float = DEADLINE) -> Any:
        return until(what, look, deadline)

    def until_status(self, name: str, deadline: float = DEADLINE, **wanted: Any) -> dict[str, Any]:
        """The job's status, once these fields of it are as wanted."""

        def holds() -> dict[str, Any] | None:
            status = self.status(name)
            return status if all(status.get(key) == value for key, value in wanted.items()) else None

        return dict(until(f"{name} with {wanted}", holds, deadline))

    def until_members(self, name: str, number: int, deadline: float = DEADLINE) -> None:
        """Wait for a round of so many."""
        until(f"a round of {number}", lambda: self.progress(name).get("members") == number, deadline)

    def operator(self, *flags: str, port: int = 0) -> subprocess.Popen[bytes]:
        """Start an operator that serves this namespace alone."""
        words = ["operator", "--namespace", self.name, "--host", "127.0.0.1", f"--health-port={port}"]
        with (self._logs / f"operator-{len(self._started)}.log").open("wb") as log:
            started = subprocess.Popen(
                [Path(sys.executable).with_name("resile"), *words, f"--master-image={IMAGE}", *flags],
                env=environment(),
                stdout=log,
                stderr=log,
            )
        self._started.append(started)
        return started

    def log(self, number: int = 0) -> str:
        """What the operator of this number has written."""
        return (self._logs / f"operator-{number}.log").read_text()

    def stop_all(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait(10)

    def close(self) -> None:
        """Let go of operators and connections."""
        self.stop_all()
        self._api.close()

    def running(self, name: str) -> str:
        """The uid of the job's master once it runs."""

        def seen() -> str:
            pod = self.get("pod", master(name))
            return str(pod["metadata"]["uid"]) if pod.get("status", {}).get("phase") == "Running" else ""

        return str(until(f"the master of {name}", seen))

    def replaced(self, name: str, old: str, deadline: float = DEADLINE) -> float:
        """Seconds until the job's master is another pod than `old`."""
        begun = time.monotonic()
        until(f"another master of {name}", lambda: self.uid("pod", master(name)) not in ("", old), deadline)
        return time.monotonic() - begun


def _asked(ask: Callable[[], T]) -> T:
    """An answer of the API server, which may have been started anew since it was asked the last time."""
    try:
        return ask()
    except httpx2.TransportError:
        return ask()


NamespaceT = TypeVar("NamespaceT", bound=KubeNamespace)


@contextmanager
def new_namespace(prefix: str, logs: Path, kind: type[NamespaceT]) -> Iterator[NamespaceT]:
    """A namespace that has no operators, jobs and pods afterwards.

    On another cluster than that of hack/cluster it is deleted with all that is in it. There the rest of it stays until
    `make cluster-down`: to empty a namespace keeps the API server busy for longer than some tests take.
    """
    made = kind(f"{prefix}-{uuid.uuid4().hex[:8]}", logs)
    with _client() as client:
        client.create(Namespace(metadata=ObjectMeta(name=made.name)))
    try:
        yield made
    finally:
        made.close()
        with _client() as client:
            if _is_ours():
                client.deletecollection(api.JOBS, namespace=made.name)
            else:
                client.delete(Namespace, made.name)  # it is gone some time later
            # Pods of a test that is over would train on until their grace is over.
            client.deletecollection(Pod, namespace=made.name, grace_period=1)
