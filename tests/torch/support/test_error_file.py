"""Why a process ends, in one sentence: for its agent, and for the user who reads the log."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from resile.torch._support import error_file

GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:8858. This is typically caused by a remote worker crashing and is not a bug."
)


@pytest.fixture(autouse=True)
def excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


def ends_with(kind: type[Exception], words: str) -> Exception:
    """The error that a decorated function of a library raised through this script."""

    @error_file.recorded_in_error_file(ValueError, permanent=True)
    def of_a_library() -> None:
        raise kind(words)

    with pytest.raises(kind) as raised:
        of_a_library()
    return raised.value


def test_the_agent_finds_the_sentence_the_scripts_own_lines_and_that_no_try_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(error_file.ERROR_FILE, str(tmp_path / "error.json"))
    error = ends_with(ValueError, "no room")
    sys.excepthook(type(error), error, error.__traceback__)
    message: dict[str, Any] = json.loads((tmp_path / "error.json").read_text())["message"]
    assert (message["message"], message["extraInfo"]["permanent"]) == ("ValueError: no room", True)
    stack = message["extraInfo"]["py_callstack"]
    assert "in ends_with" in stack
    assert "error_file.py" not in stack.replace("test_error_file.py", "")
    assert "contextlib.py" not in stack


def test_an_error_that_the_script_catches_is_not_left_for_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(error_file.ERROR_FILE, str(tmp_path / "error.json"))
    ends_with(ValueError, "no room")
    other = RuntimeError("hours later")
    sys.excepthook(type(other), other, None)
    assert not (tmp_path / "error.json").exists()


def test_errors_of_other_kinds_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(error_file.ERROR_FILE, str(tmp_path / "error.json"))
    ends_with(KeyError, "x")
    assert not (tmp_path / "error.json").exists()
    assert sys.excepthook is sys.__excepthook__


def test_the_interpreter_prints_the_scripts_own_lines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    error = ends_with(ValueError, "no room")
    sys.excepthook(type(error), error, error.__traceback__)
    printed = capsys.readouterr().err
    assert printed.endswith("ValueError: no room\n")
    assert "contextlib.py" not in printed
    other = ValueError("another")
    sys.excepthook(ValueError, other, None)
    assert "ValueError: another" in capsys.readouterr().err


def test_the_loss_of_a_peer_is_told_without_gloos_source_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    error = RuntimeError(GLOO)
    assert error_file.is_peer_loss(error)
    assert not error_file.is_peer_loss(RuntimeError("a shape that does not fit"))
    assert error_file.in_brief(error) == "Connection closed by peer [127.0.0.1]:8858"
    assert error_file.in_brief(RuntimeError("one\ntwo")) == "one"
    wrapped = error_file.in_brief(RuntimeError(f"gradients were not averaged: {GLOO}"))
    assert wrapped == "gradients were not averaged: Connection closed by peer [127.0.0.1]:8858"
    error_file.print_briefly(error)
    sys.excepthook(RuntimeError, error, None)
    assert capsys.readouterr().err.endswith("\nRuntimeError: Connection closed by peer [127.0.0.1]:8858\n")
