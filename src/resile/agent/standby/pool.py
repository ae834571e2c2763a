"""Warm standbys: interpreters that have imported torch and wait to take the place of a lost process.

Importing torch is most of the cost of a restart. So the agent has one interpreter, the template, import the script's
modules and fork as many standbys as there may be processes to replace at once. Standbys cost little beyond the
template, because they share the memory of the imports. The first processes of a node start from the template too: it
imports while the node still looks for its master. `--standbys` says how many standbys there are (`cli/run/options.py`).
`interpreter.py` is the program of template and standbys; `docs/decisions/0011-warm-standbys.md` gives the reasons.

Standbys must never do harm. Whatever goes wrong with one (it was killed, it hangs, a file changed since it was
imported, there is no memory), the process is started from scratch. After too many failures in a row the agent makes no
more standbys and logs that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from resile.agent.options import RunOptions
from resile.agent.standby.forks import Come, ForkQueue, Forks
from resile.agent.standby.interpreter import NAME
from resile.agent.standby.preload import NotEnoughMemory, Preload, cold_because
from resile.agent.standby.standby import Standby, StartOrder
from resile.agent.workers import kernel_calls
from resile.api.ids import MiB, Seconds
from resile.common.backoff import Backoff
from resile.common.log_once import LogOnChange
from resile.protocol.agent_to_master import StandbyReport

log = logging.getLogger("resile.agent")

WARM_WITHIN = Seconds(300.0)
"""Time for a template to finish its imports; a network disk may be slow."""
WAIT_WITHIN = Seconds(2.0)
"""How long a process waits for a standby that is forked for it; a start from scratch takes longer."""
REFILL_AFTER = Seconds(0.5)
"""Pause between the use of a standby and the fork of another, so that starting processes have the cores."""
YIELDED_FOR = Seconds(60.0)
"""Pause before standbys are made again after their memory was given to checkpoints."""
MAX_FAILURES = 5
"""Failures in a row after which no more standbys are made."""
ASIDE_FOR = Seconds(5.0)
"""Pause before a template that became a training process is replaced, so that starting processes have the cores."""
BACKOFF = Backoff(first=1.0, limit=8.0)
"""Pauses before a lost template is replaced."""
NO_STANDBYS = StandbyReport(ready=0, memory=0)


class StandbyPool:
    def __init__(
        self,
        options: RunOptions,
        environ: Mapping[str, str] = os.environ,
        *,
        stdin: int | None = None,
        changed: Callable[[StandbyReport], None] = lambda _: None,
    ) -> None:
        """`stdin` is the stdin of training processes, as for Popen. `changed` is called when `facts` changes."""
        self._wanted = options.standbys
        self._off_because = cold_because(options) if self._wanted else "--standbys is 0"
        self._preload = Preload(options, environ, stdin)
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._template: Standby | None = None
        self._warm = False
        """True if the template has imported everything and can fork."""
        self._ready: list[Standby] = []
        self._beginning: set[Standby] = set()
        """Standbys that were asked to begin and have not confirmed it."""
        self._forks = Forks(self._hangs)
        self._awaits_heir = False
        """True if a standby that is being forked will be the next template."""
        self._hurried: Standby | None = None
        """A former template that still imports, and will fork the next one before it becomes a training process."""
        self._queue = ForkQueue()
        """Processes that wait for a standby, which is forked now or when the import is done."""
        self._reading: asyncio.Future[bool] | None = None
        """Reads the script to see if it imports torch; None once the first process starts."""
        self._failures = 0
        self._failing = False
        """True if something went wrong since the last call of `warm`."""
        self._notices = LogOnChange(log, logging.INFO)
        self._timer: asyncio.TimerHandle | None = None
        self.facts = NO_STANDBYS

    # what the agent asks ----------------------------------------------------------------------------------------------

    def ahead(self) -> None:
        """Start a template for the first processes now, if the script imports torch.

        Does nothing if `--preload` is given, or if this pool makes no standbys.
        """
        # A module of `--preload` may turn out not to be importable by a template, which would delay the first start.
        if not self._off_because and not self._preload.preload:
            self._reading = self._loop.run_in_executor(None, self._preload.imports_torch)
            self._reading.add_done_callback(self._read)

    def _read(self, reading: asyncio.Future[bool]) -> None:
        wanted = not reading.cancelled() and reading.result()
        if wanted and self._reading is reading and not self._off_because and self._template is None:
            self._warm_up(urgent=True)
        self._reading = None

    def later(self, seconds: float) -> None:
        """Call `warm` after `seconds`, unless `later` or `warm` is called before."""
        self._call_off()
        self._timer = self._loop.call_later(seconds, self.warm)

    def warm(self) -> None:
        """Make the missing standbys, unless they are being made or the pool has given up making standbys."""
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
        """Take a standby, or a template that still imports, for a process with the variables `environment`.

        Returns None if there is neither, or if they were made with other variables.
        """
        # A template that still imports is taken, because an import that starts now would end later and slow it down.
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
        """Wait for a standby that will become a process with the variables `environment`.

        The standby is forked now, or after the imports. `come` is called with it, or with None if none comes. Returns a
        function that cancels the wait. If no standby can be forked, returns None and never calls `come`.
        """
        template = self._template if self._warm else None
        if (template is None and self._hurried is None and not self._awaits_heir) or not self._serves(environment):
            return None
        if template is None:
            return self._queue.add(come)
        enough = len(self._forks) > len(self._queue)  # standbys that are being forked anyway serve the queue first
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
        """Turn a standby into a training process, and call `begun` when it has begun.

        If the standby ends before that, `lost` is called with its exit code.
        """
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
                if why := self._preload.imported(standby, words, self._ready):
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
                told, self._hurried = True, None  # it is no template any more, however long its end takes
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
        """End a standby that `take` returned, if `begin` was not called for it."""
        standby.end()
        if self._hurried is standby:
            self._hurried = None
            self._queue.disappoint()

    def close(self) -> None:
        """End all standbys for good. The caller ends the processes that wait for one."""
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
            self._notices.say(f"no standbys for now, lost processes start from scratch: {why}")
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
        if why := self._preload.imported(new, words, self._ready):
            self._give_up(why)
        elif words["left"]:
            self._template = None
            self._came(new)
            self.later(REFILL_AFTER)
        else:
            self._warm = True
            self._fork()

    def _unfit(self, unfit: str, *, again: bool, quiet: bool, without: str) -> None:
        if without and self._preload.leave_out(without):
            log.info("%s is not imported ahead: %s", without, unfit)
            if self._template is None:  # it was to become a process, which starts from scratch now
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
        assert self._template is not None
        self._collect()
        for _ in range(self._wanted + len(self._queue) - len(self._ready) - len(self._forks)):
            if not self._forks.ask(self._template, self._answered):
                self._queue.disappoint()  # processes that queued during an import have no deadline
                break

    def _make_heir(self, old: Standby) -> None:
        if self._template is None and not self._awaits_heir and not self._off_because:
            self._awaits_heir = self._forks.ask(old, self._inherited)
        if not self._awaits_heir:
            self._queue.disappoint()

    def _inherited(self, heir: Standby | None) -> None:
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
        self._drop()
        self._failed("the interpreter that makes standbys hangs")

    def _came(self, standby: Standby) -> None:
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
        """Log the failure `why` and call `warm` after a pause. Give up standbys after MAX_FAILURES failures in a row.

        Processes that wait for a standby start from scratch. Failures before the next call of `warm` count as one.
        """
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
            self._notices.say(f"no standbys, lost processes start from scratch: {why}")
        self._drop()

    def yield_memory(self) -> bool:
        """End all standbys for YIELDED_FOR, because checkpoints need the memory. False if there were no standbys."""
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
        self._failing = True  # standbys that begin now will fail in the same way
        self.later(BACKOFF.first)

    def _drop(self) -> None:
        """End template and standbys, also those that are being forked. All are gone when this returns."""
        self._queue.disappoint()
        template, ended = self._template, self._ready
        self._template, self._warm, self._ready = None, False, []
        if template is not None:
            template.kill(alone=True)  # not its group, or a standby that is just being forked would be lost unnoticed
        ended += self._forks.rest()
        self._awaits_heir = False
        ended += [template] if template is not None else []
        for interpreter in ended:
            interpreter.end()
        self._collect()
        if ended:
            self._tell()

    def _collect(self) -> None:
        """Reap ended children that this pool does not know: standbys that came too late, and adopted orphans."""
        known = {self._template.pid} if self._template is not None else set()
        known |= {standby.pid for standby in (*self._ready, *self._beginning)}
        for pid in kernel_calls.adopted(NAME) if not self._forks else ():
            if pid not in known:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _call_off(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, *, measured: bool = False) -> None:
        """Update `facts`, and call `changed` if they have changed.

        If `measured`, the memory is measured anew and logged. Otherwise the last measurement is used.
        """
        all_ = [*self._ready, *([self._template] if self._template is not None else [])]
        memory = self.facts.memory if all_ else 0
        if measured:
            memory = sum(kernel_calls.memory_of(each.pid) for each in all_)
            count = len(self._ready)
            log.info(
                "%d %s ready (%d MiB in all)", count, "standby is" if count == 1 else "standbys are", memory // MiB
            )
        facts = StandbyReport(ready=len(self._ready), memory=memory)
        if facts != self.facts:
            self.facts = facts
            self._changed(facts)
