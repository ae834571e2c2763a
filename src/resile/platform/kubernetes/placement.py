"""Machines that a pod must not be put on, and how it is released from that when there is room nowhere else.

A machine that falls silent stays a good one to the scheduler until its kubelet has been missed for 40 s, and the pod
that was lost leaves room on it: without a rule it is the likeliest machine for the replacement. The rule is a hard one,
since a preference is outweighed by a machine that is empty. A pod that finds no room under it is made again without it
once Kubernetes has had the time to find out whether the machine lives.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from resile.api.ids import Seconds
from resile.kube.kinds import Object

ANNOTATION = "resile.avoids"
"""On a pod: the machines, with commas between them."""
NO_ROOM = Seconds(60.0)
"""How long a pod waits for another machine: 40 s until a dead one is noticed by Kubernetes, and a reserve."""
_REQUIRED, _TERMS = "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"


def avoid(pod: Object, machines: Iterable[str]) -> None:
    """Keep a pod off these machines, whatever else it asks for."""
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
    """Whether a pod has no machine yet and may not take every one."""
    metadata = pod["metadata"]
    free = (pod.get("spec") or {}).get("nodeName") or metadata.get("deletionTimestamp")
    return not free and ANNOTATION in (metadata.get("annotations") or {})


def released(pod: Object) -> Object:
    """The same pod as one to make, without the rules of `avoid`."""
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
    else:  # one asks for nothing more, and one is enough
        del nodes[_REQUIRED]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "annotations": annotations}, "spec": spec}


def _rule(machine: str) -> Object:
    return {"key": "metadata.name", "operator": "NotIn", "values": [machine]}
