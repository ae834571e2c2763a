"""What 10,000 idle nodes cost their master: connections that carry only heartbeats, at the production interval."""

from __future__ import annotations

import time

from benchmarks.harness import Row, cpu_seconds, memory_mb, say
from benchmarks.many_agents import gathered
from resile.api.timeouts import derive

AGENTS = 10_000
CORES = 0.5
MEMORY_MB = 300.0


def run(quick: bool, agents: int = AGENTS) -> list[Row]:
    seconds = 5.0 if quick else 20.0
    say(f"idle: {agents:,} agents with a heartbeat every {derive().heartbeat:g} s, for {seconds:g} s")
    with gathered(agents) as crowd:
        crowd.join()
        pid = crowd.master.pid
        beats, before, start = crowd.beats(), cpu_seconds(pid), time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - start
        cores, rate = (cpu_seconds(pid) - before) / took, (crowd.beats() - beats) / took
        return [
            Row(
                measure=f"{agents:,} idle nodes: the master's cores",
                value=cores,
                unit="cores",
                bar=CORES,
                note=f"{rate:,.0f} heartbeats a second",
            ),
            Row(
                measure=f"{agents:,} idle nodes: the master's memory",
                value=memory_mb(pid, "VmRSS"),
                unit="MB",
                bar=MEMORY_MB,
                note=f"{memory_mb(pid, 'VmHWM'):.0f} MB at most, in the rendezvous",
            ),
            Row(measure=f"{agents:,} idle nodes: false verdicts", value=crowd.verdicts, bar=0),
        ]
