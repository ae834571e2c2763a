"""A free port for the store of a round, outside the range from which the system hands out ports for outgoing calls."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterable, Mapping

FIRST, LAST = 20000, 29999
TRIES = 200


def free_port(environ: Mapping[str, str] = os.environ) -> int:
    """A port that nobody listens on now; one of `HOST_PORTS` if that is set.

    Raises:
        OSError: none is free.
    """
    for port in _candidates(environ):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free for the store of a round")


def _candidates(environ: Mapping[str, str]) -> Iterable[int]:
    given = [int(word) for word in environ.get("HOST_PORTS", "").split(",") if word.strip().isdigit()]
    return given or random.sample(range(FIRST, LAST + 1), TRIES)
