"""Every command but `run`: found by name, loaded when asked for, and the one place where errors become exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from resile import __version__
from resile.client.errors import BAD_USAGE, FAILED, INTERRUPTED

MODULES = {
    "submit": "submit",
    "get": "get",
    "describe": "describe",
    "logs": "logs",
    "scale": "steer",
    "suspend": "steer",
    "resume": "steer",
    "delete": "steer",
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
    try:
        code = cli.main(args=list(argv), prog_name="resile", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:  # a group without its command
        click.echo(error.format_message())
        sys.exit(0)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "resile"
        _say(f"{path}: {' '.join(error.format_message().split())}")
        _say(f"`{path} --help` explains it")
        sys.exit(BAD_USAGE)
    except click.ClickException as error:
        for sentence in error.format_message().splitlines():
            _say(f"resile: {sentence}")
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _say("resile: interrupted")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        sys.exit(FAILED)  # as click does where it notices first


def _say(sentence: str) -> None:
    click.echo(sentence, err=True)
