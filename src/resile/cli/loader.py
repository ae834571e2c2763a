"""Every command but `run`: found by name, loaded when asked for, and the one place where errors become exit codes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from resile import __version__
from resile.cli.closed_pipe import quiet_if_reader_leaves
from resile.cli.exit_codes import BAD_USAGE, FAILED, INTERRUPTED
from resile.client.errors import CommandError, NotUsableError

MODULES = {
    "submit": "submit",
    "get": "get",
    "describe": "describe",
    "logs": "logs",
    "scale": "scale",
    "suspend": "suspend",
    "resume": "suspend",
    "delete": "delete",
    "explain": "explain",
    "manifests": "manifests",
    "operator": "operator",
    "chaos": "chaos",
}
"""Where each command is, below `resile.cli.commands`."""


class Commands(click.Group):
    """The group that loads a command's module only when that command is run."""

    def list_commands(self, _: click.Context) -> list[str]:
        """All names, in the order of the overview."""
        return list(MODULES)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        """The command of this name."""
        if name not in MODULES:
            return None
        command = getattr(importlib.import_module(f"resile.cli.commands.{MODULES[name]}"), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="resile")
def cli() -> None:
    """Elastic, fault-tolerant training."""


def main(argv: Sequence[str]) -> NoReturn:
    """Run a command and end the process: 0, 1 with one sentence, 2 for what cannot be used, 130 after Ctrl-C."""
    with quiet_if_reader_leaves():
        sys.exit(_exit_code(argv))


def _exit_code(argv: Sequence[str]) -> int:
    try:
        code = cli.main(args=list(argv), prog_name="resile", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:  # a group without its command
        click.echo(error.format_message())
        return 0
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "resile"
        _say(f"{path}: {' '.join(error.format_message().split())}")
        _say(f"`{path} --help` explains it")
        return BAD_USAGE
    except (click.ClickException, CommandError) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        for sentence in text.splitlines():
            _say(f"resile: {sentence}")
        return BAD_USAGE if isinstance(error, NotUsableError) else FAILED
    except (click.Abort, KeyboardInterrupt):
        _say("resile: interrupted")
        return INTERRUPTED


def _say(sentence: str) -> None:
    click.echo(sentence, err=True)
