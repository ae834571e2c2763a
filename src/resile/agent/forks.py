"""Standbys that were asked for and have not answered yet.

A warm interpreter forks another one when it is asked to, and that one answers on a line of its own. It is an orphan at
first, so the agent adopts orphans until the last of them has come. Nobody is waited for here: whoever does not answer
within `FORK_WITHIN` makes the interpreter that was asked count as one that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
from collections.abc import Callable

from resile.agent import kernel
from resile.agent.interpreter import FORK, MAX_PACKET
from resile.agent.standby import COLLECT_WITHIN, Interpreter
from resile.api.ids import Seconds

FORK_WITHIN = Seconds(10.0)

Answered = Callable[[Interpreter | None], None]
"""Told of an interpreter that was asked for; None if it was lost before it was ready."""


class Forks:
    """The lines of all that are on their way."""

    def __init__(self, hangs: Callable[[], None]) -> None:
        """`hangs` is called for each that does not answer in time."""
        self._hangs = hangs
        self._loop = asyncio.get_running_loop()
        self._lines: dict[socket.socket, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def ask(self, old: Interpreter, answered: Answered) -> bool:
        """Ask for one more; False if there is no room for its line."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return False
        self._lines[ours] = self._loop.call_later(FORK_WITHIN, self._hangs)
        self._loop.add_reader(ours, lambda: answered(self._arrived(ours)))
        kernel.adopt_orphans(True)
        with contextlib.suppress(OSError), theirs:  # it may be ending: then this line ends, too
            old.send(FORK, [theirs.fileno()])
        return True

    def rest(self) -> list[Interpreter]:
        """Wait for those that are on their way, a moment at most for each, and tell nobody else of them."""
        late = []
        for line in list(self._lines):
            select.select([line], [], [], COLLECT_WITHIN)
            if (interpreter := self._arrived(line)) is not None:
                late.append(interpreter)
        return late

    def _arrived(self, line: socket.socket) -> Interpreter | None:
        """The interpreter that has just answered on this line; None if there is none."""
        self._loop.remove_reader(line)
        self._lines.pop(line).cancel()
        if not self._lines:
            kernel.adopt_orphans(False)
        try:
            return Interpreter(json.loads(line.recv(MAX_PACKET, socket.MSG_DONTWAIT))["ready"], line)
        except (OSError, ValueError):
            line.close()
            return None
