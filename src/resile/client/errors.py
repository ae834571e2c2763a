"""How a command says that it cannot: one sentence on standard error and an exit code, never a traceback."""

from __future__ import annotations

import click

FAILED = 1
BAD_USAGE = 2
INTERRUPTED = 130
SIGNALLED = 128
"""Added to the number of the signal that ended a command."""


class CommandError(click.ClickException):
    """The command cannot do what was asked; the text is one sentence (or one per line, where there are several)."""

    exit_code = FAILED


class NotUsableError(CommandError):
    """What the user wrote (a flag, a file, a name) cannot be used as it is."""

    exit_code = BAD_USAGE
