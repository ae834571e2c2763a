"""Whatever a peer says, it gets one sentence and its own connection's end; a good peer is served right after."""

from __future__ import annotations

import pytest

from resile.protocol.agent_to_master import NodeFinished
from resile.protocol.commands import MAX_EVENTS, Ask, Events
from resile.protocol.master_to_agent import JobOver
from resile.wire.frames import MAX_FRAME, PREFIX, encode
from resile.wire.handshake import MAGIC, REFUSAL, ClientHandshake, HandshakeRefused
from tests.wire.peers import Place, soon


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(PREFIX, "big") + body


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1000, b"\xff" * 100_000, b"resile?"])
async def test_garbage_instead_of_a_handshake(place: Place, garbage: bytes) -> None:
    raw = await place.raw()
    raw.say(garbage)
    await place.ear.until(lambda: place.ear.refused)
    assert place.ear.refused[0].startswith("the peer at 127.0.0.1:")
    assert place.ear.refused[0].endswith("does not speak resile's protocol")
    if len(garbage) < 10_000:  # unread bytes reset the connection, and the refusal may be lost with it
        assert await raw.hear_all() == REFUSAL
    assert not place.opened
    await place.check_still_serves()
    assert len(place.ear.refused) == 1


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resile.wire.transport.HANDSHAKE_DEADLINE", 0.1)


@pytest.mark.parametrize("limit", [-1, 0, MAX_EVENTS + 1])
async def test_a_command_that_asks_for_too_many_events_is_no_message(place: Place, limit: int) -> None:
    raw = await place.raw()
    await raw.shake()
    raw.say(encode(Ask(request=1, command=Events(limit=limit))))
    await place.ear.until(lambda: place.ear.closed)
    assert "a message that is not allowed here" in place.ear.closed[0]
    assert not place.ear.messages


async def test_messages_without_a_handshake(place: Place) -> None:
    raw = await place.raw()
    raw.say(encode(NodeFinished(round=1)))
    assert await raw.hear_all() == REFUSAL
    assert place.ear.refused[0].endswith("does not speak resile's protocol")
    assert not place.ear.messages
    await place.check_still_serves()


async def test_a_wrong_token(place: Place) -> None:
    with pytest.raises(HandshakeRefused) as refused:
        await place.call(token=b"wrong")
    expected = f"the server at 127.0.0.1:{place.server.port} refused this peer: wrong or missing job token"
    assert str(refused.value) == expected
    assert len(place.ear.refused) == 1
    assert place.ear.refused[0].endswith("has a wrong or missing job token")
    assert not place.opened
    await place.check_still_serves()


@pytest.mark.usefixtures("short_deadline")
async def test_no_token_at_all_runs_into_the_deadline(place: Place) -> None:
    raw = await place.raw()
    raw.say(ClientHandshake(b"none", "s").hello)
    assert (await raw.hear(len(MAGIC) + 32)).startswith(MAGIC)
    assert await raw.hear_all() == b""
    assert place.ear.refused[0].endswith("did not finish the handshake within 0.1 s")
    await place.check_still_serves()


@pytest.mark.usefixtures("short_deadline")
async def test_a_peer_that_says_nothing_runs_into_the_deadline(place: Place) -> None:
    raw = await place.raw()
    assert await raw.hear_all() == b""
    assert place.ear.refused[0].endswith("did not finish the handshake within 0.1 s")
    await place.check_still_serves()


async def test_a_peer_that_leaves_during_the_handshake(place: Place) -> None:
    raw = await place.raw()
    raw.say(MAGIC)
    raw.hang_up()
    await place.ear.until(lambda: place.ear.refused)
    assert place.ear.refused[0].endswith("closed the connection during the handshake")
    await place.check_still_serves()


async def test_a_replayed_handshake(place: Place) -> None:
    good = await place.raw()
    shake = ClientHandshake(b"a token that nobody guesses", "s")
    good.say(shake.hello)
    proof = shake.feed(await good.hear(len(MAGIC) + 32))
    good.say(proof)
    await soon(lambda: place.opened)

    thief = await place.raw()
    thief.say(shake.hello + proof)
    assert await thief.hear_all() == REFUSAL
    assert place.ear.refused[0].endswith("has a wrong or missing job token")
    assert len(place.opened) == 1
    await place.check_still_serves()


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (frame(b"\xc1\xc1\xc1"), "sent bytes that are no message"),
        (frame(b""), "sent bytes that are no message"),
        (frame(b"\x91\x01"), "sent a message that is not allowed here: Expected `object`, got `array`"),
        (
            frame(b"\x81\xa4type\xa4Nope"),
            "sent a message that is not allowed here: Invalid value 'Nope' - at `$.type`",
        ),
        (
            frame(b"\x83\xa4type\xacNodeFinished\xa5round\x01\xa4evil\x01"),
            "sent a message that is not allowed here: Object contains unknown field `evil`",
        ),
        (
            encode(JobOver(succeeded=True, reason="", message="")),
            "sent a message that is not allowed here: Invalid value 'JobOver' - at `$.type`",
        ),
        (
            (MAX_FRAME + 1).to_bytes(PREFIX, "big"),
            "sent a message of 1048577 bytes, over the limit of 1048576 bytes",
        ),
        (b"\xff\xff\xff\xff", "sent a message of 4294967295 bytes, over the limit of 1048576 bytes"),
    ],
)
async def test_bad_messages_after_a_good_handshake(place: Place, said: bytes, sentence: str) -> None:
    raw = await place.raw()
    await raw.shake()
    raw.say(encode(NodeFinished(round=7)))
    await place.ear.until(lambda: place.ear.messages)
    raw.say(said)
    assert await raw.hear_all() == b""
    await place.ear.until(lambda: place.ear.closed)
    assert place.ear.closed == [f"the peer at {place.opened[0].peer} {sentence}"]
    assert place.ear.messages == [NodeFinished(round=7)]
    await place.check_still_serves()


async def test_a_message_cut_short_by_the_end(place: Place) -> None:
    raw = await place.raw()
    await raw.shake()
    raw.say(encode(NodeFinished(round=7))[:-1])
    raw.writer.write_eof()
    await place.ear.until(lambda: place.ear.closed)
    peer = place.opened[0].peer
    assert place.ear.closed == [f"the peer at {peer} closed the connection in the middle of a message"]
    assert not place.ear.messages
    await place.check_still_serves()


async def test_messages_that_follow_a_bad_one_are_not_heard(place: Place) -> None:
    raw = await place.raw()
    await raw.shake()
    raw.say(frame(b"\xc1") + encode(NodeFinished(round=7)))
    await place.ear.until(lambda: place.ear.closed)
    assert not place.ear.messages
    await place.check_still_serves()
