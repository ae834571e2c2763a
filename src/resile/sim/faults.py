"""Faults, injected at the moments that a schedule names."""

from __future__ import annotations

from functools import partial

from resile.api.ids import Bytes, GiB, NodeId, NodeKey, Rank
from resile.api.kinds.run.names import WORKER
from resile.api.plan import Migration, NewNode, NodeResources, Plan, RoleChange
from resile.core.events import PlanDeleted
from resile.protocol.job_changes import Scale, Suspend
from resile.protocol.reports import NodeEnd, NodeStatus
from resile.sim.cluster import Cluster
from resile.sim.schedule import FAULTS_UNTIL, Fault
from resile.sim.world.agent import SimAgent


def arm(cluster: Cluster) -> None:
    """Schedule every fault of the cluster's schedule.

    10 s after `FAULTS_UNTIL`, the network and the platform become reliable.
    """
    for at, fault in cluster.schedule.faults:
        cluster.clock.at(at, partial(inject, cluster, fault))

    def calm() -> None:
        cluster.calm = True

    cluster.clock.at(FAULTS_UNTIL + 10.0, calm)


def inject(cluster: Cluster, fault: Fault) -> None:
    rng = cluster.rng
    match fault:
        case Fault.MASTER:
            cluster.crash_master(rng.uniform(0.05, 6.0))
        case Fault.ARRIVE:
            cluster.boot()
        case Fault.SCALE:
            cluster.ask_for(Scale(role=WORKER, replicas=rng.randint(0, 8)))
        case Fault.PLAN:
            plan = draw_plan(cluster)
            cluster.ask_for(plan)
            if rng.random() < 0.1:
                cluster.clock.after(rng.uniform(0.0, 5.0), lambda: cluster.master.submit(PlanDeleted(uid=plan.uid)))
        case Fault.SUSPEND:
            cluster.ask_for(Suspend(on=True))
            cluster.clock.after(rng.uniform(1.0, 8.0), lambda: cluster.ask_for(Suspend(on=False)))
        case _ if cluster.alive:
            agent = rng.choice(cluster.alive)
            cluster.tell("fault", f"{fault} hits {agent.incarnation} ({agent.key})")
            _hit(cluster, agent, fault)


def draw_plan(cluster: Cluster) -> Plan:
    """Draw a random plan. The plan may name nodes that do not exist, and may ask for too much."""
    rng = cluster.rng
    nodes = [key for key, node in cluster.state.nodes.items() if node.alive and key.role == WORKER]
    nodes.append(NodeKey(WORKER, NodeId(rng.randint(0, 9))))
    named = rng.sample(nodes, min(len(nodes), rng.randint(1, 3)))
    kind = rng.choice(("roles", "create", "remove", "migrate", "all"))
    memory = NodeResources(memory=rng.choice((None, Bytes(2 * GiB))))
    number = rng.randint(1, 10**9)
    moved = named if kind == "migrate" else named[1:]
    roles = {WORKER: RoleChange(replicas=rng.choice((None, rng.randint(0, 8))), resources=memory)}
    added = [NewNode(role=WORKER, rank=rng.choice((None, Rank(rng.randint(0, 9))))) for _ in range(rng.randint(0, 2))]
    return Plan(
        name=f"plan{number}",
        uid=f"uid{number}",
        roles=roles if kind == "roles" else {},
        create=tuple(added) if kind in ("create", "all") else (),
        remove=tuple(named[:1]) if kind in ("remove", "all") else (),
        migrate=tuple(Migration(node=node, resources=memory) for node in moved) if kind in ("migrate", "all") else (),
    )


def _hit(cluster: Cluster, agent: SimAgent, fault: Fault) -> None:
    rng, clock = cluster.rng, cluster.clock
    match fault:
        case Fault.PROCESS | Fault.OOM:
            agent.fail(oom=fault is Fault.OOM)
        case Fault.TEAR:
            agent.tear()
        case Fault.PARTITION | Fault.FREEZE:
            hold = agent.isolate if fault is Fault.PARTITION else agent.freeze
            hold(True)
            clock.after(rng.choice((rng.uniform(0.1, 1.0), rng.uniform(1.0, 8.0))), lambda: hold(False))
        case Fault.POWER:
            agent.die(silently=True)
            _perhaps_again(cluster)
        case Fault.NODE:
            cluster.node_failures += 1
            _end(cluster, agent, NodeStatus.FAILED, NodeEnd(exit_code=1, reason="Error"))
        case Fault.PREEMPT:
            status = rng.choice((NodeStatus.FAILED, NodeStatus.DELETED))
            _end(cluster, agent, status, NodeEnd(reason="Preempted"))
        case Fault.LEAVE:
            agent.leave("a person pressed control-C")
            _perhaps_again(cluster)
        case Fault.RESTART_IN_PLACE:
            agent.die()
            clock.after(rng.uniform(0.6, 2.0), lambda: _again_in_place(cluster, agent.key))


def _end(cluster: Cluster, agent: SimAgent, status: NodeStatus, end: NodeEnd) -> None:
    machine = cluster.platform.machines.get(agent.key)
    if machine is not None:
        cluster.platform.end(machine, status, end)
    else:
        agent.die()
        _perhaps_again(cluster)


def _perhaps_again(cluster: Cluster) -> None:
    if not cluster.schedule.spec.managed and cluster.rng.random() < 0.7:
        cluster.clock.after(cluster.rng.uniform(0.5, 8.0), cluster.boot)


def _again_in_place(cluster: Cluster, key: NodeKey) -> None:
    machine = cluster.platform.machines[key]
    if not machine.status.ended:
        machine.agent = cluster.boot(key)
