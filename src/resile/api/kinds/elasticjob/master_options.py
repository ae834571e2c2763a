"""The options of a job's master, which travel as annotations of the ElasticJob.

DLRover's keep their names; `recovery_budget` is ours and sets every other interval. They are read as data and never
become part of a command line. Other annotations are left alone: other programs put them there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from resile.api.defaults import DEFAULT_RECOVERY_BUDGET
from resile.api.ids import Seconds
from resile.api.manifests.errors import ManifestErrors, listed, shown, under
from resile.api.quantity import duration as duration
from resile.api.timeouts import BadTimeouts, Timeouts, derive

FOREVER = Seconds(10 * 365 * 86400.0)
"""Stands for "no limit": longer than any job, and still a finite number for every format it is written in."""

SERVICE_TYPES = ("grpc", "http")
ELASTIC_MODES = ("base", "ucp")
PENDING_STRATEGIES = ("-1", "0", "1", "2")
NEVER_FAIL_ON_PENDING = ("-1", "0")

_INTEGER = re.compile(r"-?[0-9]{1,9}", re.ASCII)
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


class MasterOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the annotations of an ElasticJob say to its master."""

    recovery_budget: Seconds = DEFAULT_RECOVERY_BUDGET
    pending_timeout: Seconds | None = None
    """`FOREVER` when pending nodes never fail the job; None when nothing was said."""
    pending_fail_strategy: int = 1
    """Which pending nodes fail the job: 1 those that it cannot run without, 2 any, -1 and 0 none."""
    service_type: str = "grpc"
    training_elastic_mode: str = "base"
    pre_check_ops: str = ""
    pre_check_bypass: bool = False
    enable_dashboard: bool = False
    dashboard_port: int = 0
    """0 when nothing was said."""

    def timeouts(self) -> Timeouts:
        """The ladder these options ask for. Raises `BadTimeouts` when it does not hold."""
        return derive(self.recovery_budget, pend=self.pending_timeout)


def read_options(annotations: Mapping[str, str], path: str, errors: ManifestErrors) -> MasterOptions:
    """Read the options among `annotations`; a wrong one is told and keeps its default."""
    reader = _Reader(annotations, path, errors)
    pending = reader.whole("pending_timeout", "must be a whole number of seconds, 0 for no limit")
    strategy = reader.choice("pending_fail_strategy", PENDING_STRATEGIES, "1")
    pending_timeout = None if pending is None else Seconds(float(pending))
    if strategy in NEVER_FAIL_ON_PENDING or (pending is not None and pending <= 0):
        pending_timeout = FOREVER
    return MasterOptions(
        recovery_budget=reader.budget("recovery_budget"),
        pending_timeout=pending_timeout,
        pending_fail_strategy=int(strategy),
        service_type=reader.choice("service_type", SERVICE_TYPES, "grpc"),
        training_elastic_mode=reader.choice("training_elastic_mode", ELASTIC_MODES, "base"),
        pre_check_ops=annotations.get("pre_check_ops", ""),
        pre_check_bypass=reader.truth("pre_check_bypass"),
        enable_dashboard=reader.truth("enable_dashboard"),
        dashboard_port=reader.port("dashboard_port"),
    )


class _Reader:
    def __init__(self, annotations: Mapping[str, str], path: str, errors: ManifestErrors) -> None:
        self._annotations = annotations
        self._path = path
        self._errors = errors

    def _wrong(self, name: str, allowed: str) -> None:
        self._errors.add(under(self._path, name), f"{allowed}, not {shown(self._annotations[name])}")

    def _given(self, name: str) -> str | None:
        value = self._annotations.get(name)
        return value if isinstance(value, str) else None

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        value = self._given(name)
        if value is None or value in choices:
            return value or default
        self._wrong(name, f"must be {listed(choices)}")
        return default

    def truth(self, name: str) -> bool:
        value = self._given(name)
        if value is not None and value.lower() not in _TRUTH:
            self._wrong(name, "must be true or false")
        return _TRUTH.get((value or "false").lower(), False)

    def whole(self, name: str, allowed: str) -> int | None:
        value = self._given(name)
        if value is None:
            return None
        if not _INTEGER.fullmatch(value):
            self._wrong(name, allowed)
            return None
        return int(value)

    def port(self, name: str) -> int:
        allowed = "must be a port from 1 to 65535"
        value = self.whole(name, allowed)
        if value is None:
            return 0
        if not 1 <= value <= 65535:
            self._wrong(name, allowed)
            return 0
        return value

    def budget(self, name: str) -> Seconds:
        text = self._given(name)
        if text is None:
            return DEFAULT_RECOVERY_BUDGET
        value = duration(text)
        if value is None:
            self._wrong(name, "must be a duration such as 10s, 1m30s or 500ms")
            return DEFAULT_RECOVERY_BUDGET
        try:
            derive(value)
        except BadTimeouts as bad:
            self._errors.add(under(self._path, name), str(bad).partition(": ")[2])
            return DEFAULT_RECOVERY_BUDGET
        return value
