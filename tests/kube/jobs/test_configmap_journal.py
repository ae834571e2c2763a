"""The journal in a ConfigMap, against a real API server."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from resile.api.ids import NodeId, NodeKey
from resile.api.job import JobSpec, RoleSpec
from resile.api.job_view import JobEvent
from resile.core.engine import Engine
from resile.core.events import AnyEvent, ChangeWanted, NodeSeen, Started
from resile.core.state import new_state
from resile.kube.client import BlockingClient
from resile.kube.config import from_environment
from resile.kube.errors import unreachable
from resile.master.journal import configmap
from resile.master.journal.base import JournalDamaged, JournalError, JournalGone, JournalTaken
from resile.master.journal.configmap import ConfigMapJournal, seal, unseal
from resile.protocol.job_changes import Scale
from resile.protocol.reports import NodeStatus
from tests.kube.namespace import KUBECONFIG, KubeNamespace, kubectl

W0 = NodeKey("worker", NodeId(0))


def test_what_was_sealed_is_unsealed_and_what_was_changed_is_refused() -> None:
    sealed = seal(b"state")
    assert unseal(sealed) == b"state"
    with pytest.raises(ValueError, match="checksum"):
        unseal(sealed[:-1] + b"!")


class Place:
    """A ConfigMap for a journal, as the operator would have made it, in a namespace of its own."""

    def __init__(self, namespace: str) -> None:
        owner = json.loads(kubectl("-n", namespace, "create", "serviceaccount", "owner", "-o", "json"))
        uid = owner["metadata"]["uid"]  # any living owner will do, or the ConfigMap would be collected
        self.namespace = namespace
        self.open = ExitStack()
        self.spec = JobSpec(
            name="j", kind="elasticjob", namespace=namespace, uid=uid, roles={"worker": RoleSpec(replicas=1)}
        )
        self.name = "elasticjob-j-dlrover-master"
        reference = {"apiVersion": "v1", "kind": "ServiceAccount", "name": "owner", "uid": uid}
        metadata = {"name": self.name, "namespace": namespace, "ownerReferences": [reference]}
        self._manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
        self.make()

    def make(self) -> None:
        kubectl("create", "--validate=false", "-f", "-", stdin=json.dumps(self._manifest))

    def journal(
        self, client: BlockingClient | None = None, spec: JobSpec | None = None, served: str = ""
    ) -> ConfigMapJournal:
        journal = ConfigMapJournal(
            spec or self.spec, client or BlockingClient(from_environment(), "test"), served=served
        )
        self.open.callback(journal.close)
        return journal

    def keys(self) -> list[str]:
        found = json.loads(kubectl("-n", self.namespace, "get", "configmap", self.name, "-o", "json"))
        return sorted(found.get("binaryData") or {})

    def patch(self, patch: dict[str, Any]) -> None:
        words = ["-n", self.namespace, "patch", "configmap", self.name, "--type=merge", "-p", json.dumps(patch)]
        kubectl(*words)


@pytest.fixture
def place(namespace: KubeNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("KUBECONFIG", KUBECONFIG)
    place = Place(namespace.name)
    with place.open:
        yield place


def told(number: int) -> JobEvent:
    return JobEvent(number=number, at=float(number), reason="Thing", message=f"thing {number}")


def seen(status: NodeStatus) -> AnyEvent:
    return NodeSeen(node=W0, status=status)


def begun(place: Place, client: BlockingClient | None = None) -> ConfigMapJournal:
    journal = place.journal(client)
    assert journal.load() is None
    journal.snapshot(new_state(place.spec, 0.0), 0.0)
    return journal


def test_the_next_master_reads_what_the_last_one_wrote(place: Place) -> None:
    first = begun(place)
    first.remember("wanted", "two")
    first.append([(1.0, Started()), (2.0, seen(NodeStatus.STARTING))], [told(1)])
    first.append([(3.0, seen(NodeStatus.RUNNING))], [told(2)])
    second = place.journal()
    history = second.load()
    assert history is not None
    assert history.events == [(1.0, Started()), (2.0, seen(NodeStatus.STARTING)), (3.0, seen(NodeStatus.RUNNING))]
    assert second.story() == [told(1), told(2)]
    assert second.last_told() == 2
    assert second.recall("wanted") == "two"


def test_of_two_masters_the_older_one_is_told_and_writes_nothing(place: Place) -> None:
    older = begun(place)
    newer = place.journal()
    newer.load()
    with pytest.raises(JournalTaken, match="another master has taken over"):
        older.append([(1.0, Started())], [])
    newer.append([(2.0, Started())], [])
    history = place.journal().load()
    assert history is not None
    assert history.events == [(2.0, Started())]


def test_somebody_who_labels_the_config_map_stops_nobody(place: Place) -> None:
    journal = begun(place)
    place.patch({"metadata": {"labels": {"team": "vision"}}})
    journal.append([(1.0, Started())], [])
    assert place.keys() == ["log-000001", "snapshot", "story"]


def test_a_deleted_journal_is_written_again_by_the_master_that_lives(place: Place) -> None:
    journal = begun(place)
    journal.remember("wanted", "two")
    journal.append([(1.0, Started())], [told(1)])
    kubectl("-n", place.namespace, "delete", "configmap", place.name)
    with pytest.raises(JournalGone, match=f"the journal {place.name} was deleted"):
        journal.append([(2.0, seen(NodeStatus.RUNNING))], [told(2)])
    place.make()
    journal.append([(2.0, seen(NodeStatus.RUNNING))], [told(2)])
    journal.append([(3.0, seen(NodeStatus.FAILED))], [])
    reader = place.journal(served="the job has pods")
    history = reader.load()
    assert history is not None
    assert history.events == [(1.0, Started()), (2.0, seen(NodeStatus.RUNNING)), (3.0, seen(NodeStatus.FAILED))]
    assert (reader.story(), reader.recall("wanted")) == ([told(1), told(2)], "two")
    with pytest.raises(JournalTaken):
        journal.append([(4.0, Started())], [])


def test_an_empty_journal_of_a_job_that_was_served_before_is_refused_and_left_as_it_is(place: Place) -> None:
    with pytest.raises(JournalDamaged, match=f"the journal {place.name} is empty, but the job has pods"):
        place.journal(served="the job has pods").load()
    begun(place)


class LosesAnswers(BlockingClient):
    """A client whose network fails after the server has written."""

    lose: Callable[[], bool] = staticmethod(lambda: False)

    def patch(self, *words: Any, **options: Any) -> Any:  # type: ignore[override]
        done = super().patch(*words, **options)
        if self.lose():
            raise unreachable(TimeoutError("the answer was lost"))
        return done


def test_a_write_whose_answer_was_lost_is_not_written_twice(place: Place) -> None:
    client = LosesAnswers(from_environment(), "test")
    journal = begun(place, client)
    client.lose = lambda: True
    with pytest.raises(JournalError, match="cannot be written"):
        journal.append([(1.0, Started())], [told(1)])
    client.lose = lambda: False
    journal.append([(1.0, Started())], [told(1)])
    journal.append([(2.0, seen(NodeStatus.RUNNING))], [])
    reader = place.journal()
    history = reader.load()
    assert history is not None
    assert history.events == [(1.0, Started()), (2.0, seen(NodeStatus.RUNNING))]
    assert reader.story() == [told(1)]


def test_a_snapshot_after_a_lost_answer_holds_everything_once(place: Place) -> None:
    client = LosesAnswers(from_environment(), "test")
    journal = begun(place, client)
    engine = Engine(new_state(place.spec, 0.0))
    engine.handle(Started(), 1.0)
    client.lose = lambda: True
    with pytest.raises(JournalError):
        journal.append([(1.0, Started())], [])
    client.lose = lambda: False
    journal.snapshot(engine.state, 1.0)
    assert place.keys() == ["snapshot", "story"]


def test_a_long_log_becomes_part_of_the_snapshot(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configmap, "FOLD_ENTRIES", 10)
    monkeypatch.setattr(configmap, "STORY_LINES", 5)
    journal = begun(place)
    engine = Engine(new_state(place.spec, 0.0))
    events: list[AnyEvent] = [
        Started(),
        *(ChangeWanted(change=Scale(role="worker", replicas=1 + n % 3)) for n in range(30)),
    ]
    for number, event in enumerate(events, start=1):
        engine.handle(event, float(number))
        journal.append([(float(number), event)], [told(number)])
    assert len(place.keys()) <= 12
    reader = place.journal()
    history = reader.load()
    assert history is not None
    assert Engine.replay(history.state, history.events).state == engine.state
    assert [line.number for line in reader.story()] == [27, 28, 29, 30, 31]


def test_what_would_not_fit_becomes_a_part_of_the_state_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = begun(place)
    journal.append([(1.0, Started())], [told(1)])
    monkeypatch.setattr(configmap, "LARGEST", 4000)
    stranger = NodeKey("worker", NodeId(99))
    crowd: list[tuple[float, AnyEvent]] = [
        (2.0 + n, NodeSeen(node=stranger, status=NodeStatus.DELETED, host=uuid.uuid4().hex)) for n in range(300)
    ]
    journal.append(crowd, [told(2)])
    assert place.keys() == ["snapshot", "story"]
    reader = place.journal()
    history = reader.load()
    assert history is not None
    expected = Engine.replay(new_state(place.spec, 0.0), [(1.0, Started()), *crowd]).state
    assert Engine.replay(history.state, history.events).state == expected
    assert reader.story() == [told(1), told(2)]


def test_a_damaged_journal_is_refused_as_a_whole(place: Place) -> None:
    journal = begun(place)
    journal.append([(1.0, Started())], [])
    journal.append([(2.0, seen(NodeStatus.RUNNING))], [])
    place.patch({"binaryData": {"log-000001": None}})
    with pytest.raises(JournalDamaged, match="an entry of the log is missing"):
        place.journal().load()
    place.patch({"binaryData": {"snapshot": "AAAAAAAA"}})
    with pytest.raises(JournalDamaged, match="checksum"):
        place.journal().load()


def test_the_journal_of_an_earlier_job_of_this_name_is_not_taken(place: Place) -> None:
    begun(place)
    later = JobSpec(
        name="j", kind="elasticjob", namespace=place.namespace, uid=str(uuid.uuid4()), roles=place.spec.roles
    )
    with pytest.raises(JournalError, match="an earlier job of this name"):
        place.journal(spec=later).load()
