"""The shard ledger, example by example."""

import pytest

from resile.core import events as ev
from resile.protocol.agent_to_master import Leaving, ShardsFreed
from resile.protocol.shards import DatasetOpen, OpenDataset, ShardGranted, ShardNoted, ShardProgress, TakeShard
from tests.core.given import bare, running_bare


def opened(size: int = 10, shard_size: int = 4, epochs: int = 1, seed: int | None = None):
    job = running_bare(2)
    job.says(
        0, OpenDataset(worker="a", request=1, name="d", size=size, shard_size=shard_size, epochs=epochs, seed=seed)
    )
    assert job.sent(DatasetOpen)[0].error == ""
    return job


def take(job, worker: str, request: int, node: int = 0):
    job.says(node, TakeShard(worker=worker, request=request, dataset="d"))
    grants = job.sent(ShardGranted)
    return grants[0] if grants else None


def advance(job, worker: str, lease: int, upto: int, node: int = 0) -> bool:
    job.says(node, ShardProgress(worker=worker, request=99, dataset="d", lease=lease, upto=upto))
    return job.sent(ShardNoted)[0].counted


def part(grant: ShardGranted) -> tuple[int, int, int]:
    return grant.epoch, grant.start, grant.end


def test_shards_are_dealt_in_order_and_the_last_may_be_short():
    job = opened()
    assert [part(take(job, "a", n)) for n in (1, 2, 3)] == [(0, 0, 4), (0, 4, 8), (0, 8, 10)]


def test_the_same_request_gets_the_same_shard():
    job = opened()
    assert take(job, "a", 1) == take(job, "a", 1)
    assert take(job, "b", 1).start == 4


def test_of_a_lost_workers_shard_only_the_unfinished_part_returns():
    job = opened()
    grant = take(job, "a", 1)
    advance(job, "a", grant.lease, 3)
    job.says(0, ShardsFreed(worker="a"))
    assert part(take(job, "b", 1)) == (0, 3, 4)


def test_a_report_under_a_lease_that_was_taken_back_is_not_counted():
    job = opened()
    grant = take(job, "a", 1, node=1)
    job.says(1, Leaving(because="SIGTERM"))
    take(job, "b", 1)
    assert not advance(job, "a", grant.lease, 4, node=1)
    assert job.state.ledger.datasets["d"].done == 0


def test_a_report_of_another_worker_is_not_counted():
    job = opened()
    grant = take(job, "a", 1)
    assert not advance(job, "b", grant.lease, 4)


def test_a_report_that_comes_twice_is_counted_once_and_confirmed_twice():
    job = opened()
    grant = take(job, "a", 1)
    assert advance(job, "a", grant.lease, 2)
    assert advance(job, "a", grant.lease, 2)
    assert advance(job, "a", grant.lease, 4)
    assert advance(job, "a", grant.lease, 4)
    assert advance(job, "a", grant.lease, 2)
    assert job.state.ledger.datasets["d"].done == 4


def test_a_report_beyond_the_shard_is_not_counted():
    job = opened()
    grant = take(job, "a", 1)
    assert not advance(job, "a", grant.lease, 5)


def test_a_worker_waits_while_others_hold_the_rest_and_gets_what_they_lose():
    job = opened(size=4)
    take(job, "a", 1, node=1)
    assert take(job, "b", 1) is None
    job.says(1, Leaving(because="SIGTERM"))
    (grant,) = job.sent(ShardGranted)
    assert (grant.worker, part(grant)) == ("b", (0, 0, 4))


def test_waiting_workers_are_told_when_everything_is_done():
    job = opened(size=4)
    grant = take(job, "a", 1)
    assert take(job, "b", 1) is None
    advance(job, "a", grant.lease, 4)
    (told,) = job.sent(ShardGranted)
    assert (told.worker, told.lease) == ("b", 0)
    assert take(job, "a", 2).lease == 0


def test_a_worker_that_is_gone_gets_nothing_more():
    job = opened()
    job.says(0, ShardsFreed(worker="a"))
    denied = take(job, "a", 1)
    assert denied.lease == 0
    assert "worker a hung up or ended before" in denied.error, "which is not the end of the data"
    served = take(job, "b", 1)
    assert served.lease != 0
    assert served.error == ""


def test_wishes_do_not_outlive_a_master():
    job = opened(size=4)
    take(job, "a", 1)
    take(job, "b", 1)
    job.does(ev.MasterReturned())
    assert job.state.ledger.datasets["d"].waiting == {}


def test_an_agent_process_that_was_replaced_loses_its_workers_shards():
    job = bare(1, 1)
    job.comes(0, name="first")
    job.says(0, OpenDataset(worker="a", request=1, name="d", size=4, shard_size=4))
    take(job, "a", 1)
    job.comes(0, name="second")
    assert "ShardsReturned" in job.notes()
    assert part(take(job, "b", 1)) == (0, 0, 4)


def test_a_seed_shuffles_every_epoch_into_another_permutation_of_the_shards():
    job = bare(1, 1)
    job.comes(0)
    job.says(0, OpenDataset(worker="a", request=1, name="d", size=50, shard_size=5, epochs=2, seed=3))
    parts = [part(take(job, "a", number)) for number in range(1, 21)]
    first, second = ([start for of, start, _ in parts if of == epoch] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(0, 50, 5))
    assert len({tuple(first), tuple(second), tuple(sorted(first))}) == 3


def test_other_words_for_an_open_data_set_are_refused_and_the_same_words_are_fine():
    job = opened()
    job.says(1, OpenDataset(worker="b", request=1, name="d", size=10, shard_size=4))
    assert job.sent(DatasetOpen)[0].error == ""
    job.says(1, OpenDataset(worker="b", request=1, name="d", size=11, shard_size=4))
    assert "cannot be opened again with other values" in job.sent(DatasetOpen)[0].error


@pytest.mark.parametrize(("size", "shard_size", "epochs"), [(-1, 1, 1), (1, 0, 1), (1, 1, -1), (0, 1, 0)])
def test_nonsense_is_refused_with_a_sentence(size, shard_size, epochs):
    job = running_bare(1)
    job.says(0, OpenDataset(worker="a", request=1, name="d", size=size, shard_size=shard_size, epochs=epochs))
    assert job.sent(DatasetOpen)[0].error.startswith("data set 'd': ")


def test_a_data_set_without_end_is_dealt_for_ever():
    job = opened(size=4, epochs=0)
    assert [part(take(job, "a", n))[0] for n in range(1, 5)] == [0, 1, 2, 3]


def test_an_unknown_data_set_is_an_error_and_not_the_end_of_the_data():
    job = running_bare(1)
    answer = take(job, "a", 1)
    assert answer.lease == 0
    assert "there is no data set 'd'" in answer.error
