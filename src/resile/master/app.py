"""One master process: journal, engine, server and platform put together, from the start to the job's end."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import msgspec

from resile.api.ids import NodeKey, Seconds
from resile.api.job_view import JobView
from resile.core import decisions as de
from resile.core import events as ev
from resile.core.engine import Engine
from resile.core.state import new_state
from resile.master.commands import Commands
from resile.master.event_queue import RETRY_SECONDS, EventQueue
from resile.master.job_view import StandbyView, view
from resile.master.journal.base import Journal, JournalDamaged
from resile.master.journal.sqlite import SQLiteJournal
from resile.master.server import AgentConnections, executor, log_note
from resile.platform.base import Observation, Platform
from resile.protocol.commands import ToMaster
from resile.protocol.job_changes import Stop
from resile.wire.connection import Server, serve
from resile.wire.job_directory import JobDirectory, MasterAddress

log = logging.getLogger("resile.master")

FAREWELL = Seconds(10.0)
"""How much longer than the exit grace a master whose job is over waits for agents and nodes to end. A platform may wait
half of that for the last word of a node before it deletes what is left."""
SCRAPE_SECONDS = Seconds(5.0)
"""How long a request for the metrics waits for a busy master."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 0
    tls: ssl.SSLContext | None = None
    metrics_port: int | None = None


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a running master that background tasks beside it need; one such task writes the job's status."""

    events: EventQueue
    commands: Commands
    observers: list[Callable[[de.Note], None]]
    fresh: bool
    """True if the journal was empty: this is the job's first master."""


async def run_master(
    directory: JobDirectory,
    options: Options,
    make_platform: Callable[[str], Platform] | None,
    *,
    journal: Journal | None = None,
    accompany: Callable[[Serving], AbstractAsyncContextManager[None]] | None = None,
) -> bool:
    """Serve the job of this directory until it is over, and return True if it succeeded.

    `make_platform` gets the master's address and returns the platform that launches nodes. On bare machines it is None.
    If `journal` is None, an SQLite file in the job directory is used. The journal is closed at the end. The context
    `accompany` is entered before the first event is handled and left after the last message to the agents.

    Raises `JournalError`, `CannotListen` if the port is in use, or `DirectoryError` if the directory holds no job.
    """
    spec = directory.spec()
    journal = SQLiteJournal(directory.journal) if journal is None else journal
    async with AsyncExitStack() as cleanup:
        cleanup.callback(journal.close)
        history = journal.load()
        if history is None and directory.address() is not None:
            raise JournalDamaged("the journal is empty, but a master has served this job before")
        if history is None:
            clock = _clock()
            engine = Engine(new_state(spec, clock()))
            journal.snapshot(engine.state, clock())
        else:
            engine = Engine.replay(history.state, history.events)
            clock = _clock(not_before=history.until)
        over = asyncio.Event()
        replayed = len(history.events) if history else 0
        events = EventQueue(engine, journal, clock, told=journal.last_told(), replayed=replayed)
        cleanup.callback(events.close)
        if history is not None:
            events.submit(ev.MasterReturned())
        events.submit(ev.Started())  # changes nothing if the job has started
        standbys: dict[NodeKey, StandbyView] = {}

        def look() -> JobView:
            return view(events.engine.state, events.now, standbys)

        commands = Commands(events.submit, journal, look)
        connections = AgentConnections(events.submit, events.heard, spec.name, commands, standbys)
        observers: list[Callable[[de.Note], None]] = [log_note]
        if options.metrics_port is not None:
            cleanup.callback(_serve_metrics(look, observers, options.metrics_port))
        server = await _listen(directory, options, connections)
        cleanup.callback(server.close)
        address = MasterAddress(host=options.host, port=server.port, pid=os.getpid())
        platform = make_platform(f"{address.reachable_host}:{server.port}") if make_platform else None
        if accompany is not None:
            serving = Serving(events=events, commands=commands, observers=observers, fresh=history is None)
            await cleanup.enter_async_context(accompany(serving))
        events.start(executor(connections, platform, commands.reply, over.set, observers))
        if platform is not None:
            await _attach(platform, events, fresh=history is None)
            cleanup.push_async_callback(platform.close)
        cleanup.callback(_announce(directory, address))
        log.info("the master of %s listens on %s:%d", spec.name, options.host, server.port)
        if not spec.managed:
            cleanup.callback(_stop_without_agents(events))
        if engine.state.phase.over:
            # The last master died before it told every agent of the end. The agents will connect and learn it.
            await asyncio.sleep(spec.timeouts.master_recovery)
            over.set()
        await over.wait()
        await _farewell(events, connections)
        return engine.state.phase == "Succeeded"


def _clock(not_before: float = 0.0) -> Callable[[], float]:
    """A clock that reads like the wall clock, but never jumps or goes back, not even across a restart.

    `not_before` is the last time in the journal. If the wall time is earlier now, the clock begins at `not_before`.
    """
    offset = max(time.time(), not_before) - time.monotonic()
    return lambda: offset + time.monotonic()


async def _listen(directory: JobDirectory, options: Options, connections: AgentConnections) -> Server:
    before = directory.address()
    port = options.port or (before.port if before is not None else 0)
    return await serve(
        options.host,
        port,
        token=directory.token(),
        decode=ToMaster,
        on_message=connections.on_message,
        on_close=connections.on_close,
        on_bad_message=connections.on_bad_message,
        on_refused=lambda peer, because: log.warning("refused %s: %s", peer, because),
        tls=options.tls,
    )


async def _attach(platform: Platform, events: EventQueue, *, fresh: bool) -> None:
    def seen(observation: Observation) -> ev.NodeSeen:
        return ev.NodeSeen(node=observation.node, status=observation.status, end=observation.end, host=observation.host)

    await platform.start(lambda observation: events.submit(seen(observation)))
    if not fresh:
        events.submit(ev.NodesListed(seen=tuple(map(seen, await platform.adopt()))))


def _announce(directory: JobDirectory, address: MasterAddress) -> Callable[[], None]:
    retry: asyncio.TimerHandle | None = None

    def announce() -> None:
        nonlocal retry
        try:
            directory.announce(address)
        except OSError as error:
            log.error("cannot write down where the master listens: %s", os.strerror(error.errno or 0))
            retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, announce)

    def stop() -> None:
        if retry is not None:
            retry.cancel()

    announce()
    return stop


def _stop_without_agents(events: EventQueue) -> Callable[[], None]:
    patience = events.engine.state.spec.timeouts.connect

    def look() -> None:
        if events.engine.state.rendezvous.config is None:
            events.submit(ev.ChangeWanted(change=Stop(because=f"no node came within {patience:g} s")))

    return asyncio.get_running_loop().call_later(patience, look).cancel


async def _farewell(events: EventQueue, connections: AgentConnections) -> None:
    """Wait, for a limited time, until every agent has disconnected and every launched node has ended."""
    gone = asyncio.Event()

    def check() -> None:
        state = events.engine.state
        running = state.spec.managed and any(not node.status.ended for node in state.nodes.values())
        if not connections.agents and not running:
            gone.set()

    events.observers.append(check)
    check()
    try:
        async with asyncio.timeout(events.engine.state.spec.longest_exit_grace + FAREWELL):
            await gone.wait()
    except TimeoutError:
        log.warning("some nodes are still there after the job's end")


def _serve_metrics(
    look: Callable[[], JobView], observers: list[Callable[[de.Note], None]], port: int
) -> Callable[[], None]:
    from resile.master.metrics import JobCollector, serve  # only here, since training does not need it

    loop = asyncio.get_running_loop()

    async def on_the_loop() -> JobView:
        return look()

    # Scrapes come on another thread, and the state may be read only on the loop.
    collector = JobCollector(lambda: asyncio.run_coroutine_threadsafe(on_the_loop(), loop).result(SCRAPE_SECONDS))

    def count(note: de.Note) -> None:
        collector.reasons[note.reason] += 1

    observers.append(count)
    return serve(collector, port)
