"""Starts the master of a job without a cluster, on the machine that the endpoint names.

The master runs under a supervisor, in a process of its own, so the master and this agent outlive each other. Every
agent on that machine may start it: a lock in the job's directory admits one master. The run id and the port give the
directory its name, so agents of one user on one machine share the job's token through it.

Two lock files beside the directory outlive it. The agent that holds NAME.launch may decide whether to start a master.
Every agent of the run on this machine and the supervisor hold NAME.present. So a new agent can tell a job whose master
is just being restarted from the files of an earlier run, and removes only the latter. `stale_directories` removes the
files of other runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import ipaddress
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from resile.agent.options import Endpoint, RunOptions, Security
from resile.agent.stale_directories import locked, sweep_runs
from resile.api.job import JobSpec
from resile.api.kinds.run.names import RUN_KIND
from resile.wire.job_directory import DirectoryError, JobDirectory

log = logging.getLogger("resile.agent")

LAUNCH_PATIENCE = 15.0
MAX_STARTS = 10
REVIVE_AFTER = 2.0
"""Seconds without a master after which an agent may restart a master that another agent had started."""


class CannotLaunchMaster(Exception):
    """The master could not be started; the text is one sentence."""


def hosts_master(options: RunOptions) -> bool:
    if options.managed:
        return False
    if options.endpoint is None:
        return True
    return options.hosts if options.hosts is not None else is_here(options.endpoint.host)


def is_here(host: str) -> bool:
    """True if `host` is an address of this machine."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def run_directory(options: RunOptions, endpoint: Endpoint, environ: Mapping[str, str] = os.environ) -> JobDirectory:
    """The job directory of this run on this machine, named after run id and port."""
    fallback = Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "resile"
    root = Path(options.state_dir or fallback) / "runs"
    name = hashlib.sha256(f"{options.run_id}@{endpoint.port}".encode()).hexdigest()[:16]
    return JobDirectory(root / name)


def token_of(options: RunOptions, directory: JobDirectory, endpoint: Endpoint) -> bytes:
    """The token that the run was given, or a default.

    The default is the token in the job directory if the endpoint is loopback, otherwise a hash of the run id.

    Raises:
        DirectoryError: there is no job directory (yet) to take the token from.
    """
    token = _known_token(options, endpoint)
    return directory.token() if token is None else token.encode()


def _known_token(options: RunOptions, endpoint: Endpoint) -> str | None:
    """The token of the run; None if the job directory makes one up."""
    if options.security.token or is_loopback(endpoint.host):
        return options.security.token or None
    return hashlib.sha256(f"resile run {options.run_id}".encode()).hexdigest()


def token_notice(options: RunOptions, endpoint: Endpoint) -> str:
    """A warning if the job's secret can be guessed; otherwise empty."""
    if options.managed or options.security.token or is_loopback(endpoint.host):
        return ""
    return (
        "no token was given, so anyone who knows the run id can join this job; "
        "give all machines the same RESILE_TOKEN to keep others out"
    )


class MasterLauncher:
    """Starts the supervisor of a run's master, and starts it again if supervisor and master are gone."""

    def __init__(self, options: RunOptions, endpoint: Endpoint, directory: JobDirectory) -> None:
        self._options = options
        self._endpoint = endpoint
        self._directory = directory
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._presence: int | None = None

    async def start(self) -> None:
        """Start a master for this run, unless the run has one. Removes files of an earlier run with this id and port.

        Raises:
            CannotLaunchMaster: the master did not come up. Its supervisor, if there is one, was told to end.
        """
        options = self._options
        try:
            async with asyncio.timeout(LAUNCH_PATIENCE):
                self._directory.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                sweep_runs(self._directory.path.parent)
                with await self._turn():
                    if self._is_run_present() or (self._directory.exists and self._directory.master_lives()):
                        return  # if its master is gone for good, `revive` starts another
                    shutil.rmtree(self._directory.path, ignore_errors=True)
                    spec = JobSpec(name=options.job_name, kind=RUN_KIND, timeouts=options.timeouts)
                    self._directory.create(spec, _known_token(options, self._endpoint))
                    self._spawn()
                    await self._wait_until_up()
        except DirectoryError as error:
            raise CannotLaunchMaster(str(error)) from error
        except TimeoutError:
            raise CannotLaunchMaster(f"the master did not come up within {LAUNCH_PATIENCE:g} s") from None
        except OSError as error:
            where, why = self._directory.path.parent, os.strerror(error.errno or 0)
            raise CannotLaunchMaster(f"cannot keep the job in {where}: {why[:1].lower()}{why[1:]}") from error

    def close(self) -> None:
        """Release the lock that shows that this agent lives (`_is_run_present`). Master and supervisor go on."""
        if self._presence is not None:
            os.close(self._presence)
            self._presence = None

    def _is_run_present(self) -> bool:
        """True if another agent of this run, or the run's supervisor, lives on this machine.

        Each of them has a shared lock on the file NAME.present, beside the job directory NAME. This method also
        takes such a lock for this agent, and keeps it.
        """
        path = self._directory.path.with_suffix(".present")
        self._presence = descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_SH)

    def revive(self, seconds_away: float) -> None:
        """Start the master again from its journal, if neither the master nor its supervisor lives.

        `seconds_away` is the time since the master was last reached. A supervisor that another agent started counts as
        gone when that time is more than REVIVE_AFTER. Does nothing after MAX_STARTS starts.
        """
        if self._starts >= MAX_STARTS or not self._directory.exists:
            return
        gone = self._supervisor.poll() is not None if self._supervisor is not None else seconds_away > REVIVE_AFTER
        if gone and not self._directory.master_lives():
            try:
                self._spawn()
            except CannotLaunchMaster as error:
                log.warning("%s", error)  # training goes on; the next call tries again

    async def end(self, patience: float) -> None:
        """Wait for the end of the supervisor that this agent started. Stop it if it lives after `patience` seconds."""
        if not await self._has_ended_within(patience):
            self.stop()
            await self._has_ended_within(LAUNCH_PATIENCE)

    def stop(self) -> None:
        if self._supervisor is not None and self._supervisor.poll() is None:
            self._supervisor.terminate()

    async def _has_ended_within(self, seconds: float) -> bool:
        if self._supervisor is None or self._supervisor.poll() is not None:
            return True
        loop, ended, pidfd = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(self._supervisor.pid)
        loop.add_reader(pidfd, ended.set)
        try:
            async with asyncio.timeout(seconds):
                await ended.wait()
            self._supervisor.wait()
            return True
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)

    def _spawn(self) -> None:
        host = self._endpoint.host if is_loopback(self._endpoint.host) else "0.0.0.0"
        command = [sys.executable, "-m", "resile.master", "--supervise", "--directory", str(self._directory.path)]
        command += ["--host", host, "--port", str(self._endpoint.port), *_tls_flags(self._options.security)]
        try:
            with self._directory.log.open("ab") as words:
                self._supervisor = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=words,
                    stderr=words,
                    start_new_session=True,
                    pass_fds=() if self._presence is None else (self._presence,),
                )
        except OSError as error:
            raise CannotLaunchMaster(f"cannot start the master: {os.strerror(error.errno or 0)}") from error
        self._starts += 1

    async def _wait_until_up(self) -> None:
        try:
            while self._directory.address() is None:
                assert self._supervisor is not None
                if self._supervisor.poll() is not None:
                    raise CannotLaunchMaster(_last_line(self._directory.log) or "the master ended without a word")
                await asyncio.sleep(0.01)
        except BaseException:
            self.stop()
            raise

    async def _turn(self) -> contextlib.ExitStack:
        """Lock the launch of this run's master, so that no other agent launches one. Waits for the lock.

        The lock is on the file NAME.launch beside the job directory NAME. The returned context releases it at its end.
        """
        while True:
            with contextlib.suppress(BlockingIOError, FileNotFoundError), contextlib.ExitStack() as held:
                lock = locked(self._directory.path.with_suffix(".launch"), os.O_CREAT)
                os.ftruncate(held.enter_context(lock), 0)  # removes a mark of `stale_directories`
                return held.pop_all()
            await asyncio.sleep(0.02)


def _tls_flags(security: Security) -> list[str]:
    if not security.tls_cert:
        return []
    pairs = {"--tls-cert": security.tls_cert, "--tls-key": security.tls_key, "--tls-ca": security.tls_ca}
    return [word for flag, value in pairs.items() if value for word in (flag, value)]


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].removeprefix("resile master: ") if lines else ""
