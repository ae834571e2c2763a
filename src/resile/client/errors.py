"""The errors of a request to read or change jobs. Every text is one sentence, or several with one line each.

The command line turns `CommandError` into exit code 1 and `NotUsableError` into exit code 2; a page shows the text.
"""

from __future__ import annotations

from collections.abc import Collection


class CommandError(Exception):
    """Raised if a request to read or change jobs cannot be carried out."""


class NotUsableError(CommandError):
    """Raised if a flag, a file or a name that the user wrote cannot be used."""


def check_roles(job: str, asked: Collection[str], known: Collection[str]) -> None:
    """Raise `CommandError` if an `asked` role is not in `known`, the roles of the job. Call this before any change."""
    for role in asked:
        if role not in known:
            raise CommandError(f"job {job} has no role {role!r}; known are {', '.join(known)}; nothing was changed")
