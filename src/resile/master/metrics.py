"""The master's /metrics, made from the view that the command line shows. Costs nothing until it is scraped."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from resile.api.job_view import JobView
from resile.wire.connection import CannotListen


class JobCollector:
    """Gives Prometheus the job's view as gauges, and the number of job events by reason as counters."""

    def __init__(self, look: Callable[[], JobView]) -> None:
        self._look = look
        self.reasons: Counter[str] = Counter()

    def collect(self) -> Iterator[Any]:
        job = self._look()
        labels = {"job": job.name, "namespace": job.namespace}
        for name, help_text, value in (
            ("resile_round", "Number of the running round, 0 while none runs.", job.round),
            ("resile_round_members", "Nodes in the running round.", job.members),
            ("resile_step", "Training steps completed.", job.step),
            ("resile_steps_per_second", "Speed over the last minute.", job.speed),
            ("resile_goodput", "Training time over elapsed time.", job.goodput),
            ("resile_standbys", "Interpreters that wait to replace processes.", sum(n.standbys for n in job.nodes)),
            ("resile_standby_bytes", "Memory of all standbys.", sum(n.standby_memory for n in job.nodes)),
        ):
            gauge = GaugeMetricFamily(name, help_text, labels=list(labels))
            gauge.add_metric(list(labels.values()), value)
            yield gauge
        nodes = GaugeMetricFamily("resile_nodes", "Nodes by role and status.", labels=[*labels, "role", "status"])
        for (role, status), number in Counter((n.role, n.status) for n in job.nodes).items():
            nodes.add_metric([*labels.values(), role, status], number)
        yield nodes
        events = CounterMetricFamily("resile_events", "Events by reason.", labels=[*labels, "reason"])
        for reason, number in tuple(self.reasons.items()):
            events.add_metric([*labels.values(), reason], number)
        yield events


def serve(collector: JobCollector, port: int, host: str = "127.0.0.1") -> Callable[[], None]:
    """Serve /metrics from a thread, and return a function that ends it; raises `CannotListen` if the port is taken."""
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        why = os.strerror(error.errno or 0).lower()
        raise CannotListen(f"cannot serve metrics on {host}:{port}: {why}") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=2)

    return stop
