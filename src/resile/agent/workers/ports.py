"""Finds a free port for the store of a round, outside the range that the system uses for outgoing connections."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterable, Mapping

FIRST, LAST = 20000, 29999
TRIES = 200


class NoFreePort(Exception):
    """All ports that could be used are in use; the text is one sentence."""


def free_port(environ: Mapping[str, str] = os.environ) -> int:
    """A port that no process listens on. It is one of `HOST_PORTS` if `environ` has that. Raises NoFreePort."""
    for port in _candidates(environ):
        with socket.socket() as probe:
            # As the store itself does, so that closed connections of the last store do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    given = environ.get("HOST_PORTS", "")
    which = f"of HOST_PORTS={given}" if _listed(given) else f"of {TRIES} tried from {FIRST} to {LAST}"
    raise NoFreePort(f"no port {which} is free for the store of a round")


def _candidates(environ: Mapping[str, str]) -> Iterable[int]:
    return _listed(environ.get("HOST_PORTS", "")) or random.sample(range(FIRST, LAST + 1), TRIES)


def _listed(words: str) -> list[int]:
    return [int(word) for word in words.split(",") if word.strip().isdigit()]
