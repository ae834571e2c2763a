"""Who runs the master, where its job is kept, and what its secret is."""

from __future__ import annotations

import asyncio
import errno
import socket
import tempfile
from pathlib import Path

import pytest

from resile.agent import stale_directories
from resile.agent.failures.evidence import oom_kills
from resile.agent.main import _private_directory
from resile.agent.master_launcher import (
    CannotLaunchMaster,
    MasterLauncher,
    hosts_master,
    is_here,
    is_loopback,
    run_directory,
    token_notice,
    token_of,
)
from resile.agent.options import Endpoint, RunOptions, Security
from resile.agent.workers.ports import FIRST, LAST, NoFreePort, free_port
from resile.protocol.reports import RendezvousConfig
from resile.wire.job_directory import DirectoryError

HERE, THERE = Endpoint("127.0.0.1", 29400), Endpoint("203.0.113.7", 29400)


def options(state: Path | None = None, **fields: object) -> RunOptions:
    base: dict[str, object] = {
        "command": ("true",),
        "nproc": 1,
        "rendezvous": RendezvousConfig(),
        "run_id": "id",
        "job_name": "j",
    }
    if state is not None:
        base["state_dir"] = str(state)
    return RunOptions(**(base | fields))  # type: ignore[arg-type]


def test_the_machine_that_the_endpoint_names_runs_the_master_unless_told_otherwise() -> None:
    assert hosts_master(options())
    assert hosts_master(options(endpoint=HERE))
    assert not hosts_master(options(endpoint=THERE))
    assert hosts_master(options(endpoint=THERE, hosts=True))
    assert not hosts_master(options(endpoint=HERE, hosts=False))
    assert not hosts_master(options(endpoint=HERE, managed=True))


def test_addresses_are_known_for_what_they_are() -> None:
    assert is_here("localhost")
    assert not is_here("203.0.113.7")
    assert not is_here("no.such.name.invalid")
    assert [is_loopback(host) for host in ("localhost", "127.0.3.4", "::1", "10.0.0.1", "node-0")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_runs_are_kept_apart_by_id_and_port(tmp_path: Path) -> None:
    paths = {
        run_directory(options(tmp_path, run_id=run_id), Endpoint("127.0.0.1", port)).path
        for run_id in ("a", "b", "../../etc")
        for port in (1, 2)
    }
    assert len(paths) == 6
    assert {path.parent for path in paths} == {tmp_path / "runs"}


def test_the_secret_is_the_given_one_or_the_directorys_or_at_worst_the_run_id(tmp_path: Path) -> None:
    given = options(tmp_path, security=Security(token="s3cret"))
    none = options(tmp_path)
    home = run_directory(none, HERE)
    assert token_of(given, home, THERE) == b"s3cret"
    with pytest.raises(DirectoryError, match="cannot be read"):
        token_of(none, home, HERE)
    assert token_of(none, home, THERE) == token_of(options(), home, THERE)
    assert token_of(none, home, THERE) != token_of(options(run_id="other"), home, THERE)
    assert "RESILE_TOKEN" in token_notice(none, THERE)
    assert not token_notice(none, HERE)
    assert not token_notice(given, THERE)
    assert not token_notice(options(managed=True), THERE)


async def test_a_master_that_cannot_listen_is_named_and_leaves_no_supervisor(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = Endpoint("127.0.0.1", taken.getsockname()[1])
        chosen = options(tmp_path, endpoint=endpoint)
        host = MasterLauncher(chosen, endpoint, run_directory(chosen, endpoint))
        with pytest.raises(
            CannotLaunchMaster, match=f"cannot listen on 127.0.0.1:{endpoint.port}: address already in use"
        ):
            await host.start()
        await host.end(5)
        host.close()
    assert not run_directory(chosen, endpoint).master_lives()


async def test_two_agents_share_one_master_and_the_one_that_started_it_sees_it_off(tmp_path: Path) -> None:
    endpoint = Endpoint("127.0.0.1", free_port())
    chosen = options(tmp_path, endpoint=endpoint)
    home = run_directory(chosen, endpoint)
    first, second = MasterLauncher(chosen, endpoint, home), MasterLauncher(chosen, endpoint, home)
    await first.start()
    address = home.address()
    await second.start()
    assert home.address() == address
    second.revive(60.0)
    await second.end(0.1)
    assert home.master_lives(), "the other's master is not its to end"
    await first.end(0.1)
    assert not home.master_lives()
    for host in (first, second):
        host.close()


async def test_a_machine_without_room_for_a_master_is_a_sentence_and_a_later_call_revives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = Endpoint("127.0.0.1", free_port())
    chosen = options(tmp_path, endpoint=endpoint)
    home = run_directory(chosen, endpoint)
    host = MasterLauncher(chosen, endpoint, home)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "no room")

    with monkeypatch.context() as machine:
        machine.setattr("resile.agent.master_launcher.subprocess.Popen", full)
        with pytest.raises(CannotLaunchMaster, match="cannot start the master: Resource temporarily unavailable"):
            await host.start()
        host.revive(60.0)
        assert "cannot start the master" in caplog.text
    host.revive(60.0)
    async with asyncio.timeout(20):
        while home.address() is None:  # noqa: ASYNC110 (it announces itself in a file)
            await asyncio.sleep(0.01)
    await host.end(0.1)
    host.close()
    assert not home.master_lives()


def test_a_free_port_is_free_and_outside_the_range_of_outgoing_calls() -> None:
    port = free_port({})
    assert FIRST <= port <= LAST
    with socket.create_server(("", port)):
        with pytest.raises(NoFreePort, match=f"no port of HOST_PORTS={port} is free"):
            free_port({"HOST_PORTS": f"{port}"})
        other = free_port({"HOST_PORTS": f"{port}, {port + 1}, nonsense,"})
    assert other == port + 1


def test_a_port_is_free_again_as_soon_as_nobody_listens_on_it() -> None:
    """Connections of the last store, closed by the store, keep its port in TIME_WAIT for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = store.accept()
            accepted.close()
    assert free_port({"HOST_PORTS": str(port)}) == port


def test_kills_for_want_of_memory_are_counted_if_the_kernel_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert oom_kills() >= 0
    events = tmp_path / "memory.events"
    monkeypatch.setattr("resile.agent.failures.evidence._memory_events", lambda: [tmp_path / "nothing", events])
    assert oom_kills() == 0
    events.write_text("low 0\noom 2\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills() == 2
    events.write_text("oom_kill many\n")
    assert oom_kills() == 0


def test_a_lock_whose_file_was_swept_away_is_taken_anew(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    home = run_directory(chosen, HERE).path
    home.parent.mkdir()

    async def contend() -> bool:
        first = MasterLauncher(chosen, HERE, run_directory(chosen, HERE))
        with await first._turn():
            second = asyncio.ensure_future(MasterLauncher(chosen, HERE, run_directory(chosen, HERE))._turn())
            await asyncio.sleep(0.05)
            home.with_suffix(".launch").unlink()
        with await second:
            return home.with_suffix(".launch").exists()

    assert asyncio.run(asyncio.wait_for(contend(), 10))


async def test_a_run_that_takes_an_old_name_is_not_removed_for_what_an_older_run_left(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    launch = run_directory(chosen, HERE).path.with_suffix(".launch")
    launch.parent.mkdir()
    launch.touch()
    stale_directories.sweep_runs(launch.parent)
    assert launch.stat().st_size, "it is marked"
    with await MasterLauncher(chosen, HERE, run_directory(chosen, HERE))._turn():
        assert not launch.stat().st_size


def test_the_agent_of_a_local_node_keeps_its_socket_in_the_nodes_directory(tmp_path: Path) -> None:
    for home in (tmp_path, tmp_path / ("x" * 100)):
        home.mkdir(exist_ok=True)
        assert _private_directory({"RESILE_LOCAL_NODE": str(home)}).parent == home
    for gone in (str(tmp_path / "none"), ""):
        other = _private_directory({"RESILE_LOCAL_NODE": gone})
        assert other.parent == Path(tempfile.gettempdir())
        other.rmdir()
