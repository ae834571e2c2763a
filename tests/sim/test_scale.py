"""Ten thousand nodes meet."""

from benchmarks.rendezvous_cost import measure


def test_ten_thousand_nodes_are_told_their_places_within_five_seconds_of_the_last_join():
    report = measure(10_000)
    assert report.last_join_to_told_seconds <= 5.0
    assert report.loss_to_told_seconds <= 5.0


def test_the_cost_of_an_event_does_not_grow_with_the_number_of_nodes():
    few = max(measure(100).events_per_second for _ in range(3))
    assert measure(10_000).events_per_second > few / 10
