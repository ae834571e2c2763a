"""The click group of all commands except `run`: imports a command's module on use, turns errors into exit codes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from resile import __version__
from resile.cli.common_options import say
from resile.cli.main import COMMANDS
from resile.cli.process_exit import BAD_USAGE, FAILED, INTERRUPTED, quiet_if_reader_leaves
from resile.client.errors import CommandError, NotUsableError


class Commands(click.Group):
    """Imports the module of a command only when that command is run."""

    def list_commands(self, _: click.Context) -> list[str]:
        return [name for name in COMMANDS if name != "run"]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(context):
            return None
        module = "suspend" if name == "resume" else name
        command = getattr(importlib.import_module(f"resile.cli.commands.{module}"), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="resile")
def cli() -> None:
    """Elastic, fault-tolerant training."""


def main(argv: Sequence[str]) -> NoReturn:
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
        say(f"{path}: {' '.join(error.format_message().split())}")
        say(f"`{path} --help` explains it")
        return BAD_USAGE
    except (click.ClickException, CommandError) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        for sentence in text.splitlines():
            say(f"resile: {sentence}")
        return BAD_USAGE if isinstance(error, NotUsableError) else FAILED
    except (click.Abort, KeyboardInterrupt):
        say("resile: interrupted")
        return INTERRUPTED
