"""The command line on real jobs: real masters, real processes, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from resile.api.timeouts import Timeouts
from resile.cli.main import COMMANDS
from tests.cli.cli_runner import PATIENCE

AGE = r"\d+[smhd]"

# what is there ------------------------------------------------------------------------------------------------------


def test_jobs_and_nodes_are_listed_in_the_layout_of_the_seeds(steady):
    header, row = steady.out("get", "elasticjob", "torch-mnist", "-n", "dlrover").splitlines()
    assert header == "NAME          PHASE     AGE"
    assert re.fullmatch(rf"torch-mnist   Running   {AGE}", row)

    lines = steady.out("get", "pods", "torch-mnist", "-n", "dlrover").splitlines()
    assert lines[0] == "NAME                                    READY   STATUS    RESTARTS   AGE"
    for line, name in zip(
        lines[1:],
        [
            "elasticjob-torch-mnist-dlrover-master",
            "torch-mnist-edljob-worker-0          ",
            "torch-mnist-edljob-worker-1          ",
        ],
        strict=True,
    ):
        assert re.fullmatch(rf"{name}   1/1     Running   0          {AGE}", line)


def test_namespaces_are_kept_apart_and_a_job_is_found_without_naming_its_own(steady):
    empty = steady.run("get", "jobs")
    assert (empty.stdout, "There are jobs in dlrover" in empty.stderr) == ("", True)
    header, row = steady.out("get", "jobs", "-A").splitlines()
    assert header == "NAMESPACE   NAME          PHASE     AGE"
    assert row.startswith("dlrover     torch-mnist   Running")
    assert "torch-mnist-edljob-worker-1" in steady.out("get", "nodes", "torch-mnist")
    assert "must be at most" in steady.refused("get", "jobs", "-n", "../../etc", code=2)


def test_events_are_listed_with_the_columns_of_kubectl(steady):
    header, *rows = steady.out("get", "events", "torch-mnist").splitlines()
    assert header.split("   ")[0] == "LAST SEEN"
    assert header.split() == ["LAST", "SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"]
    assert re.match(rf"{AGE} +Normal +JobStarted +elasticjob/torch-mnist +job torch-mnist starts", rows[0])
    assert any("pod/torch-mnist-edljob-worker-1" in row for row in rows)


def test_every_listing_can_be_had_as_data(steady):
    job = steady.json("get", "jobs", "torch-mnist")
    assert (job["name"], job["namespace"], job["phase"]) == ("torch-mnist", "dlrover", "Running")
    assert [job["name"] for job in steady.json("get", "jobs", "-A")] == ["torch-mnist"]
    assert steady.json("get", "jobs") == []
    nodes = steady.json("get", "nodes", "torch-mnist")
    assert [node["role"] for node in nodes] == ["master", "worker", "worker"]
    assert "JobStarted" in [event["reason"] for event in steady.json("get", "events", "torch-mnist")]
    described = steady.json("describe", "torch-mnist")
    assert (described["targets"], described["first_failure"]) == ({"worker": 2}, None)


def test_wide_listings_add_columns(steady):
    assert steady.out("get", "jobs", "-A", "-o", "wide").splitlines()[0].split()[-1] == "REASON"
    assert steady.out("get", "nodes", "torch-mnist", "-o", "wide").splitlines()[0].split()[-1] == "MESSAGE"


def test_data_is_printed_without_loading_what_draws(steady):
    program = (
        "import sys\nfrom resile.cli.main import main\n"
        "try:\n    main(['get', 'jobs', '-A', '-o', 'json'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n    assert 'rich' not in sys.modules\n    print('lean')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=steady.environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout.splitlines()[-1] == "lean", done.stderr


def test_describe_tells_everything_in_sections(steady):
    text = steady.out("describe", "torch-mnist")
    for section in (
        "Phase: ",
        "Goodput: ",
        "Progress: ",
        "Nodes:",
        "Rounds:",
        "Interruptions:",
        "Last failure:",
        "Events:",
    ):
        assert re.search(rf"^{section}", text, re.MULTILINE), section
    assert re.search(r"^Phase: +Running$", text, re.MULTILINE)
    assert re.search(r"^Replicas: +worker=2$", text, re.MULTILINE)


def test_logs_of_a_job_name_the_pod_and_logs_of_a_pod_do_not(steady):
    lines = steady.out("logs", "torch-mnist", "--tail", "2").splitlines()
    assert sorted(lines) == [f"[torch-mnist-edljob-worker-{n}] line {i}" for n in (0, 1) for i in (2, 3)]
    for words in (["torch-mnist-edljob-worker-1"], ["torch-mnist", "worker-1"]):
        assert steady.out("logs", *words) == "line 1\nline 2\nline 3\n"
    assert steady.out("logs", "torch-mnist-edljob-worker-1", "--tail", "0") == ""
    data = steady.json("logs", "torch-mnist-edljob-worker-1", "--tail", "1")
    assert data == {"pod": "torch-mnist-edljob-worker-1", "line": "line 3"}
    for words in (["elasticjob-torch-mnist-dlrover-master"], ["torch-mnist", "--master"]):
        assert "the master of torch-mnist listens on" in steady.out("logs", *words)
    assert "there is no log of torch-mnist-edljob-worker-9" in steady.refused("logs", "torch-mnist-edljob-worker-9")


def test_a_reader_that_goes_away_is_no_error(steady):
    for words in (["describe", "torch-mnist"], ["logs", "torch-mnist"], ["get", "jobs", "-A", "-o", "json"]):
        started = steady.start(*words)
        started.stdout.close()
        assert started.stderr.read() == ""
        started.stderr.close()
        assert started.wait(timeout=PATIENCE) == 1


def test_an_unknown_job_is_named_with_the_nearest_known_one(steady):
    for words in (["get", "jobs"], ["describe"], ["logs"], ["suspend"], ["delete"], ["chaos", "kill-master"]):
        assert steady.refused(*words, "torch-mnits") == (
            "resile: there is no job 'torch-mnits'; did you mean torch-mnist?"
        )


def test_bad_usage_costs_one_sentence_and_exit_code_2(steady):
    assert "known are jobs, nodes, events and plans" in steady.refused("get", "bananas", code=2)
    for words in (["get"], ["scale", "torch-mnist"], ["logs", "torch-mnist", "--tail", "x"]):
        first, second = steady.run(*words, code=2).stderr.splitlines()
        assert first.startswith(f"resile {words[0]}: ")
        assert second == f"`resile {words[0]} --help` explains it"
    assert "'worker:3' is not ROLE=NUMBER" in steady.refused("scale", "torch-mnist", "worker:3", code=2)
    for number in ("10001", "9" * 23, "9" * 9999):
        assert "a role has at most 10000 nodes" in steady.refused("scale", "torch-mnist", f"worker={number}", code=2)
    assert steady.run("get", code=2).stderr.startswith("resile get: name what to list: jobs, nodes, events or plans\n")
    overview = steady.out("--help")
    for command in COMMANDS:
        assert f"  {command} " in overview
        assert "sage: resile" in steady.out(command, "--help")


def test_a_wrong_token_costs_one_sentence(bench):
    directory = bench.submit("sleep 1000")
    token = directory.token_file.read_bytes()
    directory.token_file.write_bytes(b"f" * 64)
    for words in (["get", "jobs", "steady"], ["describe", "steady"], ["scale", "steady", "worker=1"]):
        assert "the job's master refuses us" in bench.refused(*words)
    directory.token_file.unlink()
    assert "cannot be read" in bench.refused("get", "nodes", "steady")
    directory.token_file.write_bytes(token)
    assert bench.phase("steady") == "Running"


# changing -----------------------------------------------------------------------------------------------------------


def test_a_job_is_scaled_up_and_down(bench):
    bench.submit("sleep 1000")
    assert bench.out("scale", "steady", "worker=3") == "elasticjob/steady scaled: worker=3\n"
    bench.wait(lambda: len(bench.statuses("steady", "Running")) == 3)
    assert bench.json("scale", "steady", "worker=1") == {"name": "steady", "replicas": {"worker": 1}}
    bench.wait(lambda: bench.statuses("steady", "Running") == ["steady-edljob-worker-0"])
    table = bench.out("get", "nodes", "steady")
    assert ("worker-2" in table, "worker-0" in table) == (False, True)
    assert re.search(r"^steady-edljob-worker-2 +0/1 +Deleted", bench.out("get", "po", "steady", "--deleted"), re.M)
    unknown = "resile: job steady has no role 'ps'; known are worker; nothing was changed"
    assert bench.refused("scale", "steady", "ps=1") == unknown


def test_a_scale_plan_is_applied_to_the_job_it_names(bench):
    bench.submit("sleep 1000")
    plan = bench.workdir / "plan.yaml"
    head = "apiVersion: elastic.iml.github.io/v1alpha1\nkind: ScalePlan\nmetadata: {name: plan}\n"
    plan.write_text(head + "spec: {ownerJob: steady, replicaResourceSpecs: {worker: {replicas: 3}}}\n")
    assert bench.out("submit", "--local", str(plan)) == "elasticjob/steady scaled: worker=3\n"
    bench.wait(lambda: len(bench.statuses("steady", "Running")) == 3)
    plan.write_text(head + "spec: {ownerJob: steady, psHosts: [somewhere]}\n")
    assert bench.refused("submit", "--local", str(plan)).startswith("resile: scale plan plan: spec.psHosts: ")
    plan.write_text(head + "spec: {ownerJob: stead, replicaResourceSpecs: {worker: {replicas: 3}}}\n")
    assert "did you mean steady?" in bench.refused("submit", "--local", str(plan))


def test_a_scale_plan_creates_removes_and_migrates_nodes_as_on_a_cluster(bench):
    bench.submit("sleep 1000")
    plan = bench.workdir / "plan.yaml"
    head = "apiVersion: elastic.iml.github.io/v1alpha1\nkind: ScalePlan\nmetadata: {name: plan}\n"
    pods = "createPods: [{type: worker, rankIndex: 2}], removePods: [{name: steady-edljob-worker-1}], "
    moved = "migratePods: [{name: steady-edljob-worker-0, resource: {memory: 64Mi}}]"
    plan.write_text(head + f"spec: {{ownerJob: steady, {pods}{moved}}}\n")
    assert bench.out("submit", "--local", str(plan)) == (
        "elasticjob/steady scaled: one more worker, without worker-1, worker-0 moves\n"
    )
    new = ["steady-edljob-worker-2", "steady-edljob-worker-3"]
    bench.wait(lambda: bench.statuses("steady", "Running") == new)
    bench.wait(lambda: "PlanSucceeded" in bench.out("describe", "steady"))
    nodes = [node for node in bench.json("get", "nodes", "steady") if node["role"] == "worker"]
    assert {node["id"]: node["rank"] for node in nodes} == {2: 0, 3: 2}
    assert bench.refused("submit", "--local", str(plan)) == ("resile: scale plan plan: worker-1 was scaled down")


def test_a_job_is_suspended_and_resumed(bench):
    bench.submit("sleep 1000")
    assert bench.json("suspend", "steady") == {"name": "steady", "suspended": True}
    bench.wait(lambda: not bench.statuses("steady", "Running"))
    assert bench.phase("steady") == "Suspended"
    assert bench.json("resume", "steady") == {"name": "steady", "suspended": False}
    bench.wait(lambda: len(bench.statuses("steady", "Running")) == 2)
    assert bench.phase("steady") == "Running"


def test_a_wish_that_changes_nothing_says_so(bench):
    bench.submit("sleep 1000", replicas=1)
    assert bench.out("resume", "steady") == "elasticjob/steady was not suspended\n"
    assert bench.out("suspend", "steady") == "elasticjob/steady suspended\n"
    assert bench.out("suspend", "steady") == "elasticjob/steady is suspended already\n"
    assert bench.out("resume", "steady") == "elasticjob/steady resumed\n"


def test_several_jobs_are_deleted_at_once_if_all_names_are_known(bench):
    bench.submit("sleep 1000", replicas=1)
    bench.submit("sleep 1000", name="other", replicas=1)
    assert "no job 'nobody'" in bench.refused("delete", "steady", "nobody")
    assert bench.out("delete", "--now", "steady", "other") == "elasticjob/steady deleted\nelasticjob/other deleted\n"


def test_a_node_is_told_by_its_pods_name(bench):
    bench.submit("sleep 1000", replicas=1)
    assert bench.refused("logs", "worker-0") == (
        "resile: worker-0 is a node of a job; its log is that of a pod: `resile logs steady-edljob-worker-0`"
    )


@pytest.mark.parametrize("budget", ["0", "-1", "3601", "nan"])
def test_a_budget_out_of_range_is_told_the_range(bench, budget):
    said = bench.refused("explain", "timeouts", f"--recovery-budget={budget}", code=2)
    assert said == f"resile: recovery_budget: must be between 1 and 3600 seconds, not {budget}"


def test_a_deleted_job_leaves_nothing(bench):
    bench.run("submit", "--local", bench.manifest("true"))
    directory = bench.submit("sleep 1000")
    assert (bench.state / "previous" / "default" / "steady").exists()
    assert bench.out("delete", "steady") == "elasticjob/steady deleted\n"
    assert not directory.path.exists()
    assert not (bench.state / "previous" / "default" / "steady").exists()
    assert not bench.leftovers()
    assert "there are no jobs" in bench.refused("delete", "steady")


def test_a_deleted_job_can_leave_its_logs(bench):
    directory = bench.submit("echo remember; sleep 1000")
    deleted = bench.json("delete", "steady", "--keep")
    assert deleted == {"name": "steady", "deleted": True, "logs": str(directory.path)}
    assert sorted(path.name for path in directory.path.iterdir()) == ["logs", "master.log"]
    assert (directory.path / "logs" / "steady-edljob-worker-0.log").read_text() == "remember\n"
    assert "No jobs found" in bench.run("get", "jobs").stderr


def lose_master(bench, directory):
    supervisor = json.loads((directory.path / "supervisor.json").read_bytes())["pid"]
    os.kill(supervisor, signal.SIGKILL)
    os.kill(directory.address().pid, signal.SIGKILL)
    bench.wait(lambda: not directory.master_lives())


def test_a_job_that_lost_its_master_for_good_is_resumed_with_the_nodes_it_has(bench):
    directory = bench.submit("sleep 1000")
    nodes = bench.statuses("steady", "Running")
    lose_master(bench, directory)
    assert bench.out("resume", "steady") == "elasticjob/steady resumed\n"
    assert bench.statuses("steady", "Running") == nodes
    bench.run("scale", "steady", "worker=1")


def test_a_job_without_a_master_can_be_looked_at_and_deleted(bench):
    directory = bench.submit("sleep 1000")
    lose_master(bench, directory)
    assert bench.phase("steady") == "Running"
    assert re.search(r"^elasticjob-steady-dlrover-master +0/1 +Error", bench.out("get", "nodes", "steady"), re.M)
    assert "has lost its master" in bench.refused("scale", "steady", "worker=1")
    assert "was interrupted" in bench.refused("submit", "--local", bench.manifest("sleep 1000"))
    done = bench.run("delete", "steady")
    assert (done.stdout, "no master" in done.stderr) == ("elasticjob/steady deleted\n", True)
    assert not bench.leftovers()


# watching -----------------------------------------------------------------------------------------------------------


def test_watching_prints_what_changes_and_ends_with_the_job(bench):
    gate = bench.workdir / "gate"
    bench.submit(f"echo begin; until [ -e {gate} ]; do sleep 0.05; done; echo end")
    watches = {kind: bench.start("get", kind, "steady", "-w") for kind in ("jobs", "nodes", "events")}
    watches["logs"] = bench.start("logs", "steady", "-f")
    said = {kind: watch.stdout.readline() + watch.stdout.readline() for kind, watch in watches.items()}
    gate.touch()
    for kind, watch in watches.items():
        said[kind] += watch.communicate(timeout=PATIENCE)[0]
        assert watch.returncode == 0
    assert [line.split()[1] for line in said["jobs"].splitlines()] == ["PHASE", "Running", "Succeeded"]
    assert len(re.findall(r"worker-0 +0/1 +Completed", said["nodes"])) == 1
    assert "JobSucceeded" in said["events"]
    assert sorted(line.split()[-1] for line in said["logs"].splitlines()) == ["begin", "begin", "end", "end"]


def test_followed_logs_show_pods_that_appear_later_and_end_with_the_job(bench):
    first, gate = bench.workdir / "first", bench.workdir / "gate"
    bench.submit(
        f"if [ ! -e {first} ]; then touch {first}; until [ -e {gate} ]; do sleep 0.05; done; echo broken; exit 1; fi; "
        "for i in 1 2 3; do echo step $i; sleep 0.2; done; printf end",
        replicas=1,
    )
    following = bench.start("logs", "steady", "-f")
    one_pod = bench.start("logs", "steady-edljob-worker-0", "-f")
    time.sleep(0.5)
    gate.touch()
    assert one_pod.communicate(timeout=PATIENCE)[0] == "broken\n"
    lines = following.communicate(timeout=PATIENCE)[0].splitlines()
    assert lines[0].endswith("broken")
    assert lines[1:] == [f"[steady-edljob-worker-1] {word}" for word in ("step 1", "step 2", "step 3", "end")]


def test_listings_go_on_while_the_master_is_killed_and_comes_back(bench):
    directory = bench.submit("sleep 1000")
    problems: list[str] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            for words in (["get", "nodes", "steady"], ["get", "events", "steady", "-o", "json"]):
                done = bench.run(*words, code=None)
                if done.returncode or "steady" not in done.stdout:
                    problems.append(f"{words}: {done.returncode} {done.stdout} {done.stderr}")

    looking = threading.Thread(target=look)
    looking.start()
    pids = []
    try:
        for _ in range(3):
            pids.append(directory.address().pid)
            struck = json.loads(bench.out("chaos", "kill-master", "steady", "-o", "json"))
            assert struck["pids"] == pids[-1:]
            bench.wait(lambda: directory.address().pid != pids[-1] and directory.master_lives())
            bench.run("scale", "steady", f"worker={2 + len(pids) % 2}")  # wishes wait for the new master
    finally:
        over.set()
        looking.join(timeout=PATIENCE)
    assert not problems
    assert len(set(pids)) == 3
    assert re.search(r"^elasticjob-steady-dlrover-master +1/1 +Running +3 ", bench.out("get", "nodes", "steady"), re.M)
    assert [event["reason"] for event in bench.json("get", "events", "steady")].count("MasterReturned") == 3


# explaining ---------------------------------------------------------------------------------------------------------


def test_a_group_without_its_command_lists_its_commands_in_whole_words(bench):
    assert "kill-master" in bench.out("chaos")
    assert bench.out("explain").rstrip().endswith("timeouts  Print every interval and time-out.")


def test_the_ladder_of_time_outs_is_printed_whole(bench):
    header, *rows = bench.out("explain", "timeouts").splitlines()
    assert header.split() == ["NAME", "SECONDS", "OF", "BUDGET", "WHAT", "IT", "IS", "FOR"]
    assert [row.split()[0] for row in rows] == list(Timeouts.__struct_fields__)
    assert any(re.match(r"heartbeat_timeout +2 +20% +\w", row) for row in rows)
    assert any(re.match(r"exit_grace +30 +- +\w", row) for row in rows)
    assert bench.json("explain", "timeouts", "--recovery-budget", "20")["heartbeat_timeout"]["seconds"] == 4
    assert bench.refused("explain", "timeouts", "--recovery-budget", "0.1", code=2) == (
        "resile: recovery_budget: must be between 1 and 3600 seconds, not 0.1"
    )


def test_the_ladder_of_a_job_is_that_of_its_manifest(bench):
    bench.submit("true", replicas=1, annotations='{recovery_budget: "5s"}', running=False)
    assert bench.json("explain", "timeouts", "steady")["recovery_budget"]["seconds"] == 5
