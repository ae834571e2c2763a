"""Time-outs of a job: silent agents, agents that do not come back, rounds that must close.

Moving an alarm to a later time is one dictionary write, which is all that a heartbeat costs. The heap finds out when
the old time comes, so the cost per event does not grow with the number of nodes. Alarms are not in the journal: after a
restart they are set anew.
"""

from __future__ import annotations

import enum
import heapq
from itertools import count

from resile.api.ids import NodeKey
from resile.core import events as ev


class Alarm(enum.IntEnum):
    SILENCE = 0
    AWAY = 1
    PENDING = 2
    LAUNCH = 3
    STRAGGLERS = 4
    JOIN = 5


class Deadlines:
    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._at: tuple[dict[NodeKey | None, float], ...] = tuple({} for _ in Alarm)
        self._heap: list[tuple[float, int, Alarm, NodeKey | None]] = []
        self._queued: dict[tuple[Alarm, NodeKey | None], float] = {}
        """The time of the one valid heap entry of each alarm; its other entries are stale. An alarm that moves to a
        later time gets no new entry, so the heap stays small."""
        self._order = count()
        self._silent_at = self._at[Alarm.SILENCE]

    def heard(self, node: NodeKey, now: float) -> None:
        if node in self._silent_at:
            self._silent_at[node] = now + self._silence

    def watch(self, node: NodeKey, now: float) -> None:
        self.set(Alarm.SILENCE, now + self._silence, node)

    def set(self, alarm: Alarm, at: float, node: NodeKey | None = None) -> None:
        self._at[alarm][node] = at
        queued = self._queued.get((alarm, node))
        if queued is None or at < queued:
            self._push(at, alarm, node)

    def clear(self, alarm: Alarm, node: NodeKey | None = None) -> None:
        self._at[alarm].pop(node, None)

    def forget(self, node: NodeKey) -> None:
        for alarm in (Alarm.SILENCE, Alarm.AWAY, Alarm.PENDING, Alarm.LAUNCH):
            self.clear(alarm, node)

    def reset(self) -> None:
        self._heap.clear()
        self._queued.clear()
        for alarms in self._at:
            alarms.clear()

    def restart_silence_timers(self, now: float) -> None:
        for node, at in self._silent_at.items():
            self._silent_at[node] = max(at, now + self._silence)

    def next(self) -> float | None:
        """The time at which to call `due` next; None if no alarm is set.

        At that time, `due` may return no event, because an alarm may have been cleared or moved to a later time.
        """
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[ev.AnyEvent]:
        """The events of the alarms that are due. Each alarm goes off once."""
        fired: list[ev.AnyEvent] = []
        while self._heap and self._heap[0][0] <= now:
            at, _, alarm, node = heapq.heappop(self._heap)
            if self._queued.get((alarm, node)) != at:
                continue  # stale: the alarm was moved earlier and is queued again
            del self._queued[alarm, node]
            current = self._at[alarm].get(node)
            if current is None:
                continue  # cleared
            if current > now:
                self._push(current, alarm, node)
                continue
            del self._at[alarm][node]
            fired.append(self._event(alarm, node))
        return fired

    def _push(self, at: float, alarm: Alarm, node: NodeKey | None) -> None:
        self._queued[alarm, node] = at
        heapq.heappush(self._heap, (at, next(self._order), alarm, node))

    def _event(self, alarm: Alarm, node: NodeKey | None) -> ev.AnyEvent:
        if node is None:
            return ev.StragglerWaitOver() if alarm is Alarm.STRAGGLERS else ev.JoinTimeout()
        match alarm:
            case Alarm.SILENCE:
                return ev.AgentSilent(node=node, seconds=self._silence)
            case Alarm.AWAY:
                return ev.AgentStayedAway(node=node)
            case Alarm.LAUNCH:
                return ev.LaunchDue(node=node)
            case _:
                return ev.PendingTimeout(node=node)
