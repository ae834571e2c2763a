"""`python -m benchmarks` (`make bench`): every bar of the engine with its figure, and torchrun's beside it.

Says what it does on standard error while it runs, prints one table at the end, and ends with 1 if a bar was missed or a
benchmark gave up. Nothing is written outside a temporary directory, and all traffic stays on the loopback interface.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
from collections.abc import Sequence

import msgspec

from benchmarks import table
from benchmarks.harness import GaveUp, Row, say

NAMES = ("help_time", "detect", "recover", "master_loss", "rendezvous", "idle", "schedules", "silence")
"""The benchmarks, those that take longest last."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all benchmarks, or those that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=NAMES, metavar="NAME", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="shorter forms: the same measures with fewer repetitions")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="default: %(default)s")
    options = parser.parse_args(argv)
    facts, start = table.machine(), time.monotonic()
    rows: list[Row] = []
    troubles: dict[str, str] = {}
    for name in options.only or NAMES:
        try:
            rows += importlib.import_module(f"benchmarks.{name}").run(options.quick)
        except Exception as trouble:  # whatever it is, it must not cost the figures of the other benchmarks
            troubles[name] = str(trouble) if isinstance(trouble, GaveUp) else repr(trouble)
            say(f"{name} gave up: {troubles[name]}")
    facts["took"] = f"{time.monotonic() - start:.0f} s{' (quick forms)' if options.quick else ''}"
    sys.stdout.write(_json(facts, rows, troubles) if options.output == "json" else _text(facts, rows, troubles))
    return 1 if troubles or any(row.passed is False for row in rows) else 0


def _text(facts: dict[str, str], rows: list[Row], troubles: dict[str, str]) -> str:
    head = "\n".join(f"{name + ':':8} {value}" for name, value in facts.items())
    tail = "".join(f"\n{name} gave up: {trouble}" for name, trouble in troubles.items())
    return f"{head}\n\n{table.render(rows)}\n{tail}\n" if tail else f"{head}\n\n{table.render(rows)}\n"


def _json(facts: dict[str, str], rows: list[Row], troubles: dict[str, str]) -> str:
    lines = [{**msgspec.to_builtins(row), "ratio": row.ratio, "passed": row.passed} for row in rows]
    whole = msgspec.json.encode({"machine": facts, "rows": lines, "troubles": troubles})
    return msgspec.json.format(whole, indent=2).decode() + "\n"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    sys.exit(main())
