"""DNS for Services: dnsmasq on the host's cable to the nodes, fed by `dns_watcher.py`.

dnsmasq knows the names in one hosts file and answers everything else with "no such name" at once: it asks nobody. A
resolver that stays silent would cost every process group its 10-second time-out.
"""

from __future__ import annotations

from pathlib import Path

from client import Refused, listens, request
from identities import DNS
from processes import Program
from settings import HOST_ADDRESS, STATE

FOLDER = STATE / "dns"
HOSTS = FOLDER / "hosts"
DNSMASQ = "dnsmasq"
WATCHER = Path(__file__).with_name("dns_watcher.py")
ROLE_BINDINGS = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"


def prepare_dns() -> None:
    """Make the (empty) hosts file dnsmasq reads at its start."""
    FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    HOSTS.touch()


def dnsmasq() -> Program:
    """Return the name server."""
    command = (
        "dnsmasq",
        "--keep-in-foreground",
        "--conf-file=/dev/null",
        "--no-resolv",
        "--no-hosts",
        f"--addn-hosts={HOSTS}",
        f"--listen-address={HOST_ADDRESS}",
        "--bind-interfaces",
        "--address=/#/",
        "--user=nobody",
        "--pid-file=",
        "--log-facility=-",
    )
    return Program(DNSMASQ, command, lambda: listens(HOST_ADDRESS, 53))


def watcher() -> Program:
    """Return the program that keeps the hosts file equal to the cluster's Services and Endpoints."""
    command = ("env", "python3", str(WATCHER))  # as the first line of cluster.py does
    return Program("dns-watcher", command, lambda: "kubernetes.default.svc" in HOSTS.read_text(), (WATCHER,))


def allow_watcher() -> None:
    """Give the watcher the built-in role of a cluster's DNS: list and watch Services and Endpoints, nothing else."""
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": DNS.name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:kube-dns"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": DNS.name}],
    }
    try:
        request("POST", ROLE_BINDINGS, binding)
    except Refused as refusal:
        if refusal.code != 409:
            raise
