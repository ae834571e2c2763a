"""How long until every agent knows: thousands of agents join one master over loopback, and then one of them is lost.

All Joins are sent in one burst, so the time from the last of them to the last RoundFormed includes the master's work on
the whole burst: the worst case, as after a failure of a large job.
"""

from __future__ import annotations

from benchmarks.harness import Row, file_limit, say
from benchmarks.many_agents import gathered
from benchmarks.rendezvous_cost import measure
from resile.api.timeouts import derive

SPARE_FILES = 200
"""Descriptors that a master needs beside its agents' connections."""
BARS = {4000: 2.0, 10_000: 5.0}
"""Agents, and the seconds in which all must have been told."""


def run(quick: bool, sizes: dict[int, float] | None = None) -> list[Row]:
    rows: list[Row] = []
    for agents, bar in (sizes or BARS).items():
        if quick and agents > min(BARS):
            continue
        if agents + SPARE_FILES > file_limit():
            say(f"rendezvous: {agents:,} agents need more open files than this system allows; simulated instead")
            rows.append(simulated(agents, bar))
        else:
            rows += _rendezvous(agents, bar)
    return rows


def simulated(agents: int, bar: float) -> Row:
    """The same without sockets: what the core alone takes for the last join."""
    report = measure(agents)
    return Row(
        measure=f"rendezvous of {agents:,}, simulated: last join to all told",
        value=report.last_join_to_told_seconds,
        unit="s",
        bar=bar,
        note="processor time of the core alone; the system allows too few open files for real connections",
    )


def _rendezvous(agents: int, bar: float) -> list[Row]:
    say(f"rendezvous: {agents:,} agents connect to one master and join a round")
    reconnect = derive().reconnect
    with gathered(agents) as crowd:
        formed = crowd.join()
        say(f"all told of the round {formed:.3f} s after the last join; now one is lost")
        over = crowd.drop()
        return [
            Row(measure=f"rendezvous of {agents:,}: last join to all told", value=formed, unit="s", bar=bar),
            Row(
                measure=f"one of {agents:,} lost: connection's end to all told",
                value=over,
                unit="s",
                note=f"{reconnect:g} s of it are the time an agent has to call again",
            ),
        ]
