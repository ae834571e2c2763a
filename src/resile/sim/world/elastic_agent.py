"""Simulated agents whose training processes stay from round to round, as with `ElasticWorkers`.

A process that fails is replaced ahead of the next round, and the others go on without it. A broken collective fails no
process. Some scripts go on after the last step, for example with an evaluation, which the end of a round does not
interrupt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from resile.api.ids import NO_ROUND, NodeKey, Round
from resile.protocol.agent_to_master import (
    CanRegroup,
    Hello,
    Join,
    LastStepTaken,
    NodeFinished,
    WorkerFailed,
    WorkersChanged,
)
from resile.protocol.master_to_agent import RoundFormed, Welcome
from resile.sim.world.agent import Mode, SimAgent

if TYPE_CHECKING:
    from resile.sim.cluster import Cluster

LONGEST_EVALUATION = 60.0
"""Most seconds that a script goes on after its last step."""


class ElasticAgent(SimAgent):
    def __init__(self, host: Cluster, incarnation: str, key: NodeKey | None) -> None:
        super().__init__(host, incarnation, key)
        self._elastic = False
        self._up = 0
        """How many processes are in a round or can join one."""
        self._unheard_failures: list[WorkerFailed] = []
        self._changed: WorkersChanged | None = None

    def _hello(self) -> Hello:
        hello = super()._hello()
        if not self._elastic:
            return hello
        running = self.mode in (Mode.STARTING, Mode.RUNNING, Mode.COMPLETING, Mode.EVALUATING)
        return msgspec.structs.replace(hello, elastic=True, running=running)

    def _welcome(self, message: Welcome) -> None:
        if message.elastic and not self._elastic and self.mode is Mode.WAITING and self.round == NO_ROUND:
            self._elastic = True
            self._start_ahead()
        super()._welcome(message)
        if self._elastic:
            self.say(CanRegroup())
        if self.mode is not Mode.WAITING:
            self._repeat_failures()
        if self._changed is not None and self.mode is Mode.RUNNING:
            self.say(self._changed)
        if self.mode in (Mode.COMPLETING, Mode.EVALUATING):
            self.say(LastStepTaken(round=self.round))

    # rounds --------------------------------------------------------------------------------------------------------

    def _start_ahead(self) -> None:
        self._up, self.mode = 0, Mode.AHEAD
        self._later(self._host.rng.uniform(0.1, 1.5), self._ready_ahead)

    def _ready_ahead(self) -> None:
        self._up = self._nproc
        self._stopped()

    def _join(self) -> None:
        if not self._elastic:
            super()._join()
        elif self._up:
            self._repeat_failures()
            self.say(Join(after=self.round, store_port=29500, nproc=self._up, elastic=True))

    def _repeat_failures(self) -> None:
        for failed in self._unheard_failures:
            self.say(msgspec.structs.replace(failed, left=self._up))

    def _start(self, message: RoundFormed) -> None:
        if message.round <= self.round:
            return
        self._changed = None
        if not self._elastic or self.mode is Mode.FINISHED:
            super()._start(message)
            return
        self._unheard_failures.clear()
        self.round, self._place = message.round, message.assignment
        if self.mode is Mode.WAITING and self._up == message.assignment.nproc:
            self.mode = Mode.STARTING
            self._later(self._host.rng.uniform(0.002, 0.05), self._started)
        elif self.mode is Mode.WAITING and self._up:
            self._join()
        else:
            self._change(0)

    def _started(self) -> None:
        if not self._elastic or not self._up:
            self._elastic, self._up = True, self._nproc
            self.say(CanRegroup())
        super()._started()
        self._fit()

    def _fit(self) -> None:
        if self.mode is Mode.RUNNING and self._place is not None and self._up != self._place.nproc:
            self._change(self._up)

    def _change(self, nproc: int) -> None:
        self._changed = WorkersChanged(round=self.round, nproc=nproc)
        self.say(self._changed)

    def _over(self, round_: Round) -> None:
        if not self._elastic or self.mode is Mode.WAITING:
            super()._over(round_)
        elif round_ >= self.round:
            if self.mode is Mode.FINISHED:
                self._down()
                self._start_ahead()
            elif self.mode in (Mode.STARTING, Mode.RUNNING, Mode.COMPLETING):
                self._rest()

    def _rest(self) -> list[SimAgent]:
        left = self._down()
        self.mode = Mode.STOPPING
        self._later(self._host.rng.uniform(0.002, 0.05), self._stopped)
        return left

    # ends ----------------------------------------------------------------------------------------------------------

    def completed(self, round_: Round) -> None:
        if self.mode is not Mode.RUNNING or round_ != self.round:
            return
        self.mode = Mode.COMPLETING
        self._changed = None
        self.say(LastStepTaken(round=round_))

    def _complete(self, round_: Round) -> None:
        if self.mode is not Mode.COMPLETING or round_ != self.round:
            return
        self.mode = Mode.EVALUATING
        rng = self._host.rng
        self._later(rng.uniform(0.0, LONGEST_EVALUATION) if rng.random() < 0.5 else 0.0, self._evaluated)

    def _evaluated(self) -> None:
        if self.frozen:  # its processes are, too
            self._later(1.0, self._evaluated)
            return
        self.mode = Mode.FINISHED
        self.say(NodeFinished(round=self.round))

    def fail(self, *, oom: bool = False, collateral: bool = False) -> None:
        if not self._elastic:
            super().fail(oom=oom, collateral=collateral)
            return
        if collateral:
            if self.mode is Mode.RUNNING:
                self._abandon(self._rest())
            return
        if not self._up or self.mode not in (Mode.RUNNING, Mode.WAITING, Mode.COMPLETING, Mode.EVALUATING):
            return
        was, self._up = self.mode, self._up - 1
        failed = WorkerFailed(
            round=self.round,
            failure=self._new_failure(oom),
            left=self._up,
            placed=self.round if was is not Mode.WAITING else NO_ROUND,
        )
        self._host.tell(self.incarnation, f"an elastic process fails in round {self.round}, {self._up} left")
        self._unheard_failures.append(failed)
        self.say(failed)
        left = self._rest() if was in (Mode.RUNNING, Mode.COMPLETING, Mode.EVALUATING) else []
        if not self._up:
            self._timer.cancel()
            self.mode = Mode.AHEAD
        elif was is Mode.WAITING:
            self._join()
        self._abandon(left)
        self._host.clock.after(self._host.rng.uniform(0.2, 2.0), self._replaced)

    def _replaced(self) -> None:
        if self.mode in (Mode.GONE, Mode.FINISHED) or not self._elastic or self._up >= self._nproc:
            return
        self._up += 1
        if self.mode is Mode.AHEAD:
            self._stopped()
        elif self.mode is Mode.WAITING:
            self._join()
        else:
            self._fit()
