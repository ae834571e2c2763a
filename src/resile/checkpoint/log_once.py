"""What goes wrong at every save is said, but not at every save."""

from __future__ import annotations

import logging


class LogOnce:
    """Says each thing once."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: set[str] = set()

    def say(self, words: str, *, about: str = "", level: int = logging.WARNING) -> None:
        """Say it, unless it was said.

        Args:
            words: a sentence.
            about: what it is about, if the words for the same thing differ from time to time.
            level: of the log.
        """
        if (about or words) not in self._said:
            self._said.add(about or words)
            self._log.log(level, "%s", words)


class LogOnChange:
    """Says what went wrong, and is silent while it stays the same."""

    def __init__(self, log: logging.Logger, level: int = logging.ERROR) -> None:
        self._log = log
        self._level = level
        self._last = ""

    def say(self, words: str) -> None:
        """Say it, unless it was the last that was said; empty words say that all is well, and are not written."""
        if words and words != self._last:
            self._log.log(self._level, "%s", words)
        self._last = words
