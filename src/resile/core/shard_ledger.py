"""The shard ledger: which worker has which part of a data set, with exactly-once accounting per epoch.

Every record of every epoch is done, under a worker's lease, or still to do. Workers report their progress, so only the
unfinished part of a lost worker's shard returns. A report under a lease that was taken back is not counted, so no
record is counted twice. Memory grows with the shards in flight and not with the data set, because an epoch's order is
computed and not stored.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from resile.api.ids import NodeKey
from resile.common.permutation import ShuffledOrder

KEPT_FINISHED = 32
"""How many finished leases are remembered per worker: more than a worker holds at a time."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Records [start, end) of one epoch of a data set."""

    epoch: int
    start: int
    end: int


class Lease(msgspec.Struct, array_like=True):
    """A worker's right to do records [start, end). `start` moves on as the worker reports progress."""

    node: NodeKey
    worker: str
    request: int
    epoch: int
    start: int
    end: int


class ShardRequest(msgspec.Struct, frozen=True, array_like=True):
    node: NodeKey
    worker: str
    request: int


class Dataset(msgspec.Struct, kw_only=True):
    """The ledger of one data set. With `epochs` 0 the data set repeats for ever."""

    name: str
    size: int
    shard_size: int
    epochs: int
    seed: int | None
    dealt: int = 0
    """How many new shards were dealt, over all epochs. Shards that are dealt again are not counted again."""
    returned: list[Part] = []
    leases: dict[int, Lease] = {}
    last_lease: int = 0
    waiting: dict[ShardRequest, None] = {}
    """Requests that wait for a shard, oldest first."""
    done: int = 0
    """Records done, over all epochs."""
    held: dict[NodeKey, dict[str, list[int]]] = {}
    """The numbers of the leases that each worker of a node has."""
    finished: dict[NodeKey, dict[str, list[int]]] = {}
    """Numbers of the newest leases that each living worker finished, to count a repeated last report as valid."""

    @property
    def shards_per_epoch(self) -> int:
        return -(-self.size // self.shard_size)

    @property
    def exhausted(self) -> bool:
        """True if no shard is left to deal. Some shards may still be under a lease."""
        return not self.returned and bool(self.epochs) and self.dealt >= self.epochs * self.shards_per_epoch

    @property
    def complete(self) -> bool:
        return self.exhausted and not self.leases


class Ledger(msgspec.Struct, kw_only=True):
    datasets: dict[str, Dataset] = {}
    gone: dict[NodeKey, set[str]] = {}
    """Workers that ended while their node lives on. A late request of such a worker must not be served."""


def open_dataset(ledger: Ledger, name: str, size: int, shard_size: int, epochs: int, seed: int | None) -> str:
    """Register a data set. Returns an empty string, or one sentence saying why it cannot be opened."""
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


def why_denied(ledger: Ledger, dataset: str, request: ShardRequest) -> str:
    """Why a request can never be served, in one sentence; empty if it can be served now or later."""
    if dataset not in ledger.datasets:
        return f"there is no data set '{dataset}'; it must be opened before shards of it are taken"
    if request.worker in ledger.gone.get(request.node, ()):
        return f"worker {request.worker} hung up or ended before, so it gets no more shards of '{dataset}'"
    return ""


def request_shard(dataset: Dataset, request: ShardRequest) -> tuple[int, Lease] | None:
    """Grant a lease and return its number and value, or let the request wait and return None.

    A repeated request gets the same lease again. Lease number 0 means that every record of every epoch is done.
    """
    for number in dataset.held.get(request.node, {}).get(request.worker, ()):
        if dataset.leases[number].request == request.request:
            return number, dataset.leases[number]
    part = _next_part(dataset)
    if part is not None:
        dataset.last_lease += 1
        lease = Lease(request.node, request.worker, request.request, part.epoch, part.start, part.end)
        dataset.leases[dataset.last_lease] = lease
        dataset.held.setdefault(request.node, {}).setdefault(request.worker, []).append(dataset.last_lease)
        return dataset.last_lease, lease
    if dataset.complete:
        return 0, Lease(request.node, request.worker, request.request, 0, 0, 0)
    dataset.waiting.setdefault(request)
    return None


def advance(dataset: Dataset, node: NodeKey, worker: str, number: int, upto: int) -> bool:
    """Count a lease's records before `upto` as done; False if the lease is not this worker's or ends before `upto`.

    Repeating a report, or reporting less than before, changes nothing.
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
    """Take back what a lost worker had under lease and has not done. Returns the number of records to deal again."""
    ledger.gone.setdefault(node, set()).add(worker)
    freed = 0
    for dataset in ledger.datasets.values():
        dataset.finished.get(node, {}).pop(worker, None)
        freed += _release(dataset, dataset.held.get(node, {}).pop(worker, []))
        dataset.waiting = {w: None for w in dataset.waiting if (w.node, w.worker) != (node, worker)}
    return freed


def release_node(ledger: Ledger, node: NodeKey) -> int:
    ledger.gone.pop(node, None)
    freed = 0
    for dataset in ledger.datasets.values():
        dataset.finished.pop(node, None)
        for numbers in dataset.held.pop(node, {}).values():
            freed += _release(dataset, numbers)
        dataset.waiting = {w: None for w in dataset.waiting if w.node != node}
    return freed


def grantable(ledger: Ledger) -> Iterator[tuple[ShardRequest, int, Lease]]:
    """Grant leases to the waiting requests that can be served now, oldest first, and yield them."""
    for dataset in ledger.datasets.values():
        while dataset.waiting and (not dataset.exhausted or dataset.complete):
            request = next(iter(dataset.waiting))
            del dataset.waiting[request]
            granted = request_shard(dataset, request)
            if granted is not None:
                yield request, *granted


def forget_waiting(ledger: Ledger) -> None:
    """Drop the waiting requests after a restart of the master, because the agents send them again."""
    for dataset in ledger.datasets.values():
        dataset.waiting.clear()


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
