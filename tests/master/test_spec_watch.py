"""What people ask of a job by changing its ElasticJob is done, whenever its master dies."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from resile.api.job import JobSpec, RoleSpec
from resile.core.state import new_state
from resile.kube.client import Client
from resile.master.app import Serving
from resile.master.journal.configmap import ConfigMapJournal
from resile.master.kubernetes.spec_watch import LAST_SEEN, SpecWatch, WantedSpec
from resile.protocol.job_changes import Change, Scale, Suspend
from tests.kube.namespace import job

SPEC = JobSpec(name="j", kind="elasticjob", namespace="red", uid="uid-j", roles={"worker": RoleSpec(replicas=2)})


class Memory:
    """The journal's memory for texts."""

    def __init__(self, before: WantedSpec) -> None:
        self.texts = {LAST_SEEN: msgspec.json.encode(before).decode()}

    def recall(self, key: str) -> str:
        return self.texts[key]

    def remember(self, key: str, value: str) -> None:
        self.texts[key] = value


class Masters:
    """Masters of one job, one after the other: what they were asked, and how many wishes they answer before death."""

    def __init__(self) -> None:
        self.state = new_state(SPEC, 0.0)
        self.state.targets["worker"] = 2
        self.memory = Memory(WantedSpec({"worker": 2}, suspend=False))
        self.asked: list[Change] = []
        self.answers = 0

    async def see(self, changed: dict[str, Any]) -> None:
        events = SimpleNamespace(engine=SimpleNamespace(state=self.state))
        serving = cast(Serving, SimpleNamespace(events=events, commands=SimpleNamespace(change=self._change)))
        client, journal = cast(Client, None), cast(ConfigMapJournal, self.memory)
        watch = SpecWatch(SPEC, client, serving, journal, lambda *_: None)
        await watch._act(changed, msgspec.json.decode(self.memory.recall(LAST_SEEN), type=WantedSpec))

    async def _change(self, change: Change) -> str:
        self.asked.append(change)
        if not self.answers:
            await asyncio.Event().wait()
        self.answers -= 1
        return ""


async def test_a_change_is_remembered_when_all_of_it_was_answered_and_not_before() -> None:
    changed = job("j", "true", 3)
    changed["spec"]["suspend"] = True
    scale, suspend = Scale(role="worker", replicas=3), Suspend(on=True)
    masters = Masters()
    masters.answers = 1
    with pytest.raises(TimeoutError):  # it dies before the second answer
        await asyncio.wait_for(masters.see(changed), 0.05)
    assert masters.asked == [scale, suspend]

    masters.asked, masters.answers = [], 1
    masters.state.targets["worker"] = 3  # as the first wish left it
    await masters.see(changed)
    assert masters.asked == [suspend], "the next master does the rest, and nothing twice"

    masters.asked = []
    await masters.see(changed)
    assert masters.asked == []
