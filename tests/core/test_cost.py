"""The cost of an event does not grow with the number of nodes."""

import time
from collections.abc import Callable

from benchmarks.rendezvous_cost import crowd, last_joins

from resile.api.ids import Round
from resile.core import events as ev
from resile.core.engine import Engine
from resile.protocol.agent_to_master import Join, ShardsFreed, StepReport
from resile.protocol.shards import OpenDataset, TakeShard
from tests.core.given import key

FEW, MANY = 100, 10_000
"""The second is a hundred times the first, so a scan would be a hundred times slower."""
ALLOWED = 12.0
"""How much slower one event may be with many nodes: caches and dictionaries are not free, a scan is not cheap."""


def job_with(nodes: int) -> Engine:
    """A job whose nodes have just met in round 1."""
    engine = crowd(nodes)
    assert len(last_joins(engine, nodes)) == nodes
    return engine


def seconds_per_event(job: Engine, event: Callable[[int], ev.AnyEvent], times: int = 60) -> float:
    best = float("inf")
    for attempt in range(5):
        events = [event(attempt * times + number) for number in range(times)]
        begun = time.process_time()
        for one in events:
            job.handle(one, 1.0)
        best = min(best, (time.process_time() - begun) / times)
    return best


def ratio(event: Callable[[int], ev.AnyEvent], jobs: dict[int, Engine]) -> float:
    return seconds_per_event(jobs[MANY], event) / max(seconds_per_event(jobs[FEW], event), 2e-6)


def test_no_event_of_a_quiet_life_costs_more_with_ten_thousand_nodes_than_with_a_hundred():
    jobs = {FEW: job_with(FEW), MANY: job_with(MANY)}
    for job in jobs.values():
        job.handle(
            ev.AgentSaid(node=key(0), message=OpenDataset(worker="a", request=1, name="d", size=10**9, shard_size=1)),
            1.0,
        )
        for number in range(len(job.state.nodes)):
            job.handle(
                ev.AgentSaid(node=key(number), message=TakeShard(worker=f"w{number}", request=1, dataset="d")), 1.0
            )
    quiet: dict[str, Callable[[int], ev.AnyEvent]] = {
        "step": lambda n: ev.AgentSaid(node=key(0), message=StepReport(round=Round(1), step=n)),
        "shard": lambda n: ev.AgentSaid(node=key(n % FEW), message=TakeShard(worker=f"x{n}", request=1, dataset="d")),
        "blink": lambda n: ev.AgentDisconnected(node=key(n % FEW), connection=n % FEW + 1),
        "late join": lambda n: ev.AgentSaid(node=key(n % FEW), message=Join(after=Round(0), store_port=1)),
        "worker gone": lambda n: ev.AgentSaid(node=key(n % FEW), message=ShardsFreed(worker=f"x{n}")),
    }
    slower = {name: ratio(event, jobs) for name, event in quiet.items()}
    assert all(times < ALLOWED for times in slower.values()), slower


def test_a_heartbeat_costs_the_same_however_many_nodes_there_are():
    jobs = {nodes: job_with(nodes) for nodes in (FEW, MANY)}

    def seconds(job: Engine) -> float:
        best = float("inf")
        for _ in range(5):
            begun = time.process_time()
            for number in range(1000):
                job.heard(key(number % FEW), 1.0)
            best = min(best, time.process_time() - begun)
        return best

    assert seconds(jobs[MANY]) < ALLOWED * seconds(jobs[FEW])


def test_ten_thousand_heartbeats_leave_the_heap_as_it_was():
    job = job_with(FEW)
    before = len(job._deadlines._heap)
    for beat in range(10_000):
        job.heard(key(beat % FEW), 1.0 + beat / FEW)
    assert len(job._deadlines._heap) == before
