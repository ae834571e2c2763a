"""The shard ledger's requests and answers: from a training process through its agent to the master, and back.

The receiver tells requests apart by `(worker, request)`: a request that was not answered is sent again under its old
number.
"""

from __future__ import annotations

from resile.protocol.message import Message


class OpenDataset(Message, frozen=True, kw_only=True):
    """Register a data set. Repeating it changes nothing; other values for the same name are refused."""

    worker: str
    request: int
    name: str
    size: int
    shard_size: int
    epochs: int = 1
    seed: int | None = None
    """Shuffles the order of shards, the same way for every worker; None keeps them in order."""


class TakeShard(Message, frozen=True, kw_only=True):
    """Ask for the next shard. The answer comes when there is one, or when there will be none."""

    worker: str
    request: int
    dataset: str


class ShardProgress(Message, frozen=True, kw_only=True):
    """Every record before `upto` is done, of the shard that was granted with `lease`."""

    worker: str
    request: int
    dataset: str
    lease: int
    upto: int


class DatasetOpen(Message, frozen=True, kw_only=True):
    """Answer to OpenDataset; `error` is empty or one sentence."""

    worker: str
    request: int
    error: str = ""


class ShardGranted(Message, frozen=True, kw_only=True):
    """Answer to TakeShard: [start, end) of `epoch`, under a lease. `lease` 0 means there are no more shards.

    With a sentence in `error`, `lease` 0 does not mean that the data is at its end.
    """

    worker: str
    request: int
    lease: int = 0
    epoch: int = 0
    start: int = 0
    end: int = 0
    error: str = ""


class ShardNoted(Message, frozen=True, kw_only=True):
    """Answer to ShardProgress. `counted` is False if the worker does not hold that lease any more."""

    worker: str
    request: int
    counted: bool


ShardMessage = OpenDataset | TakeShard | ShardProgress
ShardAnswer = DatasetOpen | ShardGranted | ShardNoted
