"""The peers of `make bench`: torchrun, which comes with torch, and DLRover in an environment of its own.

DLRover comes from the package index into a folder of the user's cache, the first time, and borrows our torch. It does
not start with this torch by itself: a call of torch's that starts its master lacks one argument, which is passed here.
Where it cannot be had, one sentence says so and the benchmarks go on without it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.harness import BIN, Workplace, say

DLROVER = "DLRover"
DLROVER_VERSION = "0.6.1"
_PACKAGES = (f"dlrover[k8s]=={DLROVER_VERSION}", "protobuf")
_INSTALL_SECONDS = 300.0
_SOURCE = Path(__file__).resolve().parents[1] / "src"
_START = """
import functools
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from dlrover.trainer.torch import elastic_run, main
elastic_run.SubprocessHandler = functools.partial(SubprocessHandler, numa_options=None)
main.main()
"""
_LEFT_IN = (Path("/tmp/ckpt_sock"), Path("/dev/shm"))
"""Where DLRover puts files that it does not remove when it is killed, named after its jobs."""
_LEFT = "standalone_*"


class Launcher(msgspec.Struct, frozen=True):
    """How to start a script: the words before torchrun's flags, and the variables to set."""

    name: str
    words: tuple[str, ...]
    env: dict[str, str] = {}

    def start(self, place: Workplace, *flags: str | Path) -> subprocess.Popen[bytes]:
        """Start it; the flags end with the script and its arguments."""
        return place.start([*self.words, *flags], env=self.env)


OURS = Launcher("resile run", (str(BIN / "resile"), "run"))
TORCHRUN = Launcher("torchrun", (str(BIN / "torchrun"),), {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
"""With the setting without which torch 2.13 does not come back from the loss of a node."""


@functools.cache
def dlrover() -> Launcher | None:
    """DLRover's launcher, or None if there is none to be had."""
    python = _home() / "bin/python"
    try:
        if not _ready().exists():
            _make()
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        why = said.decode(errors="replace").strip().splitlines()[-1:] if said else [str(error)]
        say(f"DLRover is left out: its environment could not be made: {' '.join(why)}")
        return None
    quiet = {"PYTHONWARNINGS": "ignore", "PYTHONPATH": str(_SOURCE)}
    return Launcher(DLROVER, (str(python), "-c", _START), quiet)


@contextlib.contextmanager
def tidied() -> Iterator[None]:
    """Remove what a killed DLRover leaves outside of its directory."""
    before = set(_left())
    try:
        yield
    finally:
        for path in set(_left()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _left() -> list[Path]:
    return [path for folder in _LEFT_IN for path in folder.glob(_LEFT)]


def _home() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "resile-bench" / f"dlrover-{DLROVER_VERSION}-{sys.version_info.major}.{sys.version_info.minor}"


def _ready() -> Path:
    return _home() / f"ready-for-{_borrowed().replace('/', '-')}"


def _borrowed() -> str:
    return site.getsitepackages()[0]


def _make() -> None:
    """Make the environment.

    Raises:
        OSError: it cannot be written.
        subprocess.SubprocessError: a command failed, or took too long.
    """
    home = _home()
    say(f"making an environment for DLRover {DLROVER_VERSION} in {home}, once; this takes about a minute")
    shutil.rmtree(home, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(home)])
    _run([str(home / "bin/python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *_PACKAGES])
    (home / Path(_borrowed()).relative_to(sys.prefix) / "borrowed.pth").write_text(f"{_borrowed()}\n")
    _ready().touch()


def _run(words: list[str]) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=_INSTALL_SECONDS, stdin=subprocess.DEVNULL)
