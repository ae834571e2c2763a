"""Shards of a data set, handed out by the job's ledger: each record of each epoch is counted done exactly once.

For training whose workers need not step together (parameter servers, evaluation, batch inference): a fast worker
takes more, a lost worker's unfinished part goes to somebody else, and the number of workers may change at any time.
What is guaranteed is the accounting: a record counts once. A worker that dies between processing a record and saying so
leaves it to be processed again, so keep the work and the word about it close together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from resile.protocol.shards import OpenDataset, ShardProgress, TakeShard
from resile.wire.agent_client import AgentClient

FOR_EVER = math.inf
"""An answer takes as long as it takes: a master may be away, and another worker may be slow with the last shard."""


class NoAgentError(RuntimeError):
    """The process was not started by an agent, so nobody keeps a ledger."""


class NotServedError(RuntimeError):
    """The ledger does not serve this process, and cannot say whether there are more shards."""


class LostLeaseError(RuntimeError):
    """The shard was taken from this worker, because it was thought lost: somebody else has it now."""


class Shard:
    """Records [start, end) of `epoch`, this worker's until they are done."""

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
        """Everything before `upto` is done (None: all of it). Returns when the ledger has it.

        Raises:
            LostLeaseError: this worker does not hold the shard any more; what it says does not count.
        """
        word = ShardProgress(
            worker="",
            request=0,
            dataset=self._dataset,
            lease=self._lease,
            upto=self.end if upto is None else upto,
        )
        if not self._channel.request(word, FOR_EVER).counted:
            raise LostLeaseError(f"shard [{self.start}, {self.end}) of {self._dataset} belongs to another worker now")


class ElasticShards:
    """Iterate over it to work through a data set together with all other workers of the job.

    Every worker opens it with the same words. The iteration ends when every record of every epoch is done, by whomever.
    """

    def __init__(self, name: str, size: int, shard_size: int, *, epochs: int = 1, seed: int | None = None) -> None:
        """Open the data set.

        Args:
            name: tells the job's data sets apart.
            size: how many records it has.
            shard_size: how many of them are handed out together.
            epochs: how often to go through it; 0 never ends.
            seed: shuffles the order of shards, differently in each epoch; None keeps them in order.

        Raises:
            NoAgentError: there is no agent.
            ValueError: it is open already with other values, or they make no sense.
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
        """The next shards for this worker; the last ones are awaited, in case the worker that holds them is lost.

        Raises:
            NotServedError: this process was taken for gone (it had hung up), so what is left goes to others.
        """
        while True:
            granted = self._channel.request(TakeShard(worker="", request=0, dataset=self._name), FOR_EVER)
            if granted.error:
                raise NotServedError(granted.error)
            if not granted.lease:
                return
            yield Shard(self._channel, self._name, granted.lease, granted.epoch, granted.start, granted.end)
