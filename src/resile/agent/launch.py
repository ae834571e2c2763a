"""`resile run`, once its flags are good: find or start the master, run the agent, return its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import ssl
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from resile.agent.agent import FAILED, Agent, Identity
from resile.agent.hosting import CannotHost, MasterHost, hosts_master, run_directory, token_of
from resile.agent.options import Endpoint, RunOptions, Security
from resile.agent.ports import free_port
from resile.agent.session import Session
from resile.api.ids import NodeId, Rank
from resile.wire.directory import DirectoryError
from resile.wire.handshake import NotWelcome
from resile.wire.local_server import serve_local
from resile.wire.tls import BadTLS, client_context

log = logging.getLogger("resile.agent")

LOG_FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
REVIVE_AFTER = 2.0
"""Seconds without a master after which the agent looks whether its supervisor is gone as well."""


def launch(options: RunOptions) -> int:
    """Run this node until the job is over; the exit code of the command."""
    logging.basicConfig(format=LOG_FORMAT, level=os.environ.get("DLROVER_LOG_LEVEL", "INFO").upper())
    for notice in options.notices:
        print(notice, file=sys.stderr)
    directory = Path(tempfile.mkdtemp(prefix="resile-"))
    try:
        return asyncio.run(_run(options, directory))
    except (CannotHost, NotWelcome, DirectoryError, BadTLS) as error:
        print(f"resile run: {error}", file=sys.stderr)
        return FAILED
    except TimeoutError:
        print("resile run: the master did not come up in time", file=sys.stderr)
        return FAILED
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _run(options: RunOptions, directory: Path) -> int:
    endpoint = options.endpoint or Endpoint("127.0.0.1", free_port())
    if options.endpoint is None and options.state_dir is None:
        options = msgspec.structs.replace(options, state_dir=str(directory / "job"))
    options = msgspec.structs.replace(options, endpoint=endpoint)
    host = None
    home = run_directory(options, endpoint)
    if hosts_master(options):
        host = MasterHost(options, endpoint, home)
        await host.start()
    token, notice = token_of(options, home, endpoint)
    if notice and not options.managed:
        print(f"resile run: {notice}", file=sys.stderr)
    agent = Agent(options, _identity(options, os.environ), directory)
    return await _serve(agent, options, endpoint, token, host, directory)


async def _serve(
    agent: Agent, options: RunOptions, endpoint: Endpoint, token: bytes, host: MasterHost | None, directory: Path
) -> int:
    def away(seconds: float) -> None:
        if host is not None and seconds > REVIVE_AFTER:
            host.revive()
        agent.on_away(seconds)

    agent.session = Session(
        endpoint, token, _tls(options.security), hello=agent.hello, on_message=agent.on_message, on_away=away
    )
    loop = asyncio.get_running_loop()
    for number in options.signals:
        loop.add_signal_handler(number, agent.on_signal, number)
    local = await serve_local(
        directory / "agent.sock", on_message=agent.relay.on_message, on_close=agent.relay.on_close
    )
    session = asyncio.ensure_future(agent.session.run())
    session.add_done_callback(lambda ended: _fail_with(agent.done, ended))
    try:
        return await agent.done
    finally:
        agent.close()
        session.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await session
        local.close()


def _fail_with(done: asyncio.Future[int], ended: asyncio.Task[None]) -> None:
    """A session ends by itself only when calling again would not help."""
    if not ended.cancelled() and not done.done() and (why := ended.exception()) is not None:
        done.set_exception(why)


def _identity(options: RunOptions, environ: Mapping[str, str]) -> Identity:
    """Who this node is: what the platform says in its environment, or what the flags say."""
    hostname = socket.gethostname()
    if not options.managed:
        address = options.local_addr or ("127.0.0.1" if options.standalone else "")
        rank = Rank(options.node_rank) if options.node_rank is not None else None
        return Identity(rank=rank, address=address, host=hostname)

    def number(*names: str) -> int | None:
        values = (environ.get(name, "") for name in names)
        return next((int(value) for value in values if value.isdigit()), None)

    node_id, rank_given = number("NODE_ID", "WORKER_ID"), number("NODE_RANK", "WORKER_RANK")
    return Identity(
        role=environ.get("NODE_TYPE") or environ.get("WORKER_TYPE") or "worker",
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
    return client_context(Path(security.tls_ca), certificate=certificate, key=key, check_name=False)
