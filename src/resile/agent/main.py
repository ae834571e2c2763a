"""Runs `resile run` with checked options: finds or starts the master, runs the agent, returns its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import signal
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from resile.agent import stale_directories
from resile.agent.agent import FAILED, SIGNALLED, Agent, Identity, JobWasOver
from resile.agent.master_launcher import (
    CannotLaunchMaster,
    MasterLauncher,
    hosts_master,
    is_loopback,
    run_directory,
    token_notice,
    token_of,
)
from resile.agent.options import Endpoint, RunOptions, Security
from resile.agent.session import Session
from resile.agent.workers.attempt import LogDirectory
from resile.agent.workers.output import Output, OutputLines
from resile.agent.workers.ports import NoFreePort, free_port
from resile.agent.workers.worker_states import IllegalTransition
from resile.api.defaults import LOCAL_NODE_VARIABLE
from resile.api.ids import NodeId, Rank
from resile.api.kinds.run.names import WORKER
from resile.wire.agent_socket import serve_local
from resile.wire.connection import CannotListen
from resile.wire.handshake import HandshakeRefused
from resile.wire.job_directory import DirectoryError
from resile.wire.tls import BadTLS, client_context

log = logging.getLogger("resile.agent")
LOG_FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
"""The format of DLRover's agents, whose users search logs for these lines."""

LATE_PAUSE = 0.2
"""Seconds between two checks whether the master of an earlier run is gone."""
PORT_TRIES = 3
"""Ports that a run on this machine alone tries: a free port may be taken before the master binds it."""
SEE_OFF = 5.0
"""Seconds that the master of a run on this machine alone has to end after the run."""


def launch(options: RunOptions) -> int:
    output = Output()
    _log_to(output)
    for notice in options.notices:
        output.say(notice)
    directory: Path | None = None
    try:
        directory = _private_directory()
        _sweep_beside(directory)
        return asyncio.run(_run(options, directory, output))
    except (CannotLaunchMaster, HandshakeRefused, DirectoryError, BadTLS, CannotListen, CannotRun, NoFreePort) as error:
        output.say(f"resile run: {error}")
        return FAILED
    except KeyboardInterrupt:
        return SIGNALLED + signal.SIGINT
    finally:
        output.close()
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def _sweep_beside(directory: Path) -> None:
    # nothing closes the descriptor that `hold` returns, so the lock lasts as long as this process
    with contextlib.suppress(OSError):
        stale_directories.hold(directory)
    threading.Thread(
        target=stale_directories.sweep_agents, args=(directory.parent,), name="resile-sweep", daemon=True
    ).start()


class CannotRun(Exception):
    """This machine cannot run the agent; the text is one sentence."""


def _private_directory(environ: Mapping[str, str] = os.environ) -> Path:
    home = environ.get(LOCAL_NODE_VARIABLE, "")
    if home:
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix="agent-", dir=home))
    try:
        return Path(tempfile.mkdtemp(prefix=stale_directories.PREFIX))
    except OSError as error:  # has no errno if no directory for temporary files can be written at all
        why = os.strerror(error.errno) if error.errno and error.filename else str(error.strerror or error)
        raise CannotRun(f"cannot make a directory for temporary files: {why}") from None


class _Signals:
    """Passes signals on to the agent. A signal before the agent exists cancels the start, and `early` is its number."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._agent: Agent | None = None
        self._starting = asyncio.current_task()
        self.early = 0
        loop = asyncio.get_running_loop()
        for number in numbers:
            loop.add_signal_handler(number, self._got, number)

    def tell(self, agent: Agent | None) -> None:
        """Pass later signals on to `agent`. With None, a signal cancels the start of the next agent."""
        self._agent = agent

    def _got(self, number: int) -> None:
        if self._agent is not None:
            self._agent.on_signal(number)
        elif self._starting is not None:
            self.early = number
            self._starting.cancel()


async def _run(options: RunOptions, directory: Path, output: Output) -> int:
    signals = _Signals(options.signals)
    try:
        return await _find_master_and_run(options, directory, output, signals)
    except asyncio.CancelledError:
        if not signals.early:
            raise
        return SIGNALLED + signals.early


async def _find_master_and_run(options: RunOptions, directory: Path, output: Output, signals: _Signals) -> int:
    alone = options.endpoint is None
    if alone and options.state_dir is None:
        options = msgspec.structs.replace(options, state_dir=str(directory / "job"))
    try:
        logs = LogDirectory(options, directory)
    except OSError as error:
        raise CannotRun(f"cannot write logs in {options.log_dir}: {os.strerror(error.errno or 0)}") from None
    if options.endpoint is not None and (notice := token_notice(options, options.endpoint)):
        output.say(f"resile run: {notice}")
    if logs.kept:
        log.info("log directory set to: %s", logs.path)
    given_up = asyncio.get_running_loop().time() + options.timeouts.connect
    host: MasterLauncher | None = None
    try:
        while True:
            if hosts_master(options):
                options, host = await _host(options, alone)
            try:
                return await _serve(options, host, signals, directory=directory, logs=logs, output=output)
            except JobWasOver as late:
                signals.tell(None)
                if asyncio.get_running_loop().time() > given_up:
                    log.warning("%s", late)
                    return 0 if late.succeeded else FAILED
            finally:
                if host is not None:
                    host.close()
            await asyncio.sleep(LATE_PAUSE)
    finally:
        if alone and host is not None:
            await host.end(SEE_OFF)


async def _host(options: RunOptions, alone: bool) -> tuple[RunOptions, MasterLauncher]:
    tries_left = PORT_TRIES if alone else 1
    while True:
        endpoint = Endpoint("127.0.0.1", free_port({})) if alone else options.endpoint  # HOST_PORTS are for rounds
        assert endpoint is not None
        host = MasterLauncher(options, endpoint, run_directory(options, endpoint))
        try:
            await host.start()
            return msgspec.structs.replace(options, endpoint=endpoint), host
        except CannotLaunchMaster:
            host.close()
            tries_left -= 1
            if not tries_left:
                raise


async def _serve(
    options: RunOptions,
    host: MasterLauncher | None,
    signals: _Signals,
    *,
    directory: Path,
    logs: LogDirectory,
    output: Output,
) -> int:
    endpoint = options.endpoint
    assert endpoint is not None
    token = functools.partial(token_of, options, run_directory(options, endpoint), endpoint)
    session = Session(endpoint, token, lambda: _tls(options.security), options.security.tls_name or None)
    agent = Agent(
        options,
        _identity(options, os.environ),
        session=session,
        token=token,
        revive_master=host.revive if host is not None else lambda seconds: None,
        directory=directory,
        logs=logs,
        output=output,
    )
    local = await serve_local(agent.socket, on_message=agent.on_worker, on_close=agent.on_worker_close)
    agent.checkpoints.start()
    here = endpoint.host if is_loopback(endpoint.host) else "0.0.0.0"
    agent.checkpoints.keep_replicas(here, tls=bool(options.security.tls_ca))
    agent.standbys.ahead()
    running = agent.in_background(session.run(agent))
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: _end_by_defect(agent.done, loop, context))
    signals.tell(agent)
    try:
        return await agent.done
    finally:
        agent.close()
        with contextlib.suppress(asyncio.CancelledError, HandshakeRefused):
            await running
        local.close()
        agent.checkpoints.close()


def _log_to(output: Output) -> None:
    words = OutputLines(output)
    words.setFormatter(logging.Formatter(LOG_FORMAT))
    level = os.environ.get("DLROVER_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(handlers=[words], level=level if level in logging.getLevelNamesMapping() else "INFO")


def _end_by_defect(done: asyncio.Future[int], loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # after an IllegalTransition a worker would never end, so the agent ends
    loop.default_exception_handler(context)
    error = context.get("exception")
    if isinstance(error, IllegalTransition) and not done.done():
        done.set_exception(CannotRun(f"this agent has a defect and ends: {error}"))


def _identity(options: RunOptions, environ: Mapping[str, str]) -> Identity:
    hostname = socket.gethostname()
    if not options.managed:
        return Identity(rank=options.node_rank, address=options.local_addr or "", host=hostname)

    def number(*names: str) -> int | None:
        values = (environ.get(name, "") for name in names)
        return next((int(value) for value in values if value.isdigit()), None)

    node_id, rank_given = number("NODE_ID", "WORKER_ID"), number("NODE_RANK", "WORKER_RANK")
    return Identity(
        role=environ.get("NODE_TYPE") or environ.get("WORKER_TYPE") or WORKER,
        node_id=NodeId(node_id) if node_id is not None else None,
        rank=Rank(rank_given) if rank_given is not None else None,
        address=options.local_addr or environ.get("POD_IP", ""),
        host=environ.get("NODE_IP", "") or hostname,
    )


def _tls(security: Security) -> ssl.SSLContext | None:
    if not security.tls_ca:
        return None
    certificate = Path(security.tls_cert) if security.tls_cert else None
    key = Path(security.tls_key) if security.tls_key else None
    return client_context(Path(security.tls_ca), certificate=certificate, key=key, check_name=bool(security.tls_name))
