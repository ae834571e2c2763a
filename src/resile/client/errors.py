"""What keeps a request from being carried out. Every text is one sentence, or several with a line each.

The command line turns `CommandError` into exit code 1 and `NotUsableError` into exit code 2; a page shows the text.
"""

from __future__ import annotations


class CommandError(Exception):
    """What was asked cannot be done."""


class NotUsableError(CommandError):
    """What the user wrote (a flag, a file, a name) cannot be used as it is."""
