"""A data set handed out by shards, in real runs: each record counts once, and nobody takes an error for the end."""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from resile.protocol.shards import DatasetOpen, ShardGranted
from resile.torch.shards import ElasticShards, NoAgentError, NotServedError
from resile.wire.agent_client import AgentClient
from tests.local.resile_run import Runs, kill, opened, wait_until

WORKS = """
from probe import *
from resile.torch.shards import ElasticShards
note("start", round=int(os.environ["RESILE_ROUND"]))
for shard in ElasticShards("d", 60, 4, epochs=2, seed=5):
    note("took", epoch=shard.epoch, first=shard.start, size=len(shard))
    for record in shard:
        shard.done(record + 1)
        note("done", epoch=shard.epoch, record=record)
        if record == shard.start + 1:
            wait_for("release")
"""

LOSES = """
from probe import *
from resile.torch.shards import ElasticShards, LostLeaseError, NotServedError
from resile.wire.agent_client import AgentClient

shards = ElasticShards("d", 8, 4)
if os.fork() == 0:
    mine = next(iter(shards))
    AgentClient.from_environment().close()  # the ledger takes this process for gone
    try:
        mine.done()
    except LostLeaseError as error:
        note("lost", error=str(error), first=mine.start)
    try:
        for shard in shards:
            note("got")
        note("ended")
    except NotServedError as error:
        note("denied", error=str(error))
    os._exit(0)
os.wait()
for shard in shards:
    shard.done()
    note("done", first=shard.start)
for words in ({"shard_size": 5}, {"epochs": 2}, {"seed": 1}, {"size": -1}):
    try:
        ElasticShards("d", **{"size": 8, "shard_size": 4, **words})
    except ValueError as error:
        note("refused", error=str(error))
"""


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    with opened(tmp_path) as runs:
        yield runs


def test_two_workers_do_every_record_once_in_the_order_of_the_seed_through_a_kill(runs: Runs) -> None:
    nodes = [runs.node("--max-restarts=1", runs.script(WORKS), nnodes="2") for _ in range(2)]
    starts = runs.await_world(2)
    wait_until(lambda: len(runs.notes("done")) == 4, "half of two shards")
    kill(starts[1]["pid"], signal.SIGKILL)
    runs.await_world(2, after=starts[0]["round"])
    runs.release()
    assert [node.wait() for node in nodes] == [0, 0]
    done = Counter((note["epoch"], note["record"]) for note in runs.notes("done"))
    assert done == Counter((epoch, record) for epoch in range(2) for record in range(60))
    order: list[int] = []
    for note in runs.notes("took"):
        if note["epoch"] == 0 and note["first"] % 4 == 0 and note["first"] not in order:
            order.append(note["first"])
    assert sorted(order) == list(range(0, 60, 4))
    assert order != sorted(order)


def test_a_worker_that_was_taken_for_gone_is_told_so_and_other_words_are_refused(runs: Runs) -> None:
    run = runs.run(runs.script(LOSES))
    assert run.process.returncode == 0, run.err
    (lost,) = runs.notes("lost")
    assert lost["error"] == f"shard [{lost['first']}, {lost['first'] + 4}) of d belongs to another worker now"
    assert (len(runs.notes("got")), len(runs.notes("ended"))) == (0, 0)
    assert "hung up or ended before" in runs.notes("denied")[0]["error"]
    assert sorted(note["first"] for note in runs.notes("done")) == [0, 4]
    assert len(runs.notes("refused")) == 4


def test_without_an_agent_there_are_no_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESILE_AGENT_SOCKET", raising=False)
    with pytest.raises(NoAgentError, match="resile run"):
        ElasticShards("d", 8, 4)


def test_an_answer_may_take_any_time_and_an_error_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [
        DatasetOpen(worker="", request=0),
        ShardGranted(worker="", request=0, lease=1, end=4),
        ShardGranted(worker="", request=0, error="there is no data set 'd'"),
    ]

    def request(message: object, timeout: float) -> object:
        assert timeout == math.inf
        return answers.pop(0)

    monkeypatch.setattr(AgentClient, "from_environment", lambda: SimpleNamespace(request=request))
    shards = iter(ElasticShards("d", 8, 4))
    assert list(next(shards)) == [0, 1, 2, 3]
    with pytest.raises(NotServedError, match="there is no data set"):
        next(shards)
