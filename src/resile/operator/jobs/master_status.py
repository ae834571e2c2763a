"""Reads the status of a master's pod: why the pod cannot start, and how the master ended."""

from __future__ import annotations

import msgspec

from resile.api.manifests.pod_template import MAIN, MAIN_ANNOTATION
from resile.kube.errors import one_line
from resile.kube.kinds import Object
from resile.kube.pod_status import Obstacle, main_container_end, start_failure

LONGEST_SENTENCE = 400
"""The most characters of a message in a status: users read it in a table."""


class MasterEnd(msgspec.Struct, frozen=True):
    exit_code: int | None
    """The exit code of the master's container; None if the pod has none, such as an evicted pod."""
    why: str
    """Why the master ended, in half a sentence: `exit code 1 (…)`, `Evicted: …`."""


def why_master_cannot_start(pod: Object) -> str:
    failure = start_failure(pod)
    if failure is None:
        return ""
    what = {
        Obstacle.SCHEDULING: "the master cannot be scheduled",
        Obstacle.IMAGE: f"the master's image {failure.image} cannot be pulled",
        Obstacle.CONTAINER: f"the master's container {failure.container} cannot be started",
    }[failure.obstacle]
    return short(f"{what}: {failure.message or failure.reason}")


def master_end(pod: Object) -> MasterEnd | None:
    """How the master in `pod` ended; None if it has not ended. Other containers of the pod do not count."""
    status = pod.get("status") or {}
    phase = status.get("phase")
    if phase in ("Succeeded", "Failed") and status.get("reason"):
        # The pod's own reason (Evicted, NodeLost, Preempting, …) is the cause of what its container says.
        return MasterEnd(None, short(f"{status['reason']}: {status.get('message') or 'no more is known'}"))
    ended = main_container_end(pod, (pod["metadata"].get("annotations") or {}).get(MAIN_ANNOTATION, MAIN))
    if ended is None:
        if phase == "Succeeded":
            return MasterEnd(0, "exit code 0")
        return MasterEnd(None, "it ended without an exit code") if phase == "Failed" else None
    code = int(ended.get("exitCode", 0))
    words = _last_line(ended.get("message") or "")
    reason = ended.get("reason") or ""
    shown = f"exit code {code}" + (f", {reason}" if reason not in ("", "Error", "Completed") else "")
    return MasterEnd(code, short(f"{shown}{f' ({words})' if words else ''}"))


def short(text: str) -> str:
    return one_line(text, LONGEST_SENTENCE)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
