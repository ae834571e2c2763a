"""Warm standbys: interpreters that have imported torch and wait to take the place of a lost process.

Importing torch is most of what a restart costs. So the agent has one interpreter, the template, import what the script
imports, and fork as many standbys as there may be processes to replace at once. They cost little beyond the template,
since what was imported is shared. The first process of a node starts from it, too: while the node is still finding its
master the import is under way, and as soon as it is done there are standbys. `interpreter.py` tells what they do, and
`docs/decisions/0011-warm-standbys.md` why.

They are there to help and must never hurt. Whatever goes wrong with one (it was killed, it hangs, a file changed since
it was imported, there is no memory), the process that was wanted is started from scratch. Too many failures in a row,
and there are none any more; a sentence says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from resile.agent.options import RunOptions
from resile.agent.standby.forks import Come, ForkQueue, Forks
from resile.agent.standby.interpreter import NAME
from resile.agent.standby.preload import NotEnoughMemory, Preload, cold_because
from resile.agent.standby.standby import Standby, StartOrder
from resile.agent.workers import process_control
from resile.api.ids import Bytes, MiB, Seconds
from resile.common.backoff import Backoff

log = logging.getLogger("resile.agent")

WARM_WITHIN = Seconds(300.0)
"""For imports; a network disk may be slow."""
WAIT_WITHIN = Seconds(2.0)
"""For a standby that is forked when it is wanted; a start from scratch takes longer."""
REFILL_AFTER = Seconds(0.5)
"""Between the use of a standby and the fork of another: processes that start have the cores first."""
YIELDED_FOR = Seconds(60.0)
"""Before memory that was given back is asked for again; if it is still short, there is a sentence and no standby."""
MAX_FAILURES = 5
"""Templates and standbys that are lost in a row before there are none any more."""
ASIDE_FOR = Seconds(5.0)
"""After a template became a process and left no other, until one is made: processes that start have the cores first."""
BACKOFF = Backoff(first=1.0, limit=8.0)
"""Before a lost template is made again."""


class StandbyFacts(NamedTuple):
    """What is to be seen of standbys from outside."""

    ready: int = 0
    memory: Bytes = Bytes(0)
    """Of all of them and their template."""


class StandbyPool:
    """All warm interpreters of one agent."""

    def __init__(
        self,
        options: RunOptions,
        environ: Mapping[str, str] = os.environ,
        *,
        stdin: int | None = None,
        changed: Callable[[StandbyFacts], None] = lambda _: None,
    ) -> None:
        """Nothing runs before `warm`.

        Args:
            options: the flags.
            environ: the agent's own variables.
            stdin: where training processes read from; None: where the agent does.
            changed: told whenever there are more or fewer of them.
        """
        self._wanted = options.standbys
        self._off_because = cold_because(options) if self._wanted else "--standbys is 0"
        self._preload = Preload(options, environ, stdin)
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._template: Standby | None = None
        self._warm = False
        """The template has imported everything and can fork."""
        self._ready: list[Standby] = []
        self._beginning: set[Standby] = set()
        """Standbys that were told to begin and have not said that they have."""
        self._forks = Forks(self._hangs)
        """Standbys that were asked for and have not answered."""
        self._awaits_heir = False
        """One of the forks that are under way will be the next template."""
        self._hurried: Standby | None = None
        """It was the template, imports, and is to leave an heir before it becomes a process."""
        self._queue = ForkQueue()
        """Processes that wait for a standby that is forked for them: now, or when the import is done."""
        self._reading: asyncio.Future[bool] | None = None
        """Whether the script imports torch; dropped when the first process is wanted before the answer."""
        self._failures = 0
        self._failing = False
        """Something went wrong since the last time that standbys were wanted."""
        self._said = ""
        self._timer: asyncio.TimerHandle | None = None
        self.facts = StandbyFacts()

    # what the agent asks ----------------------------------------------------------------------------------------------

    def ahead(self) -> None:
        """Import at once, so that the first process can start from there, if the script imports torch and nothing else.

        What `--preload` names may turn out to be not importable ahead, which would delay the first start.
        """
        if not self._off_because and not self._preload.preload:
            self._reading = self._loop.run_in_executor(None, self._preload.imports_torch)
            self._reading.add_done_callback(self._read)

    def _read(self, reading: asyncio.Future[bool]) -> None:
        wanted = not reading.cancelled() and reading.result()
        if wanted and self._reading is reading and not self._off_because and self._template is None:
            self._warm_up(urgent=True)
        self._reading = None

    def later(self, seconds: float) -> None:
        """Warm up when so many seconds have passed, unless something else is asked for first."""
        self._call_off()
        self._timer = self._loop.call_later(seconds, self.warm)

    def warm(self) -> None:
        """Have as many standbys as were asked for, unless that is so, under way or hopeless."""
        self._call_off()
        self._failing = False
        if self._off_because:
            return
        if self._template is None:
            if len(self._ready) < self._wanted and not self._awaits_heir and self._hurried is None:
                self._warm_up()
        elif self._warm:
            self._fork()

    def take(self, environment: Mapping[str, str]) -> Standby | None:
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
        """Have a standby that is forked now, or when an import that is under way is done; None: nothing can be forked.

        Returns:
            What calls it off.
        """
        template = self._template if self._warm else None
        if (template is None and self._hurried is None and not self._awaits_heir) or not self._serves(environment):
            return None
        if template is None:
            return self._queue.add(come)
        enough = len(self._forks) > len(self._queue)  # those that are on their way anyhow come first
        if not enough and not self._forks.ask(template, self._answered):
            return None
        return self._queue.add(come, WAIT_WITHIN)

    def _serves(self, environment: Mapping[str, str]) -> bool:
        if self._preload.serves(environment):
            return True
        self._throw_away("its environment is not the one that standbys were made with")
        return False

    def begin(
        self,
        standby: Standby,
        command: Sequence[str],
        environment: Mapping[str, str],
        streams: Sequence[int],
        begun: Callable[[], None],
        lost: Callable[[int], None],
    ) -> None:
        """Have a standby become a process: either `begun` is called or, with its exit code, `lost`."""
        try:
            order = StartOrder(command, environment, streams)
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
                self._preload.imported(standby, words)
                if why := self._preload.too_big(self._ready):
                    self._give_up(why)
                elif words["left"]:
                    self._queue.disappoint()
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
                self._queue.disappoint()
            returncode = standby.wait()
            os.close(standby.pidfd)
            if not told:
                self._failed(f"a standby (pid {standby.pid}) was lost before it began")
            lost(returncode)

        self._beginning.add(standby)
        standby.watch(on_words, on_end)
        if order is not None and not standby.importing:
            order.give(standby)

    def discard(self, standby: Standby) -> None:
        """End one that was taken, and not begun."""
        standby.end()
        if self._hurried is standby:
            self._hurried = None
            self._queue.disappoint()

    def close(self) -> None:
        """Leave nothing behind. Processes that wait for a standby are for the caller to end; none is started."""
        self._queue.dismiss()
        self._off_because = self._off_because or "this node leaves"
        self._call_off()
        self._drop()

    # warming up -------------------------------------------------------------------------------------------------------

    def _warm_up(self, *, urgent: bool = False) -> None:
        try:
            self._collect()
            self._template = new = self._preload.start(self.facts.memory, urgent=urgent)
        except NotEnoughMemory as why:
            self._say(f"no standbys for now, lost processes start from scratch: {why}")
            return
        except OSError as error:
            self._failed(f"no interpreter can be started: {os.strerror(error.errno or 0)}")
            return
        self._warm = False
        new.watch(self._heard, self._template_ended)
        new.kill_after(WARM_WITHIN)

    def _heard(self, words: dict[str, Any]) -> None:
        new = self._template
        assert new is not None
        new.call_off()
        if "unfit" in words:
            self._unfit(**words)
            return
        self._preload.imported(new, words)
        if why := self._preload.too_big(self._ready):
            self._give_up(why)
        elif words["left"]:
            self._template = None
            self._came(new)
            self.later(REFILL_AFTER)
        else:
            self._warm = True
            self._fork()

    def _unfit(self, unfit: str, *, again: bool, quiet: bool, without: str) -> None:
        """No standby comes of this interpreter; perhaps one does of another."""
        if without and self._preload.leave_out(without):
            log.info("%s is not imported ahead: %s", without, unfit)
            if self._template is None:  # a process waited for this one, and starts from scratch now
                self.later(ASIDE_FOR)
            else:
                self._drop()
                self._warm_up()
        elif again:
            self._failed(unfit)
        else:
            self._give_up(unfit, quiet=quiet)

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
        for _ in range(self._wanted + len(self._queue) - len(self._ready) - len(self._forks)):
            if not self._forks.ask(self._template, self._answered):
                self._queue.disappoint()  # processes that queued during an import have no deadline
                break

    def _make_heir(self, old: Standby) -> None:
        """Have an interpreter that becomes a process leave another one as the template."""
        if self._template is None and not self._awaits_heir and not self._off_because:
            self._awaits_heir = self._forks.ask(old, self._inherited)
        if not self._awaits_heir:
            self._queue.disappoint()

    def _inherited(self, heir: Standby | None) -> None:
        """The next template has come, warm."""
        self._awaits_heir = False
        if heir is None:
            self._failed("a standby was lost before it was ready")
            return
        self._template, self._warm = heir, True
        heir.watch(self._heard, self._template_ended)
        self._fork()

    def _answered(self, standby: Standby | None) -> None:
        if standby is None:
            self._failed("a standby was lost before it was ready")
        else:
            self._came(standby)

    def _hangs(self) -> None:
        """The template does not do what it is asked to do; those that are ready came from it."""
        self._drop()
        self._failed("the interpreter that makes standbys hangs")

    def _came(self, standby: Standby) -> None:
        """One more has come; it is ended if no process waits for it any more, and there are enough."""

        def gone() -> None:
            self._ready.remove(standby)
            standby.wait()
            os.close(standby.pidfd)
            self._tell()
            self._failed(f"a standby (pid {standby.pid}) was lost")

        standby.watch(lambda _: None, gone)
        if self._queue:
            self._queue.serve(standby)
        elif len(self._ready) >= self._wanted:
            standby.end()
        else:
            self._ready.append(standby)
        if not self._forks:
            self._tell(measured=True)

    # when it goes wrong -----------------------------------------------------------------------------------------------

    def _failed(self, why: str) -> None:
        """Try again after a while, but not for ever; what goes wrong at once counts once."""
        self._queue.disappoint()
        if self._off_because or self._failing:
            return
        self._failing = True
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            self._give_up(f"{why}, and so it went {self._failures} times")
            return
        log.info("%s", why)
        self.later(BACKOFF.after(self._failures))

    def _give_up(self, why: str, *, quiet: bool = False) -> None:
        self._off_because = why
        if not quiet:
            self._say(f"no standbys, lost processes start from scratch: {why}")
        self._drop()

    def yield_memory(self) -> bool:
        """Give memory back to checkpoints, which need it more, and take none for a while; whether there was any."""
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
        self._failing = True  # standbys that begin just now will find out, too
        self.later(BACKOFF.first)

    def _drop(self) -> None:
        """End all of them, also those that are on their way; when this returns nothing is left."""
        self._queue.disappoint()
        template, ended = self._template, self._ready
        self._template, self._warm, self._ready = None, False, []
        if template is not None:
            template.kill(alone=True)  # not its group: a standby that is just being forked would never be heard of
        ended += self._forks.rest()
        self._awaits_heir = False
        ended += [template] if template is not None else []
        for interpreter in ended:
            interpreter.end()
        self._collect()
        if ended:
            self._tell()

    def _collect(self) -> None:
        """Collect standbys that came after their deadline, and other orphans that came with them."""
        known = {self._template.pid} if self._template is not None else set()
        known |= {standby.pid for standby in (*self._ready, *self._beginning)}
        for pid in process_control.adopted(NAME) if not self._forks else ():
            if pid not in known:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _call_off(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, *, measured: bool = False) -> None:
        """Their number has changed. Their memory is looked at when all have come: that takes some milliseconds."""
        all_ = [*self._ready, *([self._template] if self._template is not None else [])]
        memory = self.facts.memory if all_ else Bytes(0)
        if measured:
            memory = Bytes(sum(process_control.memory_of(each.pid) for each in all_))
            count = len(self._ready)
            log.info(
                "%d %s ready (%d MiB in all)", count, "standby is" if count == 1 else "standbys are", memory // MiB
            )
        self.facts = StandbyFacts(len(self._ready), memory)
        self._changed(self.facts)

    def _say(self, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            log.info("%s", sentence)
