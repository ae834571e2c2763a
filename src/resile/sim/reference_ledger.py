"""A second, naive ledger: every record by itself, kept from the answers alone. The core's must agree with it."""

from __future__ import annotations

from resile.core import decisions as de
from resile.core import events as ev
from resile.core.ledger import Dataset, Ledger

Record = tuple[int, int]
"""(epoch, index)."""


class ReferenceLedger:
    """Counts records one by one; costs memory for each, which a simulation can afford."""

    def __init__(self) -> None:
        self.done: set[Record] = set()
        self._granted: dict[int, de.AnswerShard] = {}
        self._upto: dict[int, int] = {}
        self._worker: dict[int, str] = {}

    def check(self, ledger: Ledger, event: ev.AnyEvent, made: list[de.AnyDecision]) -> None:
        """Follow the answers, then compare."""
        dataset = next(iter(ledger.datasets.values()), None)
        if dataset is None:
            return
        for decision in made:
            match decision:
                case de.AnswerShard() if decision.lease:
                    self._grant(decision)
                case de.AnswerShard() if decision.error:
                    gone = decision.worker in ledger.gone.get(decision.node, ())
                    _require(gone, f"only who is gone is denied: {decision.error}")
                case de.AnswerShard():
                    _require(dataset.complete, "nobody is told that there is no more while there is")
                case de.AnswerProgress() if decision.counted and isinstance(event, ev.ShardAdvanced):
                    self._advance(event)
        self._compare(dataset)

    def _grant(self, grant: de.AnswerShard) -> None:
        known = self._granted.get(grant.lease)
        if known is None:
            self._granted[grant.lease] = grant
            self._upto[grant.lease] = grant.start
            self._worker[grant.lease] = grant.worker
        else:
            same = (known.worker, known.epoch, known.end) == (grant.worker, grant.epoch, grant.end)
            _require(same, f"a lease stays what it was: {known} and {grant}")

    def _advance(self, event: ev.ShardAdvanced) -> None:
        grant = self._granted.get(event.lease)
        _require(grant is not None and grant.worker == event.worker, f"only a holder's report counts: {event}")
        assert grant is not None
        _require(event.upto <= grant.end, f"nobody does more than it was given: {event}")
        for index in range(self._upto[event.lease], event.upto):
            record = (grant.epoch, index)
            _require(record not in self.done, f"record {record} is counted once")
            self.done.add(record)
        self._upto[event.lease] = max(self._upto[event.lease], event.upto)

    def _compare(self, dataset: Dataset) -> None:
        _require(dataset.done == len(self.done), f"{dataset.done} records are done, and {len(self.done)} were reported")
        open_: set[Record] = set()
        parts = [(lease.epoch, lease.start, lease.end) for lease in dataset.leases.values()]
        parts += [(part.epoch, part.start, part.end) for part in dataset.returned]
        for epoch, start, end in parts:
            records = {(epoch, index) for index in range(start, end)}
            _require(not records & open_, f"no two hold the same record of {(epoch, start, end)}")
            _require(not records & self.done, f"nobody holds what is done of {(epoch, start, end)}")
            open_ |= records
        dealt = len(open_) + dataset.done
        full, left = divmod(dataset.dealt, max(1, dataset.shards_per_epoch))
        most = full * dataset.size + left * dataset.shard_size
        least = most - (dataset.shard_size if dataset.size % dataset.shard_size else 0)  # the last one may be short
        _require(least <= dealt <= most, f"what was dealt is done, held or returned: {dealt} of {most}")
        if dataset.complete:
            _require(len(self.done) == dataset.size * dataset.epochs, "complete means every record of every epoch")


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise LedgerBroken(promise)


class LedgerBroken(AssertionError):
    """A record was lost, counted twice, or given to two."""
