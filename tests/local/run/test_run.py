"""`resile run` on one machine: what scripts get, how a run ends, and who is blamed."""

from __future__ import annotations

import os
from pathlib import Path

from tests.local.resile_run import Runs, wait_until

DUMP = """
import json, os, sys
from probe import note
note("environment", args=sys.argv[1:], name=__name__, variables=dict(os.environ))
"""


def test_scripts_get_torchruns_environment_and_their_words_and_nothing_is_left(runs: Runs) -> None:
    run = runs.run("--nproc-per-node=2", "--max-restarts=2", runs.script(DUMP), "--lr", "0.1", "-x")
    assert run.process.returncode == 0, run.err
    first, second = sorted(runs.notes("environment"), key=lambda note: note["rank"])
    assert first["args"] == ["--lr", "0.1", "-x"]
    expected = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    for rank, note in enumerate((first, second)):
        found = note["variables"]
        assert {name: found[name] for name in expected} == expected
        assert (found["RANK"], found["LOCAL_RANK"], found["ROLE_RANK"]) == (str(rank),) * 3
        assert found["MASTER_PORT"] == first["variables"]["MASTER_PORT"]
    runs.nothing_is_left()
    assert list(runs.temp.iterdir()) == [], "the agent's own directory is removed"


def test_modules_and_programs_run_as_under_torchrun(runs: Runs) -> None:
    runs.script(DUMP, "trainer.py")
    module = runs.run("-m", "trainer", "word", env={"PYTHONPATH": str(runs.directory)})
    assert module.process.returncode == 0, module.err
    (note,) = runs.notes("environment")
    assert (note["args"], note["name"]) == (["word"], "__main__")
    program = runs.run("--no-python", "/bin/sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert program.process.returncode == 0
    assert program.out == "rank 0 of 1\n"


FAILS = """
from probe import *
note("start", round=ATTEMPT)
print("attempt", ATTEMPT, "of rank", RANK)
if RANK == 1:
    raise ValueError("no such batch")
time.sleep(60)
"""


def test_a_failing_script_is_restarted_and_then_reported_with_its_traceback(runs: Runs) -> None:
    run = runs.run("--nproc-per-node=2", "--max_restarts=2", runs.script(FAILS))
    assert run.process.returncode == 1
    assert [note["attempt"] for note in runs.notes("start") if note["rank"] == 1] == [0, 1, 2]
    report = run.err[run.err.index("━━") :]
    assert report.startswith("━━ rank 1 failed first")
    assert "why   ValueError: no such batch" in report
    assert "exit code 1" in report
    assert "train.py" in report
    assert "attempt 2 of rank 1" in report, "the last lines of its log"
    assert "max_restarts is 2" in run.err
    assert "restarting (1 of 2 restarts used)" in run.err
    assert "restarting (2 of 2 restarts used)" in run.err
    runs.nothing_is_left()


FIRST_BY_ERROR_FILE = """
from probe import *
if RANK == 0:
    # What @record writes; then a slow exit, while rank 1 already fails because of it.
    error = {"message": {"message": "RuntimeError: the first one", "extraInfo": {
        "py_callstack": "Traceback (most recent call last):\\n  File \\"x.py\\", line 1, in main\\n    boom()\\n"
                        "RuntimeError: the first one\\n", "timestamp": str(int(time.time()))}}}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump(error, file)
    open(os.path.join(HERE, "failed"), "w").close()
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_for("echoed")
    time.sleep(0.2)
    sys.exit(1)
wait_for("failed")
time.sleep(0.05)
open(os.path.join(HERE, "echoed"), "w").close()
raise ConnectionError("peer closed")
"""


def test_the_rank_that_recorded_its_error_first_is_blamed_even_if_it_dies_last(runs: Runs) -> None:
    run = runs.run("--nproc-per-node=2", runs.script(FIRST_BY_ERROR_FILE))
    assert run.process.returncode == 1
    assert "━━ rank 0 failed first" in run.err
    assert "why   RuntimeError: the first one" in run.err
    assert "others that followed\n    rank 1" in run.err


STILL_ENDING = FIRST_BY_ERROR_FILE.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "time.sleep(60)")


def test_a_rank_that_was_still_ending_when_it_was_asked_to_stop_is_not_said_to_have_ended_by_that(runs: Runs) -> None:
    run = runs.run("--nproc-per-node=2", runs.script(STILL_ENDING))
    assert run.process.returncode == 1
    report = run.err[run.err.index("━━") :]
    assert report.startswith("━━ rank 0 failed first")
    assert "why   RuntimeError: the first one" in report
    assert "how   exit code 1\n" in report
    assert "SIGTERM" not in report


KILLED = """
from probe import *
import signal
if RANK == 1:
    print("about to go", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(0.3)
raise ConnectionError("peer closed")
"""


def test_a_rank_that_died_by_a_signal_is_blamed_and_its_echo_is_not(runs: Runs) -> None:
    run = runs.run("--nproc-per-node=2", runs.script(KILLED))
    assert run.process.returncode == 1
    assert "━━ rank 1 failed first" in run.err
    assert "SIGSEGV" in run.err
    assert "about to go" in run.err[run.err.index("━━") :]
    assert "peer closed" not in run.err[run.err.index("━━") :]


def test_a_second_run_at_the_same_place_right_after_the_first_is_a_run_of_its_own(runs: Runs) -> None:
    script = runs.script(DUMP)
    for number in (1, 2, 3):
        run = runs.node(script, nnodes="1")
        assert run.wait() == 0, run.err
        assert len(runs.notes("environment")) == number


def test_a_run_that_comes_while_an_older_one_ends_waits_for_it(runs: Runs) -> None:
    lingering = runs.script(
        "from probe import *\nimport signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: (wait_for('saved'), sys.exit(0)))\n"
        "note('start', round=1)\n"
        "if RANK == 1:\n    wait_for('fail')\n    sys.exit(3)\n"
        "time.sleep(60)\n",
        "old.py",
    )
    old = runs.node("--nproc-per-node=2", "--rdzv-id=same", lingering, nnodes="1")
    runs.await_world(2)
    runs.release("fail")
    old.says("the job failed")
    new = runs.node("--rdzv-id=same", runs.script(DUMP), nnodes="1", env={"NEW": "1"})
    runs.release("saved")
    assert old.wait() == 1
    assert new.wait() == 0, new.err
    assert [note["variables"]["NEW"] for note in runs.notes("environment")] == ["1"]


FIFTY_RESTARTS = """
from probe import *
note("start", round=ATTEMPT)
if ATTEMPT in (2, 50):
    wait_for(f"release{ATTEMPT}")
sys.exit(ATTEMPT < 50)
"""


def test_no_descriptor_is_lost_and_no_zombie_left_over_fifty_restarts(runs: Runs) -> None:
    logs = runs.directory / "logs"
    run = runs.start("--max-restarts=60", "--tee=3", "--log-dir", str(logs), runs.script(FIFTY_RESTARTS))
    descriptors, children = {}, {}
    for attempt in (2, 50):
        wait_until(lambda: any(n["attempt"] == attempt for n in runs.notes("start")), f"attempt {attempt}")  # noqa: B023
        descriptors[attempt] = len(os.listdir(f"/proc/{run.pid}/fd"))
        children[attempt] = len(Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())
        runs.release(f"release{attempt}")
    assert run.wait() == 0, run.err
    assert descriptors[50] == descriptors[2]
    assert children == {2: 2, 50: 2}, "the supervisor and the one training process"
    assert len(list(logs.glob("*/attempt_*/0/stdout.log"))) == 51


def test_programs_that_cannot_be_started_are_named_in_one_sentence(runs: Runs) -> None:
    missing = runs.run("nothing/here.py")
    assert missing.process.returncode == 2
    assert missing.err == "resile run: script 'nothing/here.py' does not exist\n"
    broken = runs.directory / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    run = runs.run("--no-python", str(broken))
    assert run.process.returncode == 1
    assert f"cannot start {broken}: no such file or directory" in run.err
    assert "Traceback" not in run.err


def test_a_state_directory_that_cannot_be_written_is_named(runs: Runs) -> None:
    (runs.directory / "state").write_text("a file")
    run = runs.run(runs.script(DUMP))
    assert run.process.returncode == 1
    assert run.err == f"resile run: cannot keep the job in {runs.state}/runs: not a directory\n"


TALKS = """
import os
from probe import note
from resile.checkpoint.memory_client import MemoryClient
from resile.wire.agent_client import AgentClient
from resile.protocol.shards import OpenDataset
from resile.wire.rendezvous_client import RendezvousClient
from resile.wire.env import AGENT_SOCKET, WORKER

rounds = RendezvousClient.from_environment(lambda round: None)
placed = rounds.ready(0, 20)
channel = AgentClient.from_environment()
answer = channel.request(OpenDataset(worker="", request=0, name="d", size=1, shard_size=1), 20)
memory = MemoryClient(os.environ[AGENT_SOCKET], os.environ[WORKER], 0)
note("talked", round=placed.round, error=answer.error, room=memory.make_room(4096), path=os.environ[AGENT_SOCKET])
"""


def test_directories_may_have_longer_paths_than_a_socket(runs: Runs) -> None:
    long = runs.directory / ("s" * 200)
    long.mkdir()
    run = runs.run(runs.script(TALKS), env={"RESILE_STATE_DIR": str(long), "TMPDIR": str(long)})
    assert run.process.returncode == 0, run.err
    (talked,) = runs.notes("talked")
    assert talked["path"].startswith(str(long)), "scripts are told the path as it is"
    assert (talked["round"], talked["error"], talked["room"]) == (1, "", "")
    assert not list(long.glob("resile-*")), "the agent's own directory is removed"
