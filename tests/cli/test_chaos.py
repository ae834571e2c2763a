"""`resile chaos` on real jobs: it strikes what the job's records lead to, and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from resile.chaos.faults import KillMaster, KillNode, NothingToInjectError
from resile.chaos.inject_local import inject
from resile.platform.local import files
from resile.platform.local.shim import start_time
from resile.wire.job_directory import MasterAddress
from tests.cli.cli_runner import CliRunner

TRAINERS = """
for rank in 0 1; do
  (export RESILE_WORKER=w$rank RANK=$rank; exec python3 -c '
import os, time
if os.fork() == 0: time.sleep(1000)  # a data loader has its environment from its trainer
open("'$READY'/" + os.environ["RANK"], "w").write(str(os.getpid()))
time.sleep(1000)') &
done
wait
"""

ALIKE = """
for number in 1 2; do
  (export RESILE_WORKER=w$number RANK=0; exec python3 -c '
import os, time
os.close(os.open("'$READY'/" + str(os.getpid()), os.O_CREAT))
time.sleep(1000)') &
  until [ $(ls $READY | wc -l) -eq $number ]; do sleep 0.05; done
done
wait
"""


def state_of(pid: int) -> str:
    """R, S, T (stopped) … or an empty string for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.fixture
def trainers(bench: CliRunner) -> dict[int, int]:
    """A job with one node and two training processes, each with a data loader: pid by rank."""
    ready = bench.workdir / "ready"
    ready.mkdir()
    bench.submit(f"READY={ready}{TRAINERS}", replicas=1)
    bench.wait(lambda: all((ready / rank).exists() and (ready / rank).read_text() for rank in "01"))
    return {int(path.name): int(path.read_text()) for path in ready.iterdir()}


def test_a_process_is_killed_by_its_rank_and_only_that_one(bench, trainers):
    struck = json.loads(bench.out("chaos", "kill-process", "steady", "--rank", "1", "-o", "json"))
    assert (struck["pids"], struck["node"]) == ([trainers[1]], "worker-0")
    bench.wait(lambda: state_of(trainers[1]) in ("", "Z"))
    assert state_of(trainers[0]) == "S"
    for command in (["kill-process", "steady", "--rank", "7"], ["kill-rank", "steady", "7"]):
        assert bench.refused("chaos", *command) == "resile: there is no training process with rank 7"
    said = bench.out("chaos", "kill-process", "steady", "--node", "worker-0")
    assert re.fullmatch(rf"\d\d:\d\d:\d\d\.\d{{3}} killed rank 0 of worker-0 \(pid {trainers[0]}\)\n", said)


def test_of_two_processes_with_the_same_rank_the_younger_is_killed(bench):
    ready = bench.workdir / "ready"
    ready.mkdir()
    bench.submit(f"READY={ready}{ALIKE}", replicas=1)
    bench.wait(lambda: len(list(ready.iterdir())) == 2)
    older, younger = sorted((int(path.name) for path in ready.iterdir()), key=start_time)
    struck = json.loads(bench.out("chaos", "kill-process", "steady", "--rank", "0", "-o", "json"))
    assert struck["pids"] == [younger], "the other one is left from a node that was lost"
    assert state_of(older) == "S"


def test_a_node_is_frozen_and_thawed_as_a_whole(bench, trainers):
    frozen = json.loads(bench.out("chaos", "freeze-node", "steady", "steady-edljob-worker-0", "-o", "json"))["pids"]
    assert len(frozen) == 5  # the shell, two trainers, two data loaders
    bench.wait(lambda: {state_of(pid) for pid in frozen} == {"T"})
    thawed = json.loads(bench.out("chaos", "thaw-node", "steady", "worker-0", "-o", "json"))["pids"]
    assert sorted(thawed) == sorted(frozen)
    bench.wait(lambda: "T" not in {state_of(pid) for pid in frozen})


def test_a_killed_node_is_replaced(bench, trainers):
    said = bench.out("chaos", "kill-node", "steady", "worker-0")
    assert "killed worker-0 as a whole (pids " in said
    bench.wait(lambda: bench.statuses("steady", "Running") == ["steady-edljob-worker-1"])
    assert all(state_of(pid) in ("", "Z") for pid in trainers.values())
    assert bench.refused("chaos", "kill-node", "steady", "worker-0") == (
        "resile: no node worker-0 runs; running are worker-1"
    )


def test_a_pid_that_came_to_mean_another_process_is_never_struck(bench):
    directory = bench.submit("sleep 1000", replicas=1)
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        try:
            bench.wait(lambda: files.read_nodes(directory.path)[0].pid)  # it runs a moment before its file says so
            path = files.node_directory(directory.path, files.read_nodes(directory.path)[0].node) / "node.json"
            record = files.read(path, files.NodeFile)
            files.write(path, msgspec.structs.replace(record, pid=bystander.pid))
            with pytest.raises(NothingToInjectError, match="has ended by itself"):
                inject(directory, KillNode("worker-0"))
            files.write(path, record)
            address = directory.address()
            directory.announce(MasterAddress(host=address.host, port=address.port, pid=bystander.pid))
            with pytest.raises(NothingToInjectError, match="is no longer the job's master"):
                inject(directory, KillMaster())
            directory.announce(address)
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_training_that_is_struck_goes_on_and_its_end_tells_of_it(bench):
    script = bench.workdir / "train.py"
    script.write_text(
        "import time\nfrom pathlib import Path\nfrom resile.torch.progress import report_step\n"
        "for step in range(1, 1000):\n"
        "    report_step(step, 1000)\n"
        "    time.sleep(0.05)\n"
        "    if Path('over').exists(): break\n"
    )
    command = f"exec dlrover-run --nnodes=1:2 --nproc_per_node=1 --max_restarts=3 {script}"
    following = bench.start("submit", "--local", bench.manifest(command))
    bench.wait(lambda: bench.directory("steady").exists and bench.json("get", "jobs", "steady")["step"] > 3)
    at = json.loads(bench.out("chaos", "kill-process", "steady", "--rank", "1", "-o", "json"))["at"]

    def resumed() -> bool:
        outages = bench.json("get", "jobs", "steady")["outages"]
        return bool(outages) and outages[-1]["next_step_at"] is not None

    bench.wait(resumed)
    outage = bench.json("get", "jobs", "steady")["outages"][-1]
    assert 0 <= outage["noticed_at"] - at < 2
    assert re.search(
        r"^Last failure \(first of round 1\):\n  on worker-1 .* signal 9", bench.out("describe", "steady"), re.MULTILINE
    )
    for strike in (["kill-process", "steady", "--rank", "0"], ["freeze-node", "steady", "worker-0"]):
        said = bench.out("chaos", *strike).splitlines()
        assert re.fullmatch(r"noticed after \d.*s, next step after \d.*s", said[1])
    assert len(bench.out("chaos", "kill-process", "steady", "--rank", "0", "--no-wait").splitlines()) == 1
    back = bench.out("chaos", "kill-master", "steady").splitlines()[-1]
    assert re.fullmatch(r"the master was back after \d.*s", back)
    (bench.workdir / "over").touch()
    out, err = following.communicate(timeout=30)
    assert following.returncode == 0, out + err
    assert re.search(r"^BECAUSE +NOTICED +NEXT STEP +AFTER$", out, re.MULTILINE)
    assert re.search(r"^on worker-1, rank 1 \(pid \d+\) ended with signal 9 ", out, re.MULTILINE)
    assert re.search(r"goodput \d+\.\d%$", out.rstrip())
    for strike in (["kill-node", "steady", "worker-1"], ["kill-master", "steady"], ["kill-rank", "steady", "0"]):
        assert bench.refused("chaos", *strike) == (
            "resile: job steady is over (Succeeded); `resile submit` starts it again"
        )


STANDBY = """
import os, sys, time, torch
with open(os.path.join(sys.argv[1], os.environ["RANK"] + "." + os.environ["TORCHELASTIC_RESTART_COUNT"]), "w") as file:
    file.write(str(os.getpid()))
time.sleep(1000)
"""


def test_a_process_that_began_in_a_standby_is_found_by_its_rank_and_standbys_are_shown(bench):
    ready = bench.workdir / "ready"
    ready.mkdir()
    (bench.workdir / "torch.py").touch()  # something by its name, that costs nothing to import
    (bench.workdir / "train.py").write_text(STANDBY)
    run = "run --nproc-per-node 2 --max-restarts 5 --recovery-budget 2"
    bench.submit(f"PATH={Path(sys.executable).parent}:$PATH resile {run} {bench.workdir}/train.py {ready}", replicas=1)

    def pid_of(name: str) -> int:
        bench.wait(lambda: (ready / name).exists() and (ready / name).read_text() != "")
        return int((ready / name).read_text())

    bench.wait(lambda: "Standbys:  " in bench.out("describe", "steady"))
    assert re.search(r"^Standbys: +2 ready on 1 node, \d+ MiB$", bench.out("describe", "steady"), re.MULTILINE)
    for attempt in (0, 1):
        pid = pid_of(f"1.{attempt}")
        struck = json.loads(bench.out("chaos", "kill-process", "steady", "--rank", "1", "-o", "json"))
        assert struck["pids"] == [pid]
    assert f"began in a standby (pid {pid})" in bench.out("logs", "steady")
    pid_of("1.2")
    frozen = json.loads(bench.out("chaos", "freeze-node", "steady", "worker-0", "-o", "json"))["pids"]
    assert pid_of("0.2") in frozen
