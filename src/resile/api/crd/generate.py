"""The CustomResourceDefinitions of ElasticJob and ScalePlan, made from their types.

They are valid for `apiextensions.k8s.io/v1` from Kubernetes 1.20 on. Rules in CEL, which say what a schema cannot,
are apart: clusters before 1.23 do not know them and `kubectl apply` refuses a definition with unknown fields there.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from resile.api.crd.openapi import Schema, schema_of
from resile.api.job import ROLES, WORKER
from resile.api.kinds import elasticjob, scaleplan
from resile.api.manifests.metadata import GROUP, VERSION

Object = dict[str, Any]

CATEGORY = "resile"
"""`kubectl get resile` lists both kinds."""

_API_VERSION_TEXT = f"The version of this resource: {GROUP}/{VERSION}."


class Column(msgspec.Struct, frozen=True):
    """One column of `kubectl get`."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False
    """Shown only with `-o wide`."""
    text: str = ""


class Rule(msgspec.Struct, frozen=True):
    """What only CEL can say of the field at `path`; `self` is that field."""

    path: tuple[str, ...]
    expression: str
    message: str


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of resource, as a cluster is told of it."""

    kind: str
    plural: str
    short: str
    type: type
    columns: tuple[Column, ...]
    rules: tuple[Rule, ...]
    scale: dict[str, str] | None = None

    @property
    def name(self) -> str:
        """The definition's own name."""
        return f"{self.plural}.{GROUP}"


_PHASE = Column("Phase", ".status.phase")
_AGE = Column("Age", ".metadata.creationTimestamp", type="date")

_HAS_NODES = " || ".join(
    f"(has(self.{role}) && (!has(self.{role}.replicas) || self.{role}.replicas > 0))" for role in ROLES
)

ELASTIC_JOB = Definition(
    kind=elasticjob.KIND,
    plural=elasticjob.PLURAL,
    short="ej",
    type=elasticjob.ElasticJob,
    columns=(
        _PHASE,
        _AGE,
        Column("Workers", f".status.status.replicaStatuses.{WORKER}.active", "integer", wide=True, text="Running."),
        Column("Step", ".status.progress.step", "integer", wide=True, text="The newest step reached."),
        Column("Goodput", ".status.goodput", "number", wide=True, text="The share of time that went into training."),
        Column("Restarts", ".status.restarts", "integer", wide=True, text="Nodes replaced and processes restarted."),
        Column("Reason", ".status.reason", wide=True, text="Why the job is in its phase."),
    ),
    rules=(
        Rule(("spec", "distributionStrategy"), "self == oldSelf", "cannot be changed; submit another job"),
        Rule(("spec", "replicaSpecs"), _HAS_NODES, "must have a role with replicas of 1 or more"),
        Rule(
            ("spec", "replicaSpecs"),
            "!(has(self.dlrover__dash__master) && has(self.master))",
            "master is the old name of dlrover-master; give one of the two",
        ),
    ),
    scale={
        "specReplicasPath": f".spec.replicaSpecs.{WORKER}.replicas",
        "statusReplicasPath": f".status.status.replicaStatuses.{WORKER}.active",
        "labelSelectorPath": f".status.status.replicaStatuses.{WORKER}.labelSelector",
    },
)

SCALE_PLAN = Definition(
    kind=scaleplan.KIND,
    plural=scaleplan.PLURAL,
    short="sp",
    type=scaleplan.ScalePlan,
    columns=(
        _PHASE,
        _AGE,
        Column("Job", ".spec.ownerJob", wide=True, text="The job to change."),
        Column("Message", ".status.message", wide=True, text="Why it failed, or what it waits for."),
    ),
    rules=(
        Rule(("spec", "ownerJob"), "self == oldSelf", "cannot be changed; write another plan"),
        Rule(
            ("spec", "replicaResourceSpecs"),
            f"self.all(role, role in [{', '.join(map(repr, ROLES))}])",
            f"the roles are {', '.join(ROLES)}",
        ),
    ),
)

DEFINITIONS = (ELASTIC_JOB, SCALE_PLAN)


def crd(definition: Definition, *, cel: bool = False) -> Object:
    """The CustomResourceDefinition as plain data, equal in every run; `cel` adds the rules for Kubernetes 1.25 on."""
    version: Object = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [_column(column) for column in definition.columns],
        "subresources": {"status": {}, **({"scale": dict(definition.scale)} if definition.scale else {})},
        "schema": {"openAPIV3Schema": _root(definition, cel=cel)},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": definition.name},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": definition.kind,
                "listKind": f"{definition.kind}List",
                "plural": definition.plural,
                "singular": definition.kind.lower(),
                "shortNames": [definition.short],
                "categories": [CATEGORY],
            },
            "versions": [version],
        },
    }


def cel_patch(definition: Definition) -> list[Object]:
    """The operations (RFC 6902) that add the rules in CEL to a definition without them."""
    root = "/spec/versions/0/schema/openAPIV3Schema"
    grouped: dict[tuple[str, ...], list[Object]] = {}
    for rule in definition.rules:
        grouped.setdefault(rule.path, []).append(_written(rule))
    return [
        {
            "op": "add",
            "path": f"{root}{''.join(f'/properties/{field}' for field in path)}/x-kubernetes-validations",
            "value": rules,
        }
        for path, rules in grouped.items()
    ]


def _root(definition: Definition, *, cel: bool) -> Schema:
    schema = copy.deepcopy(schema_of(definition.type))
    properties = schema["properties"]
    properties["apiVersion"] = {"description": _API_VERSION_TEXT, "type": "string"}
    properties["kind"] = {"description": f"The kind of this resource: {definition.kind}.", "type": "string"}
    for rule in definition.rules if cel else ():
        at = schema
        for field in rule.path:
            at = at["properties"][field]
        at.setdefault("x-kubernetes-validations", []).append(_written(rule))
    return schema


def _written(rule: Rule) -> Object:
    return {"rule": rule.expression, "message": rule.message}


def _column(column: Column) -> Object:
    written = {"name": column.name, "type": column.type, "jsonPath": column.path}
    if column.text:
        written["description"] = column.text
    return {**written, **({"priority": 1} if column.wide else {})}
