"""A second, naive ledger with one entry per record, kept from the answers alone. The core's must agree with it."""

from __future__ import annotations

from resile.core import decisions as de
from resile.core import events as ev
from resile.core.shard_ledger import Dataset, Ledger
from resile.protocol.shards import ShardGranted, ShardNoted, ShardProgress
from resile.sim.invariants import require

Record = tuple[int, int]
"""(epoch, index of the record in the data set)."""


class ReferenceLedger:
    def __init__(self) -> None:
        self.done: set[Record] = set()
        self._granted: dict[int, ShardGranted] = {}
        self._upto: dict[int, int] = {}

    def check(self, ledger: Ledger, event: ev.AnyEvent, made: list[de.AnyDecision]) -> None:
        dataset = next(iter(ledger.datasets.values()), None)
        if dataset is None:
            return
        asked = event.message if isinstance(event, ev.AgentSaid) else None
        for decision in made:
            match decision:
                case de.Send(message=ShardGranted() as grant) if grant.lease:
                    self._grant(grant)
                case de.Send(to=(node,), message=ShardGranted() as grant) if grant.error:
                    gone = grant.worker in ledger.gone.get(node, ())
                    require(gone, f"only a worker that is gone is denied: {grant.error}")
                case de.Send(message=ShardGranted()):
                    require(dataset.complete, "no worker is told that there is no more while there is")
                case de.Send(message=ShardNoted(counted=True)) if isinstance(asked, ShardProgress):
                    self._advance(asked)
        self._compare(dataset)

    def _grant(self, grant: ShardGranted) -> None:
        known = self._granted.get(grant.lease)
        if known is None:
            self._granted[grant.lease] = grant
            self._upto[grant.lease] = grant.start
        else:
            same = (known.worker, known.epoch, known.end) == (grant.worker, grant.epoch, grant.end)
            require(same, f"a lease stays what it was: {known} and {grant}")

    def _advance(self, report: ShardProgress) -> None:
        grant = self._granted.get(report.lease)
        require(grant is not None and grant.worker == report.worker, f"only a holder's report counts: {report}")
        assert grant is not None
        require(report.upto <= grant.end, f"no worker does more than it was given: {report}")
        for index in range(self._upto[report.lease], report.upto):
            record = (grant.epoch, index)
            require(record not in self.done, f"record {record} is counted once")
            self.done.add(record)
        self._upto[report.lease] = max(self._upto[report.lease], report.upto)

    def _compare(self, dataset: Dataset) -> None:
        require(dataset.done == len(self.done), f"{dataset.done} records are done, and {len(self.done)} were reported")
        open_: set[Record] = set()
        parts = [(lease.epoch, lease.start, lease.end) for lease in dataset.leases.values()]
        parts += [(part.epoch, part.start, part.end) for part in dataset.returned]
        for epoch, start, end in parts:
            records = {(epoch, index) for index in range(start, end)}
            require(not records & open_, f"no two hold the same record of {(epoch, start, end)}")
            require(not records & self.done, f"no worker holds what is done of {(epoch, start, end)}")
            open_ |= records
        dealt = len(open_) + dataset.done
        full, left = divmod(dataset.dealt, max(1, dataset.shards_per_epoch))
        most = full * dataset.size + left * dataset.shard_size
        least = most - (dataset.shard_size if dataset.size % dataset.shard_size else 0)  # the last one may be short
        require(least <= dealt <= most, f"what was dealt is done, held or returned: {dealt} of {most}")
        if dataset.complete:
            require(len(self.done) == dataset.size * dataset.epochs, "complete means every record of every epoch")
