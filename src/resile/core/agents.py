"""Agents that connect, disconnect, and report their processes."""

from __future__ import annotations

from resile.api.ids import NO_ROUND, NodeKey, Rank
from resile.core import completion, progress, shard_ledger
from resile.core.completion import Reason
from resile.core.context import Context
from resile.core.deadlines import Alarm
from resile.core.decisions import Admit, DeleteNode, Refuse
from resile.core.events import AgentConnected
from resile.core.nodes import launching, lifecycle
from resile.core.rendezvous import forming, rounds, running, state_holders
from resile.core.rendezvous.state import Rendezvous, RoundFailures
from resile.core.state import Agent, Done, Idle, JobState, Node, Phase, Resting, Training
from resile.protocol.agent_to_master import Hello, Leaving, NodeFinished, WorkerFailed
from resile.protocol.master_to_agent import Leave, Refused, RoundFormed, RoundOver, Welcome
from resile.protocol.reports import NodeEnd, NodeStatus, RendezvousConfig

MAX_FAILURES = 64
"""How many failures of one round are kept. The first one matters; the others follow from it."""


def on_agent_connected(ctx: Context, event: AgentConnected) -> None:
    """Admit an agent that has connected, or refuse it.

    An admitted agent gets its node. On bare machines, the node may be new. An agent in an old round is told that this
    round is over. An agent that does not know that it is a member of the running round is told its assignment.
    """
    state, hello, connection = ctx.state, event.hello, event.connection
    if state.phase.over:
        ctx.decide(Refuse(connection=connection, message=completion.job_over(state)))
        return
    node = _rules_error(state, hello) or _node_of(ctx, hello)
    if isinstance(node, str):
        ctx.decide(Refuse(connection=connection, message=Refused(because=node)))
        return
    if node.agent is not None and node.agent.incarnation == hello.incarnation and connection < node.agent.connection:
        return  # the agent has a newer connection, so this one is closed or about to be
    rdzv, rules = state.rendezvous, state.rendezvous.config
    opens = rules is None or (rdzv.forming is not None and not ctx.index.trainers)
    rdzv.config = hello.rendezvous
    if rules is not None:
        forming.raise_max(rdzv, rules.max_nodes)  # an agent launched before a scale-up still brings a smaller number
    # A master whose journal was lost must not use a number again: the agent would take it for an old round.
    rdzv.last_round = max(rdzv.last_round, hello.round)
    if opens:
        forming.start_join_timer(ctx, rdzv)
    if node.agent is not None and node.agent.incarnation != hello.incarnation:
        _forget_process(ctx, node)
    node.agent = Agent(
        incarnation=hello.incarnation,
        address=hello.address,
        host=hello.host,
        nproc=hello.nproc,
        connection=connection,
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
    ctx.decide(Admit(connection=connection, message=_welcome(ctx, node)))
    _agree_on_round(ctx, node, node.agent, hello)
    ctx.touch(node)
    state_holders.answer_stuck(ctx)
    forming.form(ctx, rdzv)


def on_agent_disconnected(ctx: Context, node: Node, connection: int) -> None:
    """Give the agent the time-out `reconnect` to come back. Does nothing if it already has a newer connection."""
    if node.agent is None or node.agent.connection != connection:
        return
    if ctx.state.phase.over:
        node.agent.connection = 0  # agents exit when the job is over, and the platform reports how
        ctx.touch(node)
        ctx.deadlines.clear(Alarm.AWAY, node.key)
    else:
        ctx.detach(node, ctx.now + ctx.timeouts.reconnect)
        forming.form(ctx, ctx.state.rendezvous)  # no round waits for a node that may be gone


def on_can_regroup(ctx: Context, node: Node) -> None:
    if node.agent is not None:
        node.agent.elastic = True
        ctx.touch(node)


def on_leaving(ctx: Context, node: Node, message: Leaving) -> None:
    if node.alive:
        lifecycle.on_node_ended(ctx, node, NodeStatus.DELETED, NodeEnd(reason="Left", message=message.because))


def on_worker_failed(ctx: Context, node: Node, report: WorkerFailed) -> None:
    """Handle the failure of a training process. The first failure of a round ends the round.

    Later failures in the round count as consequences of the first one, except a lack of memory. Elastic processes are
    different: they survive the failure of a peer, so each of their failures is handled. All failures of one node in one
    round cost the node one restart, because one cause often kills several processes.
    """
    state, rdzv, failure = ctx.state, ctx.state.rendezvous, report.failure
    _note_failure(rdzv, node.key, report)
    if report.member and report.round == rdzv.previous.round:
        progress.on_cause_found(state.progress, f"on {node.key}, {failure}", str(node.key))
    if failure.permanent and node.alive:
        ctx.note("ProcessFailed", f"on {node.key}, {failure}", node.key, warning=True)
        declared = state.spec.roles.get(node.key.role)  # bare machines have no roles
        reason = declared.failure if declared is not None else Reason.WORKER_ERROR
        completion.fail(ctx, reason, f"on {node.key}, {failure}; no restart would mend that")
        return
    member = rdzv.has_member(node.key) and report.member
    current = member and report.round == rdzv.last_round
    elastic = node.agent is not None and node.agent.elastic
    if node.agent is not None and elastic:
        if node.alive and not _counts(node, failure.pid):
            return
        node.agent.holds = NO_ROUND  # the process that failed may be the one that had the state
        current = member and report.round <= rdzv.last_round  # in an older round it died after its agent had joined
        if not report.left:
            node.agent.phase = Idle()  # no round waits for the process that will replace the last one
        ctx.touch(node)
        if not report.member:
            running.on_spare_worker_failed(rdzv, node, report.left)
    trained = state.trained
    # Running out of memory never follows from another failure, so it counts even if its report is not the first.
    grow = failure.oom and state.spec.managed and report.round == rdzv.last_round
    if not node.alive or not (current or grow or elastic):
        return
    ctx.note("ProcessFailed", f"on {node.key}, {failure}", node.key, warning=True)
    if current or grow:
        running.stop(ctx, rdzv, f"on {node.key}, {failure}", node.key, failed=True)
    if report.member and report.round == rdzv.previous.round:
        rounds.on_script_failed(ctx, rdzv, node)
    if grow:
        ctx.decide(DeleteNode(node=node.key, grace=ctx.timeouts.kill_grace, because="it ran out of memory"))
        lifecycle.on_node_ended(ctx, node, NodeStatus.FAILED, NodeEnd(exit_code=137, reason="OOMKilled"))
        return
    if not report.placed or node.crashed_in != report.placed:
        node.crashes = [at for at in node.crashes if trained - at < ctx.timeouts.budget_window] + [trained]
    node.crashed_in = report.placed or node.crashed_in
    allowed = rdzv.config.max_restarts if rdzv.config is not None else 0
    if len(node.crashes) <= allowed:
        forming.form(ctx, rdzv)  # its peers may have waited for the process that failed
        return
    message = f"on {node.key}, {failure}; that was failure {len(node.crashes)} and max_restarts is {allowed}"
    if state.spec.managed:
        ctx.send(node.key, Leave(because=message, exit_code=1))
        lifecycle.on_node_ended(
            ctx, node, NodeStatus.FAILED, NodeEnd(exit_code=1, reason="Error", message=str(failure))
        )
    else:
        completion.fail(ctx, Reason.RESTARTS_SPENT if allowed else Reason.WORKER_ERROR, message)


def _counts(node: Node, pid: int) -> bool:
    """True if no failure of the elastic process `pid` was reported before. Remembers the pid."""
    if pid and pid in node.counted:
        return False
    node.counted = [*node.counted[-MAX_FAILURES + 1 :], pid]
    return True


def _note_failure(rdzv: Rendezvous, node: NodeKey, report: WorkerFailed) -> None:
    if report.round > rdzv.failures.round:
        rdzv.failures = RoundFailures(round=report.round)
    known = rdzv.failures.failures
    same = any(key == node and failure.pid == report.failure.pid for key, failure in known)
    if report.round == rdzv.failures.round and not same and len(known) < MAX_FAILURES:
        known.append((node, report.failure))


def _welcome(ctx: Context, node: Node) -> Welcome:
    timeouts = ctx.timeouts
    return Welcome(
        node=node.key,
        rank=node.rank,
        heartbeat=timeouts.heartbeat,
        heartbeat_timeout=timeouts.heartbeat_timeout,
        kill_grace=timeouts.kill_grace,
        exit_grace=ctx.state.spec.exit_grace(node.key.role),
        elastic=bool(ctx.index.elastic),
    )


def _agree_on_round(ctx: Context, node: Node, agent: Agent, hello: Hello) -> None:
    rdzv = ctx.state.rendezvous
    current = rdzv.running
    number, assignment = (current.round, current.assignments.get(node.key)) if current is not None else (NO_ROUND, None)
    if hello.finished and rounds.on_node_finished(ctx, rdzv, node, NodeFinished(round=hello.round)):
        return
    if hello.running or hello.finished:
        agent.phase = Training(hello.round)
        if assignment is None or hello.round != number:
            if agent.elastic and hello.running:
                agent.phase = Resting(hello.round)
            ctx.send(node.key, RoundOver(round=hello.round, because="the job is in another round"))
    elif assignment is not None and hello.round < number:
        # It does not know that it is a member: the message was lost with its connection, or with the old master.
        agent.phase = Training(number)
        ctx.send(node.key, RoundFormed(round=number, assignment=assignment))
    elif isinstance(agent.phase, Done) or assignment is None:
        agent.phase = Idle()


def _node_of(ctx: Context, hello: Hello) -> Node | str:
    """Return an agent's node (maybe a new one, on bare machines), or a sentence that says why to refuse the agent."""
    state = ctx.state
    if hello.node_id is not None:
        node = state.nodes.get(NodeKey(hello.role, hello.node_id))
        if node is not None and node.alive:
            return node
        if state.spec.managed:
            if node is None:
                return f"this job has no node {hello.role}-{hello.node_id}"
            how = node.leaving or node.how_it_ended
            return f"{node.key} {how}; it is not part of the job any more"
    elif state.spec.managed:
        return "this job's nodes have ids (NODE_ID) and this agent has none"
    known = ctx.index.incarnations.get(hello.incarnation)
    if known is not None and state.nodes[known].alive:
        return state.nodes[known]
    node = Node(
        key=launching.new_key(ctx, hello.role),
        rank=_free_rank(ctx, hello.role, hello.rank),
        status=NodeStatus.RUNNING,
        launched_at=ctx.now,
    )
    state.nodes[node.key] = node
    members = state.rendezvous.previous.members
    if known in members:  # the node counted as lost and came back with a new key; it may still finish that round
        members.remove(known)
        members.add(node.key)
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
    config, new = state.rendezvous.config, hello.rendezvous
    if not 1 <= new.min_nodes <= new.max_nodes or new.node_unit < 1 or hello.nproc < 1:
        return "the rules of rendezvous make no sense: 1 <= min <= max nodes, node_unit >= 1 and nproc >= 1 are needed"
    if config is None:
        return ""
    same = (config.min_nodes, config.node_unit) == (new.min_nodes, new.node_unit)
    if same and (state.spec.managed or config.max_nodes == new.max_nodes):
        return ""
    return (
        f"this node was started with {_rules(new)}, but the job runs with {_rules(config)}; "
        "start all nodes with the same --nnodes and --node_unit"
    )


def _rules(config: RendezvousConfig) -> str:
    unit = f" --node_unit={config.node_unit}" if config.node_unit > 1 else ""
    return f"--nnodes={config.min_nodes}:{config.max_nodes}{unit}"


def _forget_process(ctx: Context, node: Node) -> None:
    freed = shard_ledger.release_node(ctx.state.ledger, node.key)
    if freed:
        ctx.note("ShardsReturned", f"{freed} records that {node.key} held are to do again", node.key)
    node.agent = None
    node.restarts += 1
    rdzv = ctx.state.rendezvous
    if rdzv.has_member(node.key):
        running.stop(ctx, rdzv, f"the agent of {node.key} restarted", node.key)
