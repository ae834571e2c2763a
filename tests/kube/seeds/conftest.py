"""Room on the cluster for a number of workers, whatever else runs there."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import pytest

from tests.kube.namespace import kubectl, patch_node, until

SEATS = 4


@pytest.fixture(scope="module")
def seat(deployed: None) -> Iterator[str]:
    """The name of a resource of which the cluster has four."""
    name = f"resile.example/seat-{uuid.uuid4().hex[:8]}"
    found = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    nodes = [node["metadata"]["name"] for node in found if node["status"]["nodeInfo"]["kubeletVersion"]]
    path = "/status/capacity/" + name.replace("/", "~1")
    try:
        for number, node in enumerate(nodes):
            share = SEATS // len(nodes) + (number < SEATS % len(nodes))
            patch_node(node, {"op": "add", "path": path, "value": str(share)})
        until("the seats", lambda: sum(int(_room(node, "allocatable").get(name, 0)) for node in nodes) == SEATS)
        yield name
    finally:
        for node in nodes:
            if name in _room(node, "capacity"):
                patch_node(node, {"op": "remove", "path": path})


def _room(node: str, kind: str) -> dict[str, str]:
    return dict(json.loads(kubectl("get", "node", node, "-o", "json"))["status"][kind])
