"""Makes the manifest of a node's pod from the user's template. All functions are pure.

The template stays as written. Added are labels, the environment, the job's token and its master's certificate, a
memory-backed `/dev/shm`, and tolerations that end the pod seconds after its machine loses its connection. Replaced is
only what would break the job: variables of the same name, and `restartPolicy`, since a new pod replaces a lost node.
"""

from __future__ import annotations

import copy
from fractions import Fraction

from resile.api.defaults import MASTER_PORT, TOKEN_FILE_VARIABLE
from resile.api.ids import Rank
from resile.api.job import JobSpec
from resile.api.kinds import registry
from resile.api.kinds.base import NodeSetting
from resile.api.manifests.pod_template import is_gpu, main_container
from resile.api.plan import NodeResources
from resile.api.quantity import amount, write_cores, write_size
from resile.kube.kinds import Object, of
from resile.kube.owner_references import owner_reference
from resile.platform.base import Launch
from resile.platform.kubernetes.placement import avoid

TOKEN_DIRECTORY = "/var/run/secrets/resile"
TOKEN_FILE = f"{TOKEN_DIRECTORY}/token"
TRUSTED = "ca.crt"
"""The certificate that nodes trust: its key in the job's Secret, and its file name beside the token's file."""
TRUSTED_VARIABLE, NAME_VARIABLE = "RESILE_TLS_CA", "RESILE_TLS_NAME"
TOKEN_VOLUME = "resile-token"
SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_VOLUME = "resile-shm"
READABLE_BY_ALL = 0o444
"""The mode of the token's file. All may read it, since the container may run as any user."""

GPU = "nvidia.com/gpu"
"""The name of the resource for GPUs if the pod template names none."""

AWAY_SECONDS = 10
"""How long Kubernetes keeps a pod on an unreachable machine. By then the job has long replaced the pod's node."""
_AWAY_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def master_address(spec: JobSpec) -> str:
    return f"{registry.job_kind(spec.kind).master_host(spec.name, spec.namespace)}:{MASTER_PORT}"


def pod_manifest(spec: JobSpec, launch: Launch, address: str, *, tls: bool = True) -> Object:
    """The manifest of a node's pod. Its variables tell the node's agent to connect to the master at `address`.

    With `tls`, more variables name the master's host and the file of the master's certificate, next to the token.
    """
    kind, role = registry.job_kind(spec.kind), spec.roles[launch.node.role]
    template: Object = copy.deepcopy(role.template)
    metadata = template.get("metadata") or {}
    labels = kind.node_labels(
        spec.name,
        role=launch.node.role,
        node_id=launch.node.id,
        rank=launch.rank,
        relaunch_count=launch.relaunch_count,
    )
    pod = template.get("spec") or {}
    pod["restartPolicy"] = "Never"
    pod.setdefault("automountServiceAccountToken", False)
    pod.setdefault("enableServiceLinks", False)  # variables of every Service around: hundreds, in a large job
    _prioritise(pod, role.priority, launch)
    if role.batch_scheduler and role.batch_scheduler != "default":
        pod.setdefault("schedulerName", role.batch_scheduler)
    pod["tolerations"] = _tolerations(pod.get("tolerations") or [])
    main = main_container({"spec": pod})
    host = kind.master_host(spec.name, spec.namespace)
    secure = {TRUSTED_VARIABLE: f"{TOKEN_DIRECTORY}/{TRUSTED}", NAME_VARIABLE: host}
    main["env"] = _environment(spec, launch, address, secure if tls else {}, main.get("env") or [])
    if launch.resources != NodeResources():
        main["resources"] = _resources(main.get("resources") or {}, launch.resources)
    _mount_token(spec, pod, main)
    _mount_shared_memory(pod, main)
    made: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": kind.node_name(spec.name, launch.node.role, launch.node.id),
            "namespace": spec.namespace,
            "labels": {**(metadata.get("labels") or {}), **labels},
            "annotations": metadata.get("annotations") or {},
            "ownerReferences": [owner_reference(of(kind), spec.name, spec.uid)],
        },
        "spec": pod,
    }
    avoid(made, launch.avoid)
    return made


def service_manifest(spec: JobSpec, role: str, rank: Rank) -> Object:
    """The manifest of the Service of one rank. The Service keeps its name when the rank's node is replaced."""
    kind, port = registry.job_kind(spec.kind), spec.roles[role].port
    selector = kind.rank_selector(spec.name, role, rank)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": kind.service_name(spec.name, role, rank),
            "namespace": spec.namespace,
            "labels": selector,
            "ownerReferences": [owner_reference(of(kind), spec.name, spec.uid)],
        },
        "spec": {"selector": selector, "ports": [{"port": port, "targetPort": port}]},
    }


def _prioritise(pod: Object, priority: str, launch: Launch) -> None:
    if not priority or "priorityClassName" in pod:
        return
    if priority in ("high", "low"):
        pod["priorityClassName"] = priority
    else:
        # By rank, so that a node's replacement inherits the priority.
        first = launch.rank < launch.replicas * Fraction(priority)
        pod["priorityClassName"] = "high" if first else "low"


def _tolerations(given: list[Object]) -> list[Object]:
    said = {toleration.get("key") for toleration in given}
    if None in said or "" in said:  # it tolerates whatever comes
        return given
    return given + [
        {"key": taint, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": AWAY_SECONDS}
        for taint in _AWAY_TAINTS
        if taint not in said
    ]


def _environment(
    spec: JobSpec, launch: Launch, address: str, secure: dict[str, str], given: list[Object]
) -> list[Object]:
    """The pod's variables. Those of resile come first, so the user's (`given`) can use them, such as `$(NODE_RANK)`."""
    kind = registry.job_kind(spec.kind)
    setting = NodeSetting(
        node=launch.node,
        rank=launch.rank,
        replicas=launch.replicas,
        relaunch_count=launch.relaunch_count,
        master_address=address,
        peers=kind.service_addresses(spec, {launch.node.role: launch.replicas}),
    )
    values = {**kind.environment(spec, setting), TOKEN_FILE_VARIABLE: TOKEN_FILE, **secure}
    looked_up = {"POD_IP": "status.podIP", "NODE_IP": "status.hostIP"}
    names = {*values, *looked_up}
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in looked_up.items()),
        *({"name": name, "value": value} for name, value in values.items()),
        *(entry for entry in given if entry["name"] not in names),
    ]


def _resources(given: Object, wanted: NodeResources) -> Object:
    requests, limits = dict(given.get("requests") or {}), dict(given.get("limits") or {})
    if wanted.memory is not None:
        requests["memory"] = limits["memory"] = write_size(wanted.memory)
    if wanted.cpu is not None:
        requests["cpu"] = write_cores(wanted.cpu)
        if "cpu" in limits and amount(limits["cpu"]) < amount(requests["cpu"]):
            limits["cpu"] = requests["cpu"]
    if wanted.gpu is not None:
        for name in [name for name in {**requests, **limits} if is_gpu(name)] or [GPU]:
            requests[name] = limits[name] = str(wanted.gpu)
    return {**given, "requests": requests, "limits": limits}


def _mount_token(spec: JobSpec, pod: Object, main: Object) -> None:
    secret = {"secretName": registry.job_kind(spec.kind).token_secret(spec.name), "defaultMode": READABLE_BY_ALL}
    pod["volumes"] = [*(pod.get("volumes") or []), {"name": TOKEN_VOLUME, "secret": secret}]
    mount = {"name": TOKEN_VOLUME, "mountPath": TOKEN_DIRECTORY, "readOnly": True}
    main["volumeMounts"] = [*(main.get("volumeMounts") or []), mount]


def _mount_shared_memory(pod: Object, main: Object) -> None:
    mounts = main.get("volumeMounts") or []
    if any(str(mount.get("mountPath", "")).rstrip("/") == SHARED_MEMORY for mount in mounts):
        return
    pod["volumes"] = [*(pod.get("volumes") or []), {"name": SHARED_MEMORY_VOLUME, "emptyDir": {"medium": "Memory"}}]
    main["volumeMounts"] = [*mounts, {"name": SHARED_MEMORY_VOLUME, "mountPath": SHARED_MEMORY}]
