"""Warm standbys: interpreters that have imported torch and wait to take the place of a lost process.

Importing torch is most of what a restart costs. So the agent has one interpreter, the template, import what the script
imports, and fork as many standbys as there may be processes to replace at once. They cost little beyond the template,
since what was imported is shared. The first process of a node starts from it, too: while the node is still finding its
master the import is under way, and as soon as it is done there are standbys. `resile.agent.interpreter` tells what they
do, and `docs/decisions/0011-warm-standbys.md` why.

They are there to help and must never hurt. Whatever goes wrong with one (it was killed, it hangs, a file changed since
it was imported, there is no memory), the process that was wanted is started from scratch. Too many failures in a row,
and there are none any more; a sentence says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from resile.agent import kernel
from resile.agent.interpreter import FORK, MAX_PACKET, NAME, Script, Unfit
from resile.agent.options import LOCAL_RANK_MACRO, RunOptions
from resile.agent.standby import COLLECT_WITHIN, Interpreter, Order, template
from resile.agent.workerenv import CHANGING, shared_environment
from resile.api.ids import Bytes, MiB, Seconds
from resile.checkpoint.room import short_of

log = logging.getLogger("resile.agent")

MEMORY = "RESILE_STANDBY_MEMORY"
"""How much memory standbys may take on a node, as in `1Gi`; without it, what machine and container have."""
USUAL = Bytes(384 * MiB)
"""What torch takes in an interpreter, as long as it was not measured."""
WARM_WITHIN = Seconds(300.0)
"""For imports; a network disk may be slow."""
FORK_WITHIN = Seconds(10.0)
REFILL_AFTER = Seconds(0.5)
"""Between the use of a standby and the fork of another: those that start have the cores first."""
YIELDED_FOR = Seconds(60.0)
"""Before memory that was given back is asked for again; if it is still short, there is a sentence and no standby."""
TORCH = ("torch", "torch._dynamo")
"""What standbys are for: without it there is no use in them."""
MAX_FAILURES = 5
"""Templates and standbys that are lost in a row before there are none any more."""
ASIDE_FOR = Seconds(5.0)
"""After a template became a process and left no other, until one is made: those that start have the cores first."""
FIRST_PAUSE = Seconds(1.0)
"""Before a lost template is made again; doubled with every failure."""


class Facts(NamedTuple):
    """What is to be seen of standbys from outside."""

    ready: int = 0
    memory: Bytes = Bytes(0)
    """Of all of them and their template."""


def cold_because(options: RunOptions) -> str:
    """Why no process of this run can start from a standby: one sentence; empty if it can."""
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
    meeting = options.meeting
    if meeting.max_nodes == 1 and not meeting.max_restarts and not options.managed:
        return "nothing is ever restarted (--max-restarts is 0)"
    return ""


def _imports_torch(command: list[str]) -> bool:
    """Whether an import of torch is a start for a process of this command, told from its source."""
    try:
        return bool(Script(command).wanted([]))
    except Unfit:
        return False


Come = Callable[[Interpreter | None], None]
"""Told of a standby that was waited for; None if there will be none."""


class Standbys:
    """All warm interpreters of one agent."""

    def __init__(
        self,
        options: RunOptions,
        environ: Mapping[str, str] = os.environ,
        *,
        stdin: int | None = None,
        changed: Callable[[Facts], None] = lambda _: None,
    ) -> None:
        """Nothing runs before `warm`.

        Args:
            options: the flags.
            environ: the agent's own variables.
            stdin: where training processes read from; None: where the agent does.
            changed: told whenever there are more or fewer of them.
        """
        self._wanted = options.standbys
        self._off = cold_because(options) if self._wanted else "--standbys is 0"
        self._environment = shared_environment(environ, options=options, run_id=options.run_id)
        self._environ = environ
        program = options.command[: 4 if "-m" in options.command[2:3] else 3]  # what it is told comes with the order
        self._request = {"command": program, "preload": options.preload, "changing": sorted(CHANGING)}
        self._without: list[str] = []
        """Modules that cannot be imported ahead."""
        self._stdin = stdin
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._template: Interpreter | None = None
        self._warm = False
        """The template has imported everything and can fork."""
        self._began = 0.0
        self._ready: list[Interpreter] = []
        self._beginning: set[Interpreter] = set()
        """Those that were told to begin and have not said that they have."""
        self._coming: dict[socket.socket, asyncio.TimerHandle] = {}
        """Lines of standbys that were asked for and have not answered."""
        self._heir: socket.socket | None = None
        """The one of these lines on which the next template will answer."""
        self._hurried: Interpreter | None = None
        """It was the template, imports, and is to leave an heir before it becomes a process."""
        self._awaiting: list[Come] = []
        """Those who wait for a standby that is forked when the import is done."""
        self._reading: asyncio.Future[bool] | None = None
        """Whether the script imports torch; nobody has asked for a process yet."""
        self._failures = 0
        self._failing = False
        """Something went wrong since the last time that standbys were wanted."""
        self._need = USUAL
        self._said = ""
        self._timer: asyncio.TimerHandle | None = None
        self.facts = Facts()

    # what the agent asks ----------------------------------------------------------------------------------------------

    def ahead(self) -> None:
        """Import at once, so that the first process can start from there, if the script imports torch and nothing else.

        What `--preload` names may turn out to be not importable ahead, which would delay the first start.
        """
        if not self._off and not self._request["preload"]:
            self._reading = self._loop.run_in_executor(None, _imports_torch, list(self._request["command"]))
            self._reading.add_done_callback(self._read)

    def _read(self, reading: asyncio.Future[bool]) -> None:
        wanted = not reading.cancelled() and reading.result()
        if wanted and self._reading is reading and not self._off and self._template is None:
            self._warm_up(urgent=True)
        self._reading = None

    def later(self, seconds: float) -> None:
        """Warm up when so much time has passed in which nobody asked for anything else."""
        self._calm()
        self._timer = self._loop.call_later(seconds, self.warm)

    def warm(self) -> None:
        """Have as many standbys as were asked for, unless that is so, under way or hopeless."""
        self._calm()
        self._failing = False
        if self._off:
            return
        if self._template is None:
            if len(self._ready) < self._wanted and self._heir is None and self._hurried is None:
                self._warm_up()
        elif self._warm:
            self._fork()

    def take(self, environment: Mapping[str, str]) -> Interpreter | None:
        """A standby for a process with these variables, or the template if it is still importing; None: there is none.

        An import that is under way is ahead of one that starts now, and beside it both would take longer.
        """
        self._reading = None
        if not self._ready and (self._template is None or self._warm):
            return None
        if not self._serves(environment):
            return None
        if self._ready:
            taken = self._ready.pop(0)
        else:
            assert self._template is not None
            taken, self._template = self._template, None
            taken.hurry()
            self._hurried = taken
        self._tell()
        return taken

    def wait_for(self, environment: Mapping[str, str], come: Come) -> Callable[[], None] | None:
        """Have a standby that is forked as soon as an import that is under way is done; None: there is no such import.

        Returns:
            What calls it off.
        """
        if (self._hurried is None and self._heir is None) or not self._serves(environment):
            return None
        self._awaiting.append(come)
        return lambda: self._awaiting.remove(come)

    def _serves(self, environment: Mapping[str, str]) -> bool:
        if {name: value for name, value in environment.items() if name not in CHANGING} == self._environment:
            return True
        self._throw_away("its environment is not the one that standbys were made with")
        return False

    def begin(
        self,
        standby: Interpreter,
        command: Sequence[str],
        environment: Mapping[str, str],
        streams: Sequence[int],
        begun: Callable[[], None],
        lost: Callable[[int], None],
    ) -> None:
        """Have a standby become a process: either `begun` is called or, with its exit code, `lost`."""
        try:
            order = Order(command, environment, streams)
        except OSError:
            order = None
            standby.kill()
        told = False

        def on_words(words: dict[str, Any]) -> None:
            if "begun" in words:
                standby.let_go()
                self._beginning.discard(standby)
                self._failures = 0
                if self._warm:
                    self.later(REFILL_AFTER)
                begun()
            elif "warm" in words:
                self._imported(standby, words)
                if why := self._too_big():
                    self._give_up(why)
                elif words["left"]:
                    self._disappoint()
                    self.later(ASIDE_FOR)
                else:
                    self._make_heir(standby)
                self._hurried = None
                if order is not None:
                    order.give(standby)
            elif "again" in words:
                nonlocal told
                told = True
                self._unfit(**words)
            elif "unfit" in words:
                self._throw_away(words["unfit"])

        def on_end() -> None:
            if order is not None:
                order.close()
            self._beginning.discard(standby)
            if self._hurried is standby:
                self._hurried = None
                self._disappoint()
            returncode = standby.wait()
            os.close(standby.pidfd)
            if not told:
                self._failed(f"a standby (pid {standby.pid}) was lost before it began")
            lost(returncode)

        self._beginning.add(standby)
        standby.watch(on_words, on_end)
        if order is not None and not standby.importing:
            order.give(standby)

    def discard(self, standby: Interpreter) -> None:
        """End one that was taken, and not begun."""
        standby.end()
        if self._hurried is standby:
            self._hurried = None
            self._disappoint()

    def close(self) -> None:
        """Leave nothing behind."""
        self._off = self._off or "this node leaves"
        self._calm()
        self._drop()

    # warming up -------------------------------------------------------------------------------------------------------

    def _warm_up(self, *, urgent: bool = False) -> None:
        if why := short_of(self._need, self.facts.memory, what="a standby", limit=MEMORY, environ=self._environ):
            self._say(f"no standbys for now, lost processes start from scratch: {why}")
            return
        try:
            self._collect()
            request = self._request | {"without": self._without, "urgent": urgent}
            self._template = new = template(self._environment, request, self._stdin)
        except OSError as error:
            self._failed(f"no interpreter can be started: {os.strerror(error.errno or 0)}")
            return
        self._warm, self._began = False, self._loop.time()
        new.watch(self._heard, self._template_ended)
        new.kill_after(WARM_WITHIN)

    def _heard(self, words: dict[str, Any]) -> None:
        new = self._template
        assert new is not None
        new.calm()
        if "unfit" in words:
            self._unfit(**words)
            return
        self._imported(new, words)
        if why := self._too_big():
            self._give_up(why)
        elif words["left"]:
            self._template = None
            self._came(new)
            self.later(REFILL_AFTER)
        else:
            self._warm = True
            self._fork()

    def _imported(self, new: Interpreter, words: Mapping[str, Any]) -> None:
        self._need = Bytes(max(kernel.memory_of(new.pid), 1))
        names = [name for name in words["modules"] if not name.startswith("torch.")]
        took = self._loop.time() - self._began
        log.info(
            "%s imported ahead in %.1f s (%d MiB)%s",
            ", ".join(names),
            took,
            self._need // MiB,
            f"; {words['left']}, so it is good for one start" if words["left"] else "",
        )

    def _unfit(self, unfit: str, *, again: bool, quiet: bool, without: str) -> None:
        """No standby comes of this interpreter; perhaps one does of another."""
        if without and without not in TORCH:
            log.info("%s is not imported ahead: %s", without, unfit)
            self._without.append(without)
            if self._template is None:  # a process waited for this one, and starts from scratch now
                self.later(ASIDE_FOR)
            else:
                self._drop()
                self._warm_up()
        elif again:
            self._failed(unfit)
        else:
            self._give_up(unfit, quiet=quiet)

    def _too_big(self) -> str:
        """Why what was imported takes more memory than it may: it has it already, so nothing more is needed."""
        if not self._environ.get(MEMORY):
            return ""
        total = self._need + sum(kernel.memory_of(standby.pid) for standby in self._ready)
        return short_of(total, what="standbys", limit=MEMORY, environ=self._environ)

    def _template_ended(self) -> None:
        old, self._template, self._warm = self._template, None, False
        assert old is not None
        old.kill()
        old.wait()
        os.close(old.pidfd)
        self._failed(f"the interpreter that makes standbys (pid {old.pid}) was lost")

    # forking ----------------------------------------------------------------------------------------------------------

    def _fork(self) -> None:
        """Ask for as many standbys as are missing."""
        assert self._template is not None
        self._collect()
        for _ in range(self._wanted + len(self._awaiting) - len(self._ready) - len(self._coming)):
            self._ask(self._template)

    def _make_heir(self, old: Interpreter) -> None:
        """Have an interpreter that becomes a process leave another one as the template."""
        if self._template is None and self._heir is None and not self._off:
            self._heir = self._ask(old)
        if self._heir is None:
            self._disappoint()

    def _ask(self, old: Interpreter) -> socket.socket | None:
        """Ask for one more; orphans are ours until the last of them has come. The line on which it will answer."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None
        self._coming[ours] = self._loop.call_later(FORK_WITHIN, self._hangs)
        self._loop.add_reader(ours, self._answered, ours)
        kernel.adopt_orphans(True)
        with contextlib.suppress(OSError), theirs:  # it may be ending: then this line ends, too
            old.send(FORK, [theirs.fileno()])
        return ours

    def _answered(self, line: socket.socket) -> None:
        heir = line is self._heir
        standby = self._arrived(line)
        if standby is None:
            self._failed("a standby was lost before it was ready")
        elif heir:
            self._template, self._warm = standby, True
            standby.watch(self._heard, self._template_ended)
            self._fork()
        else:
            self._came(standby)

    def _hangs(self) -> None:
        """The template does not do what it is asked to do; those that are ready came from it."""
        self._drop()
        self._failed("the interpreter that makes standbys hangs")

    def _arrived(self, line: socket.socket) -> Interpreter | None:
        """The standby that has just answered on this line; None if there is none."""
        self._loop.remove_reader(line)
        self._coming.pop(line).cancel()
        if line is self._heir:
            self._heir = None
        if not self._coming:
            kernel.adopt_orphans(False)
        try:
            return Interpreter(json.loads(line.recv(MAX_PACKET, socket.MSG_DONTWAIT))["ready"], line)
        except (OSError, ValueError):
            line.close()
            return None

    def _came(self, standby: Interpreter) -> None:
        def gone() -> None:
            self._ready.remove(standby)
            standby.wait()
            os.close(standby.pidfd)
            self._tell()
            self._failed(f"a standby (pid {standby.pid}) was lost")

        standby.watch(lambda _: None, gone)
        if self._awaiting:
            self._awaiting.pop(0)(standby)
        else:
            self._ready.append(standby)
        if not self._coming:
            self._tell(measured=True)

    # when it goes wrong -----------------------------------------------------------------------------------------------

    def _failed(self, why: str) -> None:
        """Try again after a while, but not for ever; what goes wrong at once counts once."""
        self._disappoint()
        if self._off or self._failing:
            return
        self._failing = True
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            self._give_up(f"{why}, and so it went {self._failures} times")
            return
        log.info("%s", why)
        self.later(FIRST_PAUSE * 2 ** (self._failures - 1))

    def _give_up(self, why: str, *, quiet: bool = False) -> None:
        self._off = why
        if not quiet:
            self._say(f"no standbys, lost processes start from scratch: {why}")
        self._drop()

    def yield_memory(self) -> bool:
        """Give memory back to whoever needs it more, and take none for a while; whether there was any."""
        had = self._template is not None or bool(self._ready)
        if had:
            log.info("standbys are ended: checkpoints need their memory")
            self._drop()
            self.later(YIELDED_FOR)
        return had

    def _throw_away(self, why: str) -> None:
        if not self._failing:
            log.info("standbys are thrown away: %s", why)
        self._drop()
        self._failing = True  # those that have begun with the same will find out, too
        self.later(FIRST_PAUSE)

    def _drop(self) -> None:
        """End all of them, also those that are on their way; when this returns nothing is left."""
        self._disappoint()
        template, ended = self._template, self._ready
        self._template, self._warm, self._ready = None, False, []
        if template is not None:
            template.kill(alone=True)  # not its group: a standby that is just being forked would never be heard of
        for line in list(self._coming):
            select.select([line], [], [], COLLECT_WITHIN)
            late = self._arrived(line)
            ended += [late] if late is not None else []
        ended += [template] if template is not None else []
        for interpreter in ended:
            interpreter.end()
        self._collect()
        if ended:
            self._tell()

    def _disappoint(self) -> None:
        """Nobody need wait for a standby any longer: whoever does starts from scratch."""
        while self._awaiting:
            self._awaiting.pop(0)(None)

    def _collect(self) -> None:
        """Collect standbys that came too late for anybody to wait for them, and other orphans that came with them."""
        known = {self._template.pid} if self._template is not None else set()
        known |= {standby.pid for standby in (*self._ready, *self._beginning)}
        for pid in kernel.adopted(NAME) if not self._coming else ():
            if pid not in known:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _calm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, *, measured: bool = False) -> None:
        """Their number has changed. Their memory is looked at when all have come: that takes some milliseconds."""
        all_ = [*self._ready, *([self._template] if self._template is not None else [])]
        memory = self.facts.memory if all_ else Bytes(0)
        if measured:
            memory = Bytes(sum(kernel.memory_of(each.pid) for each in all_))
            log.info("%d standbys are ready (%d MiB in all)", len(self._ready), memory // MiB)
        self.facts = Facts(len(self._ready), memory)
        self._changed(self.facts)

    def _say(self, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            log.info("%s", sentence)
