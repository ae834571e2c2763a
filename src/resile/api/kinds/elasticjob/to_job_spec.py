"""Translates an ElasticJob to a `JobSpec`, with all defaults filled in."""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from resile.api.defaults import DEFAULT_CRASH_BUDGET
from resile.api.job import JobSpec, RoleSpec, Strategy
from resile.api.kinds.base import Role
from resile.api.kinds.elasticjob.master_options import read_options
from resile.api.kinds.elasticjob.resource import ElasticJob, EnvVar, MasterSpec, OptimizeMode, ReplicaSpec
from resile.api.kinds.elasticjob.roles import CHIEF, MASTER_ROLE, PS, ROLES, WORKER
from resile.api.manifests.errors import BadManifest, ManifestErrors
from resile.api.manifests.pod_template import command_of, literal_env, main_container, read_resources, resources_of

NAME = "elasticjob"

STARTING_REPLICAS = 1
"""The number of nodes of ps and worker in a parameter-server job that scales itself and gives no number."""

_MASTER = Role(name=MASTER_ROLE, trains=False, decides_end=False)


def to_job_spec(job: ElasticJob) -> JobSpec:
    """The job that an ElasticJob describes; raises `BadManifest` for a wrong master option, or if no role has a node.

    A parameter-server job without a chief gets one instead of a worker: N workers become a chief and N-1 workers.
    """
    errors = ManifestErrors()
    timeouts = read_options(job.metadata.annotations, "metadata.annotations", errors)
    roles = _roles(job)
    if not any(role.replicas for role in roles.values()):
        errors.add("spec.replicaSpecs", "must have a role with replicas of 1 or more")
    if errors:
        raise BadManifest(errors.found())
    master = job.spec.replica_specs.dlrover_master or job.spec.replica_specs.legacy_master
    return JobSpec(
        name=job.metadata.name,
        namespace=job.metadata.namespace,
        uid=job.metadata.uid,
        kind=NAME,
        strategy=job.spec.distribution_strategy,
        roles=roles,
        master=None if master is None else _declared(_MASTER, master, replicas=1, auto_scale=False, envs={}),
        resource_limits=read_resources(msgspec.to_builtins(job.spec.resource_limits)),
        suspend=job.spec.suspend,
        timeouts=timeouts,
        labels=dict(job.metadata.labels),
        annotations=dict(job.metadata.annotations),
    )


def _roles(job: ElasticJob) -> dict[str, RoleSpec]:
    spec = job.spec
    may_scale = spec.optimize_mode is not OptimizeMode.MANUAL and spec.enable_elastic_scheduling is not False
    is_ps_job = spec.distribution_strategy is Strategy.PARAMETER_SERVER
    roles: dict[str, RoleSpec] = {}
    for role in ROLES:
        replica: ReplicaSpec | None = getattr(spec.replica_specs, role.name)
        if replica is None:
            continue
        auto_scale = may_scale and replica.auto_scale is not False
        replicas = replica.replicas
        if replicas is None:
            replicas = STARTING_REPLICAS if is_ps_job and auto_scale and role in (PS, WORKER) else 0
        roles[role.name] = _declared(role, replica, replicas=replicas, auto_scale=auto_scale, envs=spec.envs)
    worker = spec.replica_specs.worker
    if is_ps_job and worker is not None and CHIEF.name not in roles and roles[WORKER.name].replicas:
        workers = roles[WORKER.name]
        chief = _declared(CHIEF, worker, replicas=1, auto_scale=workers.auto_scale, envs=spec.envs)
        others = msgspec.structs.replace(workers, replicas=workers.replicas - 1)
        return {CHIEF.name: chief, **roles, WORKER.name: others}
    return roles


def _declared(
    role: Role, replica: ReplicaSpec | MasterSpec, *, replicas: int, auto_scale: bool, envs: dict[str, EnvVar]
) -> RoleSpec:
    template = copy.deepcopy(replica.template)
    main = main_container(template)
    _add_envs(main, envs)
    pod = template.get("spec") or {}
    return role.declared(
        replicas=replicas,
        command=command_of(main),
        env=literal_env(main),
        requests=resources_of(main, "requests"),
        limits=resources_of(main, "limits"),
        crash_budget=DEFAULT_CRASH_BUDGET if replica.restart_count is None else replica.restart_count,
        auto_scale=auto_scale,
        priority=replica.priority,
        grace=pod.get("terminationGracePeriodSeconds"),
        restart_policy=str(replica.restart_policy or pod.get("restartPolicy") or ""),
        batch_scheduler=replica.batch_scheduler,
        template=template,
    )


def _add_envs(container: dict[str, Any], envs: dict[str, EnvVar]) -> None:
    """Put the job's variables first in a container, so that the container's own can refer to them as `$(NAME)`."""
    own = container.get("env") or []
    names = {entry["name"] for entry in own}
    added = [
        {"name": name, **msgspec.to_builtins(msgspec.structs.replace(variable, name=""))}
        for name, variable in envs.items()
        if name not in names
    ]
    if added:
        container["env"] = [*added, *own]
