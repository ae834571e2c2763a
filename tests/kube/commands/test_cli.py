"""The command line on a real cluster: every command, without `--local`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kube.namespace import (
    COMMAND_DEADLINE,
    DEADLINE,
    IMAGE,
    KUBECONFIG,
    KubeNamespace,
    job,
    kubectl,
    master,
    plan,
    token_of,
    training,
    until,
)

RESILE = str(Path(sys.executable).with_name("resile"))
AGE = r"\d+(?:s|m\d*s?)"
STAY = "for i in 1 2 3; do echo line $i; done; trap 'exit 0' TERM; while :; do sleep 0.1; done"


class Terminal:
    """Commands on the cluster, in one namespace of it; this machine has no jobs."""

    def __init__(self, namespace: KubeNamespace, place: Path) -> None:
        self.namespace = namespace
        self.place = place
        self._started: list[subprocess.Popen[str]] = []

    @property
    def environment(self) -> dict[str, str]:
        state = {"RESILE_STATE_DIR": str(self.place / "state"), "KUBECONFIG": KUBECONFIG, "COLUMNS": "120"}
        return {**os.environ, **state, "PYTHONUNBUFFERED": "1"}

    def start(self, *words: str) -> subprocess.Popen[str]:
        started = subprocess.Popen(
            [RESILE, *words, "-n", self.namespace.name],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self._started.append(started)
        return started

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        """What a command prints, and what it complains of."""
        started = self.start(*words)
        out, err = started.communicate(timeout=COMMAND_DEADLINE)
        assert "Traceback" not in err, err
        assert started.returncode == code, f"{words}: {started.returncode}\n{out}\n{err}"
        return out, err

    def out(self, *words: str) -> str:
        return self.run(*words)[0]

    def json(self, *words: str) -> Any:
        return json.loads(self.out(*words, "-o", "json"))

    def refused(self, *words: str, code: int = 1) -> str:
        err = self.run(*words, code=code)[1].splitlines()
        assert len(err) == 1, err
        return err[0]

    def manifest(self, *documents: dict[str, Any]) -> str:
        path = self.place / f"{documents[0]['metadata']['name']}.yaml"
        path.write_text("\n---\n".join(json.dumps(document) for document in documents))
        return str(path)

    def clear(self) -> None:
        for started in self._started:
            with started:
                started.kill()


class Wire:
    """A way to the API server whose connections can be cut."""

    def __init__(self, server: str) -> None:
        host, _, port = server.removeprefix("https://").partition(":")
        self._there = (host, int(port))
        self._open: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"https://127.0.0.1:{self._listening.getsockname()[1]}"
        self.connections = 0
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def cut(self) -> None:
        """Break every connection there is; new ones are taken."""
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(DEADLINE)
        self._listening.close()

    def _run(self, work: Callable[..., None], *words: socket.socket) -> None:
        self._threads.append(threading.Thread(target=work, args=words, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._there)
                self.connections += 1
                self._open += [near, far]
                for ends in ((near, far), (far, near)):
                    self._run(self._pass_on, *ends)

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)  # the other thread of the pair closes it
        source.close()


@pytest.fixture(scope="module")
def terminal(cluster: KubeNamespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    made = Terminal(cluster, tmp_path_factory.mktemp("terminal"))
    try:
        yield made
    finally:
        made.clear()


@pytest.fixture(scope="module")
def steady(terminal: Terminal) -> str:
    """A job of two workers that runs; tests that change it put it back."""
    said = terminal.out("submit", "--detach", terminal.manifest(job("steady", STAY)))
    assert said == "elasticjob/steady created\n"
    until_running(terminal, "steady", 2)
    return "steady"


def running(terminal: Terminal, name: str) -> int:
    nodes = terminal.json("get", "nodes", name)
    return sum(node["status"] == "Running" and node["role"] == "worker" for node in nodes)


def until_running(terminal: Terminal, name: str, number: int) -> None:
    """Wait for so many workers; the API server is asked first: a command for each look takes the cores they need."""

    def run() -> bool:
        return [pod["status"].get("phase") for pod in terminal.namespace.pods(name).values()].count("Running") == number

    until(f"{number} workers that run", run)
    until(f"{number} workers in the listing", lambda: running(terminal, name) == number)


# what is there ------------------------------------------------------------------------------------------------------


def test_a_job_is_submitted_and_followed_to_its_good_end(terminal: Terminal) -> None:
    out, _ = terminal.run("submit", terminal.manifest(job("short", training(10))))
    first, *story, _, _, last = out.splitlines()
    assert first == "elasticjob/short created"
    assert re.match(r"\d\d:\d\d:\d\d\.\d{3}  MasterCreated ", story[0])
    assert any("RoundFormed      round 1 runs with" in line for line in story)
    assert "job short succeeded" in out
    assert re.fullmatch(r"10 steps in .*, goodput .*%", last)
    ended = r"^short-edljob-worker-0 +0/1 +Completed"  # the kubelet says so a moment after the process has
    until("the worker's end", lambda: re.search(ended, terminal.out("get", "nodes", "short"), re.M))
    assert re.search(r"^\[short-edljob-worker-1\] .*rank \d of 2 starts at step 0", terminal.out("logs", "short"), re.M)
    assert "is over (Succeeded) and will not run again" in terminal.refused(
        "submit", terminal.manifest(job("short", ""))
    )
    assert "is over (Succeeded); nothing was changed" in terminal.refused("scale", "short", "3")
    for words in (["get", "nodes", "short", "-w"], ["logs", "short", "-f"]):  # nothing is left to wait for
        assert "short-edljob-worker-1" in terminal.out(*words)


def test_a_job_that_fails_ends_with_exit_code_1_and_says_why(terminal: Terminal) -> None:
    out, _ = terminal.run("submit", terminal.manifest(job("broken", "echo no such file: data; exit 7", 1)), code=1)
    assert "job broken failed: worker-" in out
    assert "exit code 7" in out
    assert out.splitlines()[-2:] == ["the last lines of its log:", "no such file: data"]
    text = terminal.out("describe", "broken")
    assert re.search(r"^Phase: +Failed$", text, re.M)
    assert re.search(r"^Last failure:\n  broken-edljob-worker-\d: .*exit code 7", text, re.M)


def test_listings_have_the_layout_that_they_have_on_one_machine(terminal: Terminal, steady: str) -> None:
    header, row = terminal.out("get", "elasticjob", steady).splitlines()
    assert header == "NAME     PHASE     AGE"
    assert re.fullmatch(rf"steady   (Running|Pending)   {AGE}", row)
    lines = terminal.out("get", "pods", steady).splitlines()
    assert lines[0] == "NAME                               READY   STATUS    RESTARTS   AGE"
    for line, name in zip(lines[1:], (master(steady), "steady-edljob-worker-0", "steady-edljob-worker-1"), strict=True):
        assert re.fullmatch(rf"{name} +1/1     Running   0          {AGE}", line)
    everywhere = terminal.out("get", "jobs", "-A", "-o", "wide")
    assert re.search(rf"^{terminal.namespace.name} +steady +\w+ +{AGE} +2/2 ", everywhere, re.M)
    wide = terminal.out("get", "nodes", steady, "-o", "wide")
    assert re.search(r"^steady-edljob-worker-1 .* 1 +10\.\S+ +\S+node\S* ", wide, re.M)


def test_every_listing_can_be_had_as_data_and_as_names(terminal: Terminal, steady: str) -> None:
    data = terminal.json("get", "jobs", steady)
    assert (data["name"], data["namespace"]) == (steady, terminal.namespace.name)
    assert [node["name"] for node in data["nodes"]] == ["steady-edljob-worker-0", "steady-edljob-worker-1"]
    assert f"name: {steady}\n" in terminal.out("get", "jobs", steady, "-o", "yaml")
    names = terminal.out("get", "nodes", steady, "-o", "name").splitlines()
    assert names == [f"pod/{master(steady)}", "pod/steady-edljob-worker-0", "pod/steady-edljob-worker-1"]
    events = terminal.json("get", "events", steady)
    assert {"elasticjob/steady", "pod/steady-edljob-worker-0"} <= {event["object"] for event in events}
    assert "JobStarted" in [event["reason"] for event in events]


def test_describe_tells_everything_in_sections(terminal: Terminal, steady: str) -> None:
    text = terminal.out("describe", steady)
    for section in ("Phase: ", "Goodput: ", "Replicas: +worker=2", "Cluster: ", "Conditions:", "Nodes:", "Events:"):
        assert re.search(rf"^{section}", text, re.M), section
    assert re.search(r"^  steady-edljob-worker-1 +1/1 +Running", text, re.M)
    assert re.search(r" JobStarted +elasticjob/steady ", text)
    data = terminal.json("describe", steady)
    assert data["master"]["name"] == master(steady)
    assert data["conditions"][0]["type"] == "Created"


def test_logs_are_of_one_pod_of_all_or_of_the_master(terminal: Terminal, steady: str) -> None:
    lines = terminal.out("logs", steady, "--tail", "2").splitlines()
    assert lines == [f"[steady-edljob-worker-{n}] line {i}" for n in (0, 1) for i in (2, 3)]
    assert terminal.out("logs", steady, "worker-1") == "line 1\nline 2\nline 3\n"
    assert json.loads(terminal.out("logs", "steady-edljob-worker-1", "--tail", "1", "-o", "json")) == {
        "pod": "steady-edljob-worker-1",
        "line": "line 3",
    }
    assert "JobStarted" in terminal.out("logs", steady, "--master")
    assert "there is no pod steady-edljob-worker-9 any more" in terminal.refused("logs", "steady-edljob-worker-9")
    assert "worker-1 is a node of a job" in terminal.refused("logs", "worker-1")


def test_an_unknown_job_is_named_with_the_nearest_known_one(terminal: Terminal, steady: str) -> None:
    where = f"in namespace {terminal.namespace.name} of the cluster"
    for words in (["get", "jobs"], ["describe"], ["logs"], ["suspend"], ["delete"]):
        assert terminal.refused(*words, "staedy") == f"resile: there is no job 'staedy' {where}; did you mean steady?"
    assert "has no role 'ps'; known are worker" in terminal.refused("scale", steady, "ps=1")


# changing -----------------------------------------------------------------------------------------------------------


def test_a_job_is_scaled_suspended_and_resumed(terminal: Terminal, steady: str) -> None:
    assert terminal.out("scale", steady, "3") == "elasticjob/steady scaled: worker=3\n"
    until_running(terminal, steady, 3)
    plans = terminal.manifest(plan("fewer", steady, replicaResourceSpecs={"worker": {"replicas": 2}}))
    assert terminal.out("submit", plans) == "scaleplan/fewer created\n"
    until("the plan", lambda: terminal.json("get", "plans", steady)[0]["phase"] == "Succeeded")
    assert re.search(rf"^fewer +Succeeded +{AGE} +steady", terminal.out("get", "plans", "-o", "wide"), re.M)
    until_running(terminal, steady, 2)

    assert terminal.out("suspend", steady) == "elasticjob/steady suspended\n"
    assert terminal.out("suspend", steady) == "elasticjob/steady is suspended already\n"
    until("a pause", lambda: terminal.json("get", "jobs", steady)["phase"] == "Suspended")
    assert terminal.out("resume", steady) == "elasticjob/steady resumed\n"
    assert terminal.out("resume", steady) == "elasticjob/steady was not suspended\n"
    until_running(terminal, steady, 2)


def test_a_pod_is_killed_and_the_interruption_told(terminal: Terminal) -> None:
    following = terminal.start("submit", terminal.manifest(job("hurt", training(100_000))))
    until("training", lambda: terminal.namespace.progress("hurt").get("members") == 2)
    struck, created, ran = terminal.out("chaos", "kill-node", "hurt", "worker-1").splitlines()
    assert struck.endswith(" killed hurt-edljob-worker-1")
    assert re.fullmatch(r"hurt-edljob-worker-2 was created after .* m?s", created)
    assert re.fullmatch(r"hurt-edljob-worker-2 ran after .* s", ran)
    assert f"{master('hurt')} ran after " in terminal.out("chaos", "kill-master", "hurt")
    assert "has no pod hurt-edljob-worker-99 that runs" in terminal.refused("chaos", "kill-node", "hurt", "worker-99")
    told = r"^  BECAUSE +NOTICED +NEXT STEP +AFTER\n  worker-1 .* \d+\.\d+ s$"
    until("the interruption", lambda: re.search(told, terminal.out("describe", "hurt"), re.M))
    terminal.run("delete", "hurt")
    out, err = following.communicate(timeout=DEADLINE)
    assert "NodeRelaunched" in out
    assert (following.returncode, err) == (1, "resile: the job was deleted\n")


def test_the_ladder_of_a_job_is_that_of_its_manifest(terminal: Terminal, steady: str) -> None:
    assert terminal.json("explain", "timeouts", steady)["recovery_budget"]["seconds"] == 10


def test_a_manifest_changes_a_job_that_runs_and_says_whether_it_did(terminal: Terminal, steady: str) -> None:
    namespace = terminal.namespace.name
    assert terminal.out("submit", "--detach", terminal.manifest(job(steady, STAY))).startswith("elasticjob/steady ")
    again = json.loads(terminal.out("submit", "--detach", terminal.manifest(job(steady, STAY)), "-o", "json"))
    assert again == {"kind": "ElasticJob", "name": steady, "namespace": namespace, "how": "unchanged"}
    elsewhere = job(steady, STAY)
    elsewhere["metadata"]["namespace"] = "elsewhere"
    assert "the manifest says namespace elsewhere" in terminal.refused("submit", terminal.manifest(elsewhere), code=2)
    wrong = job(steady, STAY)
    wrong["spec"]["replicaSpecs"]["worker"]["colour"] = "red"
    assert "spec.replicaSpecs.worker.colour: unknown field" in terminal.refused(
        "submit", terminal.manifest(wrong), code=2
    )


def open_gate(terminal: Terminal, pod: str, gate: str) -> None:
    """Make the file that a pod's command waits for; the command may end before `touch` does, and take it along."""
    said = terminal.namespace.kubectl("exec", pod, "--", "/bin/touch", gate, check=False)
    assert "error" not in said.lower(), said


def test_watching_and_following_end_with_the_job(terminal: Terminal) -> None:
    gate = "/tmp/gate"
    command = f"echo begin; until [ -e {gate} ]; do sleep 0.05; done; echo end"
    terminal.run("submit", "--detach", terminal.manifest(job("gated", command)))
    until_running(terminal, "gated", 2)
    watches = {kind: terminal.start("get", kind, "gated", "-w") for kind in ("jobs", "nodes", "events")}
    watches["logs"] = terminal.start("logs", "gated", "-f")
    watches["submit"] = terminal.start("submit", terminal.manifest(job("gated", command)))
    said = {kind: watch.stdout.readline() + watch.stdout.readline() for kind, watch in watches.items() if watch.stdout}
    for number in (0, 1):
        open_gate(terminal, f"gated-edljob-worker-{number}", gate)
    for kind, watch in watches.items():
        out, err = watch.communicate(timeout=DEADLINE)
        said[kind] += out
        assert watch.returncode == 0, err
    assert [line.split()[1] for line in said["jobs"].splitlines()][-1] == "Succeeded"
    assert re.search(r"worker-0 +0/1 +Completed", said["nodes"])
    assert "JobSucceeded" in said["events"]
    assert sorted(line.split()[-1] for line in said["logs"].splitlines()) == ["begin", "begin", "end", "end"]
    assert "job gated succeeded" in said["submit"]


def test_following_goes_on_after_broken_connections_and_repeats_nothing(terminal: Terminal) -> None:
    config = json.loads(kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    wire = Wire(config["clusters"][0]["cluster"]["server"])
    config["clusters"][0]["cluster"] = {"server": wire.address, "insecure-skip-tls-verify": True}
    path = terminal.place / "wired"
    path.write_text(json.dumps(config))
    command = "for i in 1 2 3; do echo begin $i; done; until [ -e /tmp/gate ]; do sleep 0.05; done; echo end"
    try:
        terminal.run("submit", "--detach", terminal.manifest(job("wired", command, 1)))
        until_running(terminal, "wired", 1)
        following = terminal.start("logs", "wired", "-f", "--kubeconfig", str(path))
        assert following.stdout is not None
        assert [following.stdout.readline() for _ in range(3)] == [f"begin {i}\n" for i in (1, 2, 3)]
        before = wire.connections
        wire.cut()
        until("other connections", lambda: wire.connections >= before + 2)
        open_gate(terminal, "wired-edljob-worker-0", "/tmp/gate")
        out, err = following.communicate(timeout=DEADLINE)
        assert (following.returncode, out) == (0, "end\n"), err
    finally:
        wire.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_submit_that_is_ended_leaves_the_job_running(terminal: Terminal, steady: str, number: signal.Signals) -> None:
    following = terminal.start("submit", terminal.manifest(job(steady, STAY)))
    assert following.stdout is not None
    following.stdout.readline()
    following.stdout.readline()
    following.send_signal(number)
    _, err = following.communicate(timeout=DEADLINE)
    assert following.returncode == 128 + number
    assert "job steady goes on" in err
    assert running(terminal, steady) == 2


def test_a_deleted_job_is_gone_with_its_pods_when_the_command_returns(terminal: Terminal) -> None:
    terminal.run("submit", "--detach", terminal.manifest(job("doomed", STAY, 1), job("spared", STAY, 1)))
    until_running(terminal, "doomed", 1)
    assert "--keep is for jobs of this machine" in terminal.refused("delete", "doomed", "--keep", code=2)
    out, err = terminal.run("delete", "doomed")
    assert (out, err) == ("elasticjob/doomed deleted\n", "stopping doomed ...\n")
    assert terminal.namespace.kubectl("get", "pods", "-l", "elasticjob-name=doomed", "-o", "name") == ""
    assert terminal.out("delete", "spared", "--no-wait") == "elasticjob/spared is being deleted\n"
    assert (
        "No jobs found in nowhere namespace."
        in subprocess.run(
            [RESILE, "get", "jobs", "-n", "nowhere"],
            env=terminal.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE,
            check=True,
        ).stderr
    )


# who may ------------------------------------------------------------------------------------------------------------


def test_a_stranger_is_told_what_is_forbidden(terminal: Terminal, steady: str) -> None:
    terminal.namespace.kubectl("create", "serviceaccount", "stranger")
    config = json.loads(kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    config["users"][0]["user"] = {"token": token_of("stranger", terminal.namespace.name)}
    path = terminal.place / "stranger"
    path.write_text(json.dumps(config))
    for words in (["get", "jobs"], ["delete", steady], ["submit", terminal.manifest(job("new", STAY))]):
        said = terminal.refused(*words, "--kubeconfig", str(path))
        assert said.startswith("resile: the cluster forbids it: elasticjobs.elastic.iml.github.io ")
        assert f"system:serviceaccount:{terminal.namespace.name}:stranger" in said


def test_a_pod_uses_its_own_service_account(terminal: Terminal, steady: str) -> None:
    namespace = terminal.namespace
    namespace.kubectl("create", "serviceaccount", "viewer")
    namespace.kubectl(
        "create", "role", "viewer", "--verb=get,list,watch", "--resource=elasticjobs.elastic.iml.github.io,pods"
    )
    namespace.kubectl("create", "rolebinding", "viewer", "--role=viewer", f"--serviceaccount={namespace.name}:viewer")
    container = {"name": "main", "image": IMAGE, "command": ["resile", "get", "nodes", steady]}
    namespace.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "inside"},
            "spec": {"serviceAccountName": "viewer", "restartPolicy": "Never", "containers": [container]},
        }
    )
    until("its end", lambda: namespace.get("pod", "inside")["status"].get("phase") in ("Succeeded", "Failed"))
    assert re.search(r"^steady-edljob-worker-\d +1/1 +Running", namespace.logs("inside"), re.M), namespace.logs(
        "inside"
    )
