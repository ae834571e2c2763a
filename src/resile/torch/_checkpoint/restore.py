"""Finds the newest step that every rank can have and loads it. All ranks load the same step.

Damage is found before the state is changed, and the ranks then agree on the next best step. The exception is data that
a rank receives from another over the process group: it is checked again on arrival, when the state may have changed
already. If that check fails, the next best step is loaded over the state. If there is none, `restore` raises an error
instead of reporting that there was nothing to restore.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from resile.checkpoint.buffer import IncompleteBuffer
from resile.checkpoint.errors import NeverReadable, NotReadable
from resile.torch._checkpoint.flatten import LoadTarget, State, StateMismatch
from resile.torch._checkpoint.memory_parts import Memory, MemoryPart, hand_over
from resile.torch._checkpoint.packing import Damaged
from resile.torch._checkpoint.parallel_copy import copying_threads
from resile.torch._checkpoint.restore_plan import Gap, Offer, RestorePlan, Source, best_plan, gaps
from resile.torch._loop.collectives import Collectives
from resile.torch._support.error_file import in_brief, recorded_in_error_file

if TYPE_CHECKING:
    from resile.torch._checkpoint.dcp_reader import AnyStorage

log = logging.getLogger(__name__)

STORED_STEPS = 8
"""How many of the newest steps in storage are considered."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds between tries to read storage that does not answer. The number is fixed, so that all ranks stop together."""
SHOWN = 8
"""How many ranks a message about missing parts names."""
OK, DAMAGED, UNREADABLE, NEVER, MISFIT, BROKEN = range(6)
UNREAD = (UNREADABLE, NEVER)


class PartsMissing(NotReadable):
    """Memory has only some parts of a step, and no step is complete; the text is one sentence."""


class Restore:
    def __init__(self, collectives: Collectives, memory: Memory, storage: AnyStorage | None) -> None:
        self._collectives = collectives
        self._memory = memory
        self._storage = storage
        self._rank, self._ranks = collectives.rank, collectives.world
        self._why = ""
        """The last problem, as the rank that met it described it."""
        self._verdict = OK
        """The outcome of this rank's own `work` in the last `_agree`."""
        self._hopeless = False
        """True if some rank cannot read storage and never will."""
        self._suspect = -1
        """On rank 0: the newest stored step that another rank found damaged and rank 0 found sound; -1 for none."""
        self.from_storage = False

    @recorded_in_error_file(NeverReadable, permanent=True)
    def run(self, state: State) -> int | None:
        """Load the newest step that all ranks can have, and return its number; None, with no change, if there is none.

        All ranks raise the same error. StateMismatch: the checkpoint is of another model or another state. NotReadable:
        memory has no step, and storage did not answer for a while. NeverReadable: the same, but waiting is useless.
        PartsMissing: memory has only some parts of a step, and there is no other step. RuntimeError: a step was loaded
        in part and none completely, or some rank met an unexpected error.
        """
        for seconds in PAUSES:
            try:
                return self._run(state)
            except NeverReadable:
                raise
            except NotReadable as error:  # all ranks raise it together, so all try again
                log.warning("%s; trying again in %g s", error, seconds)
                self._collectives.pause(seconds)
        return self._run(state)

    def _run(self, state: State) -> int | None:
        self._suspect = -1
        offers, stored = self._gather()
        unread = stored is None
        refused: list[RestorePlan] = []
        changed = False
        lacking = gaps(offers)
        while (plan := best_plan(offers, stored or [], refused)) is not None:
            load_target = LoadTarget(state)
            held: dict[int, MemoryPart] = {}
            is_stored = plan.source is Source.STORAGE
            place = self._directory if is_stored else _place(plan)
            what = f"step {plan.step} in {place}"
            verdict = self._agree(what, self._prepare, plan, offers, load_target, held)
            if verdict == OK:
                changed = True
                verdict = self._agree(what, self._load, plan, offers, load_target, held)
            if verdict == OK:
                self._agree(what, load_target.finish)
                self._memory.drop_newer(plan.step)
                self._warn_of_gaps([gap for gap in lacking if gap.step > plan.step])
                if self._rank == 0:
                    where = f"storage: {self._storage.where(plan.step)}" if self._storage and is_stored else place
                    log.info("restored step %d from %s", plan.step, where)
                self.from_storage = is_stored
                return plan.step
            if verdict in UNREAD:  # an older stored step would discard work that is not lost, so only memory may help
                unread, stored = True, []
            elif is_stored and self._rank == 0:
                self._set_aside(plan.step)
            refused.append(plan)
        if unread:
            kind = NeverReadable if self._hopeless else NotReadable
            raise kind(f"training does not begin anew because storage cannot be read: {self._why}")
        if changed:
            raise RuntimeError("no checkpoint could be restored as a whole; the state is not usable any more")
        for gap in lacking:
            if not gap.first:
                raise PartsMissing(f"training does not begin anew because {_words(gap)}, and there is no other step")
        if stored:
            self._refuse_below_suspects()
        self._warn_of_gaps(lacking)
        if stored and self._rank == 0:  # all were refused
            all_of_them = len(stored) < STORED_STEPS
            which = "no sound step is left in" if all_of_them else f"no sound one is among the newest {STORED_STEPS} of"
            log.warning("%s %s: training begins anew", which, self._directory)
        return None

    @property
    def _directory(self) -> str:
        return str(self._storage.directory) if self._storage is not None else ""

    def _refuse_below_suspects(self) -> None:
        """Raise NotReadable on all ranks if rank 0 has a `_suspect` step. A collective.

        That step may be sound, so training must not begin anew.
        """
        step = self._collectives.gather([self._suspect])[0][0]
        if step >= 0:
            raise NotReadable(
                f"training does not begin anew because step {step} in {self._directory} is damaged as one rank reads "
                "it, but rank 0 does not find it so"
            )

    def _set_aside(self, step: int) -> None:
        """On rank 0: rename a stored step that some rank found damaged.

        If rank 0 finds the step sound or cannot read it, the other rank may have read a stale copy. Then the step keeps
        its name and is noted as `_suspect`.
        """
        assert self._storage is not None
        try:
            if self._verdict == OK:
                _check(self._storage, step, 0, 1)
                log.warning("step %d in %s is left as it is: this rank finds it sound", step, self._directory)
                self._suspect = max(step, self._suspect)
                return
        except IncompleteBuffer as error:
            log.warning("step %d in %s is not used: %s", step, self._directory, error)
        except NotReadable:
            self._suspect = max(step, self._suspect)
            return
        if aside := self._storage.set_aside(step):
            log.warning("step %d in %s was set aside as %s", step, self._directory, aside)

    def _warn_of_gaps(self, lacking: Sequence[Gap]) -> None:
        if lacking and self._rank == 0:
            log.warning("%s: it is not gone on from", _words(lacking[0]))

    def _agree(self, what: str, work: Callable[..., None], *arguments: Any) -> int:
        """Do `work` and return the worst outcome of all ranks: OK, DAMAGED, UNREADABLE or NEVER. A collective.

        `what` is the subject of the log line if this rank's outcome is not OK. If the state of one rank does not fit,
        all ranks raise StateMismatch. If `work` fails unexpectedly on one rank, all ranks raise an error.
        """
        verdict, why, error = OK, "", None
        try:
            work(*arguments)
        except IncompleteBuffer as damaged:
            verdict, why = DAMAGED, str(damaged)
        except NotReadable as unreadable:
            verdict, why = NEVER if isinstance(unreadable, NeverReadable) else UNREADABLE, str(unreadable)
        except StateMismatch as misfit:
            verdict, why = MISFIT, str(misfit)
        except Exception as unforeseen:  # the other ranks wait for this verdict in any case
            verdict, error = BROKEN, unforeseen
            why = f"{type(error).__name__}: {in_brief(error)}"
        self._verdict = verdict
        verdicts = [row[0] for row in self._collectives.gather([verdict])]
        worst = max(verdicts)
        self._hopeless = self._hopeless or worst == NEVER
        if verdict in (DAMAGED, *UNREAD):
            log.warning("%s is not used: %s", what, why)
        if worst > DAMAGED:  # all ranks report the same in the end
            rank = verdicts.index(worst)
            self._why = self._collectives.tell(why)[rank]
            if worst == BROKEN:
                raise error or RuntimeError(f"rank {rank} could not restore: {self._why}")
            if worst == MISFIT:
                raise StateMismatch(self._why)
        return worst

    def _gather(self) -> tuple[list[list[Offer]], list[int] | None]:
        offers: list[Offer] = []
        stored: list[int] = []

        def look() -> None:
            offers.extend(self._memory.offers())
            if self._storage is not None and self._rank == 0:
                stored.extend(self._storage.steps()[-STORED_STEPS:])

        unread = self._agree("storage", look) in UNREAD
        row = [len(stored), *stored, *(number for offer in offers for number in offer)]
        rows = self._collectives.gather_all(row)
        width = len(Offer._fields)
        found = []
        for each in rows:
            numbers = each[1 + each[0] :]
            found.append([Offer(*numbers[at : at + width]) for at in range(0, len(numbers), width)])
        return found, None if unread else rows[0][1 : 1 + rows[0][0]]

    def _prepare(
        self, plan: RestorePlan, offers: Sequence[Sequence[Offer]], load_target: LoadTarget, held: dict[int, MemoryPart]
    ) -> None:
        """Verify the parts that this rank has and will read or send, and put them into `held`. No state changes yet.

        If the plan restores from storage, verify this rank's share of the stored files instead.
        """
        if plan.source is Source.STORAGE:
            assert self._storage is not None
            _check(self._storage, plan.step, self._rank, self._ranks)
            return
        taken = {transfer.part for transfer in plan.transfers if self._rank in transfer.takers}
        given = {transfer.part for transfer in plan.transfers if self._rank == transfer.source}
        for part in (plan.parts_for(self._rank, offers) - taken) | given:
            held[part] = self._memory.verified(plan, part, prefer_copies=plan.source is Source.COPIES and part in given)
        if not taken:
            load_target.check(item.path for each in held.values() for item in each.packed.layout.items)

    def _load(
        self, plan: RestorePlan, offers: Sequence[Sequence[Offer]], load_target: LoadTarget, held: dict[int, MemoryPart]
    ) -> None:
        if plan.source is Source.STORAGE:
            assert self._storage is not None
            _load(self._storage, plan.step, load_target)
            return
        transfers = {transfer.part: transfer for transfer in plan.transfers}
        needs = plan.parts_for(self._rank, offers)
        values_of = self._rank if self._ranks == plan.world else 0
        paths: list[Any] = []
        wrong: Exception | None = None
        for part in sorted({*transfers, *needs}):  # the same order on all ranks
            mine: MemoryPart | None = held.get(part)
            if part in transfers:
                try:
                    mine = hand_over(self._collectives, transfers[part], mine)
                except (Damaged, MemoryError, ValueError) as error:
                    wrong = wrong or error  # the other ranks go on with the next part, and so must this one
            if part in needs and mine is not None and wrong is None:
                layout = mine.packed.layout
                paths += [item.path for item in layout.items]
                values = plan.shared or part == values_of
                try:
                    mine.packed.read(load_target, copying_threads(layout.length), values=values)
                except Exception as error:  # raised after the last part
                    wrong = error
        if wrong is not None:
            raise wrong
        load_target.check(paths)
        if missing := load_target.missing():
            raise Damaged(f"it does not hold all of {missing}")


def _words(gap: Gap) -> str:
    ranks = ", ".join(map(str, gap.missing[:SHOWN])) + (" and more" if len(gap.missing) > SHOWN else "")
    return f"step {gap.step} in memory lacks what rank{'s' if len(gap.missing) > 1 else ''} {ranks} of {gap.world} had"


def _place(plan: RestorePlan) -> str:
    ranks = sorted({transfer.source for transfer in plan.transfers})
    return f"the memory of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else "memory"


def _check(storage: AnyStorage, step: int, share: int, shares: int) -> None:
    from resile.torch._checkpoint import dcp_reader  # imports DCP, a second of CPU that a restore from memory saves

    dcp_reader.check(storage, step, share, shares)


def _load(storage: AnyStorage, step: int, target: LoadTarget) -> None:
    from resile.torch._checkpoint import dcp_reader

    dcp_reader.load(storage, step, target)
