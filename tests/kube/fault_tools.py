"""Tools that break parts of the cluster, and put them right again whatever becomes of the test."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tests.kube.namespace import ROOT, STATE, kubectl, run, until

CLUSTER = ROOT / "hack/cluster/cluster.py"
NODES = ("resile-node-1", "resile-node-2", "resile-node-3")
NOTICED = 90.0
"""The test cluster gives up on a silent machine after 20 s, and on its pods 10 s later."""


def restart(part: str) -> None:
    """Kill a part of the cluster and start it again; return when it does its work."""
    run(CLUSTER, "restart", part)


@contextmanager
def frozen(machine: str) -> Iterator[None]:
    """A machine that stands still, with all that runs on it."""
    try:
        run(CLUSTER, "freeze", machine)
        yield
    finally:
        run(CLUSTER, "thaw", machine)
        until_ready(machine)


@contextmanager
def without_kubelet(machine: str) -> Iterator[None]:
    """A machine whose kubelet is gone, while its containers run on."""
    kubelet = f"kubelet-{machine.rpartition('-')[2]}"
    pid = int(json.loads((STATE / "processes" / f"{kubelet}.json").read_text())["pid"])
    try:
        os.kill(pid, signal.SIGKILL)
        yield
    finally:
        restart(kubelet)
        until_ready(machine)


def until_given_up(machine: str) -> None:
    """Wait until Kubernetes knows that a machine is away, and have its pods evicted.

    The mark for that is set for one machine every ten seconds, and others may come first; so it is set here.
    """
    until(f"{machine} to be missed", lambda: not is_ready(machine), NOTICED)
    kubectl("taint", "node", machine, "node.kubernetes.io/unreachable:NoExecute", "--overwrite")


def is_ready(machine: str) -> bool:
    """Whether the API server has heard of a machine lately, and sends pods to it."""
    found = json.loads(kubectl("get", "node", machine, "-o", "json"))
    ready = {condition["type"]: condition["status"] for condition in found["status"]["conditions"]}["Ready"]
    away = [taint["key"] for taint in found["spec"].get("taints") or [] if taint["key"].startswith("node.kubernetes")]
    return ready == "True" and not away


def until_ready(machine: str) -> None:
    until(f"{machine} to be ready", lambda: is_ready(machine), NOTICED)
