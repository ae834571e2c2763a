"""A checkpoint of 1 GiB: how long `save` holds training up, and how long a restarted process needs to have it back.

One process under `resile run` saves a module of 64 tensors, in turns with a plain memcpy of the same bytes,
DCP's `async_save` and `torch.save`, so that other work on the machine troubles all alike. Then it kills itself with -9,
and its successor restores from the agent's memory, three times over. All that is done three times, in turns with the
same under DLRover. What checkpoints cost where another node keeps a copy of them is seen on two nodes that train a
sharded model.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.checkpoint_script import HEAD
from benchmarks.dlrover_checkpoint import Flash, measure
from benchmarks.harness import BIN, GaveUp, Row, Run, Workplace, descendants, listed, say, wait_for
from benchmarks.peers import DLROVER

GIB = 1024
TORCH = "torch's own"
"""Its own ways to save and load, which stand in a column of their own."""
QUICK = 256
SECONDS = 300.0
RESTORES = 3
"""By one process after the other, each of which is killed as soon as it has the state."""
SCRIPT = (
    "import warnings\nwarnings.simplefilter('ignore')\n"
    + HEAD
    + """
import ctypes, shutil
import torch.distributed.checkpoint as dcp
from resile.torch import Checkpointer
restores = int(sys.argv[3])
state = {"module": module}
checkpointer = Checkpointer()


def peers():
    directory, file = os.path.join(here, "dcp"), os.path.join(here, "plain.pt")
    futures = []
    figures["async_save"].append(timed(lambda: futures.append(dcp.async_save(plain, checkpoint_id=directory))))
    futures[0].result()
    shutil.rmtree(directory)
    figures["torch_save"].append(timed(lambda: torch.save(plain, file)))
    figures["torch_load"].append(timed(lambda: torch.load(file, weights_only=True)))
    os.unlink(file)


if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    # what follows is the order of a training: nothing to restore, some time until the first save
    checkpointer.restore(state)
    checkpointer.wait()
    source = torch.cat([p.detach().view(-1) for p in module])
    target = torch.ones_like(source)
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes, memcpy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
    names = "memcpy each save overlap copied async_save torch_save torch_load"
    figures = {name: [] for name in names.split()}
    plain = {"module": module.state_dict()}

    def copy():
        memcpy(target.data_ptr(), source.data_ptr(), source.nbytes)

    def copy_each():
        at = target.data_ptr()
        for parameter in module:
            memcpy(at, parameter.data_ptr(), parameter.nbytes)
            at += parameter.nbytes

    copy()
    for turn in range(rounds):
        time.sleep(0.1)
        figures["memcpy"].append(timed(copy))
        time.sleep(0.1)
        figures["each"].append(timed(copy_each))
        time.sleep(0.1)
        figures["save"].append(timed(lambda: checkpointer.save(turn + 1, state)))
        checkpointer.wait()
        figures["overlap"].append(timed(lambda: checkpointer.save(turn + 1000, state, overlap=True)))
        figures["copied"].append(timed(checkpointer.before_update))
        checkpointer.wait()
        if turn % 3 == 2:
            peers()
    blocks = sum(os.fstat(buffer.descriptor).st_blocks * 512 for buffer in checkpointer._memory.buffers)
    figures["memory"] = blocks / source.nbytes
    write("saves", figures)
    os.kill(os.getpid(), signal.SIGKILL)

spoil()
seconds = timed(lambda: checkpointer.restore(state))
check()
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
write(f"restore{restart}", seconds)
if restart < restores:
    os.kill(os.getpid(), signal.SIGKILL)
"""
)


HALVES = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from resile.torch import Checkpointer

dist.init_process_group("gloo")
model = torch.nn.ParameterList(torch.zeros(int(sys.argv[1]) * 16384) for n in range(16))
fully_shard(model)
checkpointer = Checkpointer()
checkpointer.restore({"module": model})
step = kept = 0
while kept < 4:
    step += 1
    kept += checkpointer.save(step, {"module": model})
    checkpointer.wait()
    dist.barrier()
open("done", "w").close()
time.sleep(3600)
"""


class Saves(msgspec.Struct):
    """Seconds, and states of memory."""

    memcpy: list[float]
    """Of all bytes at once, which leaves the caches out."""
    each: list[float]
    """Tensor by tensor."""
    save: list[float]
    overlap: list[float]
    copied: list[float]
    async_save: list[float]
    torch_save: list[float]
    torch_load: list[float]
    memory: float


def run(quick: bool, mib: int = 0, peers: bool = True) -> list[Row]:
    mib = mib or (QUICK if quick else GIB)
    ours: list[Saves] = []
    restored: list[float] = []
    theirs: list[Flash] = []
    for _ in range(1 if quick else 3):
        saves, restores = _measure(mib)
        ours.append(saves)
        restored += restores
        if peers and (flash := measure(mib, 3)) is not None:
            theirs.append(flash)
    return _rows(mib, ours, restored, theirs) + _replicas(16 if mib < QUICK else QUICK)


def _measure(mib: int) -> tuple[Saves, list[float]]:
    """What one process and its successors need."""
    with Workplace() as place:
        script = place.script("checkpoint.py", SCRIPT)
        say(f"checkpoint: saving {mib} MiB in turns with memcpy, DCP and torch.save")
        words = ["--standalone", "--max-restarts", str(RESTORES), str(script), str(mib), "3", str(RESTORES)]
        process = place.start([BIN / "resile", "run", *words])
        saves = wait_for("all saves", partial(_read, place.path / "saves", Saves, process), SECONDS)
        say("checkpoint: killed it; waiting for its successors to restore")
        restored = [
            wait_for("a restore", partial(_read, place.path / f"restore{number}", float, process), SECONDS)
            for number in range(1, RESTORES + 1)
        ]
    return saves, restored


def _rows(mib: int, ours: list[Saves], restored: list[float], theirs: list[Flash]) -> list[Row]:
    name = "checkpoint of 1 GiB" if mib == GIB else f"checkpoint of {mib} MiB"
    memcpy = statistics.median(_all(ours, "memcpy"))
    firsts, later = [each.save[0] for each in ours], [took for each in ours for took in each.save[1:]]
    dcp, overlap = _all(ours, "async_save"), _all(ours, "overlap")
    stall = {TORCH: statistics.median(dcp) / memcpy}
    figures = (
        f"memcpy {listed(_all(ours, 'memcpy'), 3)} (by tensor {listed(_all(ours, 'each'), 3)}); save {listed(later, 3)}"
    )
    return [
        Row(
            measure=f"{name}: stall of the first save, median",
            value=statistics.median(firsts) / memcpy,
            unit="memcpy",
            bar=1.2,
            others=stall | _dlrover([each.saves[0] / memcpy for each in theirs]),
            note=f"{listed(firsts, 3)}; torch: DCP async_save",
        ),
        Row(
            measure=f"{name}: stall of later saves, median",
            value=statistics.median(later) / memcpy,
            unit="memcpy",
            bar=1.2,
            others={
                TORCH: statistics.median(dcp) / memcpy,
                **_dlrover([took / memcpy for each in theirs for took in each.saves[1:]]),
            },
            note=f"{figures}; torch: DCP async_save {listed(dcp, 3)}, torch.save {listed(_all(ours, 'torch_save'), 3)}",
        ),
        Row(
            measure=f"{name}: stall with overlap, median",
            value=statistics.median(overlap) * 1000,
            unit="ms",
            bar=10.0,
            others={TORCH: statistics.median(dcp) * 1000},
            note=f"{listed(overlap, 3)}; the copy itself then took {listed(_all(ours, 'copied'), 3)}",
        ),
        Row(
            measure=f"{name}: restored by a restarted process, median",
            value=statistics.median(restored),
            unit="s",
            bar=0.15 * mib / GIB,
            others={
                TORCH: statistics.median(_all(ours, "torch_load")),
                **_dlrover([each.load for each in theirs if each.load is not None]),
            },
            note=f"{listed(restored, 3)}, every byte checked and copied; torch: torch.load from the page cache",
        ),
        Row(measure=f"{name}: memory taken", value=max(each.memory for each in ours), unit="states", bar=2.01),
    ]


def _replicas(mib: int) -> list[Row]:
    """What two nodes need to keep their halves of a state, and each other's."""
    with Workplace() as place:
        say(f"checkpoint: two nodes save {mib} MiB in halves, and copy them to each other")
        nodes = Run(place, "2:2", [place.script("halves.py", HALVES), str(mib)])
        agents = [nodes.agent() for _ in range(2)]

        def copied() -> list[Taken] | None:
            taken = [_taken(agent.pid) for agent in agents]
            if any(agent.poll() is not None for agent in agents):
                raise GaveUp("a node ended early")
            done = (place.path / "done").exists() and all(each.own and each.copies for each in taken)
            return taken if done else None

        taken = wait_for("copies on both nodes", copied, SECONDS, 0.2)
    half = mib / 2
    most = max(taken, key=lambda each: each.own + each.copies)
    return [
        Row(
            measure=f"checkpoint in halves on two nodes ({mib} MiB): memory of a node with its copies",
            value=(most.own + most.copies) / half,
            unit="states",
            bar=4.1,
            note=f"{most.own / half:.2f} for its own and {most.copies / half:.2f} for the other node's, two of each",
        )
    ]


class Taken(msgspec.Struct, frozen=True):
    """MiB of memory that a node's agent and processes hold for checkpoints."""

    own: float
    copies: float


def _taken(agent: int) -> Taken:
    """Each buffer counted once, however many processes have it open or mapped."""
    found: dict[int, tuple[str, int]] = {}
    for pid in descendants(agent):
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                state, name = entry.stat(), os.readlink(entry)
                found[state.st_ino] = (name, state.st_blocks * 512)

    def of(kind: str) -> float:
        return sum(size for name, size in found.values() if name.startswith(f"/memfd:resile-{kind}")) / 2**20

    return Taken(of("checkpoint"), of("copy"))


def _all(ours: list[Saves], name: str) -> list[float]:
    return [each for saves in ours for each in getattr(saves, name)]


def _dlrover(figures: list[float]) -> dict[str, float]:
    """The median of DLRover's figures, if there are any."""
    return {DLROVER: statistics.median(figures)} if figures else {}


def _read(path: Path, kind: Any, process: Any) -> Any:
    if process.poll() is not None and not path.exists():
        raise GaveUp("the script ended early")
    return msgspec.json.decode(path.read_bytes(), type=kind) if path.exists() else None
