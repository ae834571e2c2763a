"""Checkpoints under real agents: what a killed process, a killed node and a signal leave, and who can go on from it."""

from __future__ import annotations

import hashlib
import inspect
import os
import signal
from typing import Any, NamedTuple

import pytest
import torch

from resile.checkpoint.storage import Storage
from resile.torch import Checkpointer
from tests.local.resile_run import Runs, kill, wait_until

SLOW = 300.0
"""Seconds for torch to start, several times over, on a machine that has other work."""
pytestmark = pytest.mark.timeout(600)


def digest(model: Any, optimizer: Any) -> str:
    """What the whole state comes to, however it is sharded. Also part of the script below."""
    tensors = [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
    whole = [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach().double().flatten() for t in tensors]
    return hashlib.sha256(str(torch.cat(whole).tolist()).encode()).hexdigest()


TRAIN = """
from __future__ import annotations
from probe import *
import hashlib
import logging, warnings
warnings.simplefilter("ignore")
logging.basicConfig(level=logging.INFO, format="%(message)s")
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from resile.torch import Checkpointer
DIGEST
torch.set_num_threads(1)
until, sharded = int(sys.argv[1]), len(sys.argv) > 2
dist.init_process_group("gloo")
torch.manual_seed(ATTEMPT)
model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.Linear(17, 5))
if sharded:
    fully_shard(model)
optimizer = torch.optim.Adam(model.parameters())
checkpointer = Checkpointer(os.path.join(HERE, "storage"))
state = {"model": model, "optimizer": optimizer, "words": "none"}


step = checkpointer.restore(state) or 0
note("start", round=int(os.environ["RESILE_ROUND"]), step=step, digest=digest(model, optimizer), words=state["words"])
run = model if sharded else torch.nn.parallel.DistributedDataParallel(model)
while step < until:
    torch.manual_seed(step)
    run(torch.randn(4, 33)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    state["words"] = f"after {step}"
    note("computed", step=step, digest=digest(model, optimizer))  # first: it may be stopped as soon as it has saved
    checkpointer.save(step, state)
    note("saved", step=step)
    if not there("release"):
        time.sleep(0.02)
    if RANK == 1 and there(f"die-at-{step}"):
        os.kill(os.getpid(), 9)
checkpointer.before_update()
note("end", step=step)
dist.destroy_process_group()
""".replace("DIGEST", inspect.getsource(digest))


def digest_of(runs: Runs, step: int) -> str:
    """What all ranks agree the state of a step was."""
    digests = {note["digest"] for note in runs.notes("computed") if note["step"] == step}
    assert len(digests) == 1, f"step {step} was not the same everywhere"
    return str(digests.pop())


def latest_start(runs: Runs, world: int, count: int) -> list[dict[str, Any]]:
    """The starts of the ranks of this world, as soon as all of them have started `count` times."""

    def found() -> list[dict[str, Any]]:
        starts = [note for note in runs.notes("start") if note["world"] == world]
        return starts[-world:] if len(starts) >= count * world else []

    return wait_until(found, f"start {count} of {world} ranks", SLOW)


class Alone(NamedTuple):
    step: int
    digest: str


def alone(runs: Runs, steps: int) -> Alone:
    """This very process, without an agent: restores what there is, trains some steps and stores them."""
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.Linear(17, 5))
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer, "words": ""}
    checkpointer = Checkpointer(runs.directory / "storage")
    step = checkpointer.restore(state) or 0
    for _ in range(steps):
        model(torch.randn(4, 33)).square().sum().backward()
        optimizer.step()
        step += 1
    if steps:
        checkpointer.save(step, state, store=True)
        checkpointer.wait(SLOW)
    checkpointer.close()
    return Alone(step, digest(model, optimizer))


def test_a_killed_process_costs_no_saved_step_and_a_signal_brings_the_last_one_to_storage(runs: Runs) -> None:
    runs.release("die-at-7")
    shm = set(os.listdir("/dev/shm"))
    run = runs.start("--nproc-per-node=2", "--max-restarts=1", runs.script(TRAIN), "100000")
    again = latest_start(runs, 2, 2)
    assert [note["step"] for note in again] == [7, 7]
    assert {note["digest"] for note in again} == {digest_of(runs, 7)}
    assert {note["words"] for note in again} == {"after 7"}
    run.says("the last checkpoint is in storage")
    wait_until(lambda: [n for n in runs.notes("saved") if n["step"] == 12], "five more steps", SLOW)
    run.signal(signal.SIGTERM)
    assert run.wait(SLOW) == 128 + signal.SIGTERM
    steps = Storage(runs.directory / "storage").steps()
    last = max(n["step"] for n in runs.notes("saved"))
    assert steps[0] == 7, "the crash brought it there"
    assert steps[-1] in (last, last - 1, last + 1), "a step that some rank was in the middle of may be missing"
    assert set(os.listdir("/dev/shm")) <= shm
    runs.nothing_is_left()
    here = alone(runs, 0)
    assert here.step == steps[-1], "one process takes up what two have left"
    if here.step <= last:
        assert here.digest == digest_of(runs, here.step)


def test_shards_are_dealt_anew_from_one_rank_to_two_and_back(runs: Runs) -> None:
    one = alone(runs, 2)
    runs.release("die-at-3")
    runs.release()
    two = runs.start("--nproc-per-node=2", "--max-restarts=1", runs.script(TRAIN), "4", "sharded")
    assert two.wait(SLOW) == 0, two.err
    assert {(note["step"], note["digest"]) for note in runs.notes("start")[:2]} == {one}, "from storage"
    starts = latest_start(runs, 2, 2)
    assert {(note["step"], note["digest"]) for note in starts} == {(3, digest_of(runs, 3))}, "each from its own memory"
    storage = Storage(runs.directory / "storage")
    assert storage.steps()[-1] == 4
    assert (storage.path(4) / "__1_0.distcp").stat().st_size > 1000, "each rank has stored its own shard"
    assert alone(runs, 0) == (4, digest_of(runs, 4))


def test_a_new_node_gets_the_newest_step_from_another_nodes_memory(runs: Runs) -> None:
    script = runs.script(TRAIN)
    nodes = [runs.node("--max-restarts=3", script, "100000", nnodes="1:2") for _ in range(2)]
    latest_start(runs, 2, 1)
    wait_until(lambda: any(n["step"] > 5 for n in runs.notes("saved")), "some steps", SLOW)
    lost = next(n for n in runs.notes("start") if n["world"] == 2 and n["rank"] == 1)
    kill(lost["agent"])
    left = next(node for node in nodes if node.pid != lost["agent"])
    new = runs.node("--max-restarts=3", script, "100000", nnodes="1:2")
    starts = latest_start(runs, 2, 2)
    assert len({note["step"] for note in starts}) == 1
    step = starts[0]["step"]
    assert step > 5
    assert {note["digest"] for note in starts} == {digest_of(runs, step)}
    wait_until(lambda: "the memory of rank" in new.err + left.err, "the word where it came from")
    for node in (left, new):
        node.signal(signal.SIGTERM)
    for node in (left, new):
        node.wait(SLOW)
