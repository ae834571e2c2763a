"""Shows resile's INFO logs in scripts that configure no logging.

Python drops messages below WARNING by default, so users would not see the messages about a recovery. As long as the
script configures no logging, resile's messages go to stderr. Once the script configures logging, earlier or later, only
its own handlers write: no message comes twice, and none comes that the script's levels exclude.
"""

from __future__ import annotations

import logging
import sys

_UNASKED = logging.INFO - 1
"""The level that `show_info_logs` sets. It works like INFO, but differs from any level that a script sets."""
_UNHEARD = -1
"""A level below that of every handler, so that no handler writes the record."""


def show_info_logs() -> None:
    """Write resile's log messages to stderr as long as the script configures no logging. Idempotent."""
    ours = logging.getLogger("resile")
    if ours.handlers or logging.getLogger().handlers:
        return
    handler = _ScriptHandler()
    handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(_UNASKED)


class _ScriptHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes a log message of resile to stderr if no other handler gets it."""

    def emit(self, record: logging.LogRecord) -> None:
        source = logging.getLogger(record.name)
        if not self._is_alone(source):
            self._retire(source, record)
            return
        self.stream = sys.stderr  # which the script may have replaced
        super().emit(record)

    def _is_alone(self, logger: logging.Logger | None) -> bool:
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True

    def _retire(self, source: logging.Logger, record: logging.LogRecord) -> None:
        """Undo the level that `show_info_logs` has set, because another handler gets the messages now.

        If `record` exists only because of that level, no handler writes it. `source` is the logger that made `record`.
        This handler is not removed, because that is unsafe while logging iterates over handlers.
        """
        ours = logging.getLogger("resile")
        if ours.level != _UNASKED:
            return
        ours.setLevel(logging.NOTSET)
        if not source.isEnabledFor(record.levelno):
            record.levelno = _UNHEARD  # without our level this record would not exist
