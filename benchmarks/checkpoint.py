"""A checkpoint of 1 GiB: how long `save` holds training up, and how long a restarted process needs to have it back.

One process under `resile run` saves a module of 64 tensors, in turns with a plain memcpy of the same bytes,
DCP's `async_save` and `torch.save`, so that other work on the machine troubles all alike. Then it kills itself with -9,
and its successor restores from the agent's memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.flash import Flash, measure
from benchmarks.harness import BIN, GaveUp, Row, Workplace, say, wait_for
from benchmarks.peers import DLROVER

GIB = 1024
QUICK = 256
SECONDS = 300.0
SCRIPT = """
import ctypes, json, os, shutil, signal, sys, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from resile.torch import Checkpointer

mib, rounds = int(sys.argv[1]), int(sys.argv[2])
here = os.path.dirname(os.path.abspath(__file__))
dist.init_process_group("gloo")
module = torch.nn.ParameterList(torch.full((mib * 4096,), float(n)) for n in range(64))
state = {"module": module}
checkpointer = Checkpointer()


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def write(name, figures):
    with open(os.path.join(here, name + ".new"), "w") as file:
        json.dump(figures, file)
    os.replace(os.path.join(here, name + ".new"), os.path.join(here, name))


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
    blocks = sum(os.fstat(buffer.descriptor).st_blocks * 512 for buffer in checkpointer._vault.buffers)
    figures["memory"] = blocks / source.nbytes
    for turn in range(max(1, rounds // 3)):
        directory = os.path.join(here, "dcp")
        futures = []
        figures["async_save"].append(timed(lambda: futures.append(dcp.async_save(plain, checkpoint_id=directory))))
        futures[0].result()
        shutil.rmtree(directory)
        file = os.path.join(here, "plain.pt")
        figures["torch_save"].append(timed(lambda: torch.save(plain, file)))
        figures["torch_load"].append(timed(lambda: torch.load(file, weights_only=True)))
        os.unlink(file)
    write("saves", figures)
    os.kill(os.getpid(), signal.SIGKILL)

with torch.no_grad():
    for parameter in module:
        parameter.fill_(-1.0)
seconds = timed(lambda: checkpointer.restore(state))
assert all(bool((p == n).all()) for n, p in enumerate(module)), "what was restored is not what was saved"
write("restore", {"restore": seconds})
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
    with Workplace() as place:
        script = place.script("checkpoint.py", SCRIPT)
        words = ["--standalone", "--max-restarts", "1", str(script), str(mib), "3" if quick else "9"]
        say(f"checkpoint: saving {mib} MiB in turns with memcpy, DCP and torch.save")
        process = place.start([BIN / "resile", "run", *words])
        saves = wait_for("all saves", partial(_read, place.path / "saves", Saves, process), SECONDS)
        say("checkpoint: killed it; waiting for its successor to restore")
        restored = wait_for("the restore", partial(_read, place.path / "restore", dict[str, float], process), SECONDS)
    flash = measure(mib, 3) if peers else None
    name = "checkpoint of 1 GiB" if mib == GIB else f"checkpoint of {mib} MiB"
    memcpy = statistics.median(saves.memcpy)
    first, steady = saves.save[0] / memcpy, statistics.median(saves.save[1:]) / memcpy
    dcp = statistics.median(saves.async_save)
    figures = f"memcpy {_list(saves.memcpy)} (by tensor {_list(saves.each)}); save {_list(saves.save)}"
    return [
        Row(
            measure=f"{name}: stall of the first save",
            value=first,
            unit="memcpy",
            bar=1.2,
            peer=dcp / memcpy,
            others=_dlrover(flash, lambda their: their.saves[0] / memcpy),
        ),
        Row(
            measure=f"{name}: stall of later saves, median",
            value=steady,
            unit="memcpy",
            bar=1.2,
            peer=dcp / memcpy,
            others=_dlrover(flash, lambda their: statistics.median(their.saves[1:]) / memcpy),
            note=f"{figures}; peer: DCP async_save {_list(saves.async_save)}, torch.save {_list(saves.torch_save)}",
        ),
        Row(
            measure=f"{name}: stall with overlap, median",
            value=statistics.median(saves.overlap) * 1000,
            unit="ms",
            bar=10.0,
            peer=dcp * 1000,
            note=f"{_list(saves.overlap)}; the copy itself then took {_list(saves.copied)}",
        ),
        Row(
            measure=f"{name}: restored by a restarted process",
            value=restored["restore"],
            unit="s",
            bar=0.15 * mib / GIB,
            peer=statistics.median(saves.torch_load),
            others=_dlrover(flash, lambda their: their.load),
            note="every byte checked and copied; peer: torch.load from the page cache",
        ),
        Row(measure=f"{name}: memory taken, in states", value=saves.memory, unit="states", bar=2.01),
    ]


def _dlrover(flash: Flash | None, figure: Callable[[Flash], float | None]) -> dict[str, float]:
    """One of DLRover's figures, if there is any."""
    found = figure(flash) if flash is not None else None
    return {} if found is None else {DLROVER: found}


def _read(path: Path, kind: Any, process: Any) -> Any:
    if process.poll() is not None and not path.exists():
        raise GaveUp("the script ended early")
    return msgspec.json.decode(path.read_bytes(), type=kind) if path.exists() else None


def _list(seconds: list[float]) -> str:
    return ", ".join(f"{each:.3f}" for each in seconds) + " s"
