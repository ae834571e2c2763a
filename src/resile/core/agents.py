"""Agents coming, going, falling silent, and reporting their processes."""

from __future__ import annotations

from resile.api.ids import NO_ROUND, NodeKey, Rank, Round
from resile.core import completion, ledger
from resile.core.completion import Reason
from resile.core.context import Context
from resile.core.deadlines import Alarm
from resile.core.decisions import Admit, DeleteNode, Refuse
from resile.core.events import AgentConnected
from resile.core.nodes import lifecycle
from resile.core.rendezvous import rounds, state_holders
from resile.core.state import (
    Agent,
    Done,
    Idle,
    JobState,
    Node,
    Phase,
    Resting,
    RoundFailures,
    RoundForming,
    RoundRunning,
    Training,
)
from resile.protocol.agent_to_master import Hello, Leaving, NodeFinished, WorkerFailed
from resile.protocol.master_to_agent import Leave, Refused, RoundFormed, RoundOver, Welcome
from resile.protocol.reports import NodeEnd, NodeStatus, RendezvousConfig

MAX_BLAMED = 64
"""How many failures of one round are kept: the first is the one that matters, the rest are collateral."""


def on_agent_connected(ctx: Context, event: AgentConnected) -> None:
    """An agent said Hello: find or make its node, and bring both sides to the same view of the round."""
    state, hello, session = ctx.state, event.hello, event.session
    if state.phase.over:
        ctx.decide(Refuse(session=session, message=completion.job_over(state)))
        return
    error = _rules_error(state, hello)
    if error:
        ctx.decide(Refuse(session=session, message=Refused(because=error)))
        return
    node = _node_of(ctx, hello)
    if isinstance(node, str):
        ctx.decide(Refuse(session=session, message=Refused(because=node)))
        return
    if node.agent is not None and node.agent.incarnation == hello.incarnation and session < node.agent.session:
        return  # it has come again since, on a newer connection: this one is closed or about to be
    opens = state.meeting is None or (isinstance(state.gathering, RoundForming) and not ctx.index.trainers)
    state.meeting = _merge(state, hello.rendezvous)
    # A master whose journal was lost must not give a number out again: the agent would take it for an old round's.
    state.last_round = max(state.last_round, hello.round)
    if opens:
        rounds.open_forming(ctx)
    if node.agent is not None and node.agent.incarnation != hello.incarnation:
        _forget_process(ctx, node)
    node.agent = Agent(
        incarnation=hello.incarnation,
        address=hello.address,
        host=hello.host,
        nproc=hello.nproc,
        session=session,
        phase=node.agent.phase if node.agent is not None else Idle(),
        elastic=hello.elastic,
        holds=node.agent.holds if node.agent is not None else NO_ROUND,
        replica_endpoint=hello.replica_endpoint,
    )
    node.host = hello.host
    node.status = NodeStatus.RUNNING
    state.suspects.pop(node.machine, None)
    if state.phase in (Phase.CREATED, Phase.PENDING):
        state.phase = Phase.RUNNING
    ctx.deadlines.clear(Alarm.AWAY, node.key)
    ctx.deadlines.watch(node.key, ctx.now)
    ctx.decide(Admit(session=session, message=_welcome(ctx, node)))
    _agree_on_round(ctx, node, node.agent, hello)
    ctx.touch(node)
    state_holders.answer_stuck(ctx)
    rounds.form(ctx)


def went(ctx: Context, node: Node, session: int) -> None:
    """A connection ended. If it was this agent's current one, it has a blink to come back."""
    if node.agent is None or node.agent.session != session or node.status.ended:
        return
    if ctx.state.phase.over:
        node.agent.session = 0  # agents go when the job is over; how they ended is the platform's to say
        ctx.touch(node)
        ctx.deadlines.clear(Alarm.AWAY, node.key)
    else:
        ctx.detach(node, ctx.now + ctx.timeouts.reconnect)
        rounds.form(ctx)  # nobody who is near waits for one that may be gone


def elastic(ctx: Context, node: Node) -> None:
    """From now on this node's processes meet in new rounds without being restarted."""
    if node.agent is not None:
        node.agent.elastic = True
        ctx.touch(node)


def leaving(ctx: Context, node: Node, event: Leaving) -> None:
    """An agent takes its leave: its peers need not find out the hard way."""
    if node.alive:
        lifecycle.ended(ctx, node, NodeStatus.DELETED, NodeEnd(reason="Left", message=event.because))


def worker_failed(ctx: Context, node: Node, event: WorkerFailed) -> None:
    """A training process ended badly. The first failure of a round ends it; the others are its echo.

    Elastic processes outlive a broken collective, so a failure of theirs is never an echo. But those that fail in one
    round of their node cost it one restart, as they would if they did not stay: what kills one often kills all.
    """
    state = ctx.state
    _blame(state, node.key, event)
    if event.failure.permanent and node.alive:
        ctx.note("ProcessFailed", f"on {node.key}, {event.failure}", node.key, warning=True)
        completion.fail(ctx, Reason.WORKER_ERROR, f"on {node.key}, {event.failure}; no restart would mend that")
        return
    gathering = state.gathering
    member = isinstance(gathering, RoundRunning) and node.key in gathering.places and event.member
    current = member and event.round == state.last_round
    elastic = node.agent is not None and node.agent.elastic
    if node.agent is not None and elastic:
        if node.alive and not _counts(node, event.failure.pid):
            return
        node.agent.holds = NO_ROUND  # the one that failed may have been the one that had the state
        ctx.touch(node)
        current = member and event.round <= state.last_round  # an older one: it died after its agent had joined
        if not event.left:
            node.agent.phase = Idle()  # nobody waits for the process that will replace the last one
            ctx.touch(node)
        if not event.member:
            rounds.unchanged(ctx, node, event.left)
    failure, trained = event.failure, state.trained
    # Running out of memory is never the echo of another failure, so it counts even if its report is not the first.
    grow = failure.oom and state.spec.managed and event.round == state.last_round
    if not node.alive or not (current or grow or elastic):
        return
    ctx.note("ProcessFailed", f"on {node.key}, {failure}", node.key, warning=True)
    if current or grow:
        rounds.stop(ctx, f"on {node.key}, {failure}", node.key, failed=True)
    if event.member and event.round == state.previous_round.round:
        rounds.failed(ctx, node)
    if grow:
        ctx.decide(DeleteNode(node=node.key, grace=ctx.timeouts.regroup_grace, because="it ran out of memory"))
        lifecycle.ended(ctx, node, NodeStatus.FAILED, NodeEnd(exit_code=137, reason="OOMKilled"))
        return
    if not event.placed or node.crashed_in != event.placed:
        node.crashes = [at for at in node.crashes if trained - at < ctx.timeouts.budget_window] + [trained]
    node.crashed_in = event.placed or node.crashed_in
    allowed = state.meeting.max_restarts if state.meeting is not None else 0
    if len(node.crashes) <= allowed:
        rounds.form(ctx)  # its peers may have waited for the one that failed
        return
    message = f"on {node.key}, {failure}; that was failure {len(node.crashes)} and max_restarts is {allowed}"
    if state.spec.managed:
        ctx.send(node.key, Leave(because=message, exit_code=1))
        lifecycle.ended(ctx, node, NodeStatus.FAILED, NodeEnd(exit_code=1, reason="Error", message=str(failure)))
    else:
        completion.fail(ctx, Reason.RESTARTS_SPENT if allowed else Reason.WORKER_ERROR, message)


def _counts(node: Node, pid: int) -> bool:
    """Whether the failure of an elastic process is news; the answer is remembered."""
    if pid and pid in node.counted:
        return False
    node.counted = [*node.counted[-MAX_BLAMED + 1 :], pid]
    return True


def _blame(state: JobState, node: NodeKey, event: WorkerFailed) -> None:
    if event.round > state.round_failures.round:
        state.round_failures = RoundFailures(round=event.round)
    known = state.round_failures.failures
    same = any(key == node and failure.pid == event.failure.pid for key, failure in known)
    if event.round == state.round_failures.round and not same and len(known) < MAX_BLAMED:
        known.append((node, event.failure))


def _welcome(ctx: Context, node: Node) -> Welcome:
    timeouts = ctx.timeouts
    return Welcome(
        node=node.key,
        rank=node.rank,
        heartbeat=timeouts.heartbeat,
        heartbeat_timeout=timeouts.heartbeat_timeout,
        regroup_grace=timeouts.regroup_grace,
        exit_grace=timeouts.exit_grace,
        elastic=bool(ctx.index.elastic),
    )


def _agree_on_round(ctx: Context, node: Node, agent: Agent, hello: Hello) -> None:
    gathering = ctx.state.gathering
    place = gathering.places.get(node.key) if isinstance(gathering, RoundRunning) else None
    number = gathering.round if isinstance(gathering, RoundRunning) else Round(0)
    if hello.finished and rounds.finished(ctx, node, NodeFinished(round=hello.round)):
        return
    if hello.running or hello.finished:
        agent.phase = Training(hello.round)
        if place is None or hello.round != number:
            if agent.elastic and hello.running:
                agent.phase = Resting(hello.round)
            because = "the job is in another round"
            ctx.send(node.key, RoundOver(round=hello.round, because=because))
    elif place is not None and hello.round < number:
        # It is a member and does not know: the word was lost with its connection, or with the old master.
        agent.phase = Training(number)
        ctx.send(node.key, RoundFormed(round=number, assignment=place))
    elif isinstance(agent.phase, Done) or place is None:
        agent.phase = Idle()


def _node_of(ctx: Context, hello: Hello) -> Node | str:
    """The node an agent speaks for, or one sentence saying why it is not welcome."""
    state = ctx.state
    if hello.node_id is not None:
        node = state.nodes.get(NodeKey(hello.role, hello.node_id))
        if node is not None and node.alive:
            return node
        if state.spec.managed:
            if node is None:
                return f"this job has no node {hello.role}-{hello.node_id}"
            how = node.leaving or lifecycle.describe(node.status, node.end)
            return f"{node.key} {how}; it is not part of the job any more"
    elif state.spec.managed:
        return "this job's nodes have ids (NODE_ID) and this agent has none"
    known = ctx.index.incarnations.get(hello.incarnation)
    if known is not None and state.nodes[known].alive:
        return state.nodes[known]
    node = Node(
        key=lifecycle.new_key(ctx, hello.role),
        rank=_free_rank(ctx, hello.role, hello.rank),
        status=NodeStatus.RUNNING,
        launched_at=ctx.now,
    )
    state.nodes[node.key] = node
    if known is not None:
        rounds.renamed(ctx, known, node.key)
    ctx.note("NodeCame", f"{node.key} came from {hello.host} with rank {node.rank}", node.key)
    return node


def _free_rank(ctx: Context, role: str, wanted: Rank | None) -> Rank:
    places = ctx.index.places
    if wanted is not None and (role, wanted) not in places:
        return wanted
    hint = ctx.index.lowest_free.get(role, 0)
    while (role, Rank(hint)) in places:
        hint += 1
    ctx.index.lowest_free[role] = hint
    return Rank(hint)


def _rules_error(state: JobState, hello: Hello) -> str:
    meeting, new = state.meeting, hello.rendezvous
    if not 1 <= new.min_nodes <= new.max_nodes or new.node_unit < 1 or hello.nproc < 1:
        return "the rules of rendezvous make no sense: 1 <= min <= max nodes, node_unit >= 1 and nproc >= 1 are needed"
    if meeting is None:
        return ""
    same = (meeting.min_nodes, meeting.node_unit) == (new.min_nodes, new.node_unit)
    if same and (state.spec.managed or meeting.max_nodes == new.max_nodes):
        return ""
    return (
        f"this node was started with {_rules(new)}, but the job runs with {_rules(meeting)}; "
        "start all nodes with the same --nnodes and --node_unit"
    )


def _rules(meeting: RendezvousConfig) -> str:
    unit = f" --node_unit={meeting.node_unit}" if meeting.node_unit > 1 else ""
    return f"--nnodes={meeting.min_nodes}:{meeting.max_nodes}{unit}"


def _merge(state: JobState, new: RendezvousConfig) -> RendezvousConfig:
    """The newest agent's rules; a managed job's maximum only grows, since older nodes know only the older one."""
    old = state.meeting
    if old is None or old.max_nodes <= new.max_nodes:
        return new
    return rounds.with_max(new, old.max_nodes)


def _forget_process(ctx: Context, node: Node) -> None:
    """Another agent process speaks for this node: the old one's training processes died with it."""
    freed = ledger.release_node(ctx.state.ledger, node.key)
    if freed:
        ctx.note("ShardsReturned", f"{freed} records that {node.key} held are to do again", node.key)
    node.agent = None
    node.restarts += 1
    gathering = ctx.state.gathering
    if isinstance(gathering, RoundRunning) and node.key in gathering.places:
        rounds.stop(ctx, f"the agent of {node.key} restarted", node.key)
