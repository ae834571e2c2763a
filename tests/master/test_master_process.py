"""A real master process: strangers, bad input, death and return."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from resile.api.ids import Round
from resile.api.master_exit_codes import CANNOT_SERVE, JOB_FAILED, TRY_AGAIN
from resile.master import __main__ as main_module
from resile.master import supervisor
from resile.master.kubernetes import app
from resile.protocol.agent_to_master import Heartbeat, Join, NodeFinished, StandbyReport
from resile.protocol.commands import Done, Events, Failed, JobEvents
from resile.protocol.job_changes import Scale, Stop
from resile.protocol.master_to_agent import JobOver, Refused, RoundFormed, RoundOver, Welcome
from resile.protocol.message import PROTOCOL
from resile.protocol.shards import OpenDataset, ShardGranted, ShardNoted, ShardProgress, TakeShard
from resile.wire.connection import CannotListen
from resile.wire.handshake import HandshakeRefused
from tests.master.masters import PATIENCE, Peer, command, master, new_job


async def test_two_agents_meet_and_the_job_ends_when_both_finish(tmp_path: Path) -> None:
    directory = new_job(tmp_path)
    with master(directory) as process:
        peers = [await Peer.call(directory), await Peer.call(directory)]
        for number, peer in enumerate(peers):
            welcome = await peer.hello(f"agent-{number}")
            assert (welcome.node.id, welcome.rank) == (number, number)
            peer.say(Join(after=Round(0), store_port=20000 + number))
        for number, peer in enumerate(peers):
            formed = await peer.hear(RoundFormed)
            assert formed.round == 1
            assert (formed.assignment.group_rank, formed.assignment.world_size) == (number, 2)
            assert formed.assignment.master_port == 20000
            peer.say(NodeFinished(round=Round(1)))
        for peer in peers:
            assert (await peer.hear(JobOver)).succeeded
            peer.connection.close()
        assert await asyncio.to_thread(process.wait, PATIENCE) == 0


async def test_a_peer_with_a_wrong_token_gets_nothing_and_the_job_is_not_disturbed(tmp_path: Path) -> None:
    directory = new_job(tmp_path)
    with master(directory):
        good = await Peer.call(directory)
        await good.hello("good")
        with pytest.raises(HandshakeRefused, match="wrong or missing job token"):
            await Peer.call(directory, token=b"not the token")
        assert (await good.status()).phase == "Running"


async def test_garbage_half_messages_and_oversized_ones_do_not_disturb_a_master(tmp_path: Path) -> None:
    directory = new_job(tmp_path)
    with master(directory):
        good = await Peer.call(directory)
        await good.hello("good")
        address = directory.address()
        assert address is not None
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, b"resile/1\n", b"resile/1\n" + b"\xff" * 4096):
            with socket.create_connection(("127.0.0.1", address.port), timeout=PATIENCE) as stranger:
                stranger.sendall(garbage)
        bad = await Peer.call(directory)
        bad.connection._transport.write((2**31).to_bytes(4, "big"))  # type: ignore[union-attr]
        await asyncio.wait_for(bad.closed.wait(), PATIENCE)
        rude = await Peer.call(directory)
        rude.say(Heartbeat())
        await asyncio.wait_for(rude.closed.wait(), PATIENCE)
        assert (await good.status()).phase == "Running"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"protocol": 99}, f"this master speaks protocol {PROTOCOL}, and the agent speaks 99"),
        ({"job": "other"}, "this is the master of job job, not of other"),
        ({"nproc": 0}, "the rules of rendezvous make no sense"),
    ],
)
async def test_an_agent_that_does_not_belong_is_told_why(
    tmp_path: Path, fields: dict[str, object], sentence: str
) -> None:
    directory = new_job(tmp_path)
    with master(directory):
        peer = await Peer.call(directory)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(peer.hello("stranger", **fields), 0.5)
        refused = await peer.hear(Refused)
        assert sentence in refused.because
        await asyncio.wait_for(peer.closed.wait(), PATIENCE)


async def test_an_agent_of_an_older_protocol_is_told_so_although_its_hello_has_other_fields(tmp_path: Path) -> None:
    directory = new_job(tmp_path)
    with master(directory):
        peer = await Peer.call(directory)
        body = msgspec.msgpack.encode({"type": "Hello", "protocol": 4, "job": "job", "meeting": {"min_nodes": 1}})
        peer.connection.send_frame(len(body).to_bytes(4, "big") + body)
        refused = await peer.hear(Refused)
        assert refused.because == f"this master speaks protocol {PROTOCOL}, and the agent speaks 4"
        await asyncio.wait_for(peer.closed.wait(), PATIENCE)


async def test_a_killed_master_comes_back_with_rounds_nodes_and_shards(tmp_path: Path) -> None:
    directory = new_job(tmp_path)
    with master(directory, "--supervise"):
        peers = [await Peer.call(directory), await Peer.call(directory)]
        for number, peer in enumerate(peers):
            await peer.hello(f"agent-{number}")
            peer.say(Join(after=Round(0), store_port=20000 + number))
        for peer in peers:
            await peer.hear(RoundFormed)
        peers[0].say(OpenDataset(worker="w", request=1, name="data", size=100, shard_size=10))
        peers[0].say(TakeShard(worker="w", request=2, dataset="data"))
        granted = await peers[0].hear(ShardGranted)
        peers[0].say(ShardProgress(worker="w", request=3, dataset="data", lease=granted.lease, upto=5))
        assert (await peers[0].hear(ShardNoted)).counted
        before = await peers[0].status()

        address = directory.address()
        assert address is not None
        os.kill(address.pid, signal.SIGKILL)
        await asyncio.wait_for(peers[0].closed.wait(), PATIENCE)
        fresh = [await Peer.call(directory, after=address.pid), await Peer.call(directory, after=address.pid)]
        for number, peer in enumerate(fresh):
            welcome = await peer.hello(f"agent-{number}", node_id=number, round=1, running=True)
            assert welcome.node.id == number
        # the same request again gets the same shard again, not another one
        fresh[0].say(TakeShard(worker="w", request=2, dataset="data"))
        again = await fresh[0].hear(ShardGranted)
        assert (again.lease, again.start, again.end) == (granted.lease, 5, granted.end)
        fresh[0].say(ShardProgress(worker="w", request=4, dataset="data", lease=again.lease, upto=10))
        assert (await fresh[0].hear(ShardNoted)).counted
        after = await fresh[0].status()
        assert (after.round, after.phase) == (before.round, "Running")
        assert [node.name for node in after.nodes] == [node.name for node in before.nodes]
        assert after.datasets[0].done == 10
        assert not [message for message in fresh[0].heard if isinstance(message, RoundOver)]


async def test_asks_are_answered_or_refused_with_a_sentence(tmp_path: Path) -> None:
    directory = new_job(tmp_path)
    with master(directory) as process:
        peer = await Peer.call(directory)
        await peer.hello("one")
        refused = await peer.ask(Scale(role="worker", replicas=3))
        assert isinstance(refused, Failed)
        assert "bare machines" in refused.error
        story = await peer.ask(Events())
        assert isinstance(story, JobEvents)
        assert [line.reason for line in story.events] == ["JobStarted", "NodeCame", "ScaleRefused"]
        assert await peer.ask(Stop(because="enough")) == Done()
        over = await peer.hear(JobOver)
        assert (over.succeeded, over.reason, over.message) == (False, "Stopped", "enough")
        peer.connection.close()
        assert await asyncio.to_thread(process.wait, PATIENCE) == JOB_FAILED


def _run(directory, *flags: str) -> subprocess.CompletedProcess[str]:  # type: ignore[no-untyped-def]
    return subprocess.run(command(directory, *flags), capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_a_taken_port_is_one_sentence_and_no_restart(tmp_path: Path) -> None:
    directory = new_job(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ended = _run(directory, "--supervise", "--port", str(port))
    assert ended.returncode == CANNOT_SERVE
    assert ended.stderr.strip() == f"resile master: cannot listen on 127.0.0.1:{port}: address already in use"


def test_a_taken_port_in_a_pod_may_become_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(*_: object) -> bool:
        raise CannotListen("address already in use")

    monkeypatch.setattr(app, "serve_on_kubernetes", serve)
    monkeypatch.setattr(main_module, "_allow_many_agents", lambda: None)
    where = ["--platform", "kubernetes", "--job", "j", "--kind", "elasticjob", "--directory", str(tmp_path / "job")]
    monkeypatch.setattr(sys, "argv", ["master", *where])
    assert main_module.main() == TRY_AGAIN


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--tls-cert c.pem", "--tls-cert and --tls-key need each other"),
        ("--tls-key k.pem", "--tls-cert and --tls-key need each other"),
        ("--tls-ca ca.pem", "--tls-ca needs --tls-cert and --tls-key"),
        ("--platform kubernetes --job j", "--platform kubernetes needs --job and --kind"),
        ("--platform kubernetes --kind elasticjob", "--platform kubernetes needs --job and --kind"),
        ("--platform kubernetes --job j --kind pod", "--kind must be one of elasticjob, not pod"),
        ("--platform kubernetes --job j --kind elasticjob --workdir /", "--workdir needs --platform local"),
        ("--platform local --namespace red", "--namespace needs --platform kubernetes"),
        ("--kind elasticjob", "--kind needs --platform kubernetes"),
        ("--supervise --enforce-memory", "--enforce-memory needs --platform local"),
    ],
)
def test_flags_that_lack_or_contradict_others_are_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, sentence: str
) -> None:
    monkeypatch.setattr(main_module, "_serve", lambda _: 0)
    monkeypatch.setattr(supervisor, "supervise", lambda _: 0)
    monkeypatch.setattr(sys, "argv", ["master", "--directory", str(tmp_path), *flags.split()])
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {sentence}\n")


def test_a_damaged_journal_is_one_sentence_and_stays_as_it_is(tmp_path: Path) -> None:
    directory = new_job(tmp_path)
    directory.journal.write_bytes(b"no journal" * 1000)
    ended = _run(directory, "--supervise")
    assert ended.returncode == CANNOT_SERVE
    assert ended.stderr.count("\n") == 1
    assert f"the journal {directory.journal} is damaged" in ended.stderr
    assert directory.journal.read_bytes() == b"no journal" * 1000


async def test_a_journal_that_was_emptied_is_refused_and_the_job_does_not_start_anew(tmp_path: Path) -> None:
    directory = new_job(tmp_path)
    with master(directory):
        peer = await Peer.call(directory)
        await peer.hello("one")
    for file in directory.path.glob("journal.db*"):
        file.unlink()
    ended = await asyncio.to_thread(_run, directory, "--supervise")
    assert (ended.returncode, ended.stderr.count("\n")) == (CANNOT_SERVE, 1)
    assert "is empty, but a master has served this job before" in ended.stderr


def test_a_directory_without_a_job_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    directory = new_job(tmp_path / "other")
    directory.path = tmp_path / "job"
    ended = _run(directory)
    assert (ended.returncode, ended.stderr.count("\n")) == (CANNOT_SERVE, 1)
    assert "is not there" in ended.stderr


async def test_a_second_master_of_the_same_job_steps_back(tmp_path: Path) -> None:
    directory = new_job(tmp_path)
    with master(directory):
        peer = await Peer.call(directory)
        ended = await asyncio.to_thread(_run, directory)
        assert (ended.returncode, ended.stderr.count("\n")) == (3, 1)
        assert "has a master already" in ended.stderr
        assert not (await peer.status()).ended_at


async def test_a_full_disk_under_the_journal_holds_decisions_back_and_loses_nothing(small_disk: Path) -> None:
    directory = new_job(small_disk)
    ballast = small_disk / "ballast"
    with master(directory) as process:
        first = await Peer.call(directory)
        await first.hello("first")
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * 512)
        late = await Peer.call(directory)
        late.say(late.greeting("late"))
        first.say(Join(after=Round(0), store_port=20000))
        full = f"the journal {directory.journal} cannot be written: database or disk is full"
        assert process.stdout is not None
        lines = process.stdout
        await asyncio.to_thread(lambda: next(line for line in lines if full in line))
        assert (await first.status()).phase == "Running", "questions are answered all the same"
        assert not late.heard, "nobody is admitted before it is written down"
        ballast.unlink()
        assert (await late.hear(Welcome)).rank == 1
        late.say(Join(after=Round(0), store_port=20001))
        assert (await first.hear(RoundFormed)).round == 1


async def test_a_master_killed_on_a_full_disk_serves_again_and_says_so_once_there_is_room(small_disk: Path) -> None:
    directory = new_job(small_disk)
    ballast = small_disk / "ballast"
    with master(directory, "--supervise"):
        first = await Peer.call(directory)
        await first.hello("first")
        old = directory.address()
        assert old is not None
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * 512)
        os.kill(old.pid, signal.SIGKILL)
        await asyncio.wait_for(first.closed.wait(), PATIENCE)
        again = await Peer.call(directory)  # at the old address: the new one could not be written down
        assert [node.status for node in (await again.status()).nodes] == ["Running"]
        assert directory.address() == old
        ballast.unlink()
        await Peer.call(directory, after=old.pid)
        assert (await again.hello("first", node_id=0)).node.id == 0


async def test_metrics_tell_what_the_command_line_tells(tmp_path: Path) -> None:
    directory = new_job(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with master(directory, "--metrics-port", str(port)):
        peer = await Peer.call(directory)
        await peer.hello("one")
        peer.say(StandbyReport(ready=2, memory=3 << 20))
        (node,) = (await peer.status()).nodes
        page = await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/metrics")
    assert 'resile_nodes{job="job",namespace="default",role="worker",status="Running"} 1.0' in page
    assert 'resile_events_total{job="job",namespace="default",reason="NodeCame"} 1.0' in page
    assert (node.standbys, node.standby_memory) == (2, 3 << 20)
    assert 'resile_standbys{job="job",namespace="default"} 2.0' in page
    assert 'resile_standby_bytes{job="job",namespace="default"} 3.145728e+06' in page


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return str(answer.read().decode())
