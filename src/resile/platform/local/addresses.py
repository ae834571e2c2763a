"""A loopback address for each node of a job, so that nodes on one machine can all listen on the same port."""

from __future__ import annotations

from collections.abc import Collection

HOSTS = 254
"""Addresses in one 127.0.N.0/24, without .0 and .255."""
NETWORKS = 254


class AddressesUsedUpError(RuntimeError):
    """More nodes live at the same time than there are addresses (64,516)."""


class Addresses:
    """Hands out 127.0.1.1, 127.0.1.2, … and starts over at the end; one that is in use is skipped.

    An address rests as long as possible before it comes back: peers of its former node may still try to reach it.
    """

    def __init__(self) -> None:
        self._next = 0

    def take(self, in_use: Collection[str]) -> str:
        """The next free address.

        Raises:
            AddressesUsedUpError: all are in use.
        """
        for _ in range(HOSTS * NETWORKS):
            network, host = divmod(self._next, HOSTS)
            self._next = (self._next + 1) % (HOSTS * NETWORKS)
            address = f"127.0.{network + 1}.{host + 1}"
            if address not in in_use:
                return address
        raise AddressesUsedUpError(f"all {HOSTS * NETWORKS} loopback addresses of the job are in use")

    def go_on_after(self, address: str) -> None:
        """Continue behind an address that an earlier master handed out, if that is further on."""
        parts = address.split(".")
        if len(parts) == 4 and all(part.isdigit() for part in parts):
            number = (int(parts[2]) - 1) * HOSTS + int(parts[3]) - 1
            self._next = max(self._next, (number + 1) % (HOSTS * NETWORKS))
