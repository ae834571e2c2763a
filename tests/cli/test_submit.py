"""`resile submit` on real jobs: starting, following and ending them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import time
import urllib.request

import pytest

from tests.cli.cli_runner import PATIENCE, RESILE


def test_a_job_is_followed_to_its_good_end_and_may_then_be_run_again(bench):
    manifest = bench.manifest("echo fine; sleep 0.2")
    for _ in range(2):
        done = bench.run("submit", "--local", manifest)
        first, *_, last = done.stdout.splitlines()
        assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}  JobStarted +job steady starts", first)
        assert last == "job steady succeeded: all 2 training nodes finished"
    previous = bench.state / "previous" / "default" / "steady"
    assert done.stderr == f"the job steady that ran before was moved to {previous}\n"
    assert (previous / "logs").is_dir()
    assert re.search(r"^elasticjob-steady-dlrover-master +0/1 +Completed", bench.out("get", "pods", "steady"), re.M)
    assert sorted(bench.out("logs", "steady").splitlines()) == [f"[steady-edljob-worker-{n}] fine" for n in (0, 1)]


def test_a_job_whose_command_fails_ends_with_exit_code_1_and_says_why(bench):
    done = bench.run("submit", "--local", bench.manifest("echo no such file: data; exit 7", restarts=1), code=1)
    assert "job steady failed: worker-" in done.stdout
    assert "exited with code 7; it is not replaced: it crashed 2 times and restartCount is 1" in done.stdout
    assert re.search(r"^WHAT FAILED +NOTICED$", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1] == "no such file: data"
    assert bench.phase("steady") == "Failed"
    told = bench.out("describe", "steady").partition("Last failure:\n")[2].splitlines()
    assert re.fullmatch(r"  steady-edljob-worker-\d \(Error\): .*code 7", told[0])
    assert told[1:3] == ["  the last lines of its log:", "  no such file: data"]
    assert re.search(r"^elasticjob-steady-dlrover-master +0/1 +Error", bench.out("get", "pods", "steady"), re.M)


def test_a_command_that_does_not_exist_is_named(bench):
    path = bench.manifest("", restarts=0, replicas=1)
    with open(path) as file:
        text = file.read().replace('["/bin/bash", "-c", ""]', '["/no/such/program"]')
    with open(path, "w") as file:
        file.write(text)
    assert "/no/such/program: command not found" in bench.run("submit", "--local", path, code=1).stdout


def test_two_jobs_of_one_name_do_not_run_at_once(bench):
    bench.submit("sleep 1000")
    assert bench.refused("submit", "--local", bench.manifest("sleep 1000")) == (
        "resile: job steady is running already; `resile delete steady` ends it"
    )


def test_a_master_that_cannot_serve_says_why_and_leaves_nothing(bench):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        path = bench.manifest("sleep 1000")
        assert bench.refused("submit", "--local", path, "--metrics-port", port) == (
            f"resile: the master did not come up: cannot serve metrics on 127.0.0.1:{port}: address already in use"
        )
    assert not bench.directory("steady").path.exists()
    bench.run("submit", "--local", path, "--detach", "--metrics-port", port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        assert b'resile_round{job="steady"' in page.read()


def test_a_detached_job_is_given_as_data(bench):
    path = bench.manifest("sleep 1000", replicas=1)
    started = json.loads(bench.out("submit", "--local", path, "--detach", "-o", "json", "-n", "lab"))
    assert (started["name"], started["namespace"]) == ("steady", "lab")
    assert (bench.directory("steady", "lab").path).samefile(started["directory"])
    assert "the manifest says namespace other" in bench.refused(
        "submit", "--local", bench.manifest("true", namespace="other"), "-n", "lab", code=2
    )


def test_every_mistake_of_a_manifest_is_told(bench):
    path = bench.workdir / "bad.yaml"
    path.write_text(
        "apiVersion: elastic.iml.github.io/v1alpha1\nkind: ElasticJob\nmetadata: {name: Bad_Name}\n"
        "spec: {replicaSpecs: {worker: {replicas: -1, colour: red, template: {}}}}\n"
    )
    sentences = bench.run("submit", "--local", str(path), code=2).stderr.splitlines()
    assert all(line.startswith(f"resile: {path}: ") for line in sentences)
    for field in ("metadata.name", "spec.replicaSpecs.worker.replicas", "spec.replicaSpecs.worker.colour"):
        assert any(f": {field}: " in line for line in sentences), field
    assert "cannot read nothing.yaml: No such file" in bench.refused("submit", "--local", "nothing.yaml", code=2)
    assert "no cluster is configured" in bench.refused("submit", bench.manifest("true"))
    assert not (bench.state / "jobs").exists()


def test_ctrl_c_stops_the_job(bench):
    following = bench.start("submit", "--local", bench.manifest("sleep 1000"))
    bench.wait(lambda: bench.directory("steady").exists and len(bench.statuses("steady", "Running")) == 2)
    following.send_signal(signal.SIGINT)
    out, err = following.communicate(timeout=PATIENCE)
    assert following.returncode == 130
    assert "stopping the job" in err
    assert "job steady was stopped: its user pressed Ctrl-C" in out
    assert re.search(r"NodeDeleted +worker-0 was deleted: the job is over$", out, re.MULTILINE)
    assert not re.search(r"(?<![.\d])143", out), "but for a time of day"
    assert bench.json("get", "jobs", "steady")["reason"] == "Stopped"


def test_a_second_ctrl_c_leaves_the_job_to_end_by_itself(bench):
    command = "trap '' TERM; while :; do sleep 0.1; done"  # it takes the whole grace to end
    following = bench.start("submit", "--local", bench.manifest(command, replicas=1))
    bench.wait(lambda: bench.directory("steady").exists and len(bench.statuses("steady", "Running")) == 1)
    following.send_signal(signal.SIGINT)
    bench.wait(lambda: bench.phase("steady") == "Failed")
    time.sleep(0.3)
    following.send_signal(signal.SIGINT)
    _, err = following.communicate(timeout=PATIENCE)
    assert (following.returncode, "left steady, which is over" in err) == (130, True)


def test_ctrl_c_before_the_job_runs_says_so_and_leaves_nothing(bench):
    following = bench.start("submit", "--local", bench.manifest("sleep 1000"))
    bench.wait(bench.directory("steady").path.exists)
    following.send_signal(signal.SIGINT)
    _, err = following.communicate(timeout=PATIENCE)
    assert following.returncode == 130
    assert "resile: interrupted" in err or "stopping the job" in err
    assert "Traceback" not in err
    assert not bench.directory("steady").exists or bench.phase("steady") == "Failed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_submit_that_is_ended_says_that_the_job_goes_on(bench, number):
    following = bench.start("submit", "--local", bench.manifest("sleep 1000", replicas=1))
    bench.wait(lambda: bench.directory("steady").exists and len(bench.statuses("steady", "Running")) == 1)
    following.send_signal(number)
    _, err = following.communicate(timeout=PATIENCE)
    assert following.returncode == 128 + number
    watch = "`resile get jobs steady` shows it, `resile delete steady` ends it"
    assert err == f"resile: {number.name}: job steady goes on; {watch}\n"
    assert bench.phase("steady") == "Running"


def test_a_role_without_a_command_is_refused(bench):
    path = bench.workdir / "silent.yaml"
    path.write_text(bench_text(bench).replace('command: ["/bin/bash", "-c", "true"]', "args: []"))
    assert bench.refused("submit", "--local", str(path), code=2) == (
        "resile: role worker has no command: a node on this machine needs one in its template"
    )
    assert not bench.directory("steady").path.exists()


def test_parameter_servers_are_said_to_come_later(bench):
    path = bench.workdir / "ps.yaml"
    path.write_text(bench_text(bench).replace("AllreduceStrategy", "ParameterServerStrategy"))
    done = bench.run("submit", "--local", str(path))
    assert "parameter servers come in a later version" in done.stderr


def bench_text(bench) -> str:
    """A manifest whose one command does nothing."""
    with open(bench.manifest("true", replicas=1)) as file:
        return file.read()


def test_a_terminal_gets_the_live_view(bench):
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(bench.workdir)
        os.execve(RESILE, [RESILE, "submit", "--local", bench.manifest("sleep 0.5")], bench.environment)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while True:
            shown += os.read(terminal, 65536)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    text = shown.decode()
    assert "resile · default/steady" in text
    assert "steady-edljob-worker-1" in text
    assert "job steady succeeded" in text
