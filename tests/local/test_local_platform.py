"""The local platform with real processes. Deadlines are generous; nothing sleeps to make time pass."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from resile.api.defaults import LOCAL_NODE_VARIABLE
from resile.api.ids import Bytes, MiB, NodeId, NodeKey, Rank, Seconds
from resile.api.job import JobSpec, Resources, RoleSpec, Strategy
from resile.api.kinds.elasticjob import roles as roles_of
from resile.api.plan import NodeResources
from resile.platform.base import Launch, Observation
from resile.platform.local import cgroup, files, node, processes
from resile.platform.local.addresses import Addresses
from resile.platform.local.platform import LocalPlatform
from resile.platform.local.shim import oom_kills, start_time, stat_of
from resile.protocol.reports import NodeStatus

DEADLINE = 30.0
NOW = Seconds(0.0)
LONG = Seconds(60.0)
WORKER = NodeKey("worker", NodeId(0))


def sh(script: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", textwrap.dedent(script))


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110 - other processes set no Event
            await asyncio.sleep(0.005)


def gone(pid: int) -> bool:
    fields = stat_of(str(pid))
    return not fields or fields[0] in "ZX"


class Job:
    """A job directory, the platforms opened on it, and all they observed."""

    def __init__(self, directory: Path, workdir: Path) -> None:
        self.directory = directory
        self.workdir = workdir
        self.seen: list[Observation] = []
        self.platforms: list[LocalPlatform] = []
        self._news = asyncio.Event()

    async def open(
        self,
        *command: str,
        role: RoleSpec | None = None,
        enforce_memory: bool = False,
        strategy: Strategy = Strategy.ALLREDUCE,
    ) -> LocalPlatform:
        roles = {"worker": role or roles_of.WORKER.declared(replicas=2, command=command)}
        if strategy is Strategy.PARAMETER_SERVER:
            roles["ps"] = roles_of.PS.declared(replicas=2, command=command)
        platform = LocalPlatform(
            JobSpec(name="digits", kind="elasticjob", uid=f"test-{os.getpid()}", roles=roles, strategy=strategy),
            self.directory,
            "127.0.0.1:50001",
            secrets={"TOKEN_FILE": "/somewhere/token"},
            enforce_memory=enforce_memory,
            workdir=self.workdir,
        )
        self.platforms.append(platform)
        await platform.start(self._observe)
        return platform

    async def run(self, *command: str, role: RoleSpec | None = None, enforce_memory: bool = False) -> LocalPlatform:
        platform = await self.open(*command, role=role, enforce_memory=enforce_memory)
        platform.launch(launch())
        return platform

    def _observe(self, observation: Observation) -> None:
        self.seen.append(observation)
        self._news.set()

    async def until(self, *wanted: NodeStatus, key: NodeKey = WORKER) -> Observation:
        async with asyncio.timeout(DEADLINE):
            while True:
                for observation in self.seen:
                    if observation.node == key and observation.status in wanted:
                        return observation
                self._news.clear()
                await self._news.wait()

    async def ended(self, key: NodeKey = WORKER) -> Observation:
        return await self.until(NodeStatus.SUCCEEDED, NodeStatus.FAILED, NodeStatus.DELETED, key=key)

    async def appears(self, name: str) -> str:
        path = self.workdir / name
        await eventually(lambda: path.exists() and path.read_text().endswith("\n"))
        return path.read_text().strip()

    async def record(self) -> files.NodeFile:
        """The worker's record, once its shim has added the processes."""
        await eventually(lambda: any(r.pid for r in files.read_nodes(self.directory)))
        record = files.read(files.node_directory(self.directory, WORKER) / "node.json", files.NodeFile)
        assert record is not None
        return record

    def log(self) -> str:
        return (self.directory / "logs" / "digits-edljob-worker-0.log").read_text()


def launch(number: int = 0, memory: Bytes | None = None) -> Launch:
    key = NodeKey("worker", NodeId(number))
    return Launch(node=key, rank=Rank(1), replicas=2, relaunch_count=3, resources=NodeResources(memory=memory))


def processes_of(directory: Path) -> list[int]:
    """Every process, shims included, that carries the cookie of a node of this job."""
    found = []
    for pid in processes.all_pids():
        with contextlib.suppress(OSError):
            mark = f"{LOCAL_NODE_VARIABLE}={directory}".encode()
            if mark in Path(f"/proc/{pid}/environ").read_bytes() and not gone(pid):
                found.append(pid)
    return found


def cgroups_left() -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"*/resile/test-{os.getpid()}"))


@pytest.fixture
async def job(tmp_path: Path) -> AsyncIterator[Job]:
    """A job of which nothing may be left: no process, no cgroup."""
    workdir = tmp_path / "work"
    workdir.mkdir()
    job = Job(tmp_path / "job", workdir)
    yield job
    for platform in job.platforms:
        await platform.close()
    job.seen.clear()
    last = await job.open()
    for observation in await last.adopt():
        last.delete(observation.node, NOW)
        await job.until(NodeStatus.DELETED, key=observation.node)
    await eventually(lambda: not processes_of(job.directory))
    await last.close()
    assert cgroups_left() == []


@pytest.fixture
def tiny_disk(job: Job) -> Iterator[Callable[[], None]]:
    """Puts the job directory on a file system of 64 KiB; calling the fixture fills it up."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    job.directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "resile-test", str(job.directory)], check=True)

    def fill() -> None:
        with contextlib.suppress(OSError), open(job.directory / "ballast", "ab", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)

    yield fill
    (job.directory / "ballast").unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def no_mounts_left(tmp_path: Path) -> Iterator[None]:
    """Runs last at the end, when no node uses the disk any more."""
    yield
    directory = tmp_path / "job"
    if os.path.ismount(directory):
        subprocess.run(["umount", str(directory)], check=True)
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()


# How a node runs.


async def test_a_node_is_seen_to_start_run_and_succeed(job: Job) -> None:
    await job.run(*sh("echo out; echo err >&2"))
    await job.until(NodeStatus.SUCCEEDED)
    assert [o.status for o in job.seen] == [NodeStatus.STARTING, NodeStatus.RUNNING, NodeStatus.SUCCEEDED]
    assert (job.seen[-1].end.exit_code, job.seen[-1].end.reason) == (0, "Completed")
    assert {o.address for o in job.seen} == {"127.0.1.1"}
    assert job.log() == "out\nerr\n"


@pytest.mark.parametrize(
    ("script", "exit_code", "reason", "message"),
    [
        ("exit 3", 3, "Error", "exited with code 3"),
        ("kill -KILL $$", 137, "Killed", "ended by SIGKILL"),
        ("kill -SEGV $$", 139, "Error", "ended by SIGSEGV"),
        ("/no/such/program", 127, "Error", "exited with code 127"),
    ],
)
async def test_a_failed_node_says_how(job: Job, script: str, exit_code: int, reason: str, message: str) -> None:
    await job.run(*sh(script))
    end = (await job.until(NodeStatus.FAILED)).end
    assert (end.exit_code, end.reason, end.message) == (exit_code, reason, message)


async def test_a_node_has_the_environment_of_a_pod(job: Job) -> None:
    role = RoleSpec(replicas=2, command=sh("env > env; pwd > pwd"), env={"MINE": "yes", "PATH": "/bin:/usr/bin"})
    await job.run(role=role)
    await job.until(NodeStatus.SUCCEEDED)
    environment = dict(line.split("=", 1) for line in (job.workdir / "env").read_text().splitlines() if "=" in line)
    expected = {
        "POD_NAME": "digits-edljob-worker-0",
        "POD_IP": "127.0.1.1",
        "NODE_RANK": "1",
        "NODE_NUM": "2",
        "RELAUNCHED_POD": "true",
        "DLROVER_MASTER_ADDR": "127.0.0.1:50001",
        "MINE": "yes",
        "TOKEN_FILE": "/somewhere/token",
        "PATH": f"{Path(sys.executable).parent}:/bin:/usr/bin",
    }
    assert {name: environment.get(name) for name in expected} == expected
    assert (job.workdir / "pwd").read_text().strip() == str(job.workdir)


async def test_a_node_inherits_no_descriptor_and_no_signal_setting(job: Job) -> None:
    await job.run(*sh("ls /proc/self/fd | wc -l; grep -E 'SigBlk|SigIgn' /proc/self/status"))
    await job.until(NodeStatus.SUCCEEDED)
    descriptors, blocked, ignored = job.log().splitlines()
    assert int(descriptors) == 4  # standard input, output, error, and the directory that ls reads
    assert int(blocked.split()[1], 16) == 0
    assert int(ignored.split()[1], 16) & 0x7FFF_FFFF == 0  # 32 and 33 are the C library's own


async def test_every_living_node_has_its_own_address(job: Job) -> None:
    platform = await job.open("/bin/sleep", "1000")
    keys = [NodeKey("worker", NodeId(number)) for number in range(4)]
    for key in keys:
        platform.launch(launch(key.id))
    addresses = [(await job.until(NodeStatus.RUNNING, key=key)).address for key in keys]
    assert addresses == ["127.0.1.1", "127.0.1.2", "127.0.1.3", "127.0.1.4"]


def test_addresses_roll_over_and_skip_those_in_use() -> None:
    addresses = Addresses()
    first = [addresses.take(set()) for _ in range(254 * 254)]
    assert (first[253], first[254], first[-1]) == ("127.0.1.254", "127.0.2.1", "127.0.254.254")
    assert len(set(first)) == len(first)
    assert addresses.take({"127.0.1.1", "127.0.1.2"}) == "127.0.1.3"


async def test_nodes_of_a_parameter_server_job_know_all_places_before_those_are_filled(job: Job) -> None:
    platform = await job.open(*sh("echo $TF_CONFIG > tf.$NODE_ID"), strategy=Strategy.PARAMETER_SERVER)
    first, other = NodeKey("ps", NodeId(1)), NodeKey("ps", NodeId(5))
    for key in (first, other):  # the second replaces the first
        platform.launch(Launch(node=key, rank=Rank(1), replicas=2))
        assert (await job.until(NodeStatus.SUCCEEDED, key=key)).address == "127.0.1.4"
    config = json.loads(await job.appears("tf.1"))
    assert config["cluster"]["ps"] == ["127.0.1.3:2222", "127.0.1.4:2222"]
    assert config["cluster"]["worker"] == ["127.0.1.1:3333", "127.0.1.2:3333"]
    assert config["task"] == {"type": "ps", "index": 1}
    assert json.loads(await job.appears("tf.5")) == config


async def test_launching_a_node_again_leaves_it_alone(job: Job) -> None:
    platform = await job.run(*sh("echo started; sleep 1000"))
    await job.until(NodeStatus.RUNNING)
    platform.launch(launch())
    platform.delete(WORKER, LONG)
    await job.until(NodeStatus.DELETED)
    platform.launch(launch())
    await asyncio.sleep(0)
    assert job.log().count("started") <= 1
    assert [o.status for o in job.seen] == [NodeStatus.STARTING, NodeStatus.RUNNING, NodeStatus.DELETED]


# What keeps a node from starting.


@pytest.mark.parametrize(
    ("command", "exit_code", "sentence"),
    [
        (("no-such-program",), 127, "no-such-program: command not found"),
        (("/etc/passwd",), 126, "/etc/passwd: cannot be executed: Permission denied"),
        ((), 127, "role worker has no command: a local node needs one in its template"),
        (("/bin/echo", "a\0b"), 126, "cannot start digits-edljob-worker-0: embedded null byte"),
        (("/bin/echo", "x" * 300_000), 126, f"cannot start digits-edljob-worker-0: {os.strerror(7)}"),
    ],
)
async def test_a_command_that_cannot_start_fails_with_a_sentence(
    job: Job, command: tuple[str, ...], exit_code: int, sentence: str
) -> None:
    await job.run(*command)
    end = (await job.until(NodeStatus.FAILED)).end
    assert end.exit_code == exit_code
    assert end.reason == "StartError"
    assert end.message.replace(f"{sys.executable}: ", "") == sentence


async def test_a_missing_working_directory_is_named(job: Job) -> None:
    job.workdir = job.workdir / "missing"
    await job.run("/bin/true")
    message = (await job.until(NodeStatus.FAILED)).end.message
    assert message == f"cannot enter the working directory {job.workdir}: No such file or directory"


async def test_a_role_that_the_job_does_not_have_fails(job: Job) -> None:
    platform = await job.open("/bin/true")
    ps = NodeKey("ps", NodeId(7))
    platform.launch(Launch(node=ps, rank=Rank(0), replicas=1))
    assert (await job.until(NodeStatus.FAILED, key=ps)).end.message == "the job has no role ps"


async def test_a_full_disk_fails_the_launch_with_a_sentence(job: Job, tiny_disk: Callable[[], None]) -> None:
    tiny_disk()
    await job.run("/bin/true")
    message = (await job.until(NodeStatus.FAILED)).end.message
    assert message.startswith("cannot start digits-edljob-worker-0: ")
    assert message.endswith("No space left on device")


async def test_a_disk_that_fills_up_costs_neither_exit_code_nor_deletion(
    job: Job, tiny_disk: Callable[[], None]
) -> None:
    platform = await job.open(
        *sh("trap '' TERM; echo $POD_IP > ready.$NODE_ID; while [ ! -e go ]; do sleep 0.02; done; exit 5")
    )
    platform.launch(launch(0))
    platform.launch(launch(1))
    await job.appears("ready.0")
    await job.appears("ready.1")
    await eventually(lambda: all(r.pid for r in files.read_nodes(job.directory)))
    tiny_disk()
    other = NodeKey("worker", NodeId(1))
    platform.delete(other, Seconds(0.1))
    assert (await job.ended(other)).status is NodeStatus.DELETED
    await platform.close()
    (job.workdir / "go").touch()
    await eventually(lambda: (job.directory / "nodes" / "worker-0" / "exit.json").exists())
    again = await job.open()
    found = {o.node: o for o in await again.adopt()}
    assert (found[WORKER].status, found[WORKER].end.exit_code) == (NodeStatus.FAILED, 5)


# How a node ends.


async def test_a_deleted_node_has_its_grace_to_save(job: Job) -> None:
    script = "trap 'sleep 0.2; echo saved > saved; exit 0' TERM; echo up > ready; while :; do sleep 0.02; done"
    platform = await job.run(*sh(script))
    await job.appears("ready")
    platform.delete(WORKER, LONG)
    observed = await job.ended()
    assert (observed.status, observed.end.exit_code) == (NodeStatus.DELETED, 0)
    assert (job.workdir / "saved").exists()


async def test_the_grace_holds_for_a_program_below_a_shell_that_sigterm_kills(job: Job) -> None:
    saver = "trap 'sleep 0.2; echo saved > saved; exit 0' TERM; echo up > ready; while :; do sleep 0.02; done"
    platform = await job.run(*sh(f"({saver}); true"))
    await job.appears("ready")
    platform.delete(WORKER, LONG)
    assert (await job.ended()).status is NodeStatus.DELETED
    assert (job.workdir / "saved").exists()


async def test_a_node_that_ignores_sigterm_is_killed_after_its_grace(job: Job) -> None:
    platform = await job.run(*sh("trap '' TERM; echo up > ready; while :; do sleep 0.02; done"))
    await job.appears("ready")
    began = time.monotonic()
    platform.delete(WORKER, Seconds(0.3))
    observed = await job.ended()
    assert (observed.status, observed.end.exit_code) == (NodeStatus.DELETED, 137)
    assert 0.3 <= time.monotonic() - began < 5


async def test_deleting_again_can_shorten_the_grace(job: Job) -> None:
    platform = await job.run(*sh("trap '' TERM; echo up > ready; while :; do sleep 0.02; done"))
    await job.appears("ready")
    platform.delete(WORKER, LONG)
    platform.delete(WORKER, NOW)
    assert (await job.ended()).status is NodeStatus.DELETED


async def test_a_node_deleted_while_it_starts_is_deleted(job: Job) -> None:
    platform = await job.run("/bin/sleep", "1000")
    platform.delete(WORKER, LONG)
    assert (await job.ended()).status is NodeStatus.DELETED


async def test_deleting_an_unknown_an_ended_or_a_deleted_node_is_observed_as_deleted(job: Job) -> None:
    platform = await job.run("/bin/true")
    await job.until(NodeStatus.SUCCEEDED)
    unknown = NodeKey("worker", NodeId(99))
    platform.delete(unknown, LONG)
    await job.until(NodeStatus.DELETED, key=unknown)
    for _ in range(2):
        job.seen.clear()
        platform.delete(WORKER, LONG)
        await job.until(NodeStatus.DELETED)


STRAY = "env -i setsid /bin/sleep 1000 & echo $! > stray"


async def test_processes_in_their_own_session_end_with_the_main_process(job: Job) -> None:
    await job.run(*sh(f"{STRAY}; sleep 1000 & exit 4"))
    assert (await job.ended()).end.exit_code == 4
    assert gone(int(await job.appears("stray")))


async def test_processes_in_their_own_session_end_with_a_deleted_node(job: Job) -> None:
    platform = await job.run(*sh(f"({STRAY}; wait) & wait"))
    stray = int(await job.appears("stray"))
    assert not gone(stray)
    platform.delete(WORKER, LONG)
    await job.until(NodeStatus.DELETED)
    assert gone(stray)


async def test_killing_the_main_process_is_observed_well_within_a_second(job: Job) -> None:
    await job.run("/bin/sleep", "1000")
    pid = (await job.record()).pid
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    end = (await job.until(NodeStatus.FAILED)).end
    assert time.monotonic() - began < 0.5
    assert (end.exit_code, end.reason) == (137, "Killed")


async def test_nothing_of_a_node_survives_its_shim(job: Job) -> None:
    await job.run(*sh("sleep 1000 & setsid sleep 1000 & echo $! > stray; wait"))
    stray = int(await job.appears("stray"))
    record = await job.record()
    alive = processes.tree(record.pid)
    assert len(alive) == 3
    os.kill(record.shim_pid, signal.SIGKILL)
    end = (await job.until(NodeStatus.FAILED)).end
    assert end.reason == "Killed"
    assert end.message == (
        f"the process that watches the node (pid {record.shim_pid}) was killed, and the node with it"
    )
    await eventually(lambda: all(gone(pid) for pid in [*alive, stray]))


async def test_a_shim_that_hangs_does_not_keep_a_deleted_node_alive(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "BACKSTOP", 0.1)
    platform = await job.run("/bin/sleep", "1000")
    record = await job.record()
    os.kill(record.shim_pid, signal.SIGSTOP)
    platform.delete(WORKER, NOW)
    assert (await job.ended()).status is NodeStatus.DELETED
    await eventually(lambda: gone(record.pid))


# What a restarted master finds.


async def test_a_new_platform_adopts_a_running_node_and_sees_it_end(job: Job) -> None:
    first = await job.run(*sh("while [ ! -e go ]; do sleep 0.02; done; exit 6"))
    await job.until(NodeStatus.RUNNING)
    await first.close()
    second = await job.open("/bin/false")
    [adopted] = await second.adopt()
    assert (adopted.node, adopted.status, adopted.address) == (WORKER, NodeStatus.RUNNING, "127.0.1.1")
    second.launch(launch(1))
    assert (await job.ended(NodeKey("worker", NodeId(1)))).address == "127.0.1.2"
    (job.workdir / "go").touch()
    assert (await job.until(NodeStatus.FAILED)).end.exit_code == 6


async def test_the_end_of_a_node_that_nobody_watched_is_known(job: Job) -> None:
    first = await job.run(*sh("while [ ! -e go ]; do sleep 0.02; done; exit 6"))
    await job.until(NodeStatus.RUNNING)
    await first.close()
    (job.workdir / "go").touch()
    await eventually(lambda: (job.directory / "nodes" / "worker-0" / "exit.json").exists())
    [adopted] = await (await job.open()).adopt()
    assert (adopted.status, adopted.end.exit_code) == (NodeStatus.FAILED, 6)


async def test_a_node_outlives_a_master_killed_right_after_the_launch(job: Job) -> None:
    master = f"""
        import asyncio, os, signal
        from pathlib import Path
        from resile.api.ids import *
        from resile.api.job import *
        from resile.platform.local.platform import LocalPlatform
        from resile.platform.base import Launch

        async def main():
            role = RoleSpec(replicas=1, command=("/bin/sleep", "1000"))
            spec = JobSpec(name="digits", kind="elasticjob", roles={{"worker": role}})
            platform = LocalPlatform(spec, Path({str(job.directory)!r}), "127.0.0.1:50001")
            await platform.start(lambda observation: None)
            platform.launch(Launch(node=NodeKey("worker", 0), rank=0, replicas=1))
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(master))
    assert await killed.wait() == -signal.SIGKILL
    platform = await job.open()
    [adopted] = await platform.adopt()
    assert adopted.status is NodeStatus.RUNNING
    platform.delete(WORKER, LONG)
    assert (await job.ended()).end.exit_code == 143


async def test_a_deletion_goes_on_when_the_master_is_gone(job: Job) -> None:
    first = await job.run(*sh("trap '' TERM; echo up > ready; while :; do sleep 0.02; done"))
    await job.appears("ready")
    pid = (await job.record()).pid
    first.delete(WORKER, Seconds(0.2))
    await first.close()
    await eventually(lambda: gone(pid))
    [adopted] = await (await job.open()).adopt()
    if not adopted.status.ended:  # whoever ended the process is about to say so
        adopted = await job.until(NodeStatus.DELETED)
    assert adopted.status is NodeStatus.DELETED


async def test_strays_of_a_shim_killed_while_nobody_watched_are_swept_up(job: Job) -> None:
    first = await job.run(*sh("setsid sleep 1000 & echo $! > stray; wait"))
    stray = int(await job.appears("stray"))
    record = await job.record()
    await first.close()
    os.kill(record.shim_pid, signal.SIGKILL)
    await eventually(lambda: gone(record.shim_pid))
    [adopted] = await (await job.open()).adopt()
    assert (adopted.status, adopted.end.reason) == (NodeStatus.FAILED, "Killed")
    await eventually(lambda: gone(stray))


async def test_a_pid_that_now_belongs_to_another_process_is_left_alone(job: Job) -> None:
    bystander = await asyncio.create_subprocess_exec("/bin/sleep", "1000")
    try:
        record = files.NodeFile(
            name="digits-edljob-worker-0",
            role="worker",
            id=0,
            rank=0,
            address="127.0.1.1",
            command=["/bin/true"],
            workdir="/",
            log="/dev/null",
            boot=processes.boot_id(),
            shim_pid=bystander.pid,
            shim_start=start_time(bystander.pid) - 1,
            pid=bystander.pid,
        )
        directory = job.directory / "nodes" / "worker-0"
        directory.mkdir(parents=True)
        files.write(directory / "node.json", record)
        assert files.read_nodes(job.directory)[0].status is NodeStatus.FAILED
        platform = await job.open()
        [adopted] = await platform.adopt()
        assert adopted.status is NodeStatus.FAILED
        platform.delete(WORKER, NOW)
        await job.until(NodeStatus.DELETED)
        assert not gone(bystander.pid)
    finally:
        bystander.kill()
        await bystander.wait()


async def test_a_record_that_makes_no_sense_is_passed_over(job: Job) -> None:
    directory = job.directory / "nodes" / "worker-0"
    directory.mkdir(parents=True)
    (directory / "node.json").write_text('{"name": 3')
    assert await (await job.open()).adopt() == []
    assert files.read_nodes(job.directory) == []


async def test_the_files_alone_tell_how_every_node_is(job: Job) -> None:
    platform = await job.run(*sh("[ $NODE_ID = 0 ] && exec sleep 1000; exit 2"))
    platform.launch(launch(10))
    await job.ended(NodeKey("worker", NodeId(10)))
    record = await job.record()
    first, second = files.read_nodes(job.directory)
    assert (first.name, first.node, first.log) == ("digits-edljob-worker-0", WORKER, Path(record.log))
    assert (first.status, first.pid) == (NodeStatus.RUNNING, record.pid)
    assert record.launched_at <= record.started_at <= time.time()
    assert (second.status, second.pid) == (NodeStatus.FAILED, 0)
    ended = files.read(files.node_directory(job.directory, second.node) / "exit.json", files.ExitFile)
    assert ended is not None
    assert (ended.exit_code, ended.started_at <= ended.ended_at) == (2, True)


# Memory limits.


@pytest.fixture
def memory_controller() -> None:
    try:
        cgroup.MemoryLimits("test-probe")
    except cgroup.NoMemoryLimitsError as error:
        pytest.skip(str(error))


EATER = (sys.executable, "-c", "x = bytearray(256 << 20); print('ate it all')")


@pytest.mark.usefixtures("memory_controller")
async def test_a_node_above_its_memory_limit_is_oom_killed(job: Job) -> None:
    role = RoleSpec(replicas=1, command=EATER, limits=Resources(memory=Bytes(64 * MiB)))
    platform = await job.run(role=role, enforce_memory=True)
    assert platform.warnings == []
    end = (await job.until(NodeStatus.FAILED)).end
    assert (end.exit_code, end.reason, end.message) == (137, "OOMKilled", "it exceeded its memory limit of 64 MiB")
    platform.launch(launch(1, memory=Bytes(512 * MiB)))
    assert (await job.ended(NodeKey("worker", NodeId(1)))).status is NodeStatus.SUCCEEDED


@pytest.mark.usefixtures("memory_controller")
async def test_a_node_that_fails_because_a_process_of_it_was_oom_killed_is_oom_killed(job: Job) -> None:
    program = f"import subprocess, sys; sys.exit(subprocess.call({EATER!r}) != 0)"
    role = RoleSpec(replicas=1, command=(sys.executable, "-c", program), limits=Resources(memory=Bytes(64 * MiB)))
    await job.run(role=role, enforce_memory=True)
    end = (await job.until(NodeStatus.FAILED)).end
    assert (end.exit_code, end.reason) == (1, "OOMKilled")


@pytest.mark.usefixtures("memory_controller")
async def test_the_cgroup_of_a_node_goes_even_if_its_shim_is_killed(job: Job) -> None:
    role = RoleSpec(replicas=1, command=("/bin/sleep", "1000"), limits=Resources(memory=Bytes(64 * MiB)))
    await job.run(role=role, enforce_memory=True)
    record = await job.record()
    assert (Path(record.cgroup) / "cgroup.procs").read_text().split() == [str(record.pid)]
    os.kill(record.shim_pid, signal.SIGKILL)
    await job.until(NodeStatus.FAILED)
    await eventually(lambda: not os.path.exists(record.cgroup))


async def test_limits_that_cannot_be_enforced_are_a_warning_and_the_node_runs(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "MOUNTS", Path("/dev/null"))
    role = RoleSpec(replicas=1, command=("/bin/true",), limits=Resources(memory=Bytes(64 * MiB)))
    platform = await job.run(role=role, enforce_memory=True)
    assert platform.warnings == [
        "memory limits are not enforced: this machine has no memory controller mounted (cgroup)"
    ]
    await job.until(NodeStatus.SUCCEEDED)


def test_version_2_of_cgroups_is_spoken_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"cgroup2 {tmp_path} cgroup2 rw,relatime 0 0\n")
    monkeypatch.setattr(cgroup, "MOUNTS", mounts)
    path = cgroup.MemoryLimits("job").create("worker-0", Bytes(64 * MiB))
    assert path == tmp_path / "resile" / "job" / "worker-0"
    assert (path / "memory.max").read_text() == str(64 * MiB)
    assert (path.parent / "cgroup.subtree_control").read_text() == "+memory"
    (path / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert oom_kills(str(path)) == 1
