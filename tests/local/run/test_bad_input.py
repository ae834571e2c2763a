"""What people and strangers get wrong: one clear sentence, a non-zero exit, and the running job is not disturbed."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time

from resile.agent.workers.ports import free_port
from resile.wire.handshake import MAGIC, NONCE
from tests.local.resile_run import UNTIL_RELEASED, Runs, wait_until


def sentence(said: str) -> str:
    """The one line that the command printed."""
    (line,) = said.splitlines()
    return line


def test_strangers_do_not_disturb_a_running_job(runs: Runs) -> None:
    """One job, and everybody who should not get in, one after the other."""
    script = runs.script(UNTIL_RELEASED)
    nodes = [runs.node(script, env={"RESILE_TOKEN": "right"}) for _ in range(3)]
    met = runs.await_world(3)

    wrong = runs.node(script, env={"RESILE_TOKEN": "wrong"})
    assert wrong.wait() == 1
    assert "token" in sentence(wrong.err)

    other = runs.node(script, nnodes="2:4", env={"RESILE_TOKEN": "right"})
    assert other.wait() == 1
    assert "this node was started with --nnodes=2:4, but the job runs with --nnodes=2:3" in other.err

    elsewhere = runs.node("--rdzv-id=other", script, env={"RESILE_TOKEN": "right"})
    assert elsewhere.wait() == 1
    assert "cannot listen on 127.0.0.1" in sentence(elsewhere.err)
    assert "in use" in elsewhere.err

    renamed = runs.node("--job-name=other", script, env={"RESILE_TOKEN": "right"})
    assert renamed.wait() == 1
    assert "this is the master of job train, not of other" in renamed.err

    lines = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(4096),
        MAGIC,
        MAGIC + bytes(NONCE),
        MAGIC + bytes(NONCE) + bytes(32),
        struct.pack(">I", 2**31) + bytes(1000),
        b"",
    ]
    callers = []
    for words in lines:
        caller = socket.create_connection(("127.0.0.1", runs.port), timeout=5)
        callers.append(caller)
        caller.sendall(words)
    for caller in callers[:3:2]:
        caller.close()  # some hang up in the middle, the others stay
    wait_until(lambda: runs.master_log.count("refused") >= 3, "strangers that were refused")
    runs.release()
    assert [node.wait() for node in nodes] == [0, 0, 0]
    for caller in callers:
        caller.close()
    assert {end["pid"] for end in runs.notes("end")} == {start["pid"] for start in met.values()}
    assert [line.reason for line in runs.story() if line.warning] == []


def test_a_port_that_serves_something_else_is_named(runs: Runs) -> None:
    with socket.create_server(("127.0.0.1", runs.port)):
        run = runs.node(runs.script(UNTIL_RELEASED), nnodes="1")
        assert run.wait() == 1
    assert f"127.0.0.1:{runs.port}" in sentence(run.err)
    assert "in use" in run.err
    runs.nothing_is_left()


def test_a_place_where_nobody_answers_is_named_after_the_time_to_connect(runs: Runs) -> None:
    began = time.monotonic()
    words = ("--rdzv-conf=is_host=0,join_timeout=1", runs.script(UNTIL_RELEASED))
    run = runs.node(*words, nnodes="2", env={"RESILE_TOKEN": "t"})
    assert run.wait() == 1
    first, *_, last = run.err.splitlines()
    assert first.endswith(f"cannot reach 127.0.0.1:{runs.port} (connection refused); trying for 1 s")
    assert "the master cannot be reached for 1 s" in last
    assert f"cannot connect to 127.0.0.1:{runs.port}: connection refused" in run.err
    assert time.monotonic() - began < 10
    assert "Traceback" not in run.err


def test_a_server_of_another_kind_is_not_taken_for_a_master(runs: Runs) -> None:
    with socket.create_server(("127.0.0.1", runs.port)) as server:
        words = ("--rdzv-conf=is_host=0", runs.script(UNTIL_RELEASED))
        run = runs.node(*words, nnodes="2", env={"RESILE_TOKEN": "t"})
        server.settimeout(20)
        caller, _ = server.accept()
        with caller:
            caller.sendall(b"220 mail.example.com ESMTP ready, and some more words to fill it\r\n")
            assert run.wait() == 1
    assert "does not speak resile's protocol" in sentence(run.err)


def test_too_few_nodes_end_the_run_after_the_time_to_join(runs: Runs) -> None:
    run = runs.node("--rdzv-conf=join_timeout=1", runs.script(UNTIL_RELEASED), nnodes="2")
    assert run.wait() == 1
    assert "1 of at least 2 nodes came within 1 s" in run.err
    runs.nothing_is_left()


def test_a_log_directory_that_cannot_be_made_is_named(runs: Runs) -> None:
    (runs.directory / "file").write_text("")
    run = runs.run("--log-dir", str(runs.directory / "file" / "logs"), runs.script(UNTIL_RELEASED))
    assert run.process.returncode == 1
    assert f"cannot write logs in {runs.directory}/file/logs" in sentence(run.err)


def test_no_directory_for_temporary_files_is_one_sentence(runs: Runs) -> None:
    text = (
        "import sys, tempfile\nfrom resile.cli.run.main import main\n"
        "def full(**_):\n    raise OSError(28, 'no space', '/tmp/x')\n"
        "tempfile.mkdtemp = full\nmain(sys.argv[1:], 'resile run')\n"
    )
    words = [sys.executable, "-c", text, runs.script(UNTIL_RELEASED)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    said = "resile run: cannot make a directory for temporary files: No space left on device"
    assert sentence(done.stderr) == said


def test_no_port_for_the_store_is_one_sentence(runs: Runs) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        run = runs.start(runs.script("print('trained')"), env={"HOST_PORTS": str(port)})
        assert run.wait() == 1
    assert run.err.splitlines()[-1] == f"resile run: no port of HOST_PORTS={port} is free for the store of a round"
    assert "Traceback" not in run.err
    runs.nothing_is_left(20)


def test_one_port_for_the_store_serves_one_round_after_the_other(runs: Runs) -> None:
    """The store closes its connections, so its port stays in TIME_WAIT when the next round needs it."""
    store = (
        "from probe import *\nimport socket\n"
        "with socket.create_server(('', int(os.environ['MASTER_PORT']))) as store:\n"
        "    with socket.create_connection(store.getsockname()):\n"
        "        store.accept()[0].close()\n"
        "note('start', port=os.environ['MASTER_PORT'])\n"
        "sys.exit(ATTEMPT == 0)\n"
    )
    port = str(free_port({}))
    run = runs.run("--max-restarts=2", runs.script(store), env={"HOST_PORTS": port})
    assert run.process.returncode == 0, run.err
    assert [note["port"] for note in runs.notes("start")] == [port, port]
