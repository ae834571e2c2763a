"""Translates a ScalePlan to a `Plan`, which a master executes."""

from __future__ import annotations

from typing import Any

from resile.api.ids import Rank
from resile.api.kinds.elasticjob.roles import WORKER
from resile.api.kinds.scaleplan.resource import PodMeta, ScalePlan
from resile.api.manifests.pod_template import is_gpu, read_resources
from resile.api.plan import Migration, NewNode, NodeResources, Plan, RoleChange


def plan_of(plan: ScalePlan, uid: str) -> Plan:
    """Translate a ScalePlan to a `Plan` with this `uid`.

    Check the plan first, because an entry of `removePods` or `migratePods` that names no node of the job is left out.
    """
    spec = plan.spec
    return Plan(
        name=plan.metadata.name,
        uid=uid,
        roles={
            role: RoleChange(replicas=one.replicas, resources=_resources(one.resource))
            for role, one in spec.replica_resource_specs.items()
        },
        create=tuple(_new_node(plan, pod) for pod in spec.create_pods),
        remove=tuple(node for pod in spec.remove_pods if (node := pod.node(plan.job)) is not None),
        migrate=tuple(
            Migration(node=node, resources=_resources(pod.resource))
            for pod in spec.migrate_pods
            if (node := pod.node(plan.job)) is not None
        ),
    )


def _new_node(plan: ScalePlan, pod: PodMeta) -> NewNode:
    """The `NewNode` for an entry of `createPods`. The entry's id is ignored, because every new node gets a new id."""
    named = pod.node(plan.job)
    role = pod.type.value if pod.type is not None else named.role if named is not None else WORKER.name
    return NewNode(
        role=role, rank=None if pod.rank_index is None else Rank(pod.rank_index), resources=_resources(pod.resource)
    )


def _resources(given: dict[str, Any]) -> NodeResources:
    amounts = read_resources(given)
    gpu = amounts.gpu if any(is_gpu(name) for name in given) else None
    return NodeResources(memory=amounts.memory, cpu=amounts.cpu, gpu=gpu)
