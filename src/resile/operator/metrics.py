"""The operator's metrics for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.reconciles = Counter(
            "resile_operator_reconciles", "Reconciliations of one object", ["kind", "outcome"], registry=self._registry
        )
        self.seconds = Histogram(
            "resile_operator_reconcile_seconds",
            "Time of a reconciliation",
            ["kind"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self.waiting = Gauge(
            "resile_operator_queue_length", "Objects waiting to be reconciled", ["kind"], registry=self._registry
        )
        self.objects = Gauge("resile_operator_objects", "Objects seen", ["kind"], registry=self._registry)
        self.masters = Counter("resile_operator_master_starts", "Masters started", ["which"], registry=self._registry)
        self.leader = Gauge("resile_operator_leader", "1 while this operator acts", registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)
