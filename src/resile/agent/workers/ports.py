"""Finds a free port for the store of a round, outside the range that the system uses for outgoing connections."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping

FIRST, LAST = 20000, 29999
TRIES = 200


class NoFreePort(Exception):
    """All ports that could be used are in use; the text is one sentence."""


def free_port(environ: Mapping[str, str] = os.environ) -> int:
    """A port that no process listens on. It is one of `HOST_PORTS` if `environ` has that. Raises NoFreePort."""
    given = environ.get("HOST_PORTS", "")
    listed = [int(word) for word in given.split(",") if word.strip().isdigit()]
    for port in listed or random.sample(range(FIRST, LAST + 1), TRIES):
        with socket.socket() as probe:
            # As the store itself does, so that closed connections of the last store do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    which = f"of HOST_PORTS={given}" if listed else f"of {TRIES} tried from {FIRST} to {LAST}"
    raise NoFreePort(f"no port {which} is free for the store of a round")
