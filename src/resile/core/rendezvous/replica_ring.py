"""Which node keeps the copies of which node's checkpoints."""

from __future__ import annotations

from collections.abc import Sequence


def ring(hosts: Sequence[str]) -> list[int]:
    """The partners of a round's nodes: item i is the number of the node that keeps the replicas of node i.

    `hosts[i]` is the machine of node i. Partners share a machine only if it has more nodes than the others.
    """
    seen: dict[str, int] = {}
    turns = []
    for number, host in enumerate(hosts):
        turns.append((seen.get(host, 0), number))
        seen[host] = seen.get(host, 0) + 1
    order = [number for _, number in sorted(turns)]
    partners = [0] * len(hosts)
    for here, following in zip(order, order[1:] + order[:1], strict=True):
        partners[here] = following
    return partners
