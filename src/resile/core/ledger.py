"""The shard ledger: who has which part of a data set, with exactly-once accounting per epoch.

Every record of every epoch is in exactly one of three places: done, under somebody's lease, or to do. A worker reports
how far it has come, so of a lost worker's shard only the unfinished part returns. A report under a lease
that was taken back is not counted, so nothing is counted twice. Cost: memory grows with the shards in
flight, not with the data set; an epoch's order is computed, not stored.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from resile.api.ids import NodeKey
from resile.common.permutation import ShuffledOrder

KEPT_FINISHED = 32
"""Leases per worker whose end is remembered; more than a worker holds at a time."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Records [start, end) of an epoch."""

    epoch: int
    start: int
    end: int


class Lease(msgspec.Struct, array_like=True):
    """A part somebody holds; `start` moves on as it reports progress."""

    node: NodeKey
    worker: str
    request: int
    epoch: int
    start: int
    end: int


class ShardRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that waits for a shard."""

    node: NodeKey
    worker: str
    request: int


class Dataset(msgspec.Struct, kw_only=True):
    """One data set's ledger. `epochs` 0 repeats for ever."""

    name: str
    size: int
    shard_size: int
    epochs: int
    seed: int | None
    dealt: int = 0
    """How many shards were dealt from the front, over all epochs."""
    returned: list[Part] = []
    leases: dict[int, Lease] = {}
    last_lease: int = 0
    wishes: dict[ShardRequest, None] = {}
    """Requests that wait, oldest first."""
    done: int = 0
    """Records done, over all epochs."""
    held: dict[NodeKey, dict[str, list[int]]] = {}
    """The leases of each node's workers."""
    finished: dict[NodeKey, dict[str, list[int]]] = {}
    """The last leases that each living worker brought to their end: it may ask again, not having heard the answer."""

    @property
    def shards_per_epoch(self) -> int:
        """How many shards make one epoch."""
        return -(-self.size // self.shard_size)

    @property
    def exhausted(self) -> bool:
        """Whether no shard is left to deal (some may still be under a lease)."""
        return not self.returned and bool(self.epochs) and self.dealt >= self.epochs * self.shards_per_epoch

    @property
    def complete(self) -> bool:
        """Whether every record of every epoch is done."""
        return self.exhausted and not self.leases


class Ledger(msgspec.Struct, kw_only=True):
    """All data sets of a job, and the workers that are known to be gone."""

    datasets: dict[str, Dataset] = {}
    gone: dict[NodeKey, set[str]] = {}
    """Workers that ended on nodes that live on: a late request of theirs must not be served."""


def open_dataset(ledger: Ledger, name: str, size: int, shard_size: int, epochs: int, seed: int | None) -> str:
    """Register a data set; returns an empty string or one sentence saying why not."""
    if size < 0 or shard_size < 1 or epochs < 0:
        return f"data set '{name}': size and epochs must be 0 or more and shard_size 1 or more"
    if size == 0 and epochs == 0:
        return f"data set '{name}': an empty data set cannot be repeated for ever"
    known = ledger.datasets.get(name)
    if known is None:
        ledger.datasets[name] = Dataset(name=name, size=size, shard_size=shard_size, epochs=epochs, seed=seed)
        return ""
    if (known.size, known.shard_size, known.epochs, known.seed) == (size, shard_size, epochs, seed):
        return ""
    return (
        f"data set '{name}' is open with size {known.size}, shard_size {known.shard_size}, epochs {known.epochs}, "
        f"seed {known.seed}; it cannot be opened again with other values"
    )


def why_denied(ledger: Ledger, dataset: str, wish: ShardRequest) -> str:
    """Why a request cannot be served at all, in one sentence: it is no answer to say that there is no more."""
    if dataset not in ledger.datasets:
        return f"there is no data set '{dataset}'; it must be opened before shards of it are taken"
    if wish.worker in ledger.gone.get(wish.node, ()):
        return f"worker {wish.worker} hung up or ended before, so it gets no more shards of '{dataset}'"
    return ""


def request_shard(dataset: Dataset, wish: ShardRequest) -> tuple[int, Lease] | None:
    """The lease for a request: a new one, the one it already has, or (0, …) for none ever; None means wait."""
    for number in dataset.held.get(wish.node, {}).get(wish.worker, ()):
        if dataset.leases[number].request == wish.request:
            return number, dataset.leases[number]
    part = _next_part(dataset)
    if part is not None:
        dataset.last_lease += 1
        lease = Lease(wish.node, wish.worker, wish.request, part.epoch, part.start, part.end)
        dataset.leases[dataset.last_lease] = lease
        dataset.held.setdefault(wish.node, {}).setdefault(wish.worker, []).append(dataset.last_lease)
        return dataset.last_lease, lease
    if dataset.complete:
        return 0, Lease(wish.node, wish.worker, wish.request, 0, 0, 0)
    dataset.wishes.setdefault(wish)
    return None


def advance(dataset: Dataset, node: NodeKey, worker: str, number: int, upto: int) -> bool:
    """Note progress under a lease; False if this worker does not hold it (any more).

    Saying the same, or less than was said before, changes nothing.
    """
    lease = dataset.leases.get(number)
    if lease is None:
        return number in dataset.finished.get(node, {}).get(worker, ())
    if lease.node != node or lease.worker != worker or upto > lease.end:
        return False
    if upto > lease.start:
        dataset.done += upto - lease.start
        lease.start = upto
    if lease.start == lease.end:
        del dataset.leases[number]
        dataset.held[node][worker].remove(number)
        ends = dataset.finished.setdefault(node, {})
        ends[worker] = [*ends.get(worker, [])[-KEPT_FINISHED + 1 :], number]
    return True


def release_worker(ledger: Ledger, node: NodeKey, worker: str) -> int:
    """A worker is gone: its parts are to do again. Returns how many records that is."""
    ledger.gone.setdefault(node, set()).add(worker)
    freed = 0
    for dataset in ledger.datasets.values():
        dataset.finished.get(node, {}).pop(worker, None)
        freed += _release(dataset, dataset.held.get(node, {}).pop(worker, []))
        dataset.wishes = {w: None for w in dataset.wishes if (w.node, w.worker) != (node, worker)}
    return freed


def release_node(ledger: Ledger, node: NodeKey) -> int:
    """A node is gone with all its workers. Returns how many records are to do again."""
    ledger.gone.pop(node, None)
    freed = 0
    for dataset in ledger.datasets.values():
        dataset.finished.pop(node, None)
        for numbers in dataset.held.pop(node, {}).values():
            freed += _release(dataset, numbers)
        dataset.wishes = {w: None for w in dataset.wishes if w.node != node}
    return freed


def grantable(ledger: Ledger) -> Iterator[tuple[ShardRequest, int, Lease]]:
    """Serve the wishes that can be served now, oldest first."""
    for dataset in ledger.datasets.values():
        while dataset.wishes and (not dataset.exhausted or dataset.complete):
            wish = next(iter(dataset.wishes))
            del dataset.wishes[wish]
            granted = request_shard(dataset, wish)
            if granted is not None:
                yield wish, *granted


def forget_waiting(ledger: Ledger) -> None:
    """After a restart of the master the agents ask again; what the old one owed is void."""
    for dataset in ledger.datasets.values():
        dataset.wishes.clear()


def _release(dataset: Dataset, numbers: list[int]) -> int:
    freed = 0
    for number in numbers:
        lease = dataset.leases.pop(number)
        dataset.returned.append(Part(lease.epoch, lease.start, lease.end))
        freed += lease.end - lease.start
    return freed


def _next_part(dataset: Dataset) -> Part | None:
    if dataset.returned:
        return dataset.returned.pop(0)
    per_epoch = dataset.shards_per_epoch
    if not per_epoch or dataset.exhausted:
        return None
    epoch, index = divmod(dataset.dealt, per_epoch)
    dataset.dealt += 1
    if dataset.seed is not None:
        index = ShuffledOrder(per_epoch, dataset.seed, epoch).at(index)
    start = index * dataset.shard_size
    return Part(epoch, start, min(start + dataset.shard_size, dataset.size))
