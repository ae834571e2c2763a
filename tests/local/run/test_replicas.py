"""A sharded state outlives the loss of any one node: its shard is in another node's memory. No storage anywhere."""

from __future__ import annotations

import signal

import pytest

from tests.local.resile_run import Runs, kill, wait_until
from tests.local.run.test_run_checkpoint import SLOW, TRAIN, digest_of, latest_start

pytestmark = pytest.mark.timeout(500)

IN_MEMORY = TRAIN.replace('Checkpointer(os.path.join(HERE, "storage"))', "Checkpointer()").replace(
    'checkpointer.save(step, state)\n    note("saved", ', 'note("saved", kept=checkpointer.save(step, state), '
)


def test_the_replacement_of_a_killed_node_gets_its_shard_from_the_node_that_keeps_a_copy(runs: Runs) -> None:
    script = runs.script(IN_MEMORY)
    nodes = [runs.node("--max-restarts=3", script, "100000", "sharded", nnodes="2:2") for _ in range(2)]
    latest_start(runs, 2, 1)
    wait_until(lambda: sum(n["kept"] for n in runs.notes("saved")) > 10, "some saves", SLOW)
    lost = next(n for n in runs.notes("start") if n["rank"] == 1)
    kill(lost["agent"])
    left = next(node for node in nodes if node.pid != lost["agent"])
    new = runs.node("--max-restarts=3", script, "100000", "sharded", nnodes="2:2")
    starts = latest_start(runs, 2, 2)
    (step,) = {note["step"] for note in starts}
    kept = [n["step"] for n in runs.notes("saved") if n["kept"] and n["at"] < min(s["at"] for s in starts)]
    assert step in sorted(set(kept))[-3:], "it is the last that all had, or the one before it"
    assert {note["digest"] for note in starts} == {digest_of(runs, step)}
    assert f"restored step {step} from the memory of rank 0" in new.err + left.err
    saved = len(runs.notes("saved"))
    wait_until(lambda: any(n["kept"] for n in runs.notes("saved")[saved:]), "saves with the new node", SLOW)
    kill(new.pid)
    alone = runs.node("--max-restarts=3", script, "100000", "sharded", nnodes="2:2")
    again = latest_start(runs, 2, 3)
    (step,) = {note["step"] for note in again}
    assert {note["digest"] for note in again} == {digest_of(runs, step)}, "the new node has had a copy made as well"
    for node in (left, alone):
        node.signal(signal.SIGTERM)
    for node in (left, alone):
        node.wait(SLOW)
