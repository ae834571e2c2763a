"""Nothing is executed before it is in the journal, and nothing is forgotten while the journal cannot be written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from resile.api.ids import NodeId, NodeKey
from resile.api.job import JobSpec, RoleSpec
from resile.api.job_view import JobEvent
from resile.api.timeouts import derive
from resile.core.decisions import Admit, AnyDecision, DeleteNode, Finish, LaunchNode, Note, Reply
from resile.core.engine import Engine
from resile.core.events import AgentConnected, AnyEvent, ChangeWanted, Started
from resile.core.state import JobState, new_state
from resile.master import event_queue as event_queue
from resile.master.event_queue import EventQueue
from resile.master.journal.base import History, JournalDamaged, JournalError, JournalTaken
from resile.protocol.agent_to_master import Hello
from resile.protocol.job_changes import Scale, Stop
from resile.protocol.message import PROTOCOL
from resile.protocol.reports import RendezvousConfig

SPEC = JobSpec(name="job", kind="elasticjob", roles={"worker": RoleSpec(replicas=2)}, timeouts=derive())


class MemoryJournal:
    """A journal that can be told to have no room."""

    folds_itself = False

    def __init__(self) -> None:
        self.full = False
        self.error: Exception | None = None
        self.attempts = 0
        self.tried: Callable[[], object] = lambda: None
        self.events: list[AnyEvent] = []
        self.lines: list[JobEvent] = []
        self.snapshots: list[JobState] = []

    def load(self) -> History | None:
        return None

    def append(self, events: Sequence[tuple[float, AnyEvent]], story: Sequence[JobEvent]) -> None:
        self.attempts += 1
        self.tried()
        if self.error is not None:
            raise self.error
        if self.full:
            raise JournalError("the journal cannot be written: no room")
        self.events += [event for _, event in events]
        self.lines += story

    def snapshot(self, state: JobState, at: float) -> None:
        self.snapshots.append(state)

    def story(self, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        return self.lines[after : after + limit]

    def last_told(self) -> int:
        return len(self.lines)

    def close(self) -> None:
        pass


class Watched:
    """An event queue, its journal, and what it executed."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.journal = MemoryJournal()
        self.executed: list[AnyDecision] = []
        self.known_when_executed: list[int] = []
        self.died = asyncio.Event()
        engine = Engine(new_state(SPEC, 0.0))
        self.events = EventQueue(engine, self.journal, clock or asyncio.get_running_loop().time, die=self._die)
        self.events.start(self._execute)
        self._turned = asyncio.Event()
        self.events.observers.append(self._turned.set)

    def _execute(self, decision: AnyDecision) -> None:
        self.executed.append(decision)
        self.known_when_executed.append(len(self.journal.events))

    def _die(self) -> None:
        self.died.set()

    def kinds(self) -> list[type]:
        return [type(decision) for decision in self.executed if not isinstance(decision, Note)]

    async def turn(self) -> None:
        """Until the batch has been handled, written and executed."""
        self._turned.clear()
        await asyncio.wait_for(self._turned.wait(), 10)

    async def executes(self, number: int) -> None:
        """Until so many decisions are executed, in however many turns: two may end before the first is noticed."""
        while len(self.kinds()) < number:
            await self.turn()

    async def attempt(self) -> None:
        """Until another write has been tried."""
        tried = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.journal.tried = lambda: loop.call_soon_threadsafe(tried.set)
        await asyncio.wait_for(tried.wait(), 10)


async def test_events_before_the_start_are_handled_in_order_once_it_comes() -> None:
    journal, executed = MemoryJournal(), list[AnyDecision]()
    events = EventQueue(Engine(new_state(SPEC, 0.0)), journal, asyncio.get_running_loop().time)
    turned = asyncio.Event()
    events.observers.append(turned.set)
    events.submit(Started())
    events.submit(ChangeWanted(change=Stop(), request=1))
    await asyncio.sleep(0.05)
    assert (journal.events, executed) == ([], [])
    events.start(executed.append)
    await asyncio.wait_for(turned.wait(), 10)
    assert [type(event) for event in journal.events] == [Started, ChangeWanted]
    assert {type(decision) for decision in executed} >= {LaunchNode, Reply, Finish}
    events.close()


async def test_events_are_journaled_before_their_decisions_are_executed() -> None:
    watched = Watched()
    watched.events.submit(Started())
    await watched.turn()
    assert watched.kinds() == [LaunchNode, LaunchNode]
    assert min(watched.known_when_executed) == 1
    watched.events.close()


async def test_what_comes_while_the_loop_is_busy_is_one_batch_in_order() -> None:
    watched = Watched()
    watched.events.submit(Started())
    watched.events.submit(ChangeWanted(change=Scale(role="worker", replicas=3), request=7))
    watched.events.submit(ChangeWanted(change=Stop(because="enough"), request=8))
    await watched.turn()
    assert [type(event) for event in watched.journal.events] == [Started, ChangeWanted, ChangeWanted]
    assert set(watched.known_when_executed) == {3}
    assert watched.kinds() == [LaunchNode, LaunchNode, Reply, LaunchNode, Reply, Finish, *[DeleteNode] * 3]
    watched.events.close()


async def test_a_full_disk_holds_decisions_back_until_there_is_room_and_loses_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_queue, "RETRY_SECONDS", 0.01)
    watched = Watched()
    watched.journal.full = True
    watched.events.submit(Started())
    await watched.attempt()
    await watched.attempt()
    assert watched.executed == []
    assert "no room" in str(watched.events.trouble)
    watched.events.submit(ChangeWanted(change=Scale(role="worker", replicas=3), request=7))
    await watched.attempt()
    assert watched.events.engine.state.targets == {"worker": 2}, "what comes meanwhile waits unhandled"

    watched.journal.full = False
    await watched.executes(4)
    assert watched.kinds() == [LaunchNode, LaunchNode, Reply, LaunchNode]
    assert [type(event) for event in watched.journal.events] == [Started, ChangeWanted]
    assert watched.events.trouble is None
    watched.events.close()


async def test_a_journal_that_stays_full_is_tried_again_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_queue, "RETRY_SECONDS", 0.05)
    watched = Watched()
    watched.journal.full = True
    watched.events.submit(Started())
    await watched.attempt()
    for number in range(100):
        watched.events.submit(ChangeWanted(change=Scale(role="worker", replicas=number)))
        await asyncio.sleep(0)
    before = watched.journal.attempts
    for _ in range(5):
        await watched.attempt()
    assert watched.journal.attempts - before == 5
    assert watched.journal.attempts < 10
    watched.events.close()


async def test_an_agent_that_comes_while_the_disk_is_full_is_not_missed_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_queue, "RETRY_SECONDS", 0.01)
    now = 100.0
    watched = Watched(clock=lambda: now)
    watched.events.submit(Started())
    await watched.turn()
    watched.journal.full = True
    watched.events.submit(came(0, connection=1))
    watched.events.submit(came(1, connection=2))
    await watched.attempt()
    now += 10 * SPEC.timeouts.heartbeat_timeout
    watched.journal.full = False
    await watched.turn()
    assert watched.kinds().count(Admit) == 2
    assert all(node.alive for node in watched.events.engine.state.nodes.values())
    watched.events.close()


async def test_a_master_that_breaks_over_an_event_ends_without_writing_or_doing_any_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched()
    handle = watched.events.engine.handle

    def break_over(event: AnyEvent, now: float) -> list[AnyDecision]:
        if isinstance(event, ChangeWanted):
            raise RuntimeError("a defect")
        return handle(event, now)

    monkeypatch.setattr(watched.events.engine, "handle", break_over)
    monkeypatch.setattr(watched.events, "_die", lambda: (_ for _ in ()).throw(SystemExit))
    watched.events.submit(Started())
    watched.events.submit(ChangeWanted(change=Stop(because="poison")))
    with pytest.raises(SystemExit):
        watched.events._turn()
    assert (watched.executed, watched.journal.events) == ([], [])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("a defect"), "the writing of the journal broke"),
        (KeyError("Content-Type"), "the writing of the journal broke"),
        (JournalDamaged("the journal j is damaged (x)"), "the journal j is damaged (x); this master ends"),
        (JournalTaken("another master has taken over"), "another master has taken over; this master ends"),
    ],
)
async def test_a_write_that_no_second_try_would_help_ends_the_master_at_once(
    error: Exception, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched()
    watched.journal.error = error
    watched.events.submit(Started())
    async with asyncio.timeout(10):
        await watched.died.wait()
    assert (watched.executed, watched.journal.attempts) == ([], 1)
    assert words in caplog.text
    watched.journal.error = None
    watched.events.close()


async def test_a_decision_that_cannot_be_carried_out_ends_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    monkeypatch.setattr(watched.events, "_execute", lambda _: 1 / 0)
    watched.events.submit(Started())
    async with asyncio.timeout(10):
        await watched.died.wait()
    watched.events.close()


async def test_what_accompanies_a_master_takes_it_along_when_it_breaks_but_not_after_the_end() -> None:
    watched = Watched()
    watched.events.broke("the watch of pods", RuntimeError("a defect"))
    assert watched.died.is_set()
    watched.died.clear()
    watched.events.close()
    watched.events.broke("the watch of pods", None)
    assert not watched.died.is_set()


async def test_notes_become_numbered_lines_of_the_story() -> None:
    watched = Watched()
    watched.events.submit(Started())
    await watched.turn()
    assert [(line.number, line.reason) for line in watched.journal.lines] == [(1, "JobStarted")]
    watched.events.close()


async def test_a_long_journal_is_replaced_by_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_queue, "COMPACT_AFTER", 2)
    watched = Watched()
    watched.events.submit(Started())
    watched.events.submit(ChangeWanted(change=Scale(role="worker", replicas=3)))
    await watched.turn()
    assert watched.journal.snapshots == [watched.events.engine.state]
    watched.events.close()


async def test_a_journal_that_folds_itself_is_never_asked_to_while_the_loop_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_queue, "COMPACT_AFTER", 2)
    watched = Watched()
    watched.journal.folds_itself = True
    watched.events.submit(Started())
    watched.events.submit(ChangeWanted(change=Scale(role="worker", replicas=3)))
    await watched.turn()
    assert len(watched.journal.events) == 2
    assert watched.journal.snapshots == []
    watched.events.close()


async def test_a_master_that_stood_still_blames_nobody_for_the_silence() -> None:
    now = 100.0
    watched = Watched(clock=lambda: now)
    watched.events.submit(Started())
    watched.events.submit(came(0, connection=1))
    await watched.turn()
    assert Admit in watched.kinds()
    now += 60.0  # the process was stopped for a minute; the agent's heartbeats wait in the socket
    watched.events._watch_own_pulse(now - 60.0)
    watched.events._turn()
    assert watched.events.engine.state.nodes[NodeKey("worker", NodeId(0))].alive
    now += 60.0  # this time it listened all the while
    watched.events._turn()
    assert not watched.events.engine.state.nodes[NodeKey("worker", NodeId(0))].alive
    watched.events.close()


def came(number: int, connection: int) -> AgentConnected:
    hello = Hello(
        protocol=PROTOCOL,
        job="job",
        incarnation=f"agent-{number}",
        address="127.0.0.1",
        host="h",
        nproc=1,
        rendezvous=RendezvousConfig(max_nodes=2),
        role="worker",
        node_id=NodeId(number),
    )
    return AgentConnected(connection=connection, hello=hello)
