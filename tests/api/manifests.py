"""Manifests as plain data, right until a test bends them."""

from __future__ import annotations

import copy
from typing import Any

Manifest = dict[str, Any]


def pod(*command: str, **container: Any) -> Manifest:
    return {"spec": {"containers": [{"name": "main", "image": "x", "command": list(command), **container}]}}


def job(**spec: Any) -> Manifest:
    """An allreduce job of two workers; keyword arguments replace fields of its spec."""
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "torch-mnist", "namespace": "dlrover"},
        "spec": {
            "distributionStrategy": "AllreduceStrategy",
            "replicaSpecs": {"worker": {"replicas": 2, "template": pod("train.sh")}},
            **spec,
        },
    }


def plan(**spec: Any) -> Manifest:
    """A manual plan for three workers; keyword arguments replace its spec."""
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ScalePlan",
        "metadata": {
            "name": "plan-0",
            "namespace": "dlrover",
            "labels": {"elasticjob-name": "torch-mnist", "scale-type": "manual"},
        },
        "spec": {"ownerJob": "torch-mnist", **(spec or {"replicaResourceSpecs": {"worker": {"replicas": 3}}})},
    }


def bent(manifest: Manifest, path: str, value: Any) -> Manifest:
    """The manifest with another value at a path such as `spec.replicaSpecs.worker` or `spec.containers.0`."""
    changed = copy.deepcopy(manifest)
    at: Any = changed
    *way, last = path.split(".")
    for step in way:
        at = at[int(step)] if isinstance(at, list) else at.setdefault(step, {})
    at[int(last) if isinstance(at, list) else last] = value
    return changed
