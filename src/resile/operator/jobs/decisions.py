"""Decides what to do about one job by what exists. Pure, so that every case is a test of three lines.

The operator writes a job's status only if no master does: if there is no master yet, if the master cannot start, or if
it ended without writing the job's end. It leaves a job that has ended as it is. A job that has begun gets its masters
even if its manifest was made invalid: they know the job from their journal.
"""

from __future__ import annotations

import enum

import msgspec

from resile.api.ids import Seconds
from resile.api.job import JobSpec
from resile.api.job_phase import INVALID_SPEC, JOURNAL_GONE, JobPhase
from resile.api.kinds.base import JobKind
from resile.api.manifests.errors import BadManifest
from resile.api.master_exit_codes import CANNOT_SERVE, FINAL, JOB_FAILED, JOB_SUCCEEDED
from resile.api.quantity import duration
from resile.api.timestamps import moment
from resile.kube.kinds import Object
from resile.kube.owner_references import is_owned_by
from resile.operator import intervals
from resile.operator.jobs.master_status import MasterEnd, master_end, short, why_master_cannot_start

DELETED = "its pod was deleted"


class Reason(enum.StrEnum):
    """The reasons that the operator writes to a job's status and Events. They are stable, for use by programs."""

    CREATED = "JobCreated"
    MASTER_CREATED = "MasterCreated"
    MASTER_RESTARTED = "MasterRestarted"
    MASTER_STARTING = "MasterStarting"
    MASTER_LOST = "MasterLost"
    MASTER_CANNOT_START = "MasterCannotStart"
    INVALID_SPEC = INVALID_SPEC
    SUCCEEDED = "JobSucceeded"
    FAILED = "JobFailed"
    PODS_REMOVED = "PodsRemoved"
    SECRET_RESTORED = "SecretRestored"
    SECRET_REPLACED = "SecretReplaced"


PASSING = (Reason.MASTER_STARTING, Reason.MASTER_LOST, Reason.MASTER_CANNOT_START)
"""Reasons that the operator writes to the status of a job without a master, and removes when the master runs."""


class Restarts(msgspec.Struct, frozen=True):
    """Counts the starts of a job's masters in a row. The count begins anew after a master that lived long."""

    starts: int = 0
    last: float | None = None
    index: int = -1
    """The number of the job's newest master. The first master has number 0; -1 if there was none."""

    def started(self, now: float, index: int) -> Restarts:
        return Restarts(self.starts + 1, now, index)

    def pause(self, now: float) -> Seconds:
        pause = intervals.START_BACKOFF.after(self.starts - intervals.FREE_STARTS + 1)
        return Seconds(max(0.0, self.last + pause - now)) if pause and self.last is not None else Seconds(0.0)

    def after(self, now: float) -> Restarts:
        """The count after the newest master has ended.

        It is 0 if that master lived for `intervals.HEALTHY`; otherwise it is unchanged.
        """
        healthy = self.last is not None and now - self.last > intervals.HEALTHY
        return Restarts(0, None, self.index) if healthy else self


class SetStatus(msgspec.Struct, frozen=True):
    """Write phase, reason and message to the job's status; if `phase` is None, the phase stays."""

    phase: JobPhase | None
    reason: str
    message: str


class EmitEvent(msgspec.Struct, frozen=True):
    reason: Reason
    message: str
    warning: bool = False


class Provision(msgspec.Struct, frozen=True):
    """Make the objects that a master needs besides its pod, such as its Service and Secrets."""


class StartMaster(msgspec.Struct, frozen=True):
    index: int
    lost: str = ""
    """How the previous master ended; empty for the first."""


class RemoveMaster(msgspec.Struct, frozen=True):
    """Remove the master's pod with this uid, so that the next master can have its name."""

    uid: str


class RemovePods(msgspec.Struct, frozen=True):
    """Remove all pods of an ended job, because their time to live is over."""


class StopNodes(msgspec.Struct, frozen=True):
    """Remove the pods of nodes that still run, since the job has no master that could end them."""


ACCEPTED = SetStatus(JobPhase.CREATED, Reason.CREATED, "the job was accepted and gets its master")

Action = SetStatus | EmitEvent | Provision | StartMaster | RemoveMaster | RemovePods | StopNodes


class Decision(msgspec.Struct, frozen=True):
    """Actions to execute in order. After `again` seconds, if given, the job is reconciled even if nothing changes."""

    actions: tuple[Action, ...] = ()
    again: Seconds | None = None


class ObservedJob(msgspec.Struct, frozen=True, kw_only=True):
    kind: JobKind
    job: Object
    pod: Object | None = None
    """The pod that has the master's name, perhaps that of an earlier job; None if there is no such pod."""
    provisioned: bool = False
    """True if the objects that a master needs were made or found within the last `intervals.RECHECK`."""
    restarts: Restarts = Restarts()
    pods_removed: bool = False

    @property
    def phase(self) -> JobPhase | None:
        return self.kind.phase_of(self.job)

    @property
    def says(self) -> tuple[str, str]:
        report = self.kind.report_of(self.job)
        return report.reason, report.message


def decide(seen: ObservedJob, spec: JobSpec | BadManifest, now: float) -> Decision:
    """Decide what to do about a job; `spec` is what its manifest describes, or the errors of the manifest."""
    job = seen.job
    if job["metadata"].get("deletionTimestamp"):
        return Decision()  # Kubernetes removes everything with it
    phase = seen.phase
    pod = seen.pod
    began = pod is not None or phase not in (None, JobPhase.CREATED, JobPhase.FAILED)
    if isinstance(spec, BadManifest) and not began:
        return _invalid(seen, spec)
    if phase is not None and phase.ended and not _was_invalid(seen):
        return _ended(seen, now)
    if pod is None:
        return _without_master(seen, DELETED, now)
    if not is_owned_by(pod, job["metadata"]["uid"]):
        return _blocked(seen, pod, now)
    over = master_end(pod)
    leaving = bool(pod["metadata"].get("deletionTimestamp"))
    # The exit code of a master that is being deleted may come from the deletion; the next master reads the journal.
    if over is not None and over.exit_code in FINAL and not leaving:
        return Decision(_finished(over))
    if over is not None:  # also while it is being deleted: a kubelet takes seconds to say so of a pod that has ended
        lost = DELETED if leaving else over.why
        rest = _without_master(msgspec.structs.replace(seen, restarts=_restarts(seen, pod)), lost, now)
        if rest.again is not None:
            return rest  # the pod stays until the next start, so that its log can be read
        return Decision((RemoveMaster(pod["metadata"]["uid"]), *rest.actions))
    if leaving:
        return _leaving(pod, now)
    return _with_master(seen, pod)


def phase_without_master(phase: JobPhase | None) -> JobPhase | None:
    """The phase to write for a job whose master cannot start: Pending, or None to keep a later phase."""
    return JobPhase.PENDING if phase in (None, JobPhase.CREATED, JobPhase.PENDING) else None


def _invalid(seen: ObservedJob, bad: BadManifest) -> Decision:
    message = short("; ".join(str(error) for error in bad.errors))
    ended = seen.phase is JobPhase.FAILED and not _was_invalid(seen)
    if ended or seen.says == (Reason.INVALID_SPEC, message):
        return Decision()
    told = EmitEvent(Reason.INVALID_SPEC, message, warning=True)
    return Decision((SetStatus(JobPhase.FAILED, Reason.INVALID_SPEC, message), told))


def _without_master(seen: ObservedJob, lost: str, now: float) -> Decision:
    phase, restarts = seen.phase, seen.restarts.after(now)
    first = phase in (None, JobPhase.CREATED, JobPhase.FAILED) and restarts.index < 0
    # Failed: its manifest was wrong and has been put right
    accepted = (ACCEPTED,) if phase in (None, JobPhase.FAILED) else ()
    pause = restarts.pause(now)
    if pause > 0.0:
        message = (
            f"the master ended {restarts.starts} times in a row, the last time: {lost}; the next start is due soon"
        )
        return Decision((*accepted, *_say(seen, None, Reason.MASTER_LOST, short(message))), pause)
    # Even if `provisioned`, which may be out of date: a master must not be started without its Service.
    return Decision((*accepted, Provision(), StartMaster(restarts.index + 1, "" if first else lost)))


def _with_master(seen: ObservedJob, pod: Object) -> Decision:
    phase, (reason, _) = seen.phase, seen.says
    actions: list[Action] = [] if seen.provisioned and reason != JOURNAL_GONE else [Provision()]
    if (pod.get("status") or {}).get("phase") == "Running":
        if phase in (None, JobPhase.CREATED) or (phase is JobPhase.PENDING and reason in PASSING):
            runs = "the master runs and asks for the nodes"
            actions.append(SetStatus(JobPhase.PENDING, JobPhase.PENDING.reason, runs))
        elif reason in PASSING:
            actions.append(SetStatus(None, phase.reason, ""))
        return Decision(tuple(actions), intervals.RECHECK)
    problem = why_master_cannot_start(pod)
    if problem:
        actions.extend(_cannot_start(seen, problem))
    elif reason != Reason.MASTER_STARTING or phase in (None, JobPhase.CREATED):
        starting = "the master's pod is being started"
        actions.extend(_say(seen, phase_without_master(phase), Reason.MASTER_STARTING, starting))
    return Decision(tuple(actions), intervals.RECHECK)


def _leaving(pod: Object, now: float) -> Decision:
    metadata = pod["metadata"]
    grace = float(metadata.get("deletionGracePeriodSeconds") or 0)
    deadline = moment(metadata["deletionTimestamp"]) or now  # the end of the grace
    asked = deadline - grace if grace <= intervals.MASTER_GRACE else deadline
    left = asked + intervals.LEAVING - now
    return Decision(again=Seconds(left)) if left > 0 else Decision((RemoveMaster(metadata["uid"]),))


def _blocked(seen: ObservedJob, pod: Object, now: float) -> Decision:
    """Decide about a job whose master cannot start, because `pod` has the master's name but belongs to another owner.

    If the job was created less than `intervals.MAKE_ROOM` ago, wait, because Kubernetes may be removing the pod of an
    earlier job. After that, write to the job's status that its master cannot start.
    """
    born = moment(seen.job["metadata"].get("creationTimestamp", "")) or now
    if now - born < intervals.MAKE_ROOM:
        return Decision((ACCEPTED,) if seen.phase is None else (), Seconds(intervals.MAKE_ROOM))
    message = f"the pod {pod['metadata']['name']} is in the way of the master and belongs to another owner"
    return Decision(_cannot_start(seen, message))


def _finished(over: MasterEnd) -> tuple[Action, ...]:
    if over.exit_code == JOB_SUCCEEDED:
        message = "the master ended with success"
        return SetStatus(JobPhase.SUCCEEDED, Reason.SUCCEEDED, message), EmitEvent(Reason.SUCCEEDED, message)
    what = "found that the job failed" if over.exit_code == JOB_FAILED else "cannot serve the job"
    message = short(f"the master {what}: {over.why}")
    stop = (StopNodes(),) if over.exit_code == CANNOT_SERVE else ()
    return *stop, SetStatus(JobPhase.FAILED, Reason.FAILED, message), EmitEvent(Reason.FAILED, message, warning=True)


def _ended(seen: ObservedJob, now: float) -> Decision:
    finished = seen.kind.report_of(seen.job).ended_at
    if finished is None:
        reason, message = seen.says
        return Decision((SetStatus(seen.phase, reason, message),))
    ttl = duration((seen.job["metadata"].get("annotations") or {}).get(intervals.TTL_ANNOTATION, ""))
    if ttl is None or seen.pods_removed:
        return Decision()
    left = finished + ttl - now
    return Decision(again=Seconds(left)) if left > 0 else Decision((RemovePods(),))


def _restarts(seen: ObservedJob, pod: Object) -> Restarts:
    index = max(seen.restarts.index, seen.kind.master_index_of(pod["metadata"].get("labels") or {}))
    if seen.restarts.last is not None:
        return msgspec.structs.replace(seen.restarts, index=index)
    return Restarts(1, moment(pod["metadata"].get("creationTimestamp", "")), index)


def _cannot_start(seen: ObservedJob, why: str) -> tuple[Action, ...]:
    said = _say(seen, phase_without_master(seen.phase), Reason.MASTER_CANNOT_START, why)
    return (*said, EmitEvent(Reason.MASTER_CANNOT_START, why, warning=True)) if said else ()


def _say(seen: ObservedJob, phase: JobPhase | None, reason: Reason, message: str) -> tuple[SetStatus, ...]:
    there = seen.says == (reason, message) and phase in (None, seen.phase)
    return () if there else (SetStatus(phase, reason, message),)


def _was_invalid(seen: ObservedJob) -> bool:
    return seen.says[0] == Reason.INVALID_SPEC
