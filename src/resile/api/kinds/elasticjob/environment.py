"""The environment variables of a node of an ElasticJob, with the names of both generations of DLRover.

The platforms add credentials, and on Kubernetes the addresses, which a pod takes from the downward API. The variables
override those of the user's template, except the ones in `_USER_MAY_SET`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from resile.api.ids import Rank
from resile.api.job import JobSpec, Strategy
from resile.api.kinds.base import NodeSetting
from resile.api.kinds.elasticjob.names import node_name
from resile.api.kinds.elasticjob.roles import ROLE_NAMES

_USER_MAY_SET = {"GRPC_ENABLE_FORK_SUPPORT": "false", "MONITOR_ENABLED": "true"}


def node_environment(spec: JobSpec, setting: NodeSetting) -> dict[str, str]:
    role = setting.node.role
    env = {
        "POD_NAME": node_name(spec.name, role, setting.node.id),
        "ELASTIC_JOB_NAME": spec.name,
        "JOB_UID": spec.uid,
        "DLROVER_MASTER_ADDR": setting.master_address,
        "DLROVER_MASTER_SERVICE_TYPE": spec.annotations.get("service_type", "grpc"),
        "DLROVER_TRAINING_ELASTIC_MODE": spec.annotations.get("training_elastic_mode", "base"),
        "RELAUNCHED_POD": "true" if setting.relaunch_count else "false",
    }
    if setting.address:
        env["POD_IP"] = setting.address
    if setting.host_address:
        env["NODE_IP"] = setting.host_address
    for generation in ("NODE", "WORKER"):
        env[f"{generation}_TYPE"] = role
        env[f"{generation}_ID"] = str(setting.node.id)
        env[f"{generation}_NUM"] = str(setting.replicas)
        env[f"{generation}_RANK"] = str(setting.rank)
    if spec.strategy is Strategy.ALLREDUCE:
        env["RANK"] = str(setting.rank)
        env["WORLD_SIZE"] = str(setting.replicas)
    own = spec.roles[role].env if role in spec.roles else {}
    env.update({name: value for name, value in _USER_MAY_SET.items() if name not in own})
    if setting.peers:
        env["TF_CONFIG"] = tf_config(setting.peers, role=role, rank=setting.rank)
    return env


def tf_config(addresses: Mapping[str, Sequence[str]], *, role: str, rank: Rank) -> str:
    """`TF_CONFIG` for one node of a parameter-server job; `addresses` has the `host:port` of every rank by role."""
    cluster = {name: list(addresses[name]) for name in ROLE_NAMES if addresses.get(name)}
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": rank}})
