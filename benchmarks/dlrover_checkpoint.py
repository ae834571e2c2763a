"""DLRover's checkpoint in memory: what a save costs, the first and later ones, and what it takes to have it back.

One process saves as many tensors as in `checkpoint.py`, kills itself with -9, and its successor takes the state from
memory and puts it into its module, as ours does.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from benchmarks.checkpoint_script import HEAD
from benchmarks.harness import GaveUp, Workplace, say, wait_for
from benchmarks.peers import Launcher, dlrover, tidied

SECONDS = 180.0
SCRIPT = (
    HEAD
    + """
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
checkpointer = DdpCheckpointer(os.path.join(here, "flash"))


def save(step):
    checkpointer.save_checkpoint(step, {"module": module.state_dict()}, storage_type=StorageType.MEMORY)


def load():
    module.load_state_dict(checkpointer.load_checkpoint()["module"])


if not os.path.exists(os.path.join(here, "saves")):
    figures = []
    for turn in range(rounds):
        time.sleep(0.1)
        figures.append(timed(lambda: save(turn + 1)))
    write("saves", figures)
    os.kill(os.getpid(), signal.SIGKILL)
spoil()
seconds = timed(load)
check()
write("load", seconds)
"""
)


class Flash(msgspec.Struct, frozen=True):
    """Seconds."""

    saves: list[float]
    load: float | None
    """None: it did not come back with the state."""


def measure(mib: int, rounds: int) -> Flash | None:
    """DLRover's figures, or None if it cannot be run here; one sentence then says why."""
    launcher = dlrover()
    if launcher is None:
        return None
    try:
        return _measure(launcher, mib, rounds)
    except GaveUp as error:
        say(f"checkpoint: DLRover is left out: {error}")
        return None


def _measure(launcher: Launcher, mib: int, rounds: int) -> Flash:
    with tidied(), Workplace() as place:
        script = place.script("flash.py", SCRIPT)
        say(f"checkpoint: DLRover saves {mib} MiB")
        launcher.start(place, "--standalone", "--nproc-per-node=1", "--max-restarts=3", script, str(mib), str(rounds))
        saves = wait_for("DLRover's saves", partial(_read, place.path / "saves"), SECONDS)
        try:
            load = wait_for("DLRover's restore", partial(_read, place.path / "load"), SECONDS)
        except GaveUp as error:
            say(f"checkpoint: {error}")
            load = None
    return Flash(msgspec.convert(saves, list[float]), msgspec.convert(load, float | None))


def _read(path: Path) -> object:
    return msgspec.json.decode(path.read_bytes()) if path.exists() else None
