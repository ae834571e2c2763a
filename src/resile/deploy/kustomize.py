"""The files of the folder `config/`: the objects of an installation, for users who adapt them with kustomize."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from resile.api.crd.generate import cel_patch, crd
from resile.api.kinds import registry
from resile.api.kinds.base import Definition, ResourceKind
from resile.deploy import installation

Object = dict[str, Any]

WIDTH = 120

_GENERATED = (
    "Written by `resile manifests --kustomize config`; change src/resile/api or src/resile/deploy/installation.py."
)

_DEFAULT_ROLE = """\
The tutorials of DLRover apply this file to let a job's master reach the API server through the namespace's default
ServiceAccount, which every other pod there has as well, those that train included. Here the operator gives each master
a ServiceAccount and a Role of its own, so this file grants nothing. Applied over DLRover's, it takes the old rights
back."""

_DEFAULT = """\
Folders are `bases` here because kubectl before 1.21 takes none among `resources`; newer ones warn, and do the same."""

_CEL = """\
What `config/default` installs, with rules in CEL, for Kubernetes 1.25 and later. Older clusters do not know them,
and kubectl before 1.21 cannot read this file."""

_PRIORITY = """\
The PriorityClasses that `priority: high`, `low` and fractions of an ElasticJob name: kubectl apply -k config/priority.
Not part of the installation, because their names are the cluster's: it may have classes of its own under them."""


class _Dumper(yaml.SafeDumper):
    """Writes a repeated value in full each time, because YAML anchors make manifests hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def to_yaml(objects: Iterable[Any]) -> str:
    """The objects as one YAML stream. Fields keep their order; the same objects always give the same text."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=WIDTH, allow_unicode=True)


def files() -> dict[str, str]:
    """The text of every file of `config/`, by its path in that folder."""
    definitions = [kind.definition for kind in registry.kinds()]
    crds = {f"bases/{definition.group}_{definition.plural}.yaml": [crd(definition)] for definition in definitions}
    rbac = {
        "service_account.yaml": [installation.service_account()],
        "operator_role.yaml": installation.operator_role(),
        "leader_election_role.yaml": installation.election_role(),
        "user_roles.yaml": installation.user_roles(),
    }
    samples = {
        f"samples/{_sample_file(kind)}": kind.sample(installation.IMAGE, installation.JOBS_NAMESPACE)
        for kind in registry.kinds()
    }
    name, _, tag = installation.IMAGE.partition(":")
    written: dict[str, list[Any]] = {
        "crd/kustomization.yaml": [_kustomization([*crds])],
        **{f"crd/{path}": objects for path, objects in crds.items()},
        "rbac/kustomization.yaml": [_kustomization([*rbac])],
        **{f"rbac/{path}": objects for path, objects in rbac.items()},
        "operator/kustomization.yaml": [
            _kustomization(["deployment.yaml"], images=[{"name": name, "newName": name, "newTag": tag}])
        ],
        "operator/deployment.yaml": [installation.deployment()],
        "default/kustomization.yaml": [_kustomization(["namespaces.yaml"], bases=["../crd", "../rbac", "../operator"])],
        "default/namespaces.yaml": installation.namespaces(),
        "cel/kustomization.yaml": [_kustomization(["../default"], patches=[*map(_cel, definitions)])],
        **{f"cel/{definition.plural}.yaml": [cel_patch(definition)] for definition in definitions},
        "priority/kustomization.yaml": [_kustomization(["priority_classes.yaml"])],
        "priority/priority_classes.yaml": installation.priority_classes(),
        "samples/kustomization.yaml": [_kustomization([*map(_sample_file, registry.JOB_KINDS)])],
        **{path: [sample.manifest] for path, sample in samples.items()},
        "rbac/default_role.yaml": installation.default_role(),
    }
    comments = {
        "default/kustomization.yaml": _DEFAULT,
        "cel/kustomization.yaml": _CEL,
        "priority/priority_classes.yaml": _PRIORITY,
        "rbac/default_role.yaml": _DEFAULT_ROLE,
        **{path: sample.comment for path, sample in samples.items()},
    }
    return {path: _commented(objects, comments.get(path, "")) for path, objects in written.items()}


def write(folder: Path) -> None:
    """Write every file into `folder`; other files stay. Raises `OSError` at the first file that cannot be written."""
    for path, text in files().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def _commented(objects: list[Any], comment: str) -> str:
    lines = [*comment.splitlines(), _GENERATED]
    return "".join(f"# {line}\n" for line in lines) + to_yaml(objects)


def _kustomization(resources: list[str], **more: Any) -> Object:
    header = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    return {**header, "resources": resources, **more}


def _cel(definition: Definition) -> Object:
    target = {"kind": "CustomResourceDefinition", "name": definition.name}
    return {"target": target, "path": f"{definition.plural}.yaml"}


def _sample_file(kind: ResourceKind) -> str:
    return f"{kind.definition.kind.lower()}.yaml"
