"""What `make bench` and `make bench-kube` have in common: run some benchmarks, print one table, judge by the bars.

It says what it does on standard error while it runs, prints one table at the end, and ends with 1 if a bar was missed
or a benchmark gave up. With `--write` the figures also go into the pages that show them.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from benchmarks import page, table
from benchmarks.harness import GaveUp, Row, say


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    """Benchmarks that belong together."""

    name: str
    """Of its section in docs/benchmarks.md."""
    package: str
    """Where the modules are; each has `run(quick) -> list[Row]`."""
    names: tuple[str, ...]
    about: str
    peer: str
    """Whose figures stand beside ours."""
    facts: Mapping[str, str] = msgspec.field(default_factory=dict)
    """What else to say above the table."""


def main(suite: Suite, argv: Sequence[str] | None = None) -> int:
    """Run all benchmarks of a suite, or those that were asked for."""
    names = suite.names
    parser = argparse.ArgumentParser(prog=f"python -m {suite.package}", description=suite.about)
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="shorter forms: the same measures with fewer repetitions")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="default: %(default)s")
    parser.add_argument(
        "--write", action="store_true", help="also write the figures into docs/benchmarks.md and the README"
    )
    options = parser.parse_args(argv)
    if options.write and (options.only or options.quick):
        parser.error("--write takes a whole run: leave --only and --quick out")
    facts, start = {**table.machine(), **suite.facts}, time.monotonic()
    rows: list[Row] = []
    troubles: dict[str, str] = {}
    for name in options.only or names:
        try:
            rows += importlib.import_module(f"{suite.package}.{name}").run(options.quick)
        except Exception as trouble:  # whatever it is, it must not cost the figures of the other benchmarks
            troubles[name] = str(trouble) if isinstance(trouble, GaveUp) else repr(trouble)
            say(f"{name} gave up: {troubles[name]}")
        except KeyboardInterrupt:
            troubles[name] = "it was interrupted"
            break
    facts["took"] = f"{time.monotonic() - start:.0f} s{' (quick forms)' if options.quick else ''}"
    text = _json(facts, rows, troubles) if options.output == "json" else _text(facts, rows, troubles, suite.peer)
    sys.stdout.write(text)
    if options.write:
        _write(suite, facts, rows, troubles)
    return 1 if troubles or any(row.passed is False for row in rows) else 0


def run(suite: Suite) -> None:
    """Be the program; SIGTERM ends it as Ctrl-C does, so that nothing is left running."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(suite))


def _write(suite: Suite, facts: dict[str, str], rows: list[Row], troubles: dict[str, str]) -> None:
    """Keep the figures of a run in which no benchmark gave up; a page with holes would hide what is missing."""
    if troubles:
        say(f"nothing is written to the pages, since {', '.join(troubles)} gave up")
        return
    page.keep(page.Results(suite.name, suite.peer, facts, rows))
    say(f"wrote {page.RESULTS}/{suite.name}.json, {page.PAGE} and {page.README}")


def _text(facts: dict[str, str], rows: list[Row], troubles: dict[str, str], peer: str) -> str:
    head = "\n".join(f"{name + ':':8} {value}" for name, value in facts.items())
    tail = "".join(f"\n{name} gave up: {trouble}" for name, trouble in troubles.items())
    body = f"{head}\n\n{table.render(rows, peer)}\n"
    return f"{body}{tail}\n" if tail else body


def _json(facts: dict[str, str], rows: list[Row], troubles: dict[str, str]) -> str:
    lines = [{**msgspec.to_builtins(row), "ratio": row.ratio, "passed": row.passed} for row in rows]
    whole = msgspec.json.encode({"machine": facts, "rows": lines, "troubles": troubles})
    return msgspec.json.format(whole, indent=2).decode() + "\n"
