"""The environment that a node's main container starts with: DLRover's names in both generations, on every platform.

Pure functions: the platforms add what only they know (credentials; on Kubernetes the addresses, which a pod takes from
the downward API). The result is laid over the user's template; switches that are the user's to set are left out if set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from resile.api.ids import NodeId, Rank
from resile.api.job import PS, ROLES, JobSpec, Strategy, node_name

PS_PORT = 2222
TASK_PORT = 3333
"""Of chief, worker and evaluator."""

_USER_MAY_SET = {"GRPC_ENABLE_FORK_SUPPORT": "false", "MONITOR_ENABLED": "true"}


def node_environment(
    spec: JobSpec,
    *,
    role: str,
    node_id: NodeId,
    rank: Rank,
    replicas: int,
    address: str,
    host_address: str,
    master_address: str,
    relaunch_count: int = 0,
) -> dict[str, str]:
    """The variables of one node, without any credential.

    Args:
        spec: the job.
        role: the node's role.
        node_id: its id, `NODE_ID`.
        rank: its place, `NODE_RANK`.
        replicas: how many nodes the role has, `NODE_NUM`.
        address: its own address, `POD_IP`; empty where the platform fills it in.
        host_address: its machine's address, `NODE_IP`; empty where the platform fills it in.
        master_address: `host:port` of the job's master.
        relaunch_count: how many nodes had this place before.
    """
    env = {
        "POD_NAME": node_name(spec, role, node_id),
        "ELASTIC_JOB_NAME": spec.name,
        "JOB_UID": spec.uid,
        "DLROVER_MASTER_ADDR": master_address,
        "DLROVER_MASTER_SERVICE_TYPE": spec.annotations.get("service_type", "grpc"),
        "DLROVER_TRAINING_ELASTIC_MODE": spec.annotations.get("training_elastic_mode", "base"),
        "RELAUNCHED_POD": "true" if relaunch_count else "false",
    }
    if address:
        env["POD_IP"] = address
    if host_address:
        env["NODE_IP"] = host_address
    for generation in ("NODE", "WORKER"):
        env[f"{generation}_TYPE"] = role
        env[f"{generation}_ID"] = str(node_id)
        env[f"{generation}_NUM"] = str(replicas)
        env[f"{generation}_RANK"] = str(rank)
    if spec.strategy is Strategy.ALLREDUCE:
        env["RANK"] = str(rank)
        env["WORLD_SIZE"] = str(replicas)
    own = spec.roles[role].env if role in spec.roles else {}
    env.update({name: value for name, value in _USER_MAY_SET.items() if name not in own})
    return env


def tf_config(addresses: Mapping[str, Sequence[str]], *, role: str, rank: Rank) -> str:
    """The value of `TF_CONFIG` for one node of a parameter-server job.

    Args:
        addresses: `host:port` of every node by role, in the order of ranks; roles without nodes are left out.
        role: the node's role.
        rank: its place among the nodes of its role.
    """
    cluster = {name: list(addresses[name]) for name in ROLES if addresses.get(name)}
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": rank}})


def service_address(spec: JobSpec, role: str, rank: Rank) -> str:
    """Where the node in a place is reached on Kubernetes: the place's own Service, which outlives its nodes."""
    port = PS_PORT if role == PS else TASK_PORT
    return f"{node_name(spec, role, rank)}.{spec.namespace}.svc:{port}"


def service_addresses(spec: JobSpec) -> dict[str, list[str]]:
    """The Services of every place that the job starts with, by role: what `tf_config` takes."""
    return {
        role: [service_address(spec, role, Rank(rank)) for rank in range(role_spec.replicas)]
        for role, role_spec in spec.roles.items()
    }
