"""One simulation, from the first event to the end of the job and of its last agent."""

from __future__ import annotations

from resile.api.kinds.run.names import WORKER
from resile.core.completion import Reason
from resile.core.nodes.oom_memory import LARGEST_MEMORY
from resile.core.rendezvous.forming import fit
from resile.core.state import Phase
from resile.protocol.reports import NodeStatus
from resile.sim import faults
from resile.sim.cluster import Cluster, Line
from resile.sim.invariants import require
from resile.sim.world.agent import Mode

LONGEST = 600.0
"""Virtual seconds within which every job must end, whatever its faults and time-outs."""
AFTERMATH = 60.0
"""Virtual seconds within which every agent and node must end after the job's end."""
LATE = 5.0
"""Virtual seconds within which the master surely gets a message from a healthy agent."""


class SimulationFailed(AssertionError):
    """An invariant broke. The text names the seed and shows the last lines of its trace."""


def simulate(seed: int) -> Cluster:
    """Run the cluster of a seed to its end and return it; raises `SimulationFailed` if an invariant breaks."""
    cluster = Cluster(seed)
    run(cluster, seed)
    return cluster


def run(cluster: Cluster, seed: int) -> None:
    """Like `simulate`, but on the caller's `cluster`, whose trace the caller can read even after a failure."""
    try:
        _run(cluster)
    except AssertionError as broken:
        last = "\n".join(render(line) for line in cluster.trace[-25:])
        raise SimulationFailed(
            f"{broken}\n{last}\nsee all of it with: python -m resile.sim --seed {seed} --verbose"
        ) from broken


def render(line: Line) -> str:
    when, who, what = line
    return f"{when:9.3f}  {who:<10}  {what}"


def _run(cluster: Cluster) -> None:
    faults.arm(cluster)
    cluster.clock.after(cluster.rng.uniform(1.0, 60.0), cluster.check_replay)
    cluster.start()
    clock = cluster.clock
    while not cluster.state.phase.over:
        require(clock.step() and clock.now < LONGEST, "the job ends")
    _judge(cluster)
    over_at = clock.now
    while any(not agent.cut for agent in cluster.alive) and clock.step():
        require(clock.now < over_at + AFTERMATH, f"every agent hears of the end: {[a.key for a in cluster.alive]}")
    while any(not machine.status.ended for machine in cluster.platform.machines.values()) and clock.step():
        require(clock.now < over_at + AFTERMATH, "every node ends after its job")
    cluster.check_replay()


def _judge(cluster: Cluster) -> None:
    state = cluster.state
    if state.phase is Phase.SUCCEEDED:
        _judge_success(cluster)
        return
    match state.reason:
        case Reason.RESTARTS_SPENT | Reason.WORKER_ERROR | Reason.WORKER_OOM:
            _judge_budget(cluster)
        case Reason.RENDEZVOUS_TIMEOUT:
            rendezvous, now = cluster.schedule.rendezvous, cluster.clock.now
            waiting = [a for a in cluster.alive if a.mode is Mode.WAITING and not a.cut and not a.frozen]
            ready = [a for a in waiting if now - max(a.waiting_since, a.healthy_since) > LATE]
            require(fit(len(ready), rendezvous) == 0, f"{len(ready)} nodes waited and no round formed")
        case Reason.PENDING_TIMEOUT:
            pending = [m for m in cluster.platform.machines.values() if m.status is NodeStatus.PENDING]
            require(bool(pending), "a job fails for pending nodes only if there are some")
        case Reason.NO_NODES_LEFT:
            healthy = [a for a in cluster.alive if not a.cut and not a.frozen]
            there = [a.incarnation for a in healthy if cluster.clock.now - a.healthy_since > LATE]
            require(not cluster.schedule.spec.managed, "only bare jobs are deserted")
            require(not there, f"{there} were there and the job was called deserted")
        case _:
            require(False, f"no plan gives a reason to end with {state.reason}")


def _judge_success(cluster: Cluster) -> None:
    if cluster.training is not None:
        training, last = cluster.training, cluster.state.rendezvous.last_round
        require(training.saved == training.total, "a job that succeeded has trained to its last step")
        require(training.newest <= last, "no step is newer than the newest round")
        return
    data, done = cluster.schedule.data, len(cluster.ledger.done)
    assert data is not None
    wanted = data.size * data.epochs
    require(done == wanted, f"a job that succeeded has read everything: {done} of {wanted}")


def _judge_budget(cluster: Cluster) -> None:
    spec, rendezvous = cluster.schedule.spec, cluster.schedule.rendezvous
    if not spec.managed:
        require(cluster.process_failures > rendezvous.max_restarts, "max_restarts is spent before the job fails")
        return
    role = spec.roles[WORKER]
    grown = cluster.state.reason == role.oom_failure and role.limits.memory == LARGEST_MEMORY
    budget = 0 if grown else role.crash_budget
    broken = sum(1 for m in cluster.platform.machines.values() if m.end.reason in ("StartError", "Error"))
    happened = cluster.process_failures + cluster.node_failures + broken
    require(happened > budget, f"{happened} failures do not spend a budget of {budget}")
