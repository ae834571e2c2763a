"""Every name, address, port and deadline of the cluster, in one place.

Nothing here is read from the machine except the two folders a user may move: the cache (what takes minutes to make and
survives `down`) and the state (what `down` removes to the last file).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("RESILE_CLUSTER_CACHE") or Path.home() / ".cache" / "resile-cluster").absolute()
STATE = Path(os.environ.get("RESILE_CLUSTER_STATE") or "/var/lib/resile-cluster").absolute()
VENV = Path(os.environ.get("RESILE_CLUSTER_VENV") or CHECKOUT / ".venv").absolute()

# The recipe's number is part of the cache's path: binaries of another recipe are never used.
KUBERNETES = "1.20.2"
RECIPE = f"kubernetes-{KUBERNETES}-recipe-3"
BINARIES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
BIN = CACHE / RECIPE / "bin"

# Addresses nobody is likely to use, all inside namespaces made here: nothing is routed to the outside.
SWITCH = "resile-switch"
HOST_LINK = "resile0"
HOST_ADDRESS = "10.77.0.1"
NODE_PREFIX = 24
POD_NETWORK = "10.78.0.0/16"
SERVICE_NETWORK = "10.79.0.0/16"
API_SERVICE_ADDRESS = "10.79.0.1"
CLUSTER_DOMAIN = "cluster.local"

API_PORT = 6443
ETCD_PORT = 23790
ETCD_PEER_PORT = 23800
CONTROLLER_MANAGER_PORT = 10257
SCHEDULER_PORT = 10259
KUBELET_PORT = 10250
KUBELET_HEALTH_PORT = 10248
PROXY_HEALTH_PORT = 10256

SERVER = f"https://{HOST_ADDRESS}:{API_PORT}"
KUBECONFIG = STATE / "kubeconfig"
RESOLV_CONF = STATE / "resolv.conf"

# Each node offers its share of the machine's memory; the rest is the machine's own.
MEMORY_SHARE_FOR_NODES = 0.9
PODS_PER_NODE = 200

# A silent machine is given up after this, in seconds: half of Kubernetes' default, for tests that wait for it. Each
# node renews its lease in the API server four times in that time.
NODE_GRACE = 20

# Images: the same few kilobytes under different names.
PAUSE_IMAGE = "resile-pause:1"
BUSYBOX_IMAGE = "busybox:latest"
RESILE_IMAGE = "resile:dev"
EXAMPLE_IMAGES = ("resile/hello:0.1.0", "resile/mnist:0.1.0")
"""Of the examples that run on a cluster, so that their manifests work as they are."""
RESILE_USER = 65532

# Deadlines in seconds. A loaded 2-core machine needs a tenth of them.
COMPONENT_DEADLINE = 60.0
NODES_DEADLINE = 120.0
STOP_DEADLINE = 10.0
COMMAND_DEADLINE = 60.0
POLL = 0.1


@dataclass(frozen=True)
class Node:
    """One node of the cluster: a number from which every name and address of it follows."""

    number: int

    @property
    def name(self) -> str:
        """The Kubernetes node's name; its namespaces, its cgroup and its cable (15 characters at most) have it too."""
        return f"resile-node-{self.number}"

    @property
    def address(self) -> str:
        """The node's address on the switch."""
        return f"10.77.0.{10 + self.number}"

    @property
    def pods(self) -> str:
        """The subnet of the node's pods."""
        return f"10.78.{self.number}.0/24"

    @property
    def home(self) -> Path:
        """The folder of everything the node writes."""
        return STATE / "nodes" / self.name

    @property
    def network_namespace(self) -> Path:
        """The file that holds the node's network namespace."""
        return Path("/run/netns") / self.name

    @property
    def mount_namespace(self) -> Path:
        """The file that holds the node's mount namespace."""
        return STATE / "namespaces" / self.name

    @property
    def containerd_socket(self) -> Path:
        """Where the node's containerd listens."""
        return self.home / "containerd.sock"


NODES = (Node(1), Node(2), Node(3))
