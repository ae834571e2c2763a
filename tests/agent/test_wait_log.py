"""What a node says while it waits."""

from __future__ import annotations

import asyncio
import logging

import pytest

from resile.agent import wait_log
from resile.agent.options import Endpoint
from resile.agent.wait_log import WaitLog
from resile.api.timeouts import derive
from resile.protocol.reports import RendezvousConfig

MASTER = Endpoint("node0", 29400)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_master_that_cannot_be_reached_is_named_at_once_and_then_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wait = WaitLog(RendezvousConfig(), derive())
    for second in range(65):
        wait.away(MASTER, second + 0.01, f"cannot connect to {MASTER}: connection refused", 60.0)
    lines = said(caplog)
    assert lines[0] == "cannot reach node0:29400 (connection refused); trying for 60 s"
    assert lines[1] == "cannot reach node0:29400 (connection refused); trying for another 50 s"
    assert len(lines) == 6
    wait.met()
    wait.away(MASTER, 0.0, "no such host", 60.0)
    assert said(caplog)[-1] == "cannot reach node0:29400 (no such host); trying for 60 s"


@pytest.mark.parametrize(
    ("rendezvous", "again", "place", "words"),
    [
        (RendezvousConfig(min_nodes=2, max_nodes=2), False, None, ": --nnodes=2 have to come within 600 s"),
        (
            RendezvousConfig(min_nodes=2, max_nodes=2),
            False,
            MASTER,
            " at node0:29400: --nnodes=2 have to come within 600 s",
        ),
        (
            RendezvousConfig(min_nodes=2, max_nodes=2),
            False,
            Endpoint("127.0.0.1", 29500),
            " at 127.0.0.1:29500: --nnodes=2 have to come within 600 s; 127.0.0.1 is this machine alone: "
            "nodes on other machines need one --rdzv-endpoint=HOST:PORT, "
            "the same for all, with a HOST that all can reach",
        ),
        (
            RendezvousConfig(min_nodes=2, max_nodes=4, last_call=7),
            False,
            None,
            ": at least 2 of --nnodes=2:4 within 600 s, and 7 s after enough have come it begins without the rest",
        ),
        (
            RendezvousConfig(min_nodes=2, max_nodes=4, join_timeout=90),
            True,
            None,
            ": at least 2 of --nnodes=2:4 within 90 s",
        ),
    ],
)
def test_a_round_that_does_not_come_is_said_to_be_waited_for(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    rendezvous: RendezvousConfig,
    again: bool,
    place: Endpoint | None,
    words: str,
) -> None:
    monkeypatch.setattr(wait_log, "FIRST_AFTER", 0.01)
    monkeypatch.setattr(wait_log, "AGAIN_EVERY", 0.01)
    caplog.set_level(logging.INFO)

    async def wait() -> None:
        one = WaitLog(rendezvous, derive(), place)
        one.joined(again)
        for _ in range(1000):
            if len(caplog.records) >= 2:
                break
            await asyncio.sleep(0.005)
        one.over()
        told = len(caplog.records)
        await asyncio.sleep(0.05)
        assert len(caplog.records) == told

    asyncio.run(asyncio.wait_for(wait(), 10))
    assert said(caplog)[0] == f"waiting for other nodes{words}"
    is_mistake = "this machine alone" in words
    assert caplog.records[0].levelname == ("WARNING" if is_mistake else "INFO")
