"""What is wrong with a pod, in one sentence, and how its container ended."""

from __future__ import annotations

from typing import Any

import msgspec

from resile.api.manifests.pod_template import MAIN
from resile.operator.cluster import Object
from resile.operator.jobs.master_pod import MAIN_ANNOTATION

MAX_SENTENCE = 400
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
_CONTAINER = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff")


class ContainerEnd(msgspec.Struct, frozen=True):
    """How a pod ended."""

    exit_code: int | None
    """Of the master's container; None where a pod ended without one, as evicted pods do."""
    why: str
    """Half a sentence: `exit code 1 (…)`, `Evicted: …`."""
    last_words: str = ""


def trouble(pod: Object) -> str:
    """Why a pod that has not started cannot start, as a sentence without a full stop; empty if nothing is known."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return short(f"the master cannot be scheduled: {condition.get('message') or condition.get('reason')}")
    for container in _containers(status):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _IMAGE:
            return short(f"the master's image {container.get('image')} cannot be pulled: {message or reason}")
        if reason in _CONTAINER:
            return short(f"the master's container {container.get('name')} cannot be started: {message or reason}")
    return ""


def end(pod: Object) -> ContainerEnd | None:
    """How a master's pod ended, or None if it has not: with its main container, whatever runs beside it."""
    status = pod.get("status") or {}
    phase = status.get("phase")
    if phase in ("Succeeded", "Failed") and status.get("reason"):
        # The pod's own: Evicted, NodeLost, Preempting, … Whatever its container says came of that.
        return ContainerEnd(None, short(f"{status['reason']}: {status.get('message') or 'no more is known'}"))
    main = (pod["metadata"].get("annotations") or {}).get(MAIN_ANNOTATION, MAIN)
    states = {
        container.get("name"): container.get("state") or {} for container in status.get("containerStatuses") or ()
    }
    ended = states.get(main, {}).get("terminated")
    if ended is None:
        if phase == "Succeeded":
            return ContainerEnd(0, "exit code 0")
        return ContainerEnd(None, "it ended without an exit code") if phase == "Failed" else None
    code = int(ended.get("exitCode", 0))
    words = last_line(ended.get("message") or "")
    reason = ended.get("reason") or ""
    shown = f"exit code {code}" + (f", {reason}" if reason not in ("", "Error", "Completed") else "")
    return ContainerEnd(code, short(f"{shown}{f' ({words})' if words else ''}"), words)


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def short(text: str) -> str:
    """On one line and not too long for a table."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_SENTENCE else f"{line[: MAX_SENTENCE - 1]}…"


def _containers(status: Object) -> list[dict[str, Any]]:
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
