"""Which node keeps the copies of which node's checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def partners_of(hosts: Sequence[str]) -> list[int]:
    """The partners of a round's nodes: item i is the number of the node that keeps the replicas of node i.

    `hosts[i]` is the machine of node i. Partners are on different machines, unless one machine has more than half of
    the nodes. Then as few partners as possible share it.
    """
    first: dict[str, int] = {}
    for number, host in enumerate(hosts):
        first.setdefault(host, number)
    order = sorted(range(len(hosts)), key=lambda number: first[hosts[number]])  # machine by machine
    largest = max(Counter(hosts).values())
    step = largest if largest < len(hosts) else 1  # a step of this length leaves every machine
    partners = [0] * len(hosts)
    for here, following in zip(order, order[step:] + order[:step], strict=True):
        partners[here] = following
    return partners
