"""The exit codes of `resile`. A failed job and a request that cannot be carried out both give 1."""

from __future__ import annotations

FAILED = 1
BAD_USAGE = 2
INTERRUPTED = 130
SIGNALLED = 128
"""Added to the number of the signal that ended a command."""
