"""The elastic loop: what losing a rank or a node costs the survivors, what a resize costs, and the loop itself.

Every step is stamped with its round, and only a step of a round that formed after the fault counts: the last step of
the old round, which may have been under way, does not. Under torchrun and DLRover the same script runs, and is
restarted; each of their figures is the median of three. That torchrun does not come back from a frozen node, nor
DLRover, was seen earlier on a machine like this, and is not waited for again.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.harness import (
    BIN,
    GaveUp,
    Row,
    Workplace,
    descendants,
    free_port,
    listed,
    percentile,
    say,
    signal_all,
    wait_for,
)
from benchmarks.peers import DLROVER, TORCHRUN, Launcher, dlrover, tidied
from benchmarks.step_log import (
    SCRIPT,
    START_SECONDS,
    all_steps,
    longest_pause,
    next_step,
    read_steps,
    steady_world,
    whole_world,
)

FROZEN_SECONDS = 180.0
"""In which torchrun did not step on without a frozen node."""
DLROVER_FROZEN_SECONDS = 600.0
COLD_KILLS = 3
LARGE_KILLS = 6
LARGE = 256
"""MiB of a state that is not small."""
PEERS_KILLS = 3
COMPARE = """
import itertools, os, sys, time
import torch
torch.set_num_threads(1)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from resile.torch import Elastic, ElasticLoader

kind, own = sys.argv[2], 256  # samples that each of the two ranks takes in a step


def made():
    torch.manual_seed(0)
    if kind in ("large", "loader"):
        model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
        inputs = torch.randn(own, 512)
    elif kind == "transformer":
        layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        model, inputs = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(4, 64, 256)
    else:
        model, inputs = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(60))), torch.randn(own, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), inputs


def steps_of_ours():
    if kind == "loader":
        for step in elastic.epochs(10**6, loader):
            with elastic.step():
                for share, (inputs,) in step:
                    (ours(inputs).square().mean() * share.weight).backward()
            yield
    for step in elastic.steps(10**9):
        with elastic.step():
            ours(given).square().mean().backward()
        yield


def steps_of_theirs():
    for epoch in itertools.count():
        if kind == "loader":
            their_loader.sampler.set_epoch(epoch)
        for (inputs,) in their_loader if kind == "loader" else [(given,)]:
            their_optimizer.zero_grad()
            theirs(inputs).square().mean().backward()
            their_optimizer.step()
            yield


def block(steps):
    begun = time.perf_counter()
    for _ in range(2):
        next(steps)
    return time.perf_counter() - begun


ours, optimizer, given = made()
dataset = TensorDataset(torch.randn(100 * own, 512))
loader = ElasticLoader(dataset, global_batch_size=2 * own, micro_batch_size=own, seed=0) if kind == "loader" else None
elastic = Elastic(ours, optimizer, sampler=loader)
mine = steps_of_ours()
next(mine)  # there is a process group now
theirs, their_optimizer, _ = made()
theirs = DistributedDataParallel(theirs)
their_loader = DataLoader(dataset, batch_size=own, sampler=DistributedSampler(dataset))
yours = steps_of_theirs()
for _ in range(10):
    block(mine), block(yours)
ratios = []
for turn in range(int(sys.argv[1])):
    pair = (mine, yours)
    first, second = [block(steps) for steps in (pair if turn % 2 else pair[::-1])]
    ratios.append(first / second if turn % 2 else second / first)
if elastic.rank == 0:
    with open("ratios.new", "w") as file:
        file.write(" ".join(map(str, ratios)))
    os.replace("ratios.new", "ratios")
os._exit(0)  # out of the midst of both loops
"""


MODELS = {
    "large": ("4 large parameters", 1.0),
    "loader": ("the same, each with its data loader", None),
    "transformer": ("a small transformer", 1.0),
    "tiny": ("120 parameters of 64 x 64, each with a hook in Python", None),
}
"""What a step is compared with, and how many percent it may cost beyond."""


def run(quick: bool) -> list[Row]:
    """All rows of the elastic loop."""
    rows = _killed_ranks(3 if quick else 30, 1 if quick else PEERS_KILLS)
    rows += _nodes(1 if quick else 5, None if quick else _torchrun_nodes(PEERS_KILLS))
    rows += [step_cost(kind, 60 if quick else 250) for kind in MODELS]
    return rows


def _kill_ranks(kills: int, *, standbys: int, frozen: int = 0) -> tuple[list[float], list[float]]:
    """From each kill to the survivors' next step, and to all of them stepping together.

    Args:
        kills: how often.
        standbys: interpreters that are kept ready.
        frozen: MiB of state that a step does not touch, and a newcomer must get.
    """
    survivors, whole = [], []
    with Workplace() as place:
        script = place.script("train.py", SCRIPT)
        words: list[str | Path] = ["--standalone", "--nproc-per-node=3", "--max-restarts=1000"]
        words += [f"--standbys={standbys}", script, str(frozen)]
        place.start([BIN / "resile", "run", *words])
        if standbys:
            place.heard(f"{standbys} standbys are ready")
        for number in range(kills):
            world = steady_world(place, 3)
            victim = world.pid_of(number % 3)
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            left = set(world.members) - {victim}
            survivors.append(next_step(place, left, world.round) - killed)
            whole.append(whole_world(place, 3, world.round) - killed)
            say(f"elastic: rank killed: survivors after {survivors[-1]:.3f} s, all three after {whole[-1]:.2f} s")
    return survivors, whole


def _killed_ranks(kills: int, peers_kills: int) -> list[Row]:
    survivors, whole = _kill_ranks(kills, standbys=3)
    _, large = _kill_ranks(min(kills, LARGE_KILLS), standbys=3, frozen=LARGE)
    _, cold = _kill_ranks(min(kills, COLD_KILLS), standbys=0)
    launchers = [launcher for launcher in (TORCHRUN, dlrover()) if launcher is not None]
    found = {launcher.name: _peer(launcher, peers_kills) for launcher in launchers}
    medians = {name: statistics.median(each) for name, each in found.items()}
    theirs, others = medians.pop(TORCHRUN.name), medians
    said = "; ".join(f"{name} {listed(each)}" for name, each in found.items())
    return [
        Row(
            measure="elastic: rank of 3 killed, to the survivors' next step, median",
            value=statistics.median(survivors),
            unit="s",
            bar=0.2,
            peer=theirs,
            others=others,
            note=f"{kills} kills, from {min(survivors):.3f} to {max(survivors):.3f} s; {said}",
        ),
        Row(
            measure="… to the survivors' next step, 95th percentile",
            value=percentile(survivors, 0.95),
            unit="s",
            bar=0.5,
        ),
        Row(
            measure="… to the whole world stepping again, median",
            value=statistics.median(whole),
            unit="s",
            bar=1.5,
            peer=theirs,
            others=others,
            note=f"from {min(whole):.2f} to {max(whole):.2f} s",
        ),
        Row(measure="… to the whole world, 95th percentile", value=percentile(whole, 0.95), unit="s", bar=1.5),
        Row(
            measure=f"… to the whole world, a state of {LARGE} MiB given by a peer, median",
            value=statistics.median(large),
            unit="s",
            bar=1.5,
            note=listed(large),
        ),
        Row(
            measure="… without standbys (--standbys 0), median",
            value=statistics.median(cold),
            unit="s",
            peer=theirs,
            others=others,
            note=listed(cold),
        ),
    ]


def _peer(launcher: Launcher, kills: int) -> list[float]:
    """Under a launcher that restarts all ranks: from each kill to the step of all."""
    took = []
    with tidied(), Workplace() as place:
        script = place.script("train.py", SCRIPT)
        launcher.start(place, "--standalone", "--nproc-per-node=3", "--max-restarts=20", script)
        for _ in range(kills):
            world = steady_world(place, 3)
            killed = time.monotonic()
            os.kill(world.pid_of(1), signal.SIGKILL)
            took.append(whole_world(place, 3, 0, others_than=set(all_steps(place))) - killed)
            say(f"elastic: {launcher.name}: the next step after {took[-1]:.2f} s")
    return took


class Nodes(msgspec.Struct, frozen=True):
    """What torchrun needs each time that a node comes, and when it is killed."""

    grown: list[float]
    killed: list[float]
    """START_SECONDS: it did not step on."""


def _torchrun_nodes(times: int) -> Nodes:
    grown, killed = [], []
    with Workplace() as place:
        words = ["--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=20", "--rdzv-backend=c10d", "--rdzv-id=bench"]
        words.append(f"--rdzv-endpoint=127.0.0.1:{free_port()}")
        come = partial(TORCHRUN.start, place, *words, place.script("train.py", SCRIPT))
        come(), come()
        for _ in range(times):
            say("elastic: torchrun with two nodes, three, and one of them killed")
            try:
                two = steady_world(place, 2)
                third = come()
                three = steady_world(place, 3)
            except GaveUp as error:  # it does not always come back from the loss before
                say(f"elastic: torchrun: {error}")
                break
            last = max(read_steps(place.path / f"steps.{pid}")[-1].at for pid in two.members)
            grown.append(max(read_steps(place.path / f"steps.{pid}")[0].at for pid in three.members) - last)
            seen = set(all_steps(place))
            at = time.monotonic()
            signal_all(descendants(third.pid), signal.SIGKILL)
            try:
                killed.append(whole_world(place, 2, 0, others_than=seen) - at)
            except GaveUp:
                killed.append(START_SECONDS)
                break
            say(f"elastic: torchrun: a third node costs {grown[-1]:.1f} s, its loss {killed[-1]:.1f} s")
    return Nodes(grown, killed)


def _nodes(times: int, theirs: Nodes | None) -> list[Row]:
    killed_node: list[float] = []
    frozen_node: list[float] = []
    grown, shrunk = [], []
    for number in range(times):
        with Workplace() as place:
            script = place.script("train.py", SCRIPT)
            words: list[str | Path] = [
                BIN / "resile",
                "run",
                "--nnodes=1:3",
                f"--rdzv-endpoint=127.0.0.1:{free_port()}",
            ]
            words += ["--rdzv-conf=last_call_timeout=2", "--max-restarts=100", script]
            come = partial(place.start, words, env={"RESILE_STATE_DIR": str(place.path / "state")})
            come(), come()
            two = steady_world(place, 2)
            stay = set(two.members)

            come()
            three = steady_world(place, 3, two.round)
            grown.append(longest_pause(place, stay, two.round))
            node = _node_of(set(three.members) - stay)
            os.kill(node, signal.SIGTERM)
            two = steady_world(place, 2, three.round)
            shrunk.append(longest_pause(place, stay, three.round))
            if not stay <= set(three.members) or set(two.members) != stay:
                raise GaveUp("a process was restarted in a resize")

            for blow, took in ((signal.SIGKILL, killed_node), (signal.SIGSTOP, frozen_node)):
                come()
                three = steady_world(place, 3, two.round)
                struck = three.pid_of(number % 3)  # rank 0 sends its state and its buffers, so it is struck, too
                stay = set(three.members) - {struck}
                at = time.monotonic()
                signal_all([_node_of({struck}), struck], blow)
                took.append(next_step(place, stay, three.round) - at)
                two = steady_world(place, 2, three.round)
                if set(two.members) != stay:
                    raise GaveUp("a process was restarted when a node was lost")
            say(
                f"elastic: node killed {killed_node[-1]:.3f} s, frozen {frozen_node[-1]:.2f} s, "
                f"pauses of 2 -> 3 -> 2: {grown[-1]:.3f} and {shrunk[-1]:.3f} s"
            )
    return [
        Row(
            measure="elastic: node killed, to the survivors' next step, longest",
            value=max(killed_node),
            unit="s",
            bar=0.5,
            peer=statistics.median(theirs.killed) if theirs is not None and theirs.killed else None,
            unfinished=(TORCHRUN.name,) if theirs and statistics.median(theirs.killed or [0]) == START_SECONDS else (),
            note=f"{listed(killed_node, 3)}, nodes of all ranks in turn"
            + (f"; torchrun {listed(theirs.killed)}; {START_SECONDS:g} s: it did not step on" if theirs else ""),
        ),
        Row(
            measure="elastic: node frozen, to the survivors' next step, longest",
            value=max(frozen_node),
            unit="s",
            bar=3.0,
            peer=FROZEN_SECONDS,
            others={DLROVER: DLROVER_FROZEN_SECONDS},
            unfinished=(TORCHRUN.name, DLROVER),
            note=f"{listed(frozen_node)}, nodes of all ranks in turn; "
            "the peers' times are from an earlier run on a machine like this: neither had taken a step by then",
        ),
        Row(
            measure="elastic: resize 2 -> 3 -> 2, pause of the others, longest",
            value=max(grown + shrunk),
            unit="s",
            bar=0.3,
            peer=statistics.median(theirs.grown) if theirs is not None and theirs.grown else None,
            note="the same processes before and after, by their pids; torchrun restarts all of them"
            + (f": {listed(theirs.grown)}" if theirs else ""),
        ),
    ]


def step_cost(kind: str, pairs: int) -> Row:
    """Steps of ours against as many of DDP.

    Two of each, in turns: whatever else the machine does swings by more than 10 % within a second, and is nearly the
    same for such a pair. How far the median may be off by chance is told with it.
    """
    with Workplace() as place:
        script = place.script("compare.py", COMPARE)
        flags = ["--standalone", "--nproc-per-node=2", "--standbys=0"]  # whose import would be measured, too
        place.start([BIN / "resile", "run", *flags, script, str(pairs), kind])
        ratios = wait_for("a comparison with DDP", partial(_read, place.path / "ratios"), START_SECONDS + pairs, 0.2)
    costs = [(float(each) - 1) * 100 for each in ratios.split()]
    cost, (least, most) = statistics.median(costs), median_within(costs)
    words, bar = MODELS[kind]
    told = f"{cost:+.2f} % (95 % sure: {least:+.1f} to {most:+.1f} %)"
    say(f"elastic: a step costs {told} against DDP, with {words}")
    return Row(
        measure=f"elastic: cost of a step against plain DDP ({words}), median",
        value=max(cost, 0.0),
        unit="%",
        bar=bar,
        note=f"{told}; {pairs} pairs, both in the same two processes, in turns",
    )


def median_within(values: Sequence[float]) -> tuple[float, float]:
    """Between which values the true median lies, in 19 of 20 cases, whatever the values are distributed like."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    least, most = math.floor(len(values) / 2 - half), math.ceil(len(values) / 2 + half) - 1
    return ordered[max(least, 0)], ordered[min(most, len(values) - 1)]


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _node_of(pids: set[int]) -> int:
    """The agent of a training process."""
    (pid,) = pids
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
