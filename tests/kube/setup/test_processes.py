"""What the programs of hack/cluster know of one another's processes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

HANDLER = "import signal; signal.signal(signal.SIGHUP, print); print(flush=True); input()"
NONE = "print(flush=True); input()"


@pytest.mark.parametrize(("script", "handles"), [(HANDLER, True), (NONE, False)])
def test_a_process_without_a_handler_is_told_apart(script: str, handles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "hack/cluster"))
    from processes import Process

    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = Process.of(child.pid)
        assert process is not None
        assert process.handles(signal.SIGHUP) is handles
        child.communicate(b"\n")
    assert not process.handles(signal.SIGHUP)
