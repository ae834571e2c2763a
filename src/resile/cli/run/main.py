"""`resile run` and `dlrover-run`: one program under two names."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from resile.agent.options import RunOptions
from resile.cli.process_exit import BAD_USAGE, quiet_if_reader_leaves
from resile.cli.run.flags import FlagError, parse
from resile.cli.run.options import resolve


def options(argv: Sequence[str], environ: Mapping[str, str], prog: str = "resile run") -> RunOptions:
    return resolve(parse(argv, environ, prog), environ, prog)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Run the script and end the process with the script's exit code, or with 2 if the flags cannot be used."""
    name = prog or os.path.basename(sys.argv[0])
    try:
        with quiet_if_reader_leaves():  # the help is printed in here
            chosen = options(sys.argv[1:] if argv is None else argv, os.environ, name)
    except FlagError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(BAD_USAGE)
    from resile.agent.main import launch  # after the flags are checked, because it imports asyncio

    sys.exit(launch(chosen))
