"""The options of a job's master, which are annotations of the ElasticJob.

DLRover's annotations keep their names; `recovery_budget` is resile's own and sets every other interval. All of them are
checked; those of features that resile does not have yet are ignored. Annotations of other programs are not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from resile.api.defaults import DEFAULT_RECOVERY_BUDGET
from resile.api.ids import Seconds
from resile.api.manifests.errors import ManifestErrors, listed, shown, under
from resile.api.quantity import duration
from resile.api.timeouts import BadTimeouts, Timeouts, derive

FOREVER = Seconds(10 * 365 * 86400.0)
"""Stands for "no limit": longer than any job, but a finite number, which every format can hold."""

CHOICES = {
    "pending_fail_strategy": ("-1", "0", "1", "2"),
    "service_type": ("grpc", "http"),
    "training_elastic_mode": ("base", "ucp"),
}
"""`pending_fail_strategy` says which pending nodes fail the job: 1 those that it needs, 2 any, -1 and 0 none."""
SWITCHES = ("pre_check_bypass", "enable_dashboard")

_INTEGER = re.compile(r"-?[0-9]{1,9}", re.ASCII)


def read_options(annotations: Mapping[str, str], path: str, errors: ManifestErrors) -> Timeouts:
    """Derive the time-outs from the options in `annotations`. A wrong option adds an error and counts as not given."""
    given = {name: value for name, value in annotations.items() if isinstance(value, str)}

    def wrong(name: str, allowed: str) -> None:
        errors.add(under(path, name), f"{allowed}, not {shown(given[name])}")

    for name, choices in CHOICES.items():
        if name in given and given[name] not in choices:
            wrong(name, f"must be {listed(choices)}")
    for name in SWITCHES:
        if given.get(name, "true").lower() not in ("true", "1", "false", "0"):
            wrong(name, "must be true or false")
    port = given.get("dashboard_port", "1")
    if not _INTEGER.fullmatch(port) or not 1 <= int(port) <= 65535:
        wrong("dashboard_port", "must be a port from 1 to 65535")

    budget = DEFAULT_RECOVERY_BUDGET
    if "recovery_budget" in given:
        seconds = duration(given["recovery_budget"])
        try:
            if seconds is None:
                wrong("recovery_budget", "must be a duration such as 10s, 1m30s or 500ms")
            else:
                budget = derive(seconds).recovery_budget
        except BadTimeouts as bad:
            errors.add(under(path, "recovery_budget"), str(bad).partition(": ")[2])

    pend = None
    if "pending_timeout" in given:
        if _INTEGER.fullmatch(given["pending_timeout"]):
            number = int(given["pending_timeout"])
            pend = Seconds(float(number)) if number > 0 else FOREVER
        else:
            wrong("pending_timeout", "must be a whole number of seconds, 0 for no limit")
    if given.get("pending_fail_strategy") in ("-1", "0"):
        pend = FOREVER
    return derive(budget, pend=pend)
