"""Where training goes on, and what was broken off, is seen also in a script that says nothing about logging.

Python drops what is below WARNING until somebody asks for it, so the lines that tell of a recovery would be seen by
those alone who know of them. As long as nobody configures logging they go to stderr. Once somebody does, before or
after, what is written and where is theirs alone: no line comes twice, and none that they did not ask for.
"""

from __future__ import annotations

import logging
import sys

from resile.common.log_format import LOG_FORMAT

_UNASKED = logging.INFO - 1
"""The level that is set here: as good as INFO, and told from what a script sets itself."""
_UNHEARD = -1
"""Below every handler's level."""


def show_info_logs() -> None:
    """Have the lines of resile written to stderr, unless logging is configured. Fine to call often."""
    ours = logging.getLogger("resile")
    if ours.handlers or logging.getLogger().handlers:
        return
    ours.addHandler(_ScriptHandler())
    if ours.level == logging.NOTSET:
        ours.setLevel(_UNASKED)


class _ScriptHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr what nobody else does."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(LOG_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record in one piece, or leave it to those who were asked to."""
        source = logging.getLogger(record.name)
        if not self._is_alone(source):
            self._retire(source, record)
            return
        self.stream = sys.stderr  # as it is now
        super().emit(record)

    def _is_alone(self, logger: logging.Logger | None) -> bool:
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True

    def _retire(self, source: logging.Logger, record: logging.LogRecord) -> None:
        """Logging was configured since. It stays in place, silent: handlers are being gone through."""
        ours = logging.getLogger("resile")
        if ours.level != _UNASKED:
            return
        ours.setLevel(logging.NOTSET)
        if not source.isEnabledFor(record.levelno):
            record.levelno = _UNHEARD  # it would not have been made
