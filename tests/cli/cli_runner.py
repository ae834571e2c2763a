"""Real jobs for tests of the command line, with a state directory of their own; nothing of them is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from resile.api.ids import Seconds
from resile.client.local.job_reader import JobReader
from resile.client.local.jobs import find
from resile.client.local.master_process import end_by_force
from resile.wire.job_directory import JobDirectory
from tests.support.template import template

RESILE = str(Path(sys.executable).with_name("resile"))
PATIENCE = 30.0
"""Seconds for anything that happens at once on an idle machine."""

MANIFEST = """\
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata:
  name: {name}
  namespace: {namespace}
  annotations: {annotations}
spec:
  distributionStrategy: AllreduceStrategy
  replicaSpecs:
    worker:
      replicas: {replicas}
      restartCount: {restarts}
      template:
        spec:
          containers:
            - name: main
              image: none
              command: ["/bin/bash", "-c", {command}]
"""


def _as_in_a_terminal() -> None:
    """A shell that runs the tests in the background has SIGINT ignored, and programs inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class CliRunner:
    """A state directory, and the commands run on it."""

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir
        self.state = workdir / "state"
        self._started: list[subprocess.Popen[str]] = []
        self.environment = {
            **os.environ,
            "RESILE_STATE_DIR": str(self.state),
            "COLUMNS": "120",
            "KUBECONFIG": str(workdir / "no-kubeconfig"),  # whatever cluster is near is not asked
        }

    def run(self, *words: str, code: int | None = 0, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        """Run a command; its exit code must be `code` (None: any), and it never ends with a traceback."""
        done = template().run(*words, env=self.environment, cwd=self.workdir, timeout=timeout)
        assert "Traceback" not in done.stderr + done.stdout, done.stderr
        assert code is None or done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def out(self, *words: str, code: int = 0) -> str:
        """What a command prints."""
        return self.run(*words, code=code).stdout

    def json(self, *words: str) -> Any:
        """What a command prints, as data."""
        return json.loads(self.out(*words, "-o", "json"))

    def refused(self, *words: str, code: int = 1) -> str:
        """The one sentence of a command that cannot."""
        done = self.run(*words, code=code)
        lines = done.stderr.splitlines()
        assert len(lines) == 1, done.stderr
        return lines[0]

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command without waiting for it."""
        started = subprocess.Popen(
            [RESILE, *words],
            env=self.environment,
            cwd=self.workdir,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_as_in_a_terminal,
        )
        self._started.append(started)
        return started

    def manifest(
        self,
        command: str,
        *,
        name: str = "steady",
        namespace: str = "default",
        replicas: int = 2,
        restarts: int = 3,
        annotations: str = "{}",
    ) -> str:
        """Write a manifest; its path."""
        path = self.workdir / f"{name}.yaml"
        path.write_text(
            MANIFEST.format(
                name=name,
                namespace=namespace,
                replicas=replicas,
                restarts=restarts,
                annotations=annotations,
                command=json.dumps(command),
            )
        )
        return str(path)

    def submit(self, command: str, *, name: str = "steady", running: bool = True, **more: Any) -> JobDirectory:
        """Start a job and leave it; with `running`, wait until all its nodes run."""
        self.run("submit", "--local", self.manifest(command, name=name, **more), "--detach")
        directory = self.directory(name, more.get("namespace", "default"))
        if running:
            self.wait(lambda: len(self.statuses(name, "Running")) >= more.get("replicas", 2))
        return directory

    def directory(self, name: str, namespace: str = "default") -> JobDirectory:
        """Where a job is."""
        return JobDirectory(self.state / "jobs" / namespace / name)

    def statuses(self, name: str, wanted: str) -> list[str]:
        """The nodes of a job that have a status: as `get nodes` lists them, but without a command for every look."""
        with patch.dict(os.environ, RESILE_STATE_DIR=str(self.state)), JobReader(find(name, None)) as look:
            nodes = look.status().nodes
        return sorted(node.name for node in nodes if node.status == wanted)

    def phase(self, name: str) -> str:
        """A job's phase."""
        return str(self.json("get", "jobs", name)["phase"])

    def wait(self, done: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Wait until something is so."""
        until = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < until, "it did not happen in time"
            time.sleep(0.05)

    def clear(self) -> None:
        """End everything, and make sure of it."""
        for started in self._started:
            with started:  # closes its pipes
                started.kill()
        for directory in self.state.glob("*/*/*/"):
            end_by_force(JobDirectory(directory), Seconds(0.0))
        self.wait(lambda: not self.leftovers(), 10)

    def leftovers(self) -> list[str]:
        """Processes that have to do with this state directory."""
        mark = os.fsencode(self.state)
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                words = (entry / "cmdline").read_bytes()
                if mark in words or mark + b"/" in (entry / "environ").read_bytes():
                    found.append(f"{entry.name}: {words!r}")
            except OSError:
                continue
        return found
