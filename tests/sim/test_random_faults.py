"""Random jobs under random faults: every seed is one history, and every invariant holds after every event of it."""

import pytest

from resile.core import shard_ledger
from resile.core.nodes import failure_causes, launching
from resile.core.rendezvous import forming, running
from resile.core.state import Phase
from resile.sim.simulate import SimulationFailed, render, simulate

CHUNK = 100


@pytest.mark.parametrize("chunk", range(5))
def test_invariants_hold_under_random_faults(chunk):
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        simulate(seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(100))
def test_invariants_hold_under_random_faults_for_long(chunk):
    for seed in range(10_000 + chunk * CHUNK, 10_000 + (chunk + 1) * CHUNK):
        simulate(seed)


def test_seeds_cover_good_ends_bad_ends_and_deaths_of_the_master():
    ended = [simulate(seed) for seed in range(150)]
    assert {cluster.state.phase for cluster in ended} == {Phase.SUCCEEDED, Phase.FAILED}
    assert sum(cluster.master_crashes for cluster in ended) > 20
    assert max(cluster.checks.rounds for cluster in ended) > 5


@pytest.mark.parametrize("seed", [1, 7, 42])
def test_the_same_seed_gives_the_same_story(seed):
    first, second = (["\n".join(map(render, simulate(seed).trace))] for _ in range(2))
    assert first == second
    assert first != ["\n".join(map(render, simulate(seed + 1).trace))]


# the checks can fail: cores that break a promise are caught


def caught(seeds: int = 300) -> str:
    """What the first seed that breaks says."""
    for seed in range(seeds):
        try:
            simulate(seed)
        except SimulationFailed as failed:
            return str(failed).splitlines()[0]
    return ""


def test_a_ledger_that_counts_twice_is_caught(monkeypatch):
    honest = shard_ledger.advance

    def twice(dataset, node, worker, number, upto):
        counted = honest(dataset, node, worker, number, upto)
        dataset.done += counted
        return counted

    monkeypatch.setattr(shard_ledger, "advance", twice)
    assert "records are done" in caught()


def test_a_ledger_that_loses_what_a_lost_worker_held_is_caught(monkeypatch):
    honest = shard_ledger._release

    def careless(dataset, numbers):
        freed = honest(dataset, numbers)
        dataset.returned.clear()
        return freed

    monkeypatch.setattr(shard_ledger, "_release", careless)
    assert "dealt" in caught()


def test_rounds_that_ignore_the_maximum_are_caught(monkeypatch):
    monkeypatch.setattr(forming, "fit", lambda nodes, config: nodes if nodes >= config.min_nodes else 0)
    assert "a round of" in caught()


def test_rounds_that_ignore_the_minimum_are_caught(monkeypatch):
    monkeypatch.setattr(
        forming, "fit", lambda nodes, config: min(nodes, config.max_nodes) // config.node_unit * config.node_unit
    )
    assert "a round of" in caught()


def test_an_id_that_is_used_again_is_caught(monkeypatch):
    honest = launching.new_key

    def reusing(turn, role):
        key = honest(turn, role)
        turn.state.next_id[role] = max(1, turn.state.next_id[role] - 1) if key.id > 2 else turn.state.next_id[role]
        return key

    monkeypatch.setattr(launching, "new_key", reusing)
    assert caught()


def test_a_round_that_nobody_ends_is_caught(monkeypatch):
    monkeypatch.setattr(running, "stop", lambda *_, **__: None)
    assert "does not outlive its members" in caught()


def test_a_preemption_that_costs_a_crash_is_caught(monkeypatch):
    monkeypatch.setattr(failure_causes, "cause_of", lambda status, end: failure_causes.Cause.CRASH)
    assert "only a crash costs a crash" in caught()
