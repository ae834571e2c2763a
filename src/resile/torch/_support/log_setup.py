"""Shows resile's INFO logs in scripts that configure no logging.

Python drops messages below WARNING by default, so a user would have to know of the messages about a recovery to see
them. As long as logging is not configured they go to stderr. Once the script configures it, before or after, only its
own handlers write: no message comes twice, and none that was not asked for.
"""

from __future__ import annotations

import logging
import sys

FORMAT = "[%(asctime)s] [%(levelname)s] %(message)s"


_UNASKED = logging.INFO - 1
"""The level that is set here. It works like INFO, but differs from any level that a script sets."""
_UNHEARD = -1
"""Below every handler's level."""


def show_info_logs() -> None:
    """Write resile's messages to stderr unless logging is configured. Idempotent."""
    ours = logging.getLogger("resile")
    if ours.handlers or logging.getLogger().handlers:
        return
    ours.addHandler(_ScriptHandler())
    if ours.level == logging.NOTSET:
        ours.setLevel(_UNASKED)


class _ScriptHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes messages to stderr that no other handler writes."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or leave it to the script's own handlers."""
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
        """Stop writing, because logging was configured since. Removal is unsafe while handlers are being iterated."""
        ours = logging.getLogger("resile")
        if ours.level != _UNASKED:
            return
        ours.setLevel(logging.NOTSET)
        if not source.isEnabledFor(record.levelno):
            record.levelno = _UNHEARD  # without our level this record would not exist
