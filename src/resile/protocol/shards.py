"""The shard ledger's requests and answers: from a training process through its agent to the master, and back.

The receiver tells requests apart by `(worker, request)`: a request that was not answered is sent again under its old
number.
"""

from __future__ import annotations

from resile.protocol.message import Message


class _Numbered(Message, frozen=True, kw_only=True):
    worker: str
    request: int


class OpenDataset(_Numbered, frozen=True, kw_only=True):
    """Register a data set. A repeated request changes nothing. A known `name` with other values gives an error."""

    name: str
    size: int
    shard_size: int
    epochs: int = 1
    seed: int | None = None
    """Shuffles the order of shards, the same way for every worker; None keeps them in order."""


class TakeShard(_Numbered, frozen=True, kw_only=True):
    """Ask for the next shard. The answer comes when a shard can be granted, or when it is certain that none is left."""

    dataset: str


class ShardProgress(_Numbered, frozen=True, kw_only=True):
    """Report that every record before `upto` of the shard under `lease` is done."""

    dataset: str
    lease: int
    upto: int


class DatasetOpen(_Numbered, frozen=True, kw_only=True):
    """Answer to OpenDataset; `error` is empty or one sentence."""

    error: str = ""


class ShardGranted(_Numbered, frozen=True, kw_only=True):
    """Answer to TakeShard: records [start, end) of `epoch`. If `lease` is 0 and `error` is empty, no shard is left."""

    lease: int = 0
    epoch: int = 0
    start: int = 0
    end: int = 0
    error: str = ""


class ShardNoted(_Numbered, frozen=True, kw_only=True):
    """Answer to ShardProgress. `counted` is False if the worker does not have the lease any more."""

    counted: bool


ShardMessage = OpenDataset | TakeShard | ShardProgress
ShardAnswer = DatasetOpen | ShardGranted | ShardNoted
