"""A loopback address for each node of a job, so that nodes on one machine can all listen on the same port."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from resile.api.ids import Rank

HOSTS = 254
"""How many addresses of one network 127.0.N.0/24 are used: all but .0 and .255."""
NETWORKS = 254


class AddressesUsedUpError(RuntimeError):
    """Raised if more nodes live at the same time than there are addresses (64,516)."""


class Addresses:
    """Hands out 127.0.1.1, 127.0.1.2, … to nodes. Skips addresses in use. Starts over after the last address.

    An address is used again as late as possible, because peers of its former node may still try to reach it.
    """

    def __init__(self) -> None:
        self._next = 0

    def take(self, in_use: Collection[str]) -> str:
        for _ in range(HOSTS * NETWORKS):
            network, host = divmod(self._next, HOSTS)
            self._next = (self._next + 1) % (HOSTS * NETWORKS)
            address = f"127.0.{network + 1}.{host + 1}"
            if address not in in_use:
                return address
        raise AddressesUsedUpError(f"all {HOSTS * NETWORKS} loopback addresses of the job are in use")

    def go_on_after(self, address: str) -> None:
        """Let `take` hand out only addresses after `address`. Call this for those of an earlier master."""
        parts = address.split(".")
        if len(parts) == 4 and all(part.isdigit() for part in parts):
            number = (int(parts[2]) - 1) * HOSTS + int(parts[3]) - 1
            self._next = max(self._next, (number + 1) % (HOSTS * NETWORKS))


class AddressBook:
    """Keeps an address for each rank. Some roles need this: their nodes get all addresses at their start (`TF_CONFIG`).

    It does the work of a cluster's Services. A rank has an address before its node has started. The rank's next node
    gets the same address, unless the previous node still lives.
    """

    def __init__(self, addresses: Addresses, places: Iterable[tuple[str, Rank]]) -> None:
        self._addresses = addresses
        self._of = {place: addresses.take(()) for place in places}

    def take(self, role: str, rank: Rank, in_use: Collection[str]) -> str:
        """The address for the next node of a rank: the rank's own address or, if that is in `in_use`, a new one.

        A new address becomes the rank's own. Raises `AddressesUsedUpError` if all addresses are in use.
        """
        known = self._of.get((role, rank))
        address = known if known and known not in in_use else self._addresses.take({*in_use, *self._of.values()})
        self._of[role, rank] = address
        return address

    def keep(self, role: str, rank: Rank, address: str) -> None:
        """Make `address` the address of a rank. Call this for a living node that an earlier master launched."""
        self._of[role, rank] = address

    def by_role(self, ports: dict[str, int]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for (role, _), address in sorted(self._of.items()):
            found.setdefault(role, []).append(f"{address}:{ports[role]}")
        return found
