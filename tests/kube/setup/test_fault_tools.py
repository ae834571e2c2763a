"""What breaks a part of the cluster puts it right, also where the breaking itself did not come to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kube import fault_tools


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of hack/cluster, which takes too long to freeze a machine."""
    asked: list[str] = []

    def run(*words: str | Path) -> str:
        asked.append(str(words[1]))
        if words[1] == "freeze":
            raise TimeoutError
        return ""

    monkeypatch.setattr(fault_tools, "run", run)
    monkeypatch.setattr(fault_tools, "is_ready", lambda machine: True)
    return asked


def test_a_machine_that_could_not_be_frozen_in_time_is_thawed(said: list[str]) -> None:
    with pytest.raises(TimeoutError), fault_tools.frozen("resile-node-1"):
        pass
    assert said == ["freeze", "thaw"]


def test_a_kubelet_is_started_again_when_it_was_already_gone(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(pid: int, number: int) -> None:
        raise ProcessLookupError

    (tmp_path / "processes").mkdir()
    (tmp_path / "processes/kubelet-1.json").write_text('{"pid": 1}')
    monkeypatch.setattr(fault_tools, "STATE", tmp_path)
    monkeypatch.setattr(fault_tools.os, "kill", gone)
    with pytest.raises(ProcessLookupError), fault_tools.without_kubelet("resile-node-1"):
        pass
    assert said == ["restart"]
