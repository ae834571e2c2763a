"""What a process does between two rounds, with an agent of whom only the words are there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from resile.agent.workers.ports import free_port
from resile.api.ids import Rank, Round
from resile.checkpoint.errors import NotReadable
from resile.checkpoint.storage import Storage
from resile.protocol.worker_to_agent import WorkerAssignment
from resile.torch._checkpoint import restore
from resile.torch._loop import rendezvous
from resile.torch._loop.group import Group, GroupLost
from resile.torch._loop.loop_checkpoints import LoopCheckpoints
from resile.torch._loop.train_state import TrainState
from resile.torch.checkpointer import Checkpointer
from resile.torch.elastic import Elastic
from tests.local.resile_run import wait_until

SOON = 5.0
"""Seconds; it takes a twentieth of it. What it must not be is a pause: 30 s here."""


class Agent:
    """The line to one that has a round for this process alone, as often as it asks."""

    def __init__(self, on_over: Callable[[Round], None]) -> None:
        self.on_over = on_over
        self.round = Round(0)
        self.ended = Round(0)
        """The last round that ends before its members have met."""
        self.completed = Round(0)
        """The last round whose last step is taken."""
        self.closed = False
        self.asked_for = 0.0
        """Seconds that were waited for the word that a round is over."""

    def ready(self, step: int, holds: int = 0) -> WorkerAssignment:
        self.round = Round(self.round + 1)
        return WorkerAssignment(
            round=self.round,
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            group_rank=Rank(0),
            group_world_size=1,
            master_addr="127.0.0.1",
            master_port=free_port(),
            verdict_within=77.0,
        )

    def over(self, round_: Round) -> bool:
        return round_ < self.round or round_ <= self.ended

    def await_over(self, round_: Round, timeout: float) -> bool:
        self.asked_for = timeout
        return self.over(round_)

    def complete(self, round_: Round, timeout: float) -> bool:
        self.completed = round_
        return not self.over(round_)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> list[Agent]:
    """Of the process whose rounds are made next."""
    agents: list[Agent] = []

    def call(on_over: Callable[[Round], None]) -> Agent:
        agents.append(Agent(on_over))
        return agents[-1]

    monkeypatch.setattr(rendezvous.RendezvousClient, "from_environment", call)
    monkeypatch.setattr(rendezvous, "_tell_script", lambda placed: None)
    return agents


def test_a_process_does_not_wait_for_storage_in_a_round_that_is_over(
    agent: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "PAUSES", (30.0,))
    away = [True]
    steps = Storage.steps

    def listing(storage: Storage) -> list[int]:
        if away[0]:
            raise NotReadable(f"{storage.directory} cannot be read: Stale file handle")
        return steps(storage)

    monkeypatch.setattr(Storage, "steps", listing)
    model = torch.nn.Linear(2, 1)
    checkpointer = Checkpointer(tmp_path)
    state = TrainState((model, torch.optim.SGD(model.parameters())), {}, checkpoints=LoopCheckpoints(checkpointer, 1))
    member = rendezvous.Rendezvous(state, "gloo", 60.0)

    class Watching(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "trying again in 30 s" in record.getMessage():
                away[0] = False
                agent[0].on_over(agent[0].round)  # in truth from another thread

    watching = Watching()
    restore.log.addHandler(watching)
    try:
        begun = time.monotonic()
        member.form()
        assert time.monotonic() - begun < SOON
        assert (member.round, member.round_over) == (2, False)
    finally:
        restore.log.removeHandler(watching)
        member.close(in_peace=True)
        checkpointer.close()


def member() -> rendezvous.Rendezvous:
    model = torch.nn.Linear(2, 1)
    return rendezvous.Rendezvous(TrainState((model, torch.optim.SGD(model.parameters())), {}), "gloo", 60.0)


def test_a_process_does_not_give_up_however_many_rounds_end_before_it_has_met_its_peers(agent: list[Agent]) -> None:
    one = member()
    agent[0].ended = Round(3 * rendezvous.MOST_MEETINGS)
    one.form()
    assert one.round == agent[0].ended + 1
    one.close(in_peace=True)


def test_a_process_gives_up_when_rounds_that_nobody_ends_do_not_come_together(
    agent: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    def form(group: Group) -> None:
        raise GroupLost("somebody cannot be reached")

    monkeypatch.setattr(Group, "form", form)
    one = member()
    with pytest.raises(RuntimeError, match="20 rounds in a row did not come together; the last: somebody cannot be"):
        one.form()
    assert agent[0].round == rendezvous.MOST_MEETINGS == 20
    one.close(in_peace=True)


def test_the_master_has_as_long_to_end_the_round_after_an_error_as_the_agent_says(agent: list[Agent]) -> None:
    meeting = member()
    try:
        meeting.form()
        assert not meeting.is_loss(RuntimeError("a shape that does not fit"))
        assert agent[0].asked_for == 77.0
    finally:
        meeting.close(in_peace=True)


def test_peers_do_not_wait_for_a_process_whose_script_fails_between_two_rounds(
    agent: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    def resize(state: TrainState, rank: int, world: int) -> None:
        raise ValueError("no room for the model")

    monkeypatch.setattr(TrainState, "resize", resize)
    monkeypatch.setattr(rendezvous, "RELEASE_AFTER", 0.01)
    one = member()
    with pytest.raises(ValueError, match="no room for the model"):
        one.form()
    wait_until(lambda: one.round_over, "the end of the group")  # though the script goes on
    one.close(in_peace=False)


@pytest.mark.parametrize("method", ["taken", "finish"])
def test_peers_do_not_wait_for_a_process_whose_script_fails_while_a_step_is_saved_or_a_loop_ends(
    agent: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("two values of the state have one name")

    monkeypatch.setattr(LoopCheckpoints, method, fail)
    monkeypatch.setattr(rendezvous, "RELEASE_AFTER", 0.01)
    model = torch.nn.Linear(2, 1)
    checkpointer = Checkpointer(tmp_path)
    elastic = Elastic(model, torch.optim.SGD(model.parameters()), checkpointer=checkpointer)

    def train() -> None:
        for _ in elastic.steps(1):
            with elastic.step():
                model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(ValueError, match="two values of the state"):
        train()
    wait_until(lambda: elastic.round_over, "the end of the group")  # though the script goes on
    elastic.close()
    checkpointer.close()


def test_the_agent_hears_of_the_last_step_before_storage_is_waited_for_and_can_end_the_round_no_more(
    agent: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[tuple[Round, bool]] = []

    def wait_stored(_: LoopCheckpoints) -> None:
        known.append((agent[0].completed, agent[0].closed))

    monkeypatch.setattr(LoopCheckpoints, "wait_stored", wait_stored)
    model = torch.nn.Linear(2, 1)
    checkpointer = Checkpointer(tmp_path)
    elastic = Elastic(model, torch.optim.SGD(model.parameters()), checkpointer=checkpointer)
    for _ in elastic.steps(1):
        with elastic.step():
            model(torch.ones(1, 2)).sum().backward()
    assert known == [(1, True)]
    elastic.close()
    checkpointer.close()
