"""Every node keeps the copies of one other, on another machine wherever that can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resile.core.rendezvous.replica_partners import partners_of


@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=30))
def test_every_node_keeps_the_copies_of_exactly_one_other(hosts: list[str]) -> None:
    partners = partners_of(hosts)
    assert sorted(partners) == list(range(len(hosts)))
    assert all(partner != node for node, partner in enumerate(partners))


@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=30))
def test_only_a_machine_with_more_than_half_of_the_nodes_keeps_its_own_copies(hosts: list[str]) -> None:
    own = [node for node, partner in enumerate(partners_of(hosts)) if hosts[partner] == hosts[node]]
    largest = max(map(hosts.count, hosts))
    assert len(own) == max(0, 2 * largest - len(hosts)), "no fewer would do"


def test_nodes_on_machines_of_their_own_follow_one_another() -> None:
    assert partners_of(["a", "b", "c"]) == [1, 2, 0]
