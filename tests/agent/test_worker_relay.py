"""The relay speaks for the agent's own processes, and what a dying master may have missed is said again."""

from __future__ import annotations

from resile.agent.worker_relay import Relay
from resile.api.ids import Round
from resile.protocol.agent_to_master import ShardsFreed, StepReport
from resile.protocol.message import Message
from resile.protocol.shards import OpenDataset, ShardGranted, ShardProgress, TakeShard
from resile.protocol.worker_to_agent import Attach, WorkerMessage


class Line:
    """A connection of a training process."""

    def __init__(self, relay: Relay, name: str) -> None:
        self.relay = relay
        self.owner: str | None = None
        self.closed = ""
        self.got: list[Message] = []
        self.say(Attach(worker=name))

    def say(self, message: WorkerMessage) -> None:
        self.relay.on_message(self, message)  # type: ignore[arg-type]

    def send(self, message: Message) -> None:
        self.got.append(message)

    def close(self, because: str) -> None:
        self.closed = because
        self.relay.on_close(self, because)  # type: ignore[arg-type]


def relay_of(*workers: str) -> tuple[Relay, list[Message]]:
    sent: list[Message] = []
    relay = Relay(sent.append)
    relay.begin(Round(3), set(workers), leads=True)
    return relay, sent


def take(worker: str, request: int = 1) -> TakeShard:
    return TakeShard(worker=worker, request=request, dataset="d")


def test_a_request_is_repeated_until_it_is_answered_and_the_answer_reaches_who_asked() -> None:
    relay, sent = relay_of("a.0", "a.1")
    asks, idle = Line(relay, "a.0"), Line(relay, "a.1")
    asks.say(take("a.0"))
    relay.repeat()
    assert sent == [take("a.0"), take("a.0")]
    granted = ShardGranted(worker="a.0", request=1, lease=7, start=0, end=4)
    relay.answer(granted)
    relay.repeat()
    assert len(sent) == 2
    assert (asks.got, idle.got) == ([granted], [])


def test_the_end_of_a_process_that_took_shards_is_told_and_told_again() -> None:
    relay, sent = relay_of("a.0")
    line = Line(relay, "a.0")
    line.say(take("a.0"))
    relay.gone("a.0")
    relay.repeat()
    assert sent[1:] == [ShardsFreed(worker="a.0"), ShardsFreed(worker="a.0")], "but not the request of the dead"
    assert line.closed


def test_the_end_of_a_process_that_took_none_is_nobodys_business() -> None:
    relay, sent = relay_of("a.0")
    Line(relay, "a.0").say(StepReport(round=Round(3), step=1))
    relay.gone("a.0")
    assert [type(message) for message in sent] == [StepReport]


def test_what_a_process_forked_goes_with_it() -> None:
    relay, sent = relay_of("a.1")
    loader = Line(relay, "a.1/99")
    loader.say(take("a.1/99"))
    relay.gone("a.1")
    assert sent[1:] == [ShardsFreed(worker="a.1/99")]
    assert loader.closed


def test_a_forked_process_that_hangs_up_is_gone_and_a_started_one_is_not() -> None:
    relay, sent = relay_of("a.1")
    for name in ("a.1", "a.1/99"):
        line = Line(relay, name)
        line.say(take(name))
        line.close("it hung up")
    assert sent[2:] == [ShardsFreed(worker="a.1/99")]


def test_strangers_and_impostors_are_cut_off() -> None:
    relay, sent = relay_of("a.1")
    stranger = Line(relay, "a.11")
    assert "no process 'a.11'" in stranger.closed
    unnamed = Line(relay, "a.1")
    unnamed.say(ShardProgress(worker="a.2", request=1, dataset="d", lease=1, upto=1))
    assert "another's name" in unnamed.closed
    assert sent == []


def test_steps_of_older_rounds_and_slower_ranks_are_not_passed_on() -> None:
    relay, sent = relay_of("a.0", "a.1")
    first, second = Line(relay, "a.0"), Line(relay, "a.1")
    first.say(StepReport(round=Round(3), step=5))
    second.say(StepReport(round=Round(3), step=5))
    second.say(StepReport(round=Round(2), step=9))
    second.say(StepReport(round=Round(3), step=6))
    assert [message.step for message in sent if isinstance(message, StepReport)] == [5, 6]
    relay.begin(Round(4), {"b.0"}, leads=True)
    Line(relay, "b.0").say(StepReport(round=Round(4), step=0))
    assert len(sent) == 3


def test_a_node_that_does_not_lead_tells_its_first_step_at_once_and_then_speaks_seldom() -> None:
    now, sent = 100.0, list[Message]()
    relay = Relay(sent.append, clock=lambda: now)
    relay.begin(Round(3), {"a.0"}, leads=False)
    line = Line(relay, "a.0")
    for step in range(200):
        line.say(StepReport(round=Round(3), step=step))
        now += 1 / 16
    assert [message.step for message in sent if isinstance(message, StepReport)] == [0, 80, 160]
    relay.gone("a.0")
    assert sent[3:] == [StepReport(round=Round(3), step=199)], "the last step of a process is never lost"
    relay.begin(Round(4), {"b.0"}, leads=False)
    Line(relay, "b.0").say(StepReport(round=Round(4), step=200))
    assert sent[4:] == [StepReport(round=Round(4), step=200)], "the next round begins at once"


def test_the_node_that_leads_tells_every_step() -> None:
    relay, sent = relay_of("a.0")
    line = Line(relay, "a.0")
    for step in range(20):
        line.say(StepReport(round=Round(3), step=step))
    assert len(sent) == 20


def test_a_process_with_too_many_open_requests_is_cut_off(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("resile.agent.worker_relay.MAX_OPEN", 2)
    relay, sent = relay_of("a.0")
    line = Line(relay, "a.0")
    for number in range(3):
        line.say(OpenDataset(worker="a.0", request=number, name="d", size=1, shard_size=1))
    assert len(sent) == 2
    assert "too many requests open" in line.closed
