"""Keeps pods off machines that fell silent, until there is no room elsewhere.

The scheduler uses a machine that fell silent until its kubelet has been missed for 40 s, and the pod that was lost
leaves room there. Without a rule that machine is the likeliest one for the replacement. The rule is required and not
preferred, since an empty machine outweighs a preference. If a pod finds no room under the rule, it is made again
without it after `NO_ROOM`, when Kubernetes knows whether the machine lives. `resile.core.nodes.launching` decides which
machines are avoided, and for how long.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from resile.api.ids import Seconds
from resile.kube.kinds import Object

ANNOTATION = "resile.avoids"
"""Annotation of a pod with the names of the machines that `avoid` keeps it off, separated by commas."""
NO_ROOM = Seconds(60.0)
"""How long an unscheduled pod keeps the rule of `avoid`: 40 s until Kubernetes notices a dead machine, and more."""
_REQUIRED, _TERMS = "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"


def avoid(pod: Object, machines: Iterable[str]) -> None:
    """Keep a pod off `machines` by a node affinity. Affinities of the pod's template stay in force."""
    names = sorted(machines)
    if not names:
        return
    metadata, spec = pod["metadata"], pod["spec"]
    metadata["annotations"] = {**(metadata.get("annotations") or {}), ANNOTATION: ",".join(names)}
    affinity = spec["affinity"] = dict(spec.get("affinity") or {})
    nodes = affinity["nodeAffinity"] = dict(affinity.get("nodeAffinity") or {})
    required = nodes[_REQUIRED] = dict(nodes.get(_REQUIRED) or {})
    required[_TERMS] = [  # one of them must hold, so each gets the rules
        {**term, "matchFields": [*(term.get("matchFields") or ()), *map(_rule, names)]}
        for term in required.get(_TERMS) or [{}]
    ]


def held_back(pod: Object) -> bool:
    """True if a pod is not scheduled yet, is not being deleted, and has a node affinity made by `avoid`."""
    metadata = pod["metadata"]
    free = (pod.get("spec") or {}).get("nodeName") or metadata.get("deletionTimestamp")
    return not free and ANNOTATION in (metadata.get("annotations") or {})


def released(pod: Object) -> Object:
    """The manifest of a new pod with the same name and spec, but without the node affinity made by `avoid`."""
    metadata = {key: pod["metadata"][key] for key in ("name", "namespace", "labels", "ownerReferences")}
    annotations = dict(pod["metadata"]["annotations"])
    rules = [_rule(name) for name in annotations.pop(ANNOTATION).split(",")]
    spec = copy.deepcopy(pod["spec"])
    nodes = spec["affinity"]["nodeAffinity"]
    kept = []
    for term in nodes[_REQUIRED][_TERMS]:
        term["matchFields"] = [rule for rule in term.get("matchFields") or () if rule not in rules]
        kept.append({key: value for key, value in term.items() if value})
    if all(kept):
        nodes[_REQUIRED][_TERMS] = kept
    else:  # a term without other rules allows every machine, and one term is enough
        del nodes[_REQUIRED]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "annotations": annotations}, "spec": spec}


def _rule(machine: str) -> Object:
    return {"key": "metadata.name", "operator": "NotIn", "values": [machine]}
