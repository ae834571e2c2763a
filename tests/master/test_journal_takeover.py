"""A journal in a ConfigMap changes hands while the master that had it still writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from resile.api.ids import NodeId, NodeKey
from resile.api.job import JobSpec, RoleSpec
from resile.api.kinds.elasticjob.names import master_name
from resile.core.engine import Engine
from resile.core.events import NodeSeen, Started
from resile.core.state import new_state
from resile.kube.client import BlockingClient
from resile.kube.kinds import CONFIG_MAPS
from resile.master.journal.base import JournalError, JournalGone, JournalTaken
from resile.master.journal.configmap import LOADS, ConfigMapJournal
from resile.protocol.reports import NodeStatus
from tests.support.fake_kube import FakeBlockingKube

SPEC = JobSpec(name="j", kind="elasticjob", namespace="red", uid="uid-j", roles={"worker": RoleSpec(replicas=1)})
SEEN = NodeSeen(node=NodeKey("worker", NodeId(0)), status=NodeStatus.RUNNING)


def journal(api: FakeBlockingKube) -> ConfigMapJournal:
    return ConfigMapJournal(SPEC, cast(BlockingClient, api))


@pytest.fixture
def api() -> FakeBlockingKube:
    made = FakeBlockingKube()
    made.replaced(CONFIG_MAPS, master_name("j"), metadata={"ownerReferences": [{"uid": "uid-j"}]})
    return made


def begun(api: FakeBlockingKube) -> ConfigMapJournal:
    first = journal(api)
    assert first.load() is None
    first.snapshot(new_state(SPEC, 0.0), 0.0)
    first.append([(1.0, Started())], [])
    return first


def between_reading_and_taking(api: FakeBlockingKube, write: Callable[[], Any], times: int = 1) -> None:
    left = times

    def before(verb: str) -> None:
        nonlocal left
        if verb == "patch" and left:
            left -= 1
            hook, api.before = api.before, lambda _: None
            write()
            api.before = hook

    api.before = before


def test_what_the_old_master_writes_while_the_new_one_takes_over_is_read_by_the_new_one(api: FakeBlockingKube) -> None:
    old = begun(api)
    between_reading_and_taking(api, lambda: old.append([(2.0, SEEN)], []))
    new = journal(api)
    history = new.load()
    assert history is not None
    assert history.events == [(1.0, Started()), (2.0, SEEN)]
    with pytest.raises(JournalTaken):
        old.append([(3.0, SEEN)], [])
    new.append([(4.0, SEEN)], [])
    later = journal(api).load()
    assert later is not None
    assert later.events == [(1.0, Started()), (2.0, SEEN), (4.0, SEEN)]


def test_a_fold_of_the_old_master_while_the_new_one_takes_over_damages_nothing(api: FakeBlockingKube) -> None:
    old = begun(api)
    state = Engine.replay(new_state(SPEC, 0.0), [(1.0, Started()), (2.0, SEEN)]).state
    between_reading_and_taking(api, lambda: old.snapshot(state, 2.0))
    new = journal(api)
    history = new.load()
    assert history is not None
    assert (history.state, history.events) == (state, [])
    new.append([(4.0, SEEN)], [])
    later = journal(api).load()
    assert later is not None
    assert (later.state, later.events) == (state, [(4.0, SEEN)])


def test_a_journal_that_never_rests_is_not_taken_over_and_loses_nothing(api: FakeBlockingKube) -> None:
    old = begun(api)
    between_reading_and_taking(api, lambda: old.append([(2.0, SEEN)], []), times=LOADS)
    with pytest.raises(JournalError, match="is changed by another program all the time"):
        journal(api).load()
    old.append([(3.0, SEEN)], [])
    history = journal(api).load()
    assert history is not None
    assert len(history.events) == LOADS + 2


def test_a_journal_that_nobody_has_made_is_asked_for_in_one_sentence() -> None:
    with pytest.raises(JournalError, match=f"the journal {master_name('j')} is not there: the operator makes it"):
        journal(FakeBlockingKube()).load()


def test_a_journal_that_was_deleted_and_made_anew_is_written_again_in_whole(api: FakeBlockingKube) -> None:
    living = begun(api)
    living.remember("seen", "7")
    api.drop(CONFIG_MAPS, "red", master_name("j"))
    with pytest.raises(JournalGone, match="was deleted; it is written again once the operator has made a new one"):
        living.append([(2.0, SEEN)], [])
    api.replaced(CONFIG_MAPS, master_name("j"), metadata={"ownerReferences": [{"uid": "uid-j"}]})
    living.append([(2.0, SEEN)], [])
    living.append([(3.0, SEEN)], [])
    later = journal(api)
    history = later.load()
    assert history is not None
    assert (history.state, history.events) == (new_state(SPEC, 0.0), [(1.0, Started()), (2.0, SEEN), (3.0, SEEN)])
    assert later.recall("seen") == "7"
