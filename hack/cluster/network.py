"""One bridge on the host and one network namespace per node, wired to it by a veth pair.

Nodes know the way to each other's pods directly, so the host forwards nothing and its firewall and sysctls stay as they
are. There is no way out: a packet for anywhere else is refused by the node at once, so nothing here ever waits for the
Internet. All rules that kube-proxy writes live in the nodes' namespaces and vanish with them.
"""

from __future__ import annotations

import json

from console import ClusterError, run
from settings import BRIDGE, HOST_ADDRESS, NODE_PREFIX, NODES, SERVICE_NETWORK, Node


def ensure_network() -> bool:
    """Make what is missing of the bridge, the namespaces and the routes; return whether anything was."""
    made = False
    if not _link_exists(BRIDGE):
        made = True
        _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("address", "replace", f"{HOST_ADDRESS}/{NODE_PREFIX}", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    for node in NODES:
        made |= _ensure_node(node)
    # The host reaches pods through their nodes, and Services through any node's kube-proxy.
    for node in NODES:
        _ip("route", "replace", node.pods, "via", node.address)
    _ip("route", "replace", SERVICE_NETWORK, "via", NODES[0].address)
    return made


def remove_network() -> bool:
    """Delete the namespaces, the cables and the bridge with its routes; return whether there were any."""
    removed = False
    for node in NODES:
        if _link_exists(node.link):
            _ip("link", "delete", node.link)
            removed = True
        if node.network_namespace.exists():
            _ip("netns", "delete", node.name)
            removed = True
    if _link_exists(BRIDGE):
        _ip("link", "delete", BRIDGE)
        removed = True
    return removed


def _ensure_node(node: Node) -> bool:
    made = False
    if node.name not in run(["ip", "netns", "list"]).split():
        node.network_namespace.unlink(missing_ok=True)
        _ip("netns", "add", node.name)
        made = True
    if not _link_exists(node.link):
        _ip("link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", node.name)
        made = True
    _ip("link", "set", node.link, "master", BRIDGE, "up")
    _ip("-n", node.name, "link", "set", "lo", "up")
    _ip("-n", node.name, "address", "replace", f"{node.address}/{NODE_PREFIX}", "dev", "eth0")
    _ip("-n", node.name, "link", "set", "eth0", "up")
    for other in NODES:
        if other != node:
            _ip("-n", node.name, "route", "replace", other.pods, "via", other.address)
    # kube-proxy and the kubelet want a default route to look at; this one answers "unreachable" instead of waiting.
    _ip("-n", node.name, "route", "replace", "unreachable", "default")
    inside = ["nsenter", f"--net={node.network_namespace}", "sh", "-c"]
    run([*inside, "echo 1 > /proc/sys/net/ipv4/ip_forward"])
    return made


def _ip(*arguments: str) -> None:
    run(["ip", *arguments])


def _link_exists(name: str) -> bool:
    try:
        return bool(json.loads(run(["ip", "-json", "link", "show", "dev", name])))
    except ClusterError:
        return False
