"""Logs for whom or what a node waits: its master, or the other nodes of a round."""

from __future__ import annotations

import asyncio
import logging

from resile.agent.master_launcher import is_loopback
from resile.agent.options import Endpoint
from resile.api.timeouts import Timeouts
from resile.protocol.reports import RendezvousConfig

log = logging.getLogger("resile.agent")

AWAY_EVERY = 10.0
"""Seconds between two log lines about a master that cannot be reached."""
FIRST_AFTER = 2.0
AGAIN_EVERY = 30.0
"""Seconds that a node waits for a round before the first log line about it, and between later ones."""


class WaitLog:
    def __init__(self, rendezvous: RendezvousConfig, timeouts: Timeouts, place: Endpoint | None = None) -> None:
        """`place` is the master's endpoint, which all nodes were given. It is None if a platform started the nodes."""
        self._rendezvous = rendezvous
        self._timeouts = timeouts
        self._place = place
        self._told_away_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def away(self, endpoint: Endpoint | None, seconds: float, why: str, patience: float) -> None:
        """Log that the master at `endpoint` cannot be reached, and `why`, but at most once in AWAY_EVERY seconds.

        The master has been away for `seconds`. Nothing is logged after `patience` seconds, or if `endpoint` is None.
        """
        if seconds >= patience or endpoint is None:
            return
        if self._told_away_at is None or not 0 <= seconds - self._told_away_at < AWAY_EVERY:
            self._told_away_at = seconds
            left = f"trying for {patience:g} s" if seconds < 1.0 else f"trying for another {patience - seconds:.0f} s"
            log.warning("cannot reach %s (%s); %s", endpoint, _reason(why, endpoint), left)

    def joined(self, again: bool) -> None:
        """Log regularly that this node waits for a round, until `over` is called. `again`: it was in a round before."""
        self.over()
        self._timer = asyncio.get_running_loop().call_later(FIRST_AFTER, self._tell, FIRST_AFTER, again)

    def met(self) -> None:
        self._told_away_at = None

    def over(self) -> None:
        """Stop the log lines of `joined`, because a round came or the node leaves."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, waited: float, again: bool) -> None:
        place = self._place
        where = "" if place is None else f" at {place}"
        so_far = f" ({waited:.0f} s so far)" if waited > 9 else ""
        hint = ""
        if place is not None and is_loopback(place.host) and not again:
            hint = f"; {place.host} is this machine alone: nodes on other machines need one --rdzv-endpoint=HOST:PORT"
            hint += ", the same for all, with a HOST that all can reach"
        level = logging.WARNING if hint else logging.INFO
        log.log(level, "waiting for other nodes%s: %s%s%s", where, self._rules(again), so_far, hint)
        self._timer = asyncio.get_running_loop().call_later(AGAIN_EVERY, self._tell, waited + AGAIN_EVERY, again)

    def _rules(self, again: bool) -> str:
        rendezvous, timeouts = self._rendezvous, self._timeouts
        join = timeouts.join if rendezvous.join_timeout is None else rendezvous.join_timeout
        if rendezvous.min_nodes == rendezvous.max_nodes:
            return f"--nnodes={rendezvous.min_nodes} have to come within {join:g} s"
        call = timeouts.last_call if rendezvous.last_call is None else rendezvous.last_call
        wait = "" if again else f", and {call:g} s after enough have come it begins without the rest"
        nodes = f"{rendezvous.min_nodes}:{rendezvous.max_nodes}"
        return f"at least {rendezvous.min_nodes} of --nnodes={nodes} within {join:g} s{wait}"


def _reason(why: str, endpoint: Endpoint) -> str:
    _, named, cause = why.partition(f"{endpoint}: ")
    return cause if named else why
