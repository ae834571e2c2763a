"""A process that ended badly is reported whatever it left behind, and the report tells why it failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from resile.agent.failures.evidence import (
    MAX_ERROR_FILE,
    find_traceback,
    in_order,
    last_part,
    read_error_file,
    read_failure,
    readable,
    tail_of,
)
from resile.agent.failures.report import report, terminal_width
from resile.protocol.reports import MAX_ERROR, MAX_LOG_TAIL, WorkerFailure

CHAINED = """\
step 7
Traceback (most recent call last):
  File "train.py", line 3, in load
    return table[name]
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 12, in <module>
    main()
    ^^^^^^
RuntimeError: no such table
"""


def failure(returncode: int = 1, rank: int = 0, at: float = 1000.0, **more: Any) -> WorkerFailure:
    return read_failure(returncode=returncode, global_rank=rank, local_rank=0, pid=42, ended_at=at, **more)


def run_script(tmp_path: Path, body: str) -> tuple[int, str, bytes]:
    """Runs a real script under `@record`; gives its return code, error file and stderr."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal\nfrom torch.distributed.elastic.multiprocessing.errors import record\n"
        f"@record\ndef main():\n    {body}\nmain()\n"
    )
    error_file = str(tmp_path / "error.json")
    ended = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"TORCHELASTIC_ERROR_FILE": error_file},
        capture_output=True,
        timeout=120,
    )
    return ended.returncode, error_file, ended.stderr


def test_what_record_wrote_is_read(tmp_path: Path) -> None:
    returncode, error_file, stderr = run_script(tmp_path, "raise ValueError('bad batch')")
    ended_at = os.stat(error_file).st_mtime + 0.5
    found = failure(returncode, at=ended_at, error_file=error_file, log_tail=stderr)
    assert (found.exit_code, found.signal, found.error) == (1, 0, "ValueError: bad batch")
    assert found.traceback.startswith("Traceback (most recent call last):")
    assert found.at == os.stat(error_file).st_mtime
    assert "errors/__init__.py" in found.log_tail
    shown = report(found, node="worker-0")
    assert "why   ValueError: bad batch" in shown
    assert shown.count("ValueError: bad batch") == 2, "once as the reason, once under the traceback, not again as log"
    assert not found.oom


def test_a_signal_leaves_no_error_file_and_is_named(tmp_path: Path) -> None:
    returncode, error_file, _ = run_script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    found = failure(returncode, error_file=error_file)
    assert (found.exit_code, found.signal, found.error, found.at) == (0, 9, "", 1000.0)
    assert "how   SIGKILL (signal 9)" in report(found, node="n")


def test_the_older_form_of_the_error_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": "it broke", "timestamp": 900}))
    assert read_error_file(str(path)) == ("it broke", "", 900.0, False)
    assert failure(error_file=str(path)).at == 900.0
    path.write_text(json.dumps({"message": "from the future", "timestamp": 4e9}))
    assert failure(error_file=str(path)).at == 1000.0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b'{"message": 3}',
        b'{"message": {}}',
        b'{"message": {"message": null, "extraInfo": [1]}}',
        b'{"message": {"message": 1, "extraInfo": {"py_callstack": 2, "timestamp": "soon"}}}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"message": "' + b"x" * MAX_ERROR_FILE + b'"}',
    ],
    ids=lambda content: repr(content[:40]),
)
def test_a_broken_error_file_does_not_hide_the_failure_and_the_log_speaks_instead(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(content)
    found = failure(3, error_file=str(path), log_tail=CHAINED.encode())
    assert (found.exit_code, found.error) == (3, "RuntimeError: no such table")


@pytest.mark.parametrize(("returncode", "permanent"), [(1, True), (-9, False), (-15, False), (3, False)])
def test_an_error_is_permanent_only_if_it_ended_the_process(tmp_path: Path, returncode: int, permanent: bool) -> None:
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": {"message": "NotWritable: no", "extraInfo": {"permanent": True}}}))
    assert failure(returncode, error_file=str(file)).permanent is permanent


def test_an_error_file_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), str(tmp_path), "/dev/zero", str(tmp_path / "none"), "bad\0name"):
        assert read_error_file(path).error == ""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@example(content=b'"\x80"', tail=b"", code=1)
@given(content=st.binary(max_size=200), tail=st.binary(max_size=300), code=st.integers(-64, 255).filter(bool))
def test_whatever_was_left_behind_makes_a_report_that_can_be_sent(
    content: bytes, tail: bytes, code: int, tmp_path: Path
) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(content)
    found = failure(code, error_file=str(path), log_tail=tail)
    assert msgspec.json.decode(msgspec.json.encode(found), type=WorkerFailure) == found
    assert report(found, node="n", others=[found])


def test_texts_are_cut_to_size_where_it_hurts_least(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    stack = "Traceback (most recent call last):\n" + "  frame\n" * 5000 + "ValueError: end"
    message = {"message": "ValueError: " + "x" * 9999, "extraInfo": {"py_callstack": stack, "timestamp": "5"}}
    path.write_text(json.dumps({"message": message}))
    found = failure(error_file=str(path), log_tail=b"line\n" * 10_000 + b"the end")
    assert len(found.error) == MAX_ERROR
    assert found.error.endswith("…")
    assert len(found.traceback) <= MAX_ERROR
    assert found.traceback.endswith("ValueError: end")
    assert len(found.log_tail) <= MAX_LOG_TAIL
    assert found.log_tail.startswith("…\nline\n")
    assert found.log_tail.endswith("the end")
    assert len(last_part("x" * 500, 100)) <= 100


def test_the_last_traceback_of_the_log_gives_the_reason() -> None:
    found = find_traceback("noise\n" + CHAINED + "a warning after it\n")
    assert found.error == "RuntimeError: no such table"
    assert found.traceback.startswith("Traceback")
    assert "KeyError: 'a'" in found.traceback
    assert "noise" not in found.traceback
    twice = find_traceback(CHAINED.replace("table", "chair") + CHAINED)
    assert "chair" not in twice.traceback


def test_a_traceback_whose_beginning_was_cut_off_still_gives_the_reason() -> None:
    cut = '    old()\n  File "train.py", line 12, in <module>\n    main()\nOSError: disk full\n'
    assert find_traceback(cut) == ("OSError: disk full", cut.rstrip("\n"), None, False)
    syntax = "  File \"train.py\", line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed\n"
    assert find_traceback(syntax).error == "SyntaxError: '(' was never closed"
    assert find_traceback('  File "train.py", line 12, in <module>\n    main()').error == ""
    assert find_traceback("RuntimeError: only a line of the log").error == ""


def test_a_traceback_in_which_torch_names_the_rank_on_every_line_is_found_without_it() -> None:
    named = "\n".join(f"[rank13]: {line}" if line else "" for line in CHAINED.split("\n"))
    after = "[rank13]:[W1116 12:00:00.1 ProcessGroup.cpp:1] Warning: destroy_process_group() was not called\n"
    assert find_traceback("noise\n" + named + after) == find_traceback("noise\n" + CHAINED)
    shown = [report(failure(log_tail=log.encode()), node="n") for log in (named, CHAINED)]
    assert shown[0] == shown[1]


def test_logs_are_made_readable() -> None:
    assert readable("10%\r50%\r100%\r\ndone \x1b[31mred\x1b[0m\x07\n") == "100%\ndone red\n"
    assert readable("a\ud800b") == "a?b"
    assert failure(log_tail=b"caf\xe9\n").log_tail == "caf\ufffd\n"


def test_the_tail_of_a_log_is_its_last_bytes(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"0123456789")
    assert tail_of(str(tmp_path / "log"), 4) == b"6789"
    assert tail_of(str(tmp_path / "log")) == b"0123456789"
    assert tail_of(str(tmp_path / "none")) == b""


def test_want_of_memory_is_seen_by_the_exception_or_told_by_the_agent() -> None:
    log = b'Traceback (most recent call last):\n  File "t.py", line 1, in f\n    x\nMemoryError\n'
    assert failure(log_tail=log).oom
    assert failure(-9, oom_killed=True).oom
    assert not failure(-9).oom
    assert "why   out of memory: the kernel killed it" in report(failure(-9, oom_killed=True), node="n")


def test_the_first_failure_is_the_cause() -> None:
    late, early = failure(rank=0, at=5.0), failure(rank=3, at=4.0)
    assert in_order([late, early]) == [early, late]
    assert in_order([failure(rank=2), failure(rank=1)])[0] == failure(rank=1)


def test_the_report_says_who_why_how_when_where_and_who_followed() -> None:
    first = failure(1, rank=3, at=1000.25, log_tail=CHAINED.encode())
    others = [failure(-15, rank=rank, at=1001.0 + rank) for rank in range(20, 0, -1) if rank != 3]
    shown = report(first, node="worker-1", others=others, log_file="/logs/3/stderr.log")
    lines = shown.splitlines()
    assert lines[0].startswith("━━ rank 3 failed first ━")
    assert "  why   RuntimeError: no such table" in lines
    assert "  how   exit code 1" in lines
    assert "  who   rank 3 (local rank 0), pid 42, on worker-1" in lines
    assert "  log   /logs/3/stderr.log" in lines
    assert lines[lines.index("  last lines of its log") + 1] == "    step 7"
    followed = lines[lines.index("  others that followed") + 1 :]
    assert followed[0] == "    rank 1   +1.8 s  SIGTERM"
    assert "    … and 11 more" in followed
    assert all(len(line) <= 100 and line == line.rstrip() for line in lines)


def test_a_silent_failure_says_what_to_do_to_learn_more() -> None:
    shown = report(failure(7), node="n")
    assert "how   exit code 7" in shown
    assert "@record" in shown
    assert "--tee 3" in shown
    assert "exit code 137, a shell's way to say SIGKILL" in report(failure(137), node="n").replace("\n        ", " ")


def test_the_report_keeps_to_a_narrow_terminal_and_to_both_ends_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    long = b'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: ' + b"x " * 400 + b"the point"
    shown = report(failure(1, log_tail=long), node="n", width=70)
    assert all(len(line) <= 70 for line in shown.splitlines())
    assert "why   ValueError: x" in shown
    assert "the point" in shown.partition("where")[0]
    for columns, width in (("20", 60), ("80", 80), ("300", 100), ("none", 100)):
        monkeypatch.setenv("COLUMNS", columns)
        assert terminal_width() == width


def test_a_program_that_could_not_be_started_is_not_told_to_be_decorated() -> None:
    missing = b"/usr/bin/python3: can't open file '/x/train.py': [Errno 2] No such file or directory\n"
    shown = report(failure(2, log_tail=missing), node="n")
    assert "why   /usr/bin/python3: can't open file '/x/train.py'" in shown
    shown = report(failure(127, log_tail=b"bash: trian: command not found\n"), node="n")
    assert "why   the program could not be started" in shown
