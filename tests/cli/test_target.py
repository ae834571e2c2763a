"""Which jobs are meant, and what is said where a cluster cannot be reached or refuses. No cluster is needed."""

from __future__ import annotations

import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from resile.client.target import Target
from resile.kube.config import config_files
from tests.cli.cli_runner import CliRunner

REFUSED = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}


def kubeconfig(path: Path, server: str, name: str = "lab") -> str:
    path.write_text(
        json.dumps(
            {
                "current-context": name,
                "clusters": [{"name": name, "cluster": {"server": server}}],
                "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
                "users": [{"name": name, "user": {"token": "none"}}],
            }
        )
    )
    return str(path)


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers every question with what `refusal` says."""

    refusal: tuple[int, str, str] = (404, "text/plain", "404 page not found")

    def do_GET(self) -> None:
        code, kind, text = self.refusal
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_PATCH = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    """Something that answers as an API server without our CRDs does."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{serving.server_port}"
        finally:
            serving.shutdown()
            thread.join()
            Refusing.refusal = (404, "text/plain", "404 page not found")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory with a job `demo` in the namespace `lab`, and a configured cluster."""
    monkeypatch.setenv("RESILE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path / "config", "https://127.0.0.1:1"))
    folder = tmp_path / "state" / "jobs" / "lab" / "demo"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text('{"name": "demo", "kind": "elasticjob"}')
    return tmp_path


def test_a_job_of_this_machine_comes_before_one_of_the_cluster(machine: Path) -> None:
    nothing_said, in_lab = Target(), Target(namespace="lab")
    for name in ("demo", "demo-edljob-worker-3", "elasticjob-demo-dlrover-master"):
        assert nothing_said.is_local(name)
        assert in_lab.is_local(name)
        assert not Target(namespace="other").is_local(name)
    assert not nothing_said.is_local("another")


def test_a_listing_is_of_this_machine_if_it_has_jobs_there(machine: Path) -> None:
    assert Target(namespace="lab").is_local()
    assert Target().is_local(everywhere=True)
    assert not Target().is_local()


def test_flags_decide(machine: Path) -> None:
    assert Target(local=True).is_local("another")
    for flag in (Target(cluster=True), Target(context="x"), Target(kubeconfig="x")):
        assert not flag.is_local("demo")


def test_without_a_cluster_everything_means_this_machine(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(machine / "nothing"))
    assert Target().is_local("another")
    assert Target().is_local()


def test_files_are_those_of_the_flag_or_of_kubeconfig_or_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/a:/b")
    monkeypatch.setenv("HOME", "/home/me")
    assert config_files("/c") == [Path("/c")]
    assert config_files() == [Path("/a"), Path("/b")]
    monkeypatch.delenv("KUBECONFIG")
    assert config_files() == [Path("/home/me/.kube/config")]


def test_a_server_that_cannot_be_reached_costs_one_sentence(bench: CliRunner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    config = kubeconfig(bench.workdir / "config", f"https://127.0.0.1:{port}")
    manifest = bench.manifest("true")
    for words in (["get", "jobs"], ["get", "jobs", "x"], ["describe", "x"], ["logs", "x"], ["submit", manifest]):
        said = bench.refused(*words, "--kubeconfig", config)
        assert said.startswith(f"resile: the API server https://127.0.0.1:{port} (context lab) cannot be reached: ")


def test_a_cluster_without_our_kinds_says_how_to_install_them(bench: CliRunner, server: str) -> None:
    config = kubeconfig(bench.workdir / "config", server)
    for words in (["get", "jobs"], ["describe", "x"], ["delete", "x"], ["submit", bench.manifest("true")]):
        assert bench.refused(*words, "--kubeconfig", config) == (
            "resile: the cluster (context lab) knows no ElasticJob; `make deploy`, or "
            "`resile manifests | kubectl apply -f -`, installs resile there"
        )


@pytest.mark.parametrize(
    ("code", "message", "sentence"),
    [
        (403, 'elasticjobs is forbidden: User "eve" cannot list', "the cluster forbids it: elasticjobs is forbidden"),
        (401, "Unauthorized", "the cluster does not take the credentials of context lab"),
        (500, "etcd is\naway", "the cluster refuses: etcd is away"),
    ],
)
def test_what_a_cluster_refuses_is_one_sentence(
    bench: CliRunner, server: str, code: int, message: str, sentence: str
) -> None:
    Refusing.refusal = (code, "application/json", json.dumps({**REFUSED, "code": code, "message": message}))
    assert sentence in bench.refused("get", "jobs", "--kubeconfig", kubeconfig(bench.workdir / "config", server))


def test_a_configuration_that_cannot_be_used_costs_one_sentence(bench: CliRunner) -> None:
    good = kubeconfig(bench.workdir / "good", "https://127.0.0.1:1")
    broken = bench.workdir / "broken"
    unusable, malformed = "the cluster's configuration cannot be used", f"{broken} is no kubeconfig file"
    for text, said in {
        "": malformed,
        "some words": malformed,
        "[": unusable,
        "clusters: 3": malformed,
        "contexts: []": malformed,
        '{"clusters": [], "contexts": []}': unusable,
    }.items():
        broken.write_text(text)
        assert said in bench.refused("get", "jobs", "--kubeconfig", str(broken)), text
    assert "there is no context 'lob' in" in bench.refused("get", "jobs", "--kubeconfig", good, "--context", "lob")
    assert "does not exist; set KUBECONFIG" in bench.refused("get", "jobs", "--kubeconfig", str(bench.workdir / "none"))
    assert "--local means this machine" in bench.refused("get", "jobs", "--local", "--context", "lab", code=2)
    assert "--enforce-memory and --metrics-port are for this machine" in bench.refused(
        "submit", bench.manifest("true"), "--enforce-memory", code=2
    )


def test_commands_for_this_machine_load_no_kubernetes_library(bench: CliRunner) -> None:
    program = (
        "import sys\nfrom resile.cli.main import main\n"
        "try:\n    main(['get', 'jobs'])\n"
        "except SystemExit:\n    assert 'lightkube' not in sys.modules\n    print('lean')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=bench.environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "lean", done.stderr
