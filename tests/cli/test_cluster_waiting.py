"""Commands that wait for a cluster: no line of a log is lost or printed twice, no failure is waited out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from resile.client.cluster import logs
from resile.client.cluster.connection import Cluster, Watch
from resile.client.cluster.logs import Bookmark, follow_pod
from resile.client.errors import CommandError
from resile.kube import kinds as kube
from resile.kube.client import Client
from resile.kube.errors import KubeError
from resile.kube.informer import Watched
from tests.support.fake_kube import FakeKube

POD = {
    "metadata": {"name": "one-edljob-worker-0", "namespace": "red", "uid": "u0"},
    "spec": {"containers": [{"name": "main"}]},
    "status": {"phase": "Running", "containerStatuses": [{"name": "main", "state": {"running": {}}}]},
}


def stamped(*lines: tuple[int, str]) -> list[str]:
    """Lines with the nanosecond at which they were written."""
    return [f"2026-11-16T02:00:00.{nanosecond:09}Z {text}" for nanosecond, text in lines]


def read(bookmark: Bookmark, lines: list[str]) -> list[str]:
    bookmark.reopen()
    return [line.partition(" ")[2] for line in lines if bookmark.passes(line)]


WRITTEN = stamped((5, "a"), (5, "b"), (7, "c"), (6, "d, from the other pipe"), (7, "e"), (9, "f"))
TEXTS = [line.partition(" ")[2] for line in WRITTEN]


def test_lines_with_equal_and_older_stamps_are_printed() -> None:
    assert read(Bookmark(), WRITTEN) == TEXTS


@pytest.mark.parametrize("broken_after", range(len(WRITTEN) + 1))
@pytest.mark.parametrize("overlap", [1, 3, len(WRITTEN)])
def test_after_a_broken_connection_every_line_comes_exactly_once(broken_after: int, overlap: int) -> None:
    bookmark = Bookmark()
    first = read(bookmark, WRITTEN[:broken_after])
    assert first + read(bookmark, WRITTEN[max(0, broken_after - overlap) :]) == TEXTS


def test_a_mark_that_is_gone_from_the_log_ends_with_the_first_later_line() -> None:
    bookmark = Bookmark()
    read(bookmark, stamped((5, "a"), (7, "half of a li")))
    assert read(bookmark, stamped((5, "a"), (7, "half of a line"), (8, "b"), (8, "c"))) == ["b", "c"]


class Server:
    """Gives a log in two connections, the first of which breaks."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def log(self, pod: str, **how: Any) -> AsyncIterator[str]:
        self.asked.append(how)
        for line in WRITTEN[:4] if len(self.asked) == 1 else WRITTEN[2:]:
            yield line
        if len(self.asked) == 1:
            raise CommandError("the connection broke")
        POD["status"] = {"phase": "Succeeded"}

    def all(self, kind: Any) -> list[dict[str, Any]]:
        return [POD]


async def test_a_followed_log_goes_on_behind_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "AGAIN_SECONDS", 0.0)
    monkeypatch.setitem(POD, "status", POD["status"])
    server, shown = Server(), list[str]()

    async def show(line: str) -> None:
        shown.append(line)

    await follow_pod(cast(Cluster, server), POD, cast(Watch, server), 100, show)
    assert shown == TEXTS
    assert [how["tail"] for how in server.asked] == [100, None]
    assert [bool(how["since"]) for how in server.asked] == [False, True]


class Surprised(FakeKube):
    """A cluster whose watch fails after the list, in a way that no code expects."""

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        await asyncio.sleep(0)
        raise RuntimeError("out of the blue")
        yield


class Refused(FakeKube):
    """A cluster that forbids watches."""

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        raise KubeError("pods is forbidden", code=403)
        yield


@pytest.mark.parametrize(
    ("cluster", "failure", "words"),
    [(Surprised(), RuntimeError, "out of the blue"), (Refused(), CommandError, "forbids it: pods is forbidden")],
)
async def test_a_command_that_waits_for_changes_hears_of_every_failure(
    cluster: FakeKube, failure: type[Exception], words: str
) -> None:
    cluster.context, cluster.server = "test", "http://here"  # type: ignore[attr-defined]

    async def wait_for_changes() -> None:
        async with Cluster(cast(Client, cluster), "red").watch(Watched(kube.PODS, "red")) as watching:
            while True:
                await watching.change(5.0)

    async with asyncio.timeout(10):
        with pytest.raises(failure, match=words):
            await wait_for_changes()
