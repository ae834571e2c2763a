"""The errors of a request to read or change jobs. Every text is one sentence, or several with one line each.

The command line turns `CommandError` into exit code 1 and `NotUsableError` into exit code 2; a page shows the text.
"""

from __future__ import annotations


class CommandError(Exception):
    """The request cannot be carried out."""


class NotUsableError(CommandError):
    """A flag, a file or a name that the user wrote cannot be used."""
