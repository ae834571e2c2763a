"""Logs a problem that recurs without repeating it each time."""

from __future__ import annotations

import logging


class LogOnce:
    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: set[str] = set()

    def say(self, words: str, *, about: str = "", level: int = logging.WARNING) -> None:
        """Log a message once. If `about` is given, only the first message with this `about` is logged."""
        if (about or words) not in self._said:
            self._said.add(about or words)
            self._log.log(level, "%s", words)


class LogOnChange:
    def __init__(self, log: logging.Logger, level: int = logging.ERROR) -> None:
        self._log = log
        self._level = level
        self._last = ""

    def say(self, words: str) -> None:
        """Log the message unless it equals the last one. An empty message means that all is well, and is not logged."""
        if words and words != self._last:
            self._log.log(self._level, "%s", words)
        self._last = words
