"""Standbys that are being forked, and the queue of processes that wait for one.

A template forks a standby when the agent asks, and the standby answers on a socket of its own. The standby is an orphan
at first, so the agent adopts orphans until the last standby has answered. Nothing here blocks. If a standby does not
answer within `FORK_WITHIN`, its template counts as hung. A process that waits gets the first standby that is ready, and
may have a deadline of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import select
import socket
from collections.abc import Callable

from resile.agent.standby.interpreter import FORK, MAX_PACKET
from resile.agent.standby.standby import COLLECT_WITHIN, Standby
from resile.agent.workers import kernel_calls
from resile.api.ids import Seconds

log = logging.getLogger("resile.agent")

FORK_WITHIN = Seconds(10.0)

Come = Callable[[Standby | None], None]
"""Called with a new standby; with None if there will be none."""


class Forks:
    def __init__(self, hangs: Callable[[], None]) -> None:
        """`hangs` is called for each standby that does not answer in time."""
        self._hangs = hangs
        self._loop = asyncio.get_running_loop()
        self._lines: dict[socket.socket, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def ask(self, old: Standby, answered: Come) -> bool:
        """Let `old` fork a standby. Calls `answered` when the fork is ready or lost. False if no socket can be made."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return False
        self._lines[ours] = self._loop.call_later(FORK_WITHIN, self._hangs)
        self._loop.add_reader(ours, lambda: answered(self._arrived(ours)))
        kernel_calls.adopt_orphans(True)
        with contextlib.suppress(OSError), theirs:  # the template may be ending; then this socket ends too
            old.send(FORK, [theirs.fileno()])
        return True

    def rest(self) -> list[Standby]:
        """Wait for the standbys that are being forked, at most COLLECT_WITHIN seconds each. Returns the ready ones.

        Their callbacks (`answered`) are not called.
        """
        late = []
        for line in list(self._lines):
            select.select([line], [], [], COLLECT_WITHIN)
            if (interpreter := self._arrived(line)) is not None:
                late.append(interpreter)
        return late

    def _arrived(self, line: socket.socket) -> Standby | None:
        self._loop.remove_reader(line)
        self._lines.pop(line).cancel()
        if not self._lines:
            kernel_calls.adopt_orphans(False)
        try:
            return Standby(json.loads(line.recv(MAX_PACKET, socket.MSG_DONTWAIT))["ready"], line)
        except (OSError, ValueError):
            line.close()
            return None


class ForkQueue:
    def __init__(self) -> None:
        self._all: dict[Come, asyncio.TimerHandle | None] = {}
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, come: Come, within: Seconds | None = None) -> Callable[[], None]:
        """Queue a process that waits for a standby.

        `come` is called with the standby, or with None if there is none after `within` seconds. Returns a function that
        takes the process off the queue.
        """
        self._all[come] = self._loop.call_later(within, self._late, come) if within is not None else None
        return lambda: self._leave(come)

    def serve(self, standby: Standby | None) -> None:
        """Give a standby to the process that has waited longest. With None, that process starts from scratch."""
        come = next(iter(self._all))
        self._leave(come)
        come(standby)

    def disappoint(self) -> None:
        """Call all callbacks with None, so that the waiting processes start from scratch."""
        while self._all:
            self.serve(None)

    def dismiss(self) -> None:
        """Empty the queue without calling the callbacks. The caller ends the processes that waited."""
        for come in list(self._all):
            self._leave(come)

    def _late(self, come: Come) -> None:
        log.info("no standby came in time; a process starts from scratch")
        self._leave(come)
        come(None)

    def _leave(self, come: Come) -> None:
        timer = self._all.pop(come, None)
        if timer is not None:
            timer.cancel()
