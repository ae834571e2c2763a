"""`resile run` with TLS: the master and all agents encrypt, and an agent without the certificate does not get in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from resile.agent.workers.ports import free_port
from tests.support.certificates import Authority

RESILE = Path(sys.executable).with_name("resile")
PATIENCE = 60


def _run(state: Path, port: int, script: Path, *flags: str) -> subprocess.Popen[str]:
    words = ["--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=tls"]
    return subprocess.Popen(
        [str(RESILE), "run", *words, *flags, str(script)],
        env=os.environ | {"RESILE_STATE_DIR": str(state)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_agents_with_certificates_meet_and_one_without_is_told_why(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    certificate, key = authority.issue("node")
    script = tmp_path / "script.py"
    script.write_text("import os; print('world', os.environ['WORLD_SIZE'])")
    tls = [f"--tls-cert={certificate}", f"--tls-key={key}", f"--tls-ca={authority.file}"]
    port = free_port()
    agents = [_run(tmp_path / "state", port, script, *tls)]
    assert agents[0].stderr is not None
    welcomed = next(line for line in agents[0].stderr if "this node is" in line)
    assert "worker-0" in welcomed
    stranger = _run(tmp_path / "state", port, script, f"--tls-ca={authority.file}", "--rdzv-conf=is_host=0")
    try:
        agents.append(_run(tmp_path / "state", port, script, *tls))
        for agent in agents:
            said, _ = agent.communicate(timeout=PATIENCE)
            assert agent.returncode == 0, said
            assert "world 2" in said
    finally:
        for process in (*agents, stranger):
            process.kill()
        said, _ = stranger.communicate(timeout=PATIENCE)
    assert not said, "a node without a certificate of the job's authority never trains"
