"""Every node keeps the copies of one other, on another machine wherever that can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resile.core.rendezvous.replica_ring import ring


@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=30))
def test_every_node_keeps_the_copies_of_exactly_one_other(hosts: list[str]) -> None:
    partners = ring(hosts)
    assert sorted(partners) == list(range(len(hosts)))
    assert all(partner != node for node, partner in enumerate(partners))


@given(st.integers(2, 6), st.integers(1, 6))
def test_machines_with_equally_many_nodes_never_keep_their_own_copies(machines: int, nodes: int) -> None:
    for hosts in ([m for m in range(machines) for _ in range(nodes)], list(range(machines)) * nodes):
        partners = ring([str(host) for host in hosts])
        assert all(hosts[partner] != hosts[node] for node, partner in enumerate(partners))


def test_nodes_on_machines_of_their_own_follow_one_another() -> None:
    assert ring(["a", "b", "c"]) == [1, 2, 0]
