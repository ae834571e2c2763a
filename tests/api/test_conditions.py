"""One history of conditions for the operator and the master."""

from __future__ import annotations

from resile.api.kinds.elasticjob.status import enter


def test_a_condition_is_true_while_the_object_is_in_it() -> None:
    first = enter([], "Created", "JobCreated", "made", "t0")
    second = enter(first, "Pending", "JobPending", "waits", "t1")
    assert [(one["type"], one["status"]) for one in second] == [("Created", "False"), ("Pending", "True")]
    assert (second[0]["lastTransitionTime"], second[0]["lastUpdateTime"]) == ("t1", "t1")
    assert enter(second, "Pending", "JobPending", "waits", "t2") == second


def test_another_reason_or_message_is_an_update_and_no_transition() -> None:
    before = enter([], "Pending", "JobPending", "waits", "t0")
    for reason, message in (("MasterLost", "waits"), ("JobPending", "waits for room")):
        (entry,) = enter(before, "Pending", reason, message, "t1")
        assert (entry["reason"], entry["message"]) == (reason, message)
        assert (entry["lastTransitionTime"], entry["lastUpdateTime"]) == ("t0", "t1")


def test_what_another_program_wrote_into_an_entry_stays() -> None:
    written = [{"type": "Custom", "status": "False", "reason": "Mine", "note": 1}]
    assert enter(written, "Running", "JobRunning", "", "t0")[0] == written[0]
