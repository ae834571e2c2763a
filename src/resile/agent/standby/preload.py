"""Starts the template of a run: which modules it imports, for which runs, and with how much memory."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from resile.agent.options import LOCAL_RANK_MACRO, RunOptions
from resile.agent.standby.interpreter import Script, Unfit
from resile.agent.standby.standby import Standby, template
from resile.agent.workers import kernel_calls
from resile.agent.workers.env import CHANGING, shared_environment
from resile.api.ids import Bytes, MiB
from resile.checkpoint.memory_limits import short_of

log = logging.getLogger("resile.agent")

MEMORY = "RESILE_STANDBY_MEMORY"
"""The variable that limits the memory of a node's standbys, as in `1Gi`. Unset: all that machine and container have."""
USUAL = Bytes(384 * MiB)
"""Memory that an interpreter with torch is assumed to take until it is measured."""
TORCH = ("torch", "torch._dynamo")
"""Modules without which standbys are useless."""


def cold_because(options: RunOptions) -> str:
    """A sentence that says why no process of this run can start from a standby; empty if processes can."""
    command = options.command
    if command[:2] != (sys.executable, "-u") or len(command) < 3:
        return "it is not run by the interpreter that runs resile"
    program = command[3] if command[2] == "-m" and len(command) > 3 else command[2]
    if LOCAL_RANK_MACRO in program:
        return f"its name depends on the process ({program})"
    if command[2] != "-m" and not os.path.isfile(program):
        return f"{program} is not a plain file"
    if options.virtual_local_rank:
        return "with --virtual-local-rank every process has an environment of its own"
    rendezvous = options.rendezvous
    if rendezvous.max_nodes == 1 and not rendezvous.max_restarts and not options.managed:
        return "nothing is ever restarted (--max-restarts is 0)"
    return ""


class NotEnoughMemory(Exception):
    """There is no memory for another interpreter; the text is one sentence."""


class Preload:
    """Starts templates for one agent, and knows how much memory they take."""

    def __init__(self, options: RunOptions, environ: Mapping[str, str], stdin: int | None) -> None:
        self._environment = shared_environment(environ, options=options)
        self._environ = environ
        self._program = list(options.command[: 4 if "-m" in options.command[2:3] else 3])
        """The command without the script's arguments, which a standby gets when it begins."""
        self.preload = options.preload
        self._without: list[str] = []
        """Modules that only the training process can import."""
        self._stdin = stdin
        self._loop = asyncio.get_running_loop()
        self._began = 0.0
        self._need = USUAL

    def imports_torch(self) -> bool:
        """True if the script imports torch and sets no environment variables before that.

        May block, because it reads the script's files.
        """
        try:
            return bool(Script(self._program).wanted([]))
        except Unfit:
            return False

    def serves(self, environment: Mapping[str, str]) -> bool:
        """True if a process with these variables can start from a standby."""
        return {name: value for name, value in environment.items() if name not in CHANGING} == self._environment

    def leave_out(self, module: str) -> bool:
        """Do not import this module in later templates. Returns False if standbys are useless without the module."""
        if module in TORCH:
            return False
        self._without.append(module)
        return True

    def start(self, taken: int, *, urgent: bool) -> Standby:
        """Start a template, at full priority if `urgent`. Standbys of this node use `taken` bytes already.

        Raises NotEnoughMemory, or OSError if no process or file can be made.
        """
        if why := short_of(self._need, taken, what="a standby", limit=MEMORY, environ=self._environ):
            raise NotEnoughMemory(why)
        request = {
            "command": self._program,
            "preload": self.preload,
            "changing": sorted(CHANGING),
            "without": self._without,
            "urgent": urgent,
        }
        new = template(self._environment, request, self._stdin)
        self._began = self._loop.time()
        return new

    def imported(self, new: Standby, words: Mapping[str, Any], others: Iterable[Standby]) -> str:
        """Measure and log the memory of a template that has finished its imports. `words` is its report of them.

        Returns a sentence if the template and `others` take more memory than RESILE_STANDBY_MEMORY; otherwise empty.
        """
        self._need = Bytes(max(kernel_calls.memory_of(new.pid), 1))
        names = [name for name in words["modules"] if not name.startswith("torch.")]
        took = self._loop.time() - self._began
        log.info(
            "%s imported ahead in %.1f s (%d MiB)%s",
            ", ".join(names),
            took,
            self._need // MiB,
            f"; {words['left']}, so it is good for one start" if words["left"] else "",
        )
        if not self._environ.get(MEMORY):
            return ""
        total = self._need + sum(kernel_calls.memory_of(other.pid) for other in others)
        return short_of(total, what="standbys", limit=MEMORY, environ=self._environ)
