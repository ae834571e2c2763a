"""The cluster's network: a switch in a namespace of its own, with a cable to each node and one to the host.

Nodes know the way to each other's pods directly and the switch is not the host's, so the host forwards nothing, and its
firewall and settings neither change nor matter. There is no way out: a node refuses a packet for anywhere else at once,
so nothing here ever waits for the Internet. kube-proxy's rules live in the nodes' namespaces and vanish with them.
"""

from __future__ import annotations

import ipaddress
import json

from console import ClusterError, run
from settings import HOST_ADDRESS, HOST_LINK, NODE_PREFIX, NODES, POD_NETWORK, SERVICE_NETWORK, SWITCH, Node

BRIDGE = "switch"


def ensure_network() -> bool:
    """Make what is missing of the switch, the nodes' namespaces and the routes; return whether anything was."""
    _check_free()
    made = _ensure_namespace(SWITCH)
    if not _link_exists(BRIDGE, SWITCH):
        _ip("-n", SWITCH, "link", "add", BRIDGE, "type", "bridge")
    _ip("-n", SWITCH, "link", "set", BRIDGE, "up")
    if not _link_exists(HOST_LINK):
        _ip("link", "add", HOST_LINK, "type", "veth", "peer", "name", "host", "netns", SWITCH)
        made = True
    _ip("-n", SWITCH, "link", "set", "host", "master", BRIDGE, "up")
    _ip("address", "replace", f"{HOST_ADDRESS}/{NODE_PREFIX}", "dev", HOST_LINK)
    _ip("link", "set", HOST_LINK, "up")
    for node in NODES:
        made |= _ensure_node(node)
    # The host reaches pods through their nodes, and Services through any node's kube-proxy.
    for node in NODES:
        _ip("route", "replace", node.pods, "via", node.address)
    _ip("route", "replace", SERVICE_NETWORK, "via", NODES[0].address)
    return made


def remove_network() -> bool:
    """Delete the host's cable (its routes go with it) and the namespaces; return whether there were any."""
    removed = False
    if _link_exists(HOST_LINK):
        _ip("link", "delete", HOST_LINK)
        removed = True
    for name in [*(node.name for node in NODES), SWITCH]:
        if name in _namespaces():
            _ip("netns", "delete", name)
            removed = True
    return removed


def _check_free() -> None:
    """Raise if the host already has another way to one of the cluster's networks: it must not be taken over."""
    host = f"{HOST_ADDRESS}/{NODE_PREFIX}"
    mine = [ipaddress.ip_network(network, strict=False) for network in (host, POD_NETWORK, SERVICE_NETWORK)]
    for route in json.loads(run(["ip", "-4", "-json", "route", "show"])):
        if route["dst"] == "default" or route.get("dev") == HOST_LINK:
            continue
        if any(network.overlaps(ipaddress.ip_network(route["dst"])) for network in mine):
            raise ClusterError(
                f"this machine already uses {route['dst']} ({route.get('dev')}), which the cluster needs"
            )


def _ensure_node(node: Node) -> bool:
    made = _ensure_namespace(node.name)
    if not _link_exists(node.name, SWITCH):
        _ip("-n", SWITCH, "link", "add", node.name, "type", "veth", "peer", "name", "eth0", "netns", node.name)
        made = True
    _ip("-n", SWITCH, "link", "set", node.name, "master", BRIDGE, "up")
    _ip("-n", node.name, "link", "set", "lo", "up")
    _ip("-n", node.name, "address", "replace", f"{node.address}/{NODE_PREFIX}", "dev", "eth0")
    _ip("-n", node.name, "link", "set", "eth0", "up")
    for other in NODES:
        if other != node:
            _ip("-n", node.name, "route", "replace", other.pods, "via", other.address)
    _ip("-n", node.name, "route", "replace", "unreachable", "default")
    inside = ["nsenter", f"--net={node.network_namespace}", "sh", "-c"]
    run([*inside, "echo 1 > /proc/sys/net/ipv4/ip_forward"])
    return made


def _ensure_namespace(name: str) -> bool:
    if name in _namespaces():
        return False
    _ip("netns", "add", name)
    return True


def _namespaces() -> list[str]:
    return run(["ip", "netns", "list"]).split()


def _ip(*arguments: str) -> None:
    run(["ip", *arguments])


def _link_exists(name: str, namespace: str = "") -> bool:
    where = ["-n", namespace] if namespace else []
    try:
        return bool(json.loads(run(["ip", "-json", *where, "link", "show", "dev", name])))
    except ClusterError:
        return False
