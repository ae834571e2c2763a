"""What a ScalePlan's manifest asks of the core."""

from __future__ import annotations

from typing import Any

from resile.api.ids import Bytes, GiB, NodeId, NodeKey, Rank
from resile.api.kinds.scaleplan.kind import SCALE_PLAN
from resile.api.kinds.scaleplan.resource import ScalePlan
from resile.api.manifests.reader import read_manifest
from resile.api.plan import Migration, NewNode, NodeResources, Plan, RoleChange


def plan(**spec: Any) -> ScalePlan:
    read = read_manifest(
        {
            "apiVersion": "elastic.iml.github.io/v1alpha1",
            "kind": "ScalePlan",
            "metadata": {"name": "p", "labels": {"elasticjob-name": "j", "scale-type": "manual"}},
            "spec": {"ownerJob": "j", **spec},
        }
    )
    assert isinstance(read, ScalePlan)
    return read


def wish(**spec: Any) -> Plan:
    return SCALE_PLAN.to_plan(plan(**spec), "u")


def test_numbers_and_resources_of_roles() -> None:
    resource = {"cpu": "500m", "memory": "2Gi", "nvidia.com/gpu": 1}
    assert wish(replicaResourceSpecs={"worker": {"replicas": 3, "resource": resource}}) == Plan(
        name="p",
        uid="u",
        roles={
            "worker": RoleChange(replicas=3, resources=NodeResources(cpu=0.5, memory=Bytes(2 * GiB), gpu=1)),
        },
    )


def test_pods_to_create_need_no_name() -> None:
    given = [{"rankIndex": 3, "resource": {"cpu": 1}}, {"type": "evaluator"}, {"name": "j-edljob-chief-7"}]
    assert wish(createPods=given).create == (
        NewNode(role="worker", rank=Rank(3), resources=NodeResources(cpu=1.0)),
        NewNode(role="evaluator"),
        NewNode(role="chief"),
    )


def test_pods_to_remove_and_to_migrate_are_named_either_way() -> None:
    asked = wish(
        removePods=[{"name": "j-edljob-worker-1"}, {"type": "worker", "id": 2}],
        migratePods=[{"name": "j-edljob-worker-0", "resource": {"memory": "4Gi"}}],
    )
    assert asked.remove == (NodeKey("worker", NodeId(1)), NodeKey("worker", NodeId(2)))
    assert asked.migrate == (
        Migration(node=NodeKey("worker", NodeId(0)), resources=NodeResources(memory=Bytes(4 * GiB))),
    )


def test_hosts_of_parameter_servers_are_refused() -> None:
    assert SCALE_PLAN.not_supported(plan(psHosts=["a:1"])) == (
        "spec.psHosts: parameter servers are moved in a later version; leave it out"
    )
    assert SCALE_PLAN.not_supported(plan(removePods=[{"name": "j-edljob-worker-1"}])) == ""
