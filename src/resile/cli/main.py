"""The entry point of `resile`: finds the command, and imports only what that command needs.

`run` starts every agent, and the time that an agent takes to start is part of every recovery: `run` must not import
click or rich. All other commands are in a click group, which is imported when one of them is run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from resile import __version__
from resile.cli.process_exit import BAD_USAGE, INTERRUPTED, quiet_if_reader_leaves

COMMANDS: dict[str, str] = {
    "run": "run a training script on this machine, alone or together with others",
    "submit": "run the job of a manifest, here (--local) or on a cluster",
    "get": "list jobs, nodes, events or scale plans, as kubectl does",
    "describe": "tell everything about a job",
    "logs": "print what nodes wrote, or follow it",
    "scale": "change how many nodes a running job has",
    "suspend": "let go of a job's nodes for a while",
    "resume": "take the nodes of a suspended job back",
    "delete": "end a job and remove it",
    "explain": "print what the engine derived from your settings, such as its time-outs",
    "manifests": "print what a cluster needs to run jobs, for kubectl apply",
    "operator": "run the operator, which gives every job of a cluster its master",
    "chaos": "break something on purpose and watch the job recover",
}


def overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  {name:<{width}}{purpose}" for name, purpose in COMMANDS.items())
    return f"""resile {__version__}: elastic, fault-tolerant training

usage: resile COMMAND [flags]

{commands}

`resile COMMAND --help` explains a command; start with
    resile run --standalone --nproc-per-node 2 YOUR_SCRIPT.py"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    words = list(sys.argv[1:] if argv is None else argv)
    first = words[0] if words else "--help"
    if first == "run":
        from resile.cli.run.main import main as run

        run(words[1:], "resile run")
    elif first in ("--help", "-h", "help", "--version", "-V"):
        with quiet_if_reader_leaves():
            print(f"resile {__version__}" if first in ("--version", "-V") else overview())
    elif first in COMMANDS:
        try:
            from resile.cli.click_group import main as command

            command(words)
        except KeyboardInterrupt:  # while modules are loaded
            print("resile: interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)
    else:
        from difflib import get_close_matches

        near = get_close_matches(first, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(COMMANDS)}"
        print(f"resile: no command {first!r}; {hint}", file=sys.stderr)
        sys.exit(BAD_USAGE)
    sys.exit(0)
