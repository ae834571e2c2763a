"""Shards of a data set, handed out by the job's ledger. Each record of each epoch is counted done exactly once.

For training whose workers need not step together (parameter servers, evaluation, batch inference). A fast worker takes
more, a lost worker's unfinished part goes to another worker, and the number of workers may change at any time. The
guarantee is about accounting: a record counts once. If a worker dies between processing a record and reporting it, the
record is processed again, so report soon after the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from resile.protocol.shards import OpenDataset, ShardProgress, TakeShard
from resile.wire.agent_client import AgentClient

__all__ = ["ElasticShards", "LostLeaseError", "NoAgentError", "NotServedError", "Shard"]

FOR_EVER = math.inf
"""No time limit: a master may be away, and another worker may be slow with the last shard."""


class NoAgentError(RuntimeError):
    """No agent started this process, so there is no ledger."""


class NotServedError(RuntimeError):
    """The ledger gives this process no more shards, because the process counts as gone. Other workers may get more."""


class LostLeaseError(RuntimeError):
    """This worker was considered lost, and its shard belongs to another worker now."""


class Shard:
    """The records [start, end) of `epoch`, which this worker has under a lease until it reports them as done."""

    def __init__(self, channel: AgentClient, dataset: str, lease: int, epoch: int, start: int, end: int) -> None:
        self._channel = channel
        self._dataset = dataset
        self._lease = lease
        self.epoch = epoch
        self.start = start
        self.end = end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def __len__(self) -> int:
        return self.end - self.start

    def done(self, upto: int | None = None) -> None:
        """Report all records before `upto` as done; None for the whole shard. Returns when the ledger has recorded it.

        Raises:
            LostLeaseError: the shard belongs to another worker now, and the report does not count.
        """
        upto = self.end if upto is None else upto
        report = ShardProgress(worker="", request=0, dataset=self._dataset, lease=self._lease, upto=upto)
        if not self._channel.request(report, FOR_EVER).counted:
            raise LostLeaseError(f"shard [{self.start}, {self.end}) of {self._dataset} belongs to another worker now")


class ElasticShards:
    """A data set that all workers of the job work through together. Iterating over it yields this worker's shards.

    Every worker opens it with the same arguments. The iteration ends when the workers have done every record of every
    epoch.
    """

    def __init__(self, name: str, size: int, shard_size: int, *, epochs: int = 1, seed: int | None = None) -> None:
        """Open the data set in the job's ledger.

        Args:
            name: tells the job's data sets apart.
            size: number of records.
            shard_size: how many records are handed out together.
            epochs: how often to go through the data; 0 never ends.
            seed: shuffles the order of shards, differently in each epoch; None keeps them in order.

        Raises:
            NoAgentError: there is no agent.
            ValueError: an argument is invalid, or a worker has opened the data set with other arguments.
        """
        channel = AgentClient.from_environment()
        if channel is None:
            raise NoAgentError("shards come from the job's master: start this script with `resile run`")
        words = OpenDataset(worker="", request=0, name=name, size=size, shard_size=shard_size, epochs=epochs, seed=seed)
        error = channel.request(words, FOR_EVER).error
        if error:
            raise ValueError(error)
        self._channel = channel
        self._name = name

    def __iter__(self) -> Iterator[Shard]:
        """Yield shards for this worker until all records of all epochs are done.

        While other workers have the last shards, this waits: the shard of a lost worker is dealt again.

        Raises:
            NotServedError: this process counts as gone, so the remaining shards go to other workers.
        """
        while True:
            granted = self._channel.request(TakeShard(worker="", request=0, dataset=self._name), FOR_EVER)
            if granted.error:
                raise NotServedError(granted.error)
            if not granted.lease:
                return
            yield Shard(self._channel, self._name, granted.lease, granted.epoch, granted.start, granted.end)
