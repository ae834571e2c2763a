"""Reporting a step never hurts the training that reports it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from resile.api.ids import Round
from resile.torch import report_step
from resile.wire.agent_client import AgentClient


def test_outside_resile_it_does_nothing_and_loads_nothing(monkeypatch):
    monkeypatch.delenv("RESILE_AGENT_SOCKET", raising=False)
    report_step(1, 10)
    check = "import sys; from resile.torch import report_step; report_step(1); sys.exit('socket' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_an_agent_that_is_gone_costs_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("RESILE_AGENT_SOCKET", str(tmp_path / "nobody.sock"))
    monkeypatch.setenv("RESILE_WORKER", "worker-0/0")
    monkeypatch.setenv("RESILE_WORKER_PID", str(os.getpid()))  # it would set it, and later tests would inherit it
    for step in range(100):
        report_step(step, 100)


def test_the_agent_hears_the_first_step_of_every_round_at_once(monkeypatch, tmp_path):
    with socket.socket(socket.AF_UNIX) as agent:
        agent.settimeout(10)
        agent.bind(str(tmp_path / "agent.sock"))
        agent.listen()
        monkeypatch.setenv("RESILE_AGENT_SOCKET", str(tmp_path / "agent.sock"))
        monkeypatch.setenv("RESILE_WORKER", "worker-0/1")
        monkeypatch.setenv("RESILE_WORKER_PID", str(os.getpid()))
        report_step(20, 115)
        channel = AgentClient.from_environment()
        assert channel is not None
        channel.round = Round(5)
        report_step(21, 115)
        line, _ = agent.accept()
        with line:
            heard = line.recv(4096)
        channel.close()
    assert heard.index(b"Attach") < heard.index(b"StepReport")
    assert heard.count(b"StepReport") == 2
