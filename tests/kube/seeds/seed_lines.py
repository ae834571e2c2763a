"""The lines of the seeds as they are written there, and what they show, compared column by column."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from tests.kube.namespace import LONGEST_PAUSE, run, until

# A step may wait for images to unpack, for torch to be imported by six processes on two cores, and for epochs.
PATIENCE = 240.0
AGE = r"\d+(s|m\d*s?)"


def line(command: str, stdin: str | None = None) -> str:
    """Run one line of a seed from the root of the checkout."""
    return run(*shlex.split(command), stdin=stdin, deadline=PATIENCE)


def wait(what: str, look: Callable[[], Any]) -> Any:
    """Return the first true answer of `look`; say how pods and jobs are when it does not come."""

    def seen() -> str:
        return line("kubectl -n dlrover get elasticjobs,pods -o wide") + line("kubectl -n dlrover describe elasticjobs")

    return until(what, look, PATIENCE, seen, pause=LONGEST_PAUSE)


def pod_rows(job: str, namespace: str = "dlrover") -> dict[str, str]:
    """The pods of a job with their STATUS, as `kubectl get pods` lists them."""
    lines = line(f"kubectl -n {namespace} get pods -l elasticjob-name={job} --no-headers").splitlines()
    return {row.split()[0]: row.split()[2] for row in lines}


def phase(job: str, namespace: str = "dlrover") -> str:
    return line(f"kubectl -n {namespace} get elasticjob {job} -o jsonpath={{.status.phase}}")
