"""The kind of the jobs of `resile run`: without custom resource, without declared roles, on no platform."""

from __future__ import annotations

from resile.api.ids import NodeKey
from resile.api.job import JobSpec
from resile.api.kinds.base import BaseJobKind, NodeSetting, Role
from resile.api.kinds.run.names import RUN_KIND, WORKER


class RunKind(BaseJobKind):
    name = RUN_KIND
    noun = "job"
    roles = (Role(name=WORKER),)
    scaled_role = WORKER

    def node_name(self, job: str, role: str, node_id: int) -> str:
        return f"{role}-{node_id}"

    def node_of(self, name: str, job: str) -> NodeKey | None:
        """Always None, because the name of a node, such as `worker-0`, does not say to which job it belongs."""
        return None

    def master_name(self, job: str) -> str:
        """The name of the job, because the master has no name of its own."""
        return job

    def environment(self, spec: JobSpec, setting: NodeSetting) -> dict[str, str]:
        return {}


RUN = RunKind()
