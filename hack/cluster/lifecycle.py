"""The cluster as a whole: bring it up, take it down, say how it is.

`up` is the same walk whether nothing runs, everything runs or something died: each part is looked at, and made or
started only if it is missing. `down` walks the other way and ends when nothing is left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import control_plane
import dns
from build import PACKAGES_TO_RUN, build, missing_binaries, missing_packages
from client import UNREACHABLE, Refused, api_healthy, request
from console import ClusterError, say, step, table, tail
from host import note_host, noted_boot, processes_of, remove_cgroups, remove_mounts, restore_host
from identities import ensure_identities
from images import DEFAULTS, import_images
from network import ensure_network, remove_network
from nodes import containerd, kube_proxy, kubelet_program, prepare_nodes
from processes import LOGS, Program, boot, end_processes, ensure, recorded, running, stop, wait_healthy
from settings import CACHE, KUBECONFIG, NODES, NODES_DEADLINE, POLL, STATE, STOP_DEADLINE, VENV

LOCK = CACHE / "lock"
LOCK_DEADLINE = 600.0
MARKER = STATE / ".resile-cluster"
SOCKET_PATH_LIMIT = 100


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold the machine's cluster lock: two commands never change the cluster at the same time."""
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        end = time.monotonic() + LOCK_DEADLINE
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ClusterError("another cluster command holds the lock and does not end") from None
                time.sleep(POLL)
        yield


def programs() -> list[Program]:
    """Return everything that runs, in the order it is started."""
    first = [control_plane.etcd(), *(containerd(node) for node in NODES), control_plane.api_server()]
    clients = [control_plane.controller_manager(), control_plane.scheduler(), dns.dnsmasq(), dns.watcher()]
    return [*first, *clients, *(kubelet_program(node) for node in NODES), *(kube_proxy(node) for node in NODES)]


def up() -> None:
    """Bring the cluster up, or repair it; return when all nodes are Ready.

    Does nothing when everything runs. When nothing does any more (the machine was restarted, or everything was killed),
    it begins afresh. Pods started from now on see this checkout, whichever one the cluster was brought up from.

    Raises:
        ClusterError: a part did not come up; the sentence names it and its log. What already runs is left for the next
            `up` to go on with.
    """
    if missing_binaries() or missing_packages(PACKAGES_TO_RUN):
        say("building what is missing (minutes the first time):")
        build(jobs=os.cpu_count() or 1)
    if max(len(str(node.containerd_socket)) for node in NODES) > SOCKET_PATH_LIMIT:
        raise ClusterError(f"the path of the state folder is too long for a socket: {STATE}")
    if noted_boot() not in (None, boot()):
        say("the machine was restarted since; beginning afresh")
        down()
    elif MARKER.exists() and not any(running(name) for name in recorded()):
        say("nothing of the last cluster runs any more; beginning afresh")
        down()
    _claim_state()
    changes = 0
    with step("network, certificates and configuration"):
        note_host()
        changes += ensure_network()
        changes += ensure_identities()
        prepare_nodes()
        dns.prepare_dns()
    if not (VENV / "bin").is_dir():
        say(f"  note: there is no virtual environment at {VENV}; pods see the checkout but no Python packages")
    etcd, api = control_plane.etcd(), control_plane.api_server()
    runtimes = [containerd(node) for node in NODES]
    with step("etcd, containerd and the API server"):
        changes += _start(etcd, *runtimes)
        wait_healthy([etcd])
        changes += _start(api)
        wait_healthy([*runtimes, api])
    with step("images"):
        changes += import_images(DEFAULTS, only_changed=True)
    with step("controller manager, scheduler, DNS, kubelets and kube-proxies"):
        dns.allow_watcher()
        rest = [program for program in programs() if program.name not in {etcd.name, api.name}]
        changes += _start(*rest)
        wait_healthy(rest)
    with step("nodes Ready"):
        _wait_nodes()
        _wait_default_account()
    say("" if changes else "everything was up already\n")
    say(_node_table())
    say(f"\nexport KUBECONFIG={KUBECONFIG}")


def restart(names: Sequence[str]) -> None:
    """End programs without a warning and start them again, whether they run or not; return when they do their work.

    Raises:
        ClusterError: there is no such program, or one did not come up.
    """
    known = {program.name: program for program in programs()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ClusterError(f"there is no {', '.join(unknown)} here; there are {', '.join(known)}")
    with step(f"restarting {', '.join(names)}"):
        end_processes([process for name in names if (process := running(name)) is not None], polite=False)
        _start(*(known[name] for name in names))
        wait_healthy([known[name] for name in names])


def freeze(name: str) -> None:
    """Make a node's machine stand still: its containers, its kubelet and all the rest; nobody is told."""
    _signal_machine(name, signal.SIGSTOP)


def thaw(name: str) -> None:
    """Let a frozen machine go on, as if no time had passed."""
    _signal_machine(name, signal.SIGCONT)


def _signal_machine(name: str, number: signal.Signals) -> None:
    node = next((node for node in NODES if node.name == name), None)
    if node is None:
        raise ClusterError(f"there is no machine {name}; there are {', '.join(one.name for one in NODES)}")
    for process in processes_of(node):
        process.send(number)


def down() -> None:
    """Take the cluster down and leave nothing behind: no process, mount, namespace, link, cgroup, setting or file.

    Does nothing when there is nothing. Ends only processes that were started here, each checked by its start time.
    """
    names = recorded()
    found = bool(names) or STATE.exists()
    with step("ending the cluster's processes"):
        # Kubelets first, or they would restart what is ended; then containers and shims; then the rest.
        stop([name for name in names if name.startswith(("kubelet", "kube-proxy"))])
        stop([name for name in names if name.startswith("containerd")])
        for node in NODES:
            _end_node(node.name)
        clients = [name for name in names if name not in ("etcd", "kube-apiserver")]
        stop(clients)
        stop(["kube-apiserver"])
        stop(["etcd"])
    with step("removing network, mounts, cgroups and files"):
        found |= remove_network()
        remove_cgroups()
        remove_mounts()
        restore_host()
        if STATE.exists():
            if not MARKER.exists():
                raise ClusterError(f"{STATE} was not made by this program, so it is not deleted")
            shutil.rmtree(STATE)
    say("the cluster is down" if found else "there was no cluster")


def status() -> bool:
    """Print what runs and how the nodes are; return whether everything is as it should be."""
    if not MARKER.exists():
        say("there is no cluster; `hack/cluster/cluster.py up` makes one")
        return False
    rows, good = [], True
    for program in programs():
        process = running(program.name)
        state = "down" if process is None else "healthy" if program.healthy() else "not healthy"
        good &= state == "healthy"
        rows.append((program.name, state, str(process.pid) if process else "-", str(program.log)))
    say(table(("COMPONENT", "STATE", "PID", "LOG"), rows))
    if api_healthy():
        say("\n" + _node_table())
        good &= not _not_ready()
    say(f"\nexport KUBECONFIG={KUBECONFIG}")
    return good


def require_up() -> None:
    """Raise unless every node's container runtime is there to import images into."""
    if any(running(containerd(node).name) is None for node in NODES):
        raise ClusterError("the cluster is not up; run `hack/cluster/cluster.py up` first")


def _claim_state() -> None:
    """Make the state folder, or accept it if it was made here."""
    if STATE.exists() and not MARKER.exists() and any(STATE.iterdir()):
        raise ClusterError(f"{STATE} holds files of somebody else; choose another folder with RESILE_CLUSTER_STATE")
    STATE.mkdir(mode=0o711, parents=True, exist_ok=True)
    STATE.chmod(0o711)
    MARKER.touch()


def _start(*wanted: Program) -> int:
    started = 0
    for program in wanted:
        if ensure(program):
            started += 1
            say(f"    started {program.name}")
    return started


def _end_node(name: str) -> None:
    """End what lives in a node until nothing does: a shim that dies may leave a child, a child may have forked."""
    node = next(node for node in NODES if node.name == name)
    end = time.monotonic() + STOP_DEADLINE
    while living := processes_of(node):
        if time.monotonic() > end:
            raise ClusterError(f"{len(living)} processes of {name} do not end")
        end_processes(living, polite=False)


def _nodes() -> list[dict[str, Any]]:
    names = {node.name for node in NODES}
    return [item for item in request("GET", "/api/v1/nodes")["items"] if item["metadata"]["name"] in names]


def _condition(item: dict[str, Any]) -> tuple[str, str]:
    for condition in item["status"].get("conditions") or []:
        if condition["type"] == "Ready":
            return condition["status"], condition.get("message", "")
    return "Unknown", "has not reported yet"


def _not_ready() -> dict[str, str]:
    """Return the nodes that are not Ready, each with the reason it gives."""
    seen = {item["metadata"]["name"]: _condition(item) for item in _nodes()}
    missing = {node.name: "has not registered" for node in NODES if node.name not in seen}
    return missing | {name: message for name, (ready, message) in seen.items() if ready != "True"}


def _wait_nodes() -> None:
    end = time.monotonic() + NODES_DEADLINE
    while True:
        try:
            waiting = _not_ready()
        except (*UNREACHABLE, Refused) as error:
            waiting = {"the API server": str(error)}
        if not waiting:
            return
        if time.monotonic() > end:
            name, reason = next(iter(waiting.items()))
            number = name.rpartition("-")[2]
            log = LOGS / (f"kubelet-{number}.log" if number.isdigit() else "kube-apiserver.log")
            raise ClusterError(f"{name} is not Ready after {NODES_DEADLINE:.0f} s: {reason}", tail(log))
        time.sleep(POLL * 2)


def _wait_default_account() -> None:
    """Wait until pods can be created: the default ServiceAccount must have its token."""
    end = time.monotonic() + NODES_DEADLINE
    while True:
        try:
            if request("GET", "/api/v1/namespaces/default/serviceaccounts/default").get("secrets"):
                return
        except Refused as refusal:
            if refusal.code != 404:
                raise
        if time.monotonic() > end:
            raise ClusterError(
                "the default ServiceAccount has no token; log of the controller manager:",
                tail(control_plane.controller_manager().log),
            )
        time.sleep(POLL)


def _mebibytes(quantity: str) -> str:
    kibibytes = int(quantity[:-2]) if quantity.endswith("Ki") else int(quantity) // 1024
    return f"{kibibytes // 1024} Mi"


def _node_table() -> str:
    rows = []
    for item in sorted(_nodes(), key=lambda item: str(item["metadata"]["name"])):
        ready, message = _condition(item)
        room = item["status"].get("allocatable", {})
        rows.append(
            (
                item["metadata"]["name"],
                "Ready" if ready == "True" else f"NotReady ({message})",
                next((entry["address"] for entry in item["status"]["addresses"] if entry["type"] == "InternalIP"), "-"),
                room.get("cpu", "-"),
                _mebibytes(room.get("memory", "0")),
                item["status"]["nodeInfo"]["kubeletVersion"],
            )
        )
    return table(("NODE", "STATUS", "ADDRESS", "CPU", "MEMORY", "VERSION"), rows)
