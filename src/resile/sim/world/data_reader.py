"""Simulated training processes that read their data by shards from the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from resile.protocol.shards import (
    DatasetOpen,
    OpenDataset,
    ShardAnswer,
    ShardGranted,
    ShardMessage,
    ShardNoted,
    ShardProgress,
    TakeShard,
)
from resile.sim.clock import Clock, Timer

if TYPE_CHECKING:
    from resile.sim.world.agent import SimAgent

DATASET = "data"


class Data(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    shard_size: int
    epochs: int
    seed: int | None
    record_time: float
    pieces: int
    """How many progress reports a worker sends for a shard."""


class DataReader:
    def __init__(self, clock: Clock, agent: SimAgent, name: str, data: Data) -> None:
        self.name = name
        self._clock = clock
        self._agent = agent
        self._data = data
        self._request = 0
        self._lease: ShardGranted | None = None
        self._upto = 0
        self._timer = Timer()
        self.pending: ShardMessage | None = None
        """The request that is not answered yet. The agent sends it again on every new connection."""

    def start(self) -> None:
        data = self._data
        self._ask(
            OpenDataset(
                worker=self.name,
                request=self._next(),
                name=DATASET,
                size=data.size,
                shard_size=data.shard_size,
                epochs=data.epochs,
                seed=data.seed,
            )
        )

    def stop(self) -> None:
        self.pending = None
        self._timer.cancel()

    def answered(self, answer: ShardAnswer) -> None:
        if self.pending is None or answer.request != self._request:
            return
        self.pending = None
        match answer:
            case DatasetOpen():
                assert not answer.error, answer.error
                self._take()
            case ShardGranted() if answer.lease == 0:
                assert not answer.error, answer.error
                self._agent.read_all(self)
            case ShardGranted():
                self._lease, self._upto = answer, answer.start
                self._work()
            case ShardNoted():
                assert self._lease is not None
                if answer.counted and self._upto < self._lease.end:
                    self._work()
                else:
                    self._take()

    def _work(self) -> None:
        assert self._lease is not None
        whole = self._lease.end - self._lease.start
        piece = max(1, -(-whole // self._data.pieces))
        self._upto = min(self._lease.end, self._upto + piece)
        self._timer = self._clock.after(piece * self._data.record_time, self._report)

    def _report(self) -> None:
        assert self._lease is not None
        self._ask(
            ShardProgress(
                worker=self.name,
                request=self._next(),
                dataset=DATASET,
                lease=self._lease.lease,
                upto=self._upto,
            )
        )

    def _take(self) -> None:
        self._ask(TakeShard(worker=self.name, request=self._next(), dataset=DATASET))

    def _next(self) -> int:
        self._request += 1
        return self._request

    def _ask(self, request: ShardMessage) -> None:
        self.pending = request
        self._agent.say(request)
