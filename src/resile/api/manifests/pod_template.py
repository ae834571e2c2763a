"""Reads and checks the parts of a pod template that resile uses: containers, commands, environment and resources.

All other fields are passed to Kubernetes unread.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from resile.api import quantity
from resile.api.job import Resources
from resile.api.manifests.errors import ManifestErrors, shown, text_problem, under
from resile.api.manifests.name_rules import check_dns_label, check_env_name

MAIN = "main"
"""The name of the container that trains; in a pod without a container of this name, the first one trains."""
MAIN_ANNOTATION = "kubectl.kubernetes.io/default-container"
"""The annotation that names the container whose log `kubectl logs` shows; on a master's pod, the master's."""

Template = dict[str, Any]
Container = dict[str, Any]


_CONTAINER_SCHEMA = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string"}},
    "x-kubernetes-preserve-unknown-fields": True,
}


def _template_schema(required: bool) -> dict[str, Any]:
    at_least_one = {"minItems": 1} if required else {}
    containers = {"type": "array", "items": _CONTAINER_SCHEMA}
    spec = {
        "type": "object",
        **({"required": ["containers"]} if required else {}),
        "properties": {"containers": {**containers, **at_least_one}, "initContainers": containers},
        "x-kubernetes-preserve-unknown-fields": True,
    }
    return {
        **({"required": ["spec"]} if required else {}),
        "properties": {"spec": spec},
        "x-kubernetes-preserve-unknown-fields": True,
    }


TEMPLATE_SCHEMA = _template_schema(required=True)
PARTIAL_TEMPLATE_SCHEMA = _template_schema(required=False)


def main_container(template: Template) -> Container:
    """The container that trains: the one with the name `MAIN`, else the first one; an empty mapping if there is none.

    The container is not copied: a change to it changes `template`.
    """
    containers: list[Container] = (template.get("spec") or {}).get("containers") or []
    for container in containers:
        if container.get("name") == MAIN:
            return container
    return containers[0] if containers else {}


def command_of(container: Container) -> tuple[str, ...]:
    return (*(container.get("command") or ()), *(container.get("args") or ()))


def literal_env(container: Container) -> dict[str, str]:
    """The environment variables with literal values. If a variable is repeated, its last value counts."""
    entries = container.get("env") or []
    return {entry["name"]: entry.get("value") or "" for entry in entries if not entry.get("valueFrom")}


def resources_of(container: Container, which: str) -> Resources:
    return read_resources((container.get("resources") or {}).get(which) or {})


def read_resources(amounts: dict[str, Any]) -> Resources:
    """The CPU, the memory and the GPUs (of any vendor) in a resource list; other resources are ignored."""
    given = {name: value for name, value in amounts.items() if value is not None}
    return Resources(
        cpu=quantity.cores(given["cpu"]) if "cpu" in given else None,
        memory=quantity.size(given["memory"]) if "memory" in given else None,
        gpu=sum(quantity.count(value) for name, value in given.items() if is_gpu(name)),
    )


def is_gpu(name: str) -> bool:
    return name.rpartition("/")[2] == "gpu"


def check_template(value: Template, path: str, errors: ManifestErrors) -> None:
    """Check the template of a node, which must have at least one container."""
    spec, at = value.get("spec"), under(path, "spec")
    if spec is None:
        errors.add(at, "must be given")
    elif isinstance(spec, dict) and not spec.get("containers"):
        got = "nothing" if spec.get("containers") is None else "an empty one"
        errors.add(under(at, "containers"), f"must be a list with at least one container, not {got}")
    check_partial_template(value, path, errors)


def check_partial_template(value: Template, path: str, errors: ManifestErrors) -> None:
    """Check the template of a master, which may be partial because it is merged into a complete one."""
    spec, path = _mapping(value, "spec", path, errors), under(path, "spec")
    names: set[str] = set()
    for field in ("containers", "initContainers"):
        for container, at in _mappings(spec, field, path, errors):
            _check_container(container, at, errors)
            name = container.get("name")
            if isinstance(name, str) and name in names:
                errors.add(under(at, "name"), f"must differ from the other containers' names, not {shown(name)} again")
            elif isinstance(name, str):
                names.add(name)
    grace = spec.get("terminationGracePeriodSeconds")
    if grace is not None and (isinstance(grace, bool) or not isinstance(grace, int) or grace < 0):
        problem = f"must be a whole number of 0 or more, not {shown(grace)}"
        errors.add(under(path, "terminationGracePeriodSeconds"), problem)


def check_resources(value: dict[str, Any], path: str, errors: ManifestErrors) -> None:
    for name, given in value.items():
        if given is None:
            continue
        try:
            if not isinstance(given, str | int | float):
                raise quantity.BadQuantity(f"{quantity.ALLOWED}, not {shown(given)}")
            if is_gpu(name):
                quantity.count(given)
            else:
                quantity.amount(given)
        except quantity.BadQuantity as bad:
            errors.add(under(path, name), str(bad))


def check_env_entry(entry: dict[str, Any], path: str, errors: ManifestErrors) -> None:
    _check(entry, "value", str, path, errors)
    if _check(entry, "valueFrom", dict, path, errors) and entry.get("valueFrom") is not None and entry.get("value"):
        errors.add(path, "must have either value or valueFrom, not both")


_CONTAINER_FIELDS = (
    *("name", "image", "imagePullPolicy", "command", "args", "workingDir", "env", "envFrom", "ports", "resources"),
    *("volumeMounts", "volumeDevices", "livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "tty"),
    *("securityContext", "terminationMessagePath", "terminationMessagePolicy", "stdin", "stdinOnce"),
)
"""Common fields of a container. Kubernetes may know others, so only a field that is similar to one is an error."""


def _check_container(container: Container, path: str, errors: ManifestErrors) -> None:
    for field in container:
        near = get_close_matches(field, _CONTAINER_FIELDS, n=1, cutoff=0.8)
        if near and near[0] != field:
            errors.add(under(path, field), f"unknown field; did you mean {near[0]}?")
    name = container.get("name")
    if name is None:
        errors.add(under(path, "name"), "must be given")
    elif _check(container, "name", str, path, errors):
        check_dns_label(name, under(path, "name"), errors)
    for field in ("command", "args"):
        for word, at in _items(container, field, path, errors):
            if not isinstance(word, str):
                errors.add(at, text_problem(word))
    for entry, at in _mappings(container, "env", path, errors):
        if entry.get("name") is None:
            errors.add(under(at, "name"), "must be given")
        elif _check(entry, "name", str, at, errors):
            check_env_name(entry["name"], under(at, "name"), errors)
        check_env_entry(entry, at, errors)
    resources = _mapping(container, "resources", path, errors)
    _check_requests_and_limits(resources, under(path, "resources"), errors)


def _check_requests_and_limits(resources: dict[str, Any], path: str, errors: ManifestErrors) -> None:
    before = len(errors)
    requests = _mapping(resources, "requests", path, errors)
    limits = _mapping(resources, "limits", path, errors)
    check_resources(requests, under(path, "requests"), errors)
    check_resources(limits, under(path, "limits"), errors)
    if len(errors) > before:
        return
    for name, given in requests.items():
        limit = limits.get(name)
        if given is not None and limit is not None and quantity.amount(given) > quantity.amount(limit):
            errors.add(
                under(under(path, "requests"), name), f"must be at most the limit of {limit}, not {shown(given)}"
            )


def _check(owner: dict[str, Any], field: str, kind: type, path: str, errors: ManifestErrors) -> bool:
    """True if a field of `owner` is absent or has the type `kind` (str, dict or list). Otherwise adds an error."""
    value = owner.get(field)
    if value is None or isinstance(value, kind):
        return True
    wanted = "a mapping" if kind is dict else "a list"
    errors.add(under(path, field), text_problem(value) if kind is str else f"must be {wanted}, not {shown(value)}")
    return False


def _mapping(owner: dict[str, Any], field: str, path: str, errors: ManifestErrors) -> dict[str, Any]:
    return (owner.get(field) or {}) if _check(owner, field, dict, path, errors) else {}


def _items(owner: dict[str, Any], field: str, path: str, errors: ManifestErrors) -> Iterator[tuple[Any, str]]:
    if _check(owner, field, list, path, errors):
        for at, item in enumerate(owner.get(field) or ()):
            yield item, under(under(path, field), at)


def _mappings(
    owner: dict[str, Any], field: str, path: str, errors: ManifestErrors
) -> Iterator[tuple[dict[str, Any], str]]:
    for item, at in _items(owner, field, path, errors):
        if isinstance(item, dict):
            yield item, at
        else:
            errors.add(at, f"must be a mapping, not {shown(item)}")
