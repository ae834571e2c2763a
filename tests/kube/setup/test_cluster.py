"""The cluster of `hack/cluster` does what a Kubernetes does: the ground the other tests of this folder stand on."""

from __future__ import annotations

import base64
import json
import os
import signal
import ssl
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kube.namespace import (
    COMMAND_DEADLINE,
    KUBECONFIG,
    ROOT,
    STATE,
    KubeNamespace,
    kubectl,
    new_namespace,
    run,
    until,
)

pytestmark = pytest.mark.usefixtures("lab")

CLUSTER = ROOT / "hack/cluster/cluster.py"
NODES = ["resile-node-1", "resile-node-2", "resile-node-3"]
# What "at once" may cost: an answer, not a resolver's 5-second time-out.
AT_ONCE = 1.0

ASK_THE_API = """
import json, ssl, urllib.error, urllib.request
account = "/var/run/secrets/kubernetes.io/serviceaccount"
context = ssl.create_default_context(cafile=f"{account}/ca.crt")
namespace = open(f"{account}/namespace").read()
url = f"https://kubernetes.default.svc/api/v1/namespaces/{namespace}/pods"
asked = urllib.request.Request(url, headers={"Authorization": "Bearer " + open(f"{account}/token").read()})
try:
    print(urllib.request.urlopen(asked, timeout=10, context=context).status)
except urllib.error.HTTPError as error:
    print(error.code, json.load(error)["message"])
"""

LOOK_UP = """
import socket, sys, time
begun = time.monotonic()
try:
    found = sorted({entry[4][0] for entry in socket.getaddrinfo(sys.argv[1], None)})
except socket.gaierror as error:
    found = [f"none {error.errno}"]
try:
    socket.gethostbyaddr("10.78.9.9")
except OSError:
    pass
print(" ".join(found), time.monotonic() - begun)
"""


def cluster(*arguments: str) -> str:
    """Run the cluster's own program and return what it printed."""
    return run(sys.executable, CLUSTER, *arguments, deadline=2 * COMMAND_DEADLINE)


class Lab(KubeNamespace):
    """A namespace for pods that need no operator."""

    def pod(self, name: str, *command: str, image: str = "resile:dev", memory: str = "512Mi", **spec: Any) -> None:
        """Create a pod that runs one command once."""
        container = {
            "name": "main",
            "image": image,
            "imagePullPolicy": "IfNotPresent",
            "command": list(command),
            "resources": {"limits": {"memory": memory}, "requests": {"memory": "16Mi", "cpu": "10m"}},
        }
        rest = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container], **spec}
        self.create(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": rest}
        )

    def address(self, pod: str) -> str:
        """Return a pod's address when it is ready."""

        def ready() -> str:
            status = self.status(pod, "pod")
            conditions = {entry["type"]: entry["status"] for entry in status.get("conditions", [])}
            return str(status["podIP"]) if conditions.get("Ready") == "True" else ""

        return str(until(f"pod {pod}", ready))

    def outcome(self, pod: str) -> dict[str, Any]:
        """Return how a pod's container ended."""

        def ended() -> dict[str, Any] | None:
            states = self.status(pod, "pod").get("containerStatuses", [])
            return states[0]["state"].get("terminated") if states else None

        outcome: dict[str, Any] = until(f"the end of pod {pod}", ended)
        return outcome

    def output(self, pod: str) -> str:
        """Return what a pod that ran to its end with success has written."""
        outcome = self.outcome(pod)
        text = self.kubectl("logs", pod)
        assert outcome["exitCode"] == 0, f"{outcome}: {text}"
        return text

    def serve(self, name: str, node: str = "", **spec: Any) -> str:
        """Run a web server on port 8000 that answers with its pod's name; return its address."""
        script = "mkdir -p /tmp/www && cd /tmp/www && hostname > index.html && exec python -m http.server 8000"
        where = {"nodeName": node} if node else {}
        self.pod(name, "sh", "-c", script, **where, **spec)
        return self.address(name)

    def service(self, name: str, app: str, **spec: Any) -> None:
        """Put a Service before the pods of a name."""
        body = {"selector": {"app": app}, "ports": [{"port": 80, "targetPort": 8000}], **spec}
        self.create({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": body})


@pytest.fixture(scope="module")
def lab(kubernetes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if Path(KUBECONFIG) != STATE / "kubeconfig":
        pytest.skip("the cluster is not the one that `make cluster` brings up")
    with new_namespace("lab", tmp_path_factory.mktemp("lab"), Lab) as made:
        until("the ServiceAccount", lambda: "secrets" in made.get("sa", "default"))
        yield made


def fetch(url: str) -> str:
    """Return a script that prints what a URL answers, trying until the route to it is there."""
    return f"for i in $(seq 50); do wget -q -T 2 -O - {url} && exit 0; sleep 0.2; done; exit 1"


def test_three_nodes_are_ready(lab: Lab) -> None:
    nodes = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    ready = {
        node["metadata"]["name"]
        for node in nodes
        for condition in node["status"]["conditions"]
        if (condition["type"], condition["status"]) == ("Ready", "True")
    }
    assert set(NODES) <= ready


def test_the_kubeconfig_is_for_its_owner_alone() -> None:
    assert Path(KUBECONFIG).stat().st_mode & 0o777 == 0o600


def test_a_pod_runs_and_its_logs_and_exec_work(lab: Lab) -> None:
    lab.pod("talker", "sh", "-c", "echo I am here; exec sleep 600", image="busybox:latest")
    lab.address("talker")
    assert lab.kubectl("logs", "talker") == "I am here\n"
    assert lab.kubectl("exec", "talker", "--", "sh", "-c", "echo from inside; hostname") == "from inside\ntalker\n"


def test_pods_reach_each_other_across_nodes(lab: Lab) -> None:
    address = lab.serve("there", NODES[0])
    for node in NODES:
        lab.pod(f"to-{node}", "sh", "-c", fetch(f"http://{address}:8000/"), nodeName=node)
    assert [lab.output(f"to-{node}") for node in NODES] == ["there\n"] * 3


def test_a_service_has_a_name_and_its_own_pod_reaches_it_too(lab: Lab) -> None:
    lab.serve("web", NODES[1])
    lab.service("web", "web")
    lab.pod("caller", "sh", "-c", fetch("http://web/"), nodeName=NODES[2])
    assert lab.output("caller") == "web\n"
    full = f"http://web.{lab.name}.svc.cluster.local/"
    assert lab.kubectl("exec", "web", "--", "sh", "-c", fetch(full)) == "web\n"


def test_a_headless_service_names_its_pods_and_forgets_them(lab: Lab) -> None:
    lab.service("group", "member", clusterIP="None")
    address = lab.serve("member", hostname="first", subdomain="group")

    def looked_up(name: str) -> str:
        return lab.kubectl("exec", "member", "--", "python", "-c", LOOK_UP, name).split()[0]

    assert until("the name", lambda: looked_up("group") == address)
    assert looked_up("first.group") == address
    lab.kubectl("delete", "service", "group")
    until("no name", lambda: looked_up("group") == "none")


def test_an_unknown_name_is_answered_at_once(lab: Lab) -> None:
    for number, name in enumerate(("nobody", "nobody.example", f"nobody.{lab.name}.svc.cluster.local")):
        lab.pod(f"asker-{number}", "python", "-c", LOOK_UP, name)
        *found, seconds = lab.output(f"asker-{number}").split()
        assert found[0] == "none"
        assert float(seconds) < AT_ONCE


def test_a_pod_over_its_memory_limit_is_oom_killed(lab: Lab) -> None:
    lab.pod("glutton", "python", "-c", "held = b'x' * (1 << 30); print('survived')", memory="64Mi")
    outcome = lab.outcome("glutton")
    assert (outcome["reason"], outcome["exitCode"]) == ("OOMKilled", 137)


def test_a_service_account_is_refused_until_it_is_given_the_right(lab: Lab) -> None:
    lab.kubectl("create", "serviceaccount", "reader")
    until("its token", lambda: "secrets" in lab.kubectl("get", "sa", "reader", "-o", "json"))
    lab.pod("refused", "python", "-c", ASK_THE_API, serviceAccountName="reader")
    assert lab.output("refused").startswith('403 pods is forbidden: User "system:serviceaccount:')
    lab.kubectl("create", "role", "reader", "--verb=list", "--resource=pods")
    lab.kubectl("create", "rolebinding", "reader", "--role=reader", f"--serviceaccount={lab.name}:reader")
    lab.pod("allowed", "python", "-c", ASK_THE_API, serviceAccountName="reader")
    assert lab.output("allowed") == "200\n"


def test_the_api_refuses_whoever_has_no_name() -> None:
    config = json.loads(Path(KUBECONFIG).read_text())["clusters"][0]["cluster"]
    authority = base64.b64decode(config["certificate-authority-data"]).decode()
    context = ssl.create_default_context(cadata=authority)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{config['server']}/api/v1/pods", timeout=10, context=context)
    with refused.value as answer:
        assert answer.code == 403
        assert "system:anonymous" in answer.read().decode()


def test_a_pod_sees_the_checkout_and_cannot_write_to_it(lab: Lab) -> None:
    here = ROOT / "src/resile/__init__.py"
    lab.pod("importer", "python", "-c", "import os, resile; print(os.getuid(), resile.__file__)")
    assert lab.output("importer") == f"65532 {here}\n"
    lab.pod("writer", "sh", "-c", f"exec 2>&1; id -u; echo >> {here} || true", image="busybox:latest")
    text = lab.output("writer")
    assert text.startswith("0\n")
    assert "Read-only file system" in text


def test_an_image_of_any_name_runs_the_checkout(lab: Lab) -> None:
    name = f"example/training-{uuid.uuid4().hex[:8]}:v1"
    cluster("image", name)
    lab.pod("any-name", "resile", "--help", image=name)
    assert "usage: resile" in lab.output("any-name")


def test_an_image_nobody_has_is_refused_without_a_long_wait(lab: Lab) -> None:
    lab.pod("no-image", "true", image="example/nobody-has-this:v1")

    def waiting() -> bool:
        states = lab.status("no-image", "pod").get("containerStatuses", [])
        return bool(states) and states[0]["state"].get("waiting", {}).get("reason") in (
            "ErrImagePull",
            "ImagePullBackOff",
        )

    until("the refusal", waiting)


@pytest.mark.alone
def test_up_repairs_what_died_and_leaves_the_rest_alone(lab: Lab) -> None:
    def pids() -> dict[str, int]:
        return {path.stem: json.loads(path.read_text())["pid"] for path in (STATE / "processes").glob("*.json")}

    before = pids()
    assert "everything was up already" in cluster("up")
    assert pids() == before
    broken = {"kube-scheduler", "dns-watcher", "kubelet-3", "containerd-2"}
    for name in broken:
        os.kill(before[name], signal.SIGKILL)
    cluster("up")
    after = pids()
    assert {name for name in after if after[name] != before[name]} == broken
    lab.pod("after-repair", "echo", "scheduled", nodeSelector={"kubernetes.io/hostname": NODES[2]})
    assert lab.output("after-repair") == "scheduled\n"


@pytest.mark.alone
def test_custom_resources_can_be_defined_and_written(lab: Lab) -> None:
    """The last of all, because the garbage collector stands still for a minute or two after a kind was removed."""
    group = f"test-{uuid.uuid4().hex[:6]}.resile.example"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": "things", "singular": "thing", "kind": "Thing"}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"things.{group}"},
        "spec": {"group": group, "names": names, "scope": "Namespaced", "versions": [version]},
    }
    kubectl("create", "-f", "-", stdin=json.dumps(definition))
    try:
        kubectl("wait", "--for=condition=Established", f"crd/things.{group}", "--timeout=30s")
        thing = {"apiVersion": f"{group}/v1", "kind": "Thing", "metadata": {"name": "one"}, "spec": {"size": 1}}
        until("the kind", lambda: "one" in lab.kubectl("apply", "-f", "-", stdin=json.dumps(thing), check=False))
        lab.kubectl("patch", f"things.{group}", "one", "--type=merge", "-p", '{"spec":{"size":2}}')
        assert json.loads(lab.kubectl("get", f"things.{group}", "one", "-o", "json"))["spec"] == {"size": 2}
    finally:
        kubectl("delete", "crd", f"things.{group}")
