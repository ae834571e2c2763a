"""The garbage collector has nothing to look for in what passes through a master by the thousand."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from resile.core.decisions import AnyDecision
from resile.core.events import AnyEvent
from resile.protocol.commands import FromMaster, ToMaster


@pytest.mark.parametrize("union", [AnyEvent, AnyDecision, FromMaster, ToMaster])
def test_messages_events_and_decisions_are_not_tracked(union: Any) -> None:
    """If they were, a full collection would fall into the joins of a large rendezvous, and halt the master."""
    assert [kind.__name__ for kind in get_args(union) if kind.__struct_config__.gc] == []
