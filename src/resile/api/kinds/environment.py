"""Moved to `resile.api.kinds.elasticjob.environment`."""

from __future__ import annotations

from typing import Any

from resile.api.ids import NodeId, NodeKey
from resile.api.job import JobSpec
from resile.api.kinds.base import NodeSetting
from resile.api.kinds.elasticjob import environment
from resile.api.kinds.elasticjob.environment import tf_config as tf_config
from resile.api.kinds.elasticjob.roles import PS, WORKER

PS_PORT, TASK_PORT = PS.port, WORKER.port


def node_environment(spec: JobSpec, *, role: str, node_id: NodeId, **more: Any) -> dict[str, str]:
    """The variables of one node, without any credential."""
    return environment.node_environment(spec, NodeSetting(node=NodeKey(role, node_id), **more))
