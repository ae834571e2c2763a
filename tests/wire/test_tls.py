from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from asyncio import sslproto
from pathlib import Path

import pytest

from resile.protocol.agent_to_master import NodeFinished
from resile.protocol.commands import FromMaster
from resile.wire.connection import connect
from resile.wire.handshake import HandshakeRefused
from resile.wire.tls import BadTLS, client_context, server_context
from resile.wire.transport import CannotConnect
from tests.support.certificates import Authority
from tests.wire.peers import TOKEN, Serve, soon


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


async def test_messages_travel_over_tls(serving: Serve, authority: Authority) -> None:
    place = await serving(tls=server_context(*authority.issue("server")))
    connection, _ = await place.call(tls=client_context(authority.file))
    connection.send(NodeFinished(round=1))
    await place.ear.until(lambda: place.ear.messages)
    assert place.ear.messages == [NodeFinished(round=1)]
    connection.close()
    await connection.wait_closed()


async def test_a_wrong_token_over_tls_is_refused_all_the_same(serving: Serve, authority: Authority) -> None:
    place = await serving(tls=server_context(*authority.issue("server")))
    trust = client_context(authority.file)
    with pytest.raises(HandshakeRefused, match="refused this peer: wrong or missing job token"):
        await place.call(token=b"wrong", tls=trust)
    await place.check_still_serves(tls=trust)


async def test_a_server_of_another_authority_is_not_trusted(
    serving: Serve, authority: Authority, tmp_path: Path
) -> None:
    place = await serving(tls=server_context(*authority.issue("server")))
    with pytest.raises(
        HandshakeRefused,
        match=rf"^the server at 127.0.0.1:{place.server.port} showed a certificate that fails: unable to get local",
    ):
        await place.call(tls=client_context(Authority(tmp_path, "theirs").file))
    assert not place.opened
    await place.check_still_serves(tls=client_context(authority.file))


async def test_a_server_under_another_name_is_not_trusted_unless_asked(serving: Serve, authority: Authority) -> None:
    place = await serving(tls=server_context(*authority.issue("server")))
    with pytest.raises(HandshakeRefused, match=r"certificate that fails: Hostname mismatch"):
        await place.call(tls=client_context(authority.file), server_name="other.example")
    for options in (
        {"tls": client_context(authority.file), "server_name": "master.example"},
        {"tls": client_context(authority.file, check_name=False), "server_name": "other.example"},
    ):
        connection, _ = await place.call(**options)
        connection.abort()
        await connection.wait_closed()


async def test_a_plain_client_learns_that_the_server_speaks_tls(serving: Serve, authority: Authority) -> None:
    place = await serving(tls=server_context(*authority.issue("server")))
    with pytest.raises(CannotConnect) as refused:
        await place.call()
    where = f"127.0.0.1:{place.server.port}"
    expected = f"the server at {where} closed the connection without a word, as one that expects TLS does"
    assert str(refused.value) == expected
    await place.check_still_serves(tls=client_context(authority.file))


async def test_a_tls_client_learns_that_the_server_is_plain(serving: Serve, authority: Authority) -> None:
    place = await serving()
    with pytest.raises(HandshakeRefused, match=r"does not speak TLS with us: \S"):
        await place.call(tls=client_context(authority.file))
    assert place.ear.refused[0].endswith("does not speak resile's protocol")
    await place.check_still_serves()


async def test_a_server_that_ends_in_the_middle_of_tls_may_be_called_again(authority: Authority) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(CannotConnect):
            await connect(
                "127.0.0.1",
                port,
                token=b"token",
                decode=FromMaster,
                on_message=lambda *_: None,
                tls=client_context(authority.file),
            )


async def test_with_mutual_tls_a_client_needs_a_certificate(serving: Serve, authority: Authority) -> None:
    place = await serving(tls=server_context(*authority.issue("server"), client_ca=authority.file))
    with pytest.raises(CannotConnect, match=r"without a word, as one that expects a client certificate does$"):
        await place.call(tls=client_context(authority.file))
    assert not place.opened
    certificate, key = authority.issue("client")
    await place.check_still_serves(tls=client_context(authority.file, certificate=certificate, key=key))


def test_each_wrong_file_gets_its_sentence(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("server")
    _, other_key = authority.issue("other")
    locked_certificate, locked_key = authority.issue("locked", password=b"secret")
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.write_text("")
    broken = tmp_path / "broken"
    broken.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    cases = [
        (lambda: server_context(missing, key), f"the TLS certificate {missing} cannot be read: No such file"),
        (lambda: server_context(certificate, missing), f"the TLS key {missing} cannot be read: No such file"),
        (lambda: client_context(missing), f"the TLS CA {missing} cannot be read: No such file"),
        (lambda: server_context(empty, key), f"the TLS certificate {empty} holds no PEM certificate"),
        (lambda: server_context(certificate, empty), f"the TLS key {empty} holds no PEM key"),
        (lambda: client_context(empty), f"the TLS CA {empty} holds no PEM certificate"),
        (lambda: client_context(broken), f"the TLS CA {broken} cannot be used: "),
        (lambda: server_context(broken, key), f"the TLS certificate {broken} and key {key} cannot be used: "),
        (
            lambda: server_context(certificate, other_key),
            f"the TLS key {other_key} does not belong to the certificate {certificate}",
        ),
        (
            lambda: server_context(locked_certificate, locked_key),
            f"the TLS key {locked_key} is protected by a password",
        ),
        (
            lambda: client_context(authority.file, certificate=certificate),
            "a TLS certificate was given without its key",
        ),
        (lambda: client_context(authority.file, key=key), "a TLS key was given without its certificate"),
    ]
    for build, sentence in cases:
        with pytest.raises(BadTLS) as refused:
            build()
        assert str(refused.value).startswith(sentence)
        assert "\n" not in str(refused.value)


def test_a_connection_costs_a_server_little_memory(authority: Authority) -> None:
    server_context(*authority.issue("server"))
    assert sslproto.SSLProtocol.max_size <= 16 * 1024, "what asyncio sets aside for each"


PEER = """
import asyncio, sys
from pathlib import Path
from resile.wire.connection import connect
from resile.protocol.commands import FromMaster
from resile.wire.tls import client_context

async def main():
    port, ca, token = int(sys.argv[1]), Path(sys.argv[2]), bytes.fromhex(sys.argv[3])
    await connect("127.0.0.1", port, token=token, decode=FromMaster, on_message=print, tls=client_context(ca))
    print("connected", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_end_of_a_killed_peer_is_heard_and_a_frozen_one_is_let_go(
    serving: Serve, authority: Authority, how: signal.Signals
) -> None:
    place = await serving(tls=server_context(*authority.issue("server")))
    words = [str(place.server.port), str(authority.file), TOKEN.hex()]
    peer = await asyncio.create_subprocess_exec(sys.executable, "-c", PEER, *words, stdout=asyncio.subprocess.PIPE)
    try:
        assert peer.stdout is not None
        await asyncio.wait_for(peer.stdout.readline(), 60)
        peer.send_signal(how)
        if how is signal.SIGSTOP:
            await soon(lambda: place.opened)
            place.opened[0].close()
        await place.ear.until(lambda: place.ear.closed)  # asyncio itself would wait 30 s for a farewell
    finally:
        with contextlib.suppress(ProcessLookupError):
            peer.kill()
        await peer.wait()
