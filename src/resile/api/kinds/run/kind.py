"""The kind of the jobs of `resile run`: there is no resource, nothing is launched, and no role is declared."""

from __future__ import annotations

from resile.api.ids import NodeKey
from resile.api.job import JobSpec
from resile.api.kinds.base import BaseJobKind, NodeSetting, Role
from resile.api.kinds.run.names import RUN_KIND, WORKER


class RunKind(BaseJobKind):
    """Jobs on bare machines."""

    name = RUN_KIND
    noun = "job"
    roles = (Role(name=WORKER),)
    scaled_role = WORKER

    def node_name(self, job: str, role: str, node_id: int) -> str:
        return f"{role}-{node_id}"

    def node_of(self, name: str, job: str) -> NodeKey | None:
        """None: the name of a node does not say which job it belongs to."""
        return None

    def master_name(self, job: str) -> str:
        """The job's own name: one of the agents hosts the master, which has none."""
        return job

    def environment(self, spec: JobSpec, setting: NodeSetting) -> dict[str, str]:
        """Nothing: no platform launches these nodes."""
        return {}


RUN = RunKind()
