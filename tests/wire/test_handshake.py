import pytest
from hypothesis import given
from hypothesis import strategies as st

from resile.wire.handshake import (
    ACCEPTED,
    MAGIC,
    PROOF,
    REFUSAL,
    ClientHandshake,
    HandshakeRefused,
    ServerHandshake,
)

TOKEN = b"token"


def test_both_sides_finish_when_both_hold_the_token() -> None:
    client, server = ClientHandshake(TOKEN, "s:1"), ServerHandshake(TOKEN, "c:2")
    to_client = server.feed(client.hello)
    to_client = server.feed(client.feed(to_client))
    assert client.feed(to_client) == b""
    assert (client.finished, server.finished) == (True, True)
    assert (client.rest, server.rest) == (b"", b"")


@given(st.integers(1, 7))
def test_the_handshake_survives_any_chopping_and_keeps_what_follows(size: int) -> None:
    client, server = ClientHandshake(TOKEN, "s:1"), ServerHandshake(TOKEN, "c:2")
    to_server, to_client = client.hello, b""
    while not client.finished:
        piece, to_server = to_server[:size], to_server[size:]
        if piece:
            to_client += server.feed(piece)
        if server.finished and not to_client.endswith(b"frames"):
            to_client += b"frames"
        piece, to_client = to_client[:size], to_client[size:]
        if piece:
            to_server += client.feed(piece)
    assert client.rest + to_client == b"frames"


def test_the_token_never_travels() -> None:
    token = b"0123456789abcdef"
    client, server = ClientHandshake(token, "s:1"), ServerHandshake(token, "c:2")
    first = client.hello
    second = server.feed(first)
    third = client.feed(second)
    fourth = server.feed(third)
    assert token not in first + second + third + fourth


def test_a_wrong_token_is_told_from_a_right_one_by_the_server() -> None:
    client, server = ClientHandshake(b"other", "s:1"), ServerHandshake(TOKEN, "c:2")
    proof = client.feed(server.feed(client.hello))
    with pytest.raises(HandshakeRefused, match=r"^the peer at c:2 has a wrong or missing job token$"):
        server.feed(proof)
    assert not server.finished


def test_a_stranger_gets_nothing_that_depends_on_the_token() -> None:
    answer = ServerHandshake(TOKEN, "c:2").feed(ClientHandshake(b"other", "s:1").hello)
    assert len(answer) == len(MAGIC) + 32
    assert answer.startswith(MAGIC)


def test_a_refused_client_says_so() -> None:
    client = ClientHandshake(b"other", "s:1")
    client.feed(ServerHandshake(TOKEN, "c:2").feed(client.hello))
    with pytest.raises(HandshakeRefused, match=r"^the server at s:1 refused this peer: wrong or missing job token$"):
        client.feed(REFUSAL)


def test_a_client_refused_before_the_nonce_says_so() -> None:
    client = ClientHandshake(TOKEN, "s:1")
    client.feed(REFUSAL[:5])
    with pytest.raises(HandshakeRefused, match=r"^the server at s:1 refused this peer: wrong or missing job token$"):
        client.feed(REFUSAL[5:])


def test_a_client_sees_through_a_server_without_the_token() -> None:
    client, fake = ClientHandshake(TOKEN, "s:1"), ServerHandshake(b"other", "c:2")
    client.feed(fake.feed(client.hello))
    with pytest.raises(HandshakeRefused, match=r"^the server at s:1 does not hold this job's token$"):
        client.feed(ACCEPTED + bytes(PROOF))


def test_a_client_sees_through_a_server_that_sends_its_own_proof_back() -> None:
    client, mirror = ClientHandshake(TOKEN, "s:1"), ServerHandshake(b"other", "c:2")
    proof = client.feed(mirror.feed(client.hello))
    with pytest.raises(HandshakeRefused, match="does not hold this job's token"):
        client.feed(ACCEPTED + proof)


def test_a_recorded_handshake_is_worthless() -> None:
    client, server = ClientHandshake(TOKEN, "s:1"), ServerHandshake(TOKEN, "c:2")
    proof = client.feed(server.feed(client.hello))
    server.feed(proof)
    assert server.finished
    again = ServerHandshake(TOKEN, "c:2")
    again.feed(client.hello)
    with pytest.raises(HandshakeRefused, match="wrong or missing job token"):
        again.feed(proof)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02", b"\0", b"resilience", b"r\xff"])
def test_garbage_is_recognised_at_its_first_wrong_byte(garbage: bytes) -> None:
    with pytest.raises(HandshakeRefused, match=r"^the peer at c:2 does not speak resile's protocol$"):
        ServerHandshake(TOKEN, "c:2").feed(garbage)


@given(st.binary(min_size=1).filter(lambda data: not MAGIC.startswith(data[: len(MAGIC)])))
def test_no_garbage_gets_past_the_magic(garbage: bytes) -> None:
    with pytest.raises(HandshakeRefused):
        ServerHandshake(TOKEN, "c:2").feed(garbage)


def test_another_version_is_named() -> None:
    with pytest.raises(
        HandshakeRefused, match=r"^the peer at c:2 speaks version 2 of resile's protocol, not version 1$"
    ):
        ServerHandshake(TOKEN, "c:2").feed(b"resile/2\n")


def test_a_client_without_tls_recognises_a_server_with_it() -> None:
    with pytest.raises(HandshakeRefused, match=r"^the server at s:1 speaks TLS, and no TLS is set up here$"):
        ClientHandshake(TOKEN, "s:1").feed(b"\x15\x03\x01\x00\x02\x02\x28")


def test_a_client_recognises_a_server_of_another_kind() -> None:
    with pytest.raises(HandshakeRefused, match=r"^the server at s:1 does not speak resile's protocol$"):
        ClientHandshake(TOKEN, "s:1").feed(b"SSH-2.0-OpenSSH_9.2\r\n")


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^the job token is empty$"):
        ServerHandshake(b"", "c:2")
