"""What an agent tells people about a round and about the failure that ended one."""

from __future__ import annotations

from resile.agent.failures.evidence import root_cause
from resile.agent.failures.report import report, terminal_width
from resile.agent.workers.attempt import Attempt
from resile.api.ids import NodeKey
from resile.protocol.reports import WorkerFailure


def story(told: WorkerFailure, failed_node: str, here: NodeKey | None, attempt: Attempt | None) -> str:
    """The report of what came first: as the master saw it, unless a process of this node had failed even earlier."""
    own = attempt.failures if attempt is not None else []
    known = [told, *(failure for failure in own if failure.pid != told.pid)]
    first = root_cause(known) or told
    node = failed_node if first is told else str(here)
    return report(
        first,
        node=node,
        log_file=attempt.log_of(first) if attempt is not None and node == str(here) else "",
        others=[failure for failure in known if failure is not first],
        width=terminal_width(),
    )


def rendezvous_result(attempt: Attempt) -> str:
    """The outcome of a rendezvous in the words that people grep for."""
    assignment, local = attempt.assignment, list(attempt.ranks)
    ranks = list(attempt.ranks.values())
    worlds = [assignment.world_size] * len(local)
    fields: dict[str, object] = {
        "restart_count": attempt.number,
        "master_addr": assignment.master_addr,
        "master_port": assignment.master_port,
        "group_rank": assignment.group_rank,
        "group_world_size": assignment.group_world_size,
        "local_ranks": local,
        "role_ranks": ranks,
        "global_ranks": ranks,
        "role_world_sizes": worlds,
        "global_world_sizes": worlds,
    }
    return "".join(f"\n  {name}={value}" for name, value in fields.items())
