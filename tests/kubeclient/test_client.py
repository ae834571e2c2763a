"""The client against an API server that misbehaves: every call ends, and whatever is wrong is one kind of error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from resile.kube import config, intervals
from resile.kube.client import BlockingClient, Client
from resile.kube.config import NoCluster, NoSuchContext, from_environment, from_files
from resile.kube.errors import Failure, KubeError, refused
from resile.kube.kinds import CONFIG_MAPS, PODS
from tests.support.kinds import ELASTIC_JOBS
from tests.support.scripted_api_server import DRIP, RESET, Scripted, answer, listed, refusal, scripted, thing

DEADLINE = 10.0


@asynccontextmanager
async def client_of(*answers: bytes) -> AsyncIterator[tuple[Client, Scripted]]:
    async with scripted(*answers) as server, asyncio.timeout(DEADLINE):
        client = Client(server.config, "test")
        try:
            yield client, server
        finally:
            await client.close()


@pytest.mark.parametrize(
    "said",
    [
        answer("starting", 503, ""),
        answer("<html>", 200, "text/html"),
        answer("null"),
        answer({"items": [{}], "metadata": {"resourceVersion": "1"}}),
        answer({"items": []}),
        answer("not json", 500),
        answer([], 500),
        RESET,
        refusal(404, "the server could not find the requested resource"),
    ],
)
async def test_an_answer_that_makes_no_sense_is_an_error_like_any_other(said: bytes) -> None:
    async with client_of(said) as (client, _):
        with pytest.raises(KubeError):
            await client.list(PODS, "red")
        with pytest.raises(KubeError):
            await anext(client.watch(PODS, "red", "1"))
        with pytest.raises(KubeError):
            await client.get(PODS, "red", "a")
        with pytest.raises(KubeError):
            await client.create(PODS, thing("a", "1"))


async def test_an_object_is_absent_only_if_the_server_names_it() -> None:
    for said, absent in (
        (refusal(404, "gone", name="a", kind="pods"), True),
        (refusal(404, "the server could not find the requested resource"), False),
        (answer("404 page not found", 404, "text/plain"), False),
    ):
        async with client_of(said) as (client, _):
            if absent:
                assert await client.get(PODS, "red", "a") is None
                assert not await client.delete(PODS, "red", "a")
                continue
            with pytest.raises(KubeError):
                await client.get(PODS, "red", "a")
            with pytest.raises(KubeError):
                await client.delete(PODS, "red", "a")


async def test_a_refusal_keeps_its_code_and_is_one_sentence() -> None:
    async with client_of(refusal(422, "no such\n field", name="a")) as (client, _):
        with pytest.raises(KubeError) as raised:
            await client.create(PODS, thing("a", "1"))
    assert (raised.value.code, str(raised.value), raised.value.failure) == (422, "no such field", Failure.REFUSED)


async def test_a_name_that_exists_is_no_error_but_another_conflict_is() -> None:
    exists = answer({"kind": "Status", "code": 409, "reason": "AlreadyExists", "message": "it exists"}, 409)
    async with client_of(exists, refusal(409, "the object has been modified")) as (client, _):
        assert await client.create(PODS, thing("a", "1")) is None
        with pytest.raises(KubeError, match="modified"):
            await client.create(PODS, thing("a", "1"))


async def test_a_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "CALL", 0.05)
    silent = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n\0"
    async with client_of(silent) as (client, _):
        with pytest.raises(KubeError, match="cannot be reached"):
            await client.get(PODS, "red", "a")


async def test_a_name_cannot_lead_to_another_object() -> None:
    async with client_of(listed("1")) as (client, server):
        for name in ("../../secrets/s", "a?watch=1", "a/b"):
            with pytest.raises(KubeError):
                await client.get(ELASTIC_JOBS, "red", name)
    assert {url.rpartition("/")[0].partition("/namespaces/")[2] for url in server.asked} == {"red/elasticjobs"}


async def test_the_blocking_client_has_the_same_answers() -> None:
    answers = [answer(thing("a", "1")), refusal(404, "gone", name="a"), refusal(409, "modified"), RESET]
    async with scripted(*answers) as server:

        def ask() -> None:
            with closing(BlockingClient(server.config, "test")) as client:
                assert client.get(CONFIG_MAPS, "red", "a") == thing("a", "1")
                assert client.get(CONFIG_MAPS, "red", "a") is None
                with pytest.raises(KubeError, match="modified"):
                    client.patch(CONFIG_MAPS, "red", "a", {})
                with pytest.raises(KubeError, match="cannot be reached"):
                    client.get(CONFIG_MAPS, "red", "a")

        async with asyncio.timeout(DEADLINE):
            await asyncio.to_thread(ask)


async def test_a_blocking_call_is_given_up_even_if_the_server_never_falls_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intervals, "CALL", 0.2)
    async with scripted(DRIP + answer(thing("a", "1"))) as server:

        def ask() -> None:
            with (
                closing(BlockingClient(server.config, "test")) as client,
                pytest.raises(KubeError, match="cannot be reached"),
            ):
                client.get(CONFIG_MAPS, "red", "a")

        async with asyncio.timeout(DEADLINE):
            await asyncio.to_thread(ask)


# where the cluster is ---------------------------------------------------------------------------------------------


def kubeconfig(path: Path, context: str, server: str = "http://here") -> Path:
    path.write_text(
        f"clusters: [{{name: {context}, cluster: {{server: '{server}'}}}}]\n"
        f"contexts: [{{name: {context}, context: {{cluster: {context}, user: me}}}}]\n"
        f"users: [{{name: me, user: {{}}}}]\ncurrent-context: {context}\n"
    )
    return path


def test_several_files_are_one_and_the_first_that_names_a_thing_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = kubeconfig(tmp_path / "one", "first"), kubeconfig(tmp_path / "two", "second", "http://there")
    assert from_files([tmp_path / "none", one, two]).context_name == "first"
    assert from_files([one, two], "second").cluster.server == "http://there"
    monkeypatch.setattr(config, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBECONFIG", f"{one}:{two}")
    assert from_environment().context_name == "first"


def test_what_cannot_be_used_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(NoCluster, match="does not exist"):
        from_files([tmp_path / "none"])
    with pytest.raises(NoSuchContext, match="there is no context 'x' in") as raised:
        from_files([kubeconfig(tmp_path / "one", "first")], "x")
    assert raised.value.known == ["first"]
    for text in ("[]", "clusters: 3", "a: [", "{}"):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(NoCluster) as refused:
            from_files([tmp_path / "bad"])
        assert "\n" not in str(refused.value)


def test_a_refusal_that_is_no_text_is_told_as_far_as_it_can_be_read() -> None:
    assert "gateway" in str(refused(502, b'"bad \x80 gateway"'))
