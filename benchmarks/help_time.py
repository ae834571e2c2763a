"""How long a fresh `resile run --help` takes, and that importing the package brings nothing heavy with it."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import BIN, Row, say

BAR_SECONDS = 0.3
HEAVY = (
    "torch",
    "numpy",
    "tensorflow",
    "starlette",
    "uvicorn",
    "fastapi",
    "flask",
    "aiohttp",
    "tornado",
    "django",
    "http.server",
    "wsgiref",
    "grpc",
    "prometheus_client",
)
"""Training frameworks and everything that is, or brings, a web server."""


def run(quick: bool) -> list[Row]:
    times = 5 if quick else 10
    say(f"help_time: {times} times `resile run --help`, and torchrun's")
    ours = [_seconds(BIN / "resile", "run", "--help") for _ in range(times)]
    theirs = [_seconds(BIN / "torchrun", "--help") for _ in range(1 if quick else 3)]
    loaded = _loaded()
    return [
        Row(
            measure="`resile run --help`, longest",
            value=max(ours),
            unit="s",
            bar=BAR_SECONDS,
            peer=max(theirs),
            note=f"median {statistics.median(ours):.3f} s; torchrun's {statistics.median(theirs):.2f} s",
        ),
        Row(measure="heavy modules after `import resile`", value=len(loaded), bar=0, note=", ".join(loaded)),
    ]


def _seconds(program: Path, *words: str) -> float:
    start = time.monotonic()
    subprocess.run([program, *words], stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - start


def _loaded() -> list[str]:
    words = f"import sys, resile; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True).stdout.split()
