from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys

import pytest

from resile.protocol.agent_to_master import Heartbeat, NodeFinished
from resile.protocol.commands import Answer, Ask, Failed, FromMaster, ToMaster
from resile.protocol.job_changes import Stop
from resile.protocol.master_to_agent import RoundOver
from resile.protocol.message import Message
from resile.wire.connection import KEEPALIVE_IDLE, CannotListen, connect, serve
from resile.wire.frames import HEARTBEAT_FRAME, MAX_FRAME, PREFIX, BadFrame, encode
from resile.wire.handshake import HandshakeRefused
from resile.wire.transport import CannotConnect, Connection
from tests.wire.peers import TOKEN, Ear, Place, Serve, soon


async def test_messages_arrive_in_order_and_heartbeats_among_them(place: Place) -> None:
    connection, _ = await place.call()
    sent: list[Message] = [Heartbeat(), NodeFinished(round=1), Heartbeat(), NodeFinished(round=2)]
    for message in sent:
        connection.send(message)
    await place.ear.until(lambda: len(place.ear.messages) == 4)
    assert place.ear.messages == sent


async def test_one_encoded_frame_goes_to_many(place: Place) -> None:
    ears = [(await place.call())[1] for _ in range(5)]
    note = RoundOver(round=1, because="worker-1 was lost")
    frame = encode(note)
    for connection in place.server.connections:
        connection.send_frame(frame)
    for ear in ears:
        await ear.until(lambda ear=ear: ear.messages)
        assert ear.messages == [note]


async def test_the_end_is_told_once_on_both_sides(place: Place) -> None:
    connection, ear = await place.call()
    await soon(lambda: place.opened)
    assert place.opened[0].peer.startswith("127.0.0.1:")
    connection.close("enough")
    await connection.wait_closed()
    await connection.wait_closed()
    await place.ear.until(lambda: place.ear.closed)
    assert ear.closed == ["enough"]
    assert place.ear.closed == [f"the peer at {place.opened[0].peer} closed the connection"]
    assert not place.server.connections
    connection.send(Heartbeat())
    connection.abort()
    assert connection.closed


async def test_what_was_sent_before_close_arrives(place: Place) -> None:
    _, ear = await place.call()
    await soon(lambda: place.opened)
    big = Answer(request=1, result=Failed(error="x" * 5_000_000))
    place.opened[0].send(big)
    place.opened[0].close()
    await ear.until(lambda: ear.closed)
    assert ear.messages == [big]
    assert ear.closed == [f"the server at 127.0.0.1:{place.server.port} closed the connection"]


async def test_an_abort_is_seen_as_a_broken_connection(place: Place) -> None:
    raw = await place.raw()
    await raw.shake()
    await soon(lambda: place.opened)
    raw.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    raw.writer.transport.abort()
    await place.ear.until(lambda: place.ear.closed)
    peer = place.opened[0].peer
    assert place.ear.closed == [f"the connection to the peer at {peer} broke: Connection reset by peer"]


async def test_a_peer_that_does_not_read_is_dropped(place: Place) -> None:
    raw = await place.raw()
    await raw.shake()
    raw.writer.transport.pause_reading()
    await soon(lambda: place.opened)
    stuck = place.opened[0]
    frame = encode(Answer(request=1, result=Failed(error="x" * 500_000)))
    for _ in range(100):
        stuck.send_frame(frame)
    await place.ear.until(lambda: place.ear.closed)
    assert place.ear.closed == [f"the peer at {stuck.peer} does not read what it is sent"]
    await place.check_still_serves()


async def test_a_message_too_long_for_the_server_is_refused_where_it_is_made(place: Place) -> None:
    connection, _ = await place.call()
    with pytest.raises(BadFrame, match=r"^a Ask message of \d+ bytes is over the limit of 1048576 bytes$"):
        connection.send(Ask(request=1, command=Stop(because="x" * MAX_FRAME)))
    assert not connection.closed


async def test_a_defect_in_the_owner_ends_that_connection_alone(place: Place) -> None:
    trouble: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: trouble.append(str(context.get("exception"))))

    def broken(connection: Connection, message: Message) -> None:
        raise RuntimeError("a defect")

    server = await serve("127.0.0.1", 0, token=TOKEN, decode=ToMaster, on_message=broken, on_close=place.ear.on_close)
    ear = Ear()
    connection = await connect(
        "127.0.0.1", server.port, token=TOKEN, decode=FromMaster, on_message=ear.on_message, on_close=ear.on_close
    )
    connection.send(NodeFinished(round=1))
    await place.ear.until(lambda: place.ear.closed)
    assert trouble == ["a defect"]
    assert place.ear.closed[0].endswith("was given up after an error here: RuntimeError('a defect')")
    again = await connect("127.0.0.1", server.port, token=TOKEN, decode=FromMaster, on_message=ear.on_message)
    again.close()
    server.close()
    await again.wait_closed()


async def test_a_port_in_use_gets_one_sentence(place: Place) -> None:
    with pytest.raises(CannotListen) as refused:
        await serve("127.0.0.1", place.server.port, token=TOKEN, decode=ToMaster, on_message=place.ear.on_message)
    assert str(refused.value) == f"cannot listen on 127.0.0.1:{place.server.port}: address already in use"
    await place.check_still_serves()


async def test_an_address_that_is_not_ours_gets_one_sentence() -> None:
    with pytest.raises(CannotListen, match=r"^cannot listen on 192\.0\.2\.1:0: cannot assign requested address$"):
        await serve("192.0.2.1", 0, token=TOKEN, decode=ToMaster, on_message=lambda *_: None)


async def test_an_empty_token_is_refused_on_both_sides() -> None:
    for start in (serve, connect):
        with pytest.raises(ValueError, match=r"^the job token is empty$"):
            await start("127.0.0.1", 0, token=b"", decode=ToMaster, on_message=lambda *_: None)


async def test_a_closed_server_lets_nobody_in_who_was_still_proving_himself(place: Place) -> None:
    raw = await place.raw()
    await soon(lambda: place.server._endpoint.opening)
    place.server.close()
    assert await raw.hear_all() == b""
    assert place.ear.refused == ["the server stopped"]
    assert not place.opened


async def test_bytes_that_look_like_a_heartbeat_inside_a_message_are_not_one(place: Place) -> None:
    raw = await place.raw()
    await raw.shake()
    await soon(lambda: place.opened)
    connection = place.opened[0]
    raw.say(len(HEARTBEAT_FRAME).to_bytes(PREFIX, "big"))
    await soon(lambda: connection._decoder.partial)
    raw.say(HEARTBEAT_FRAME)
    await place.ear.until(lambda: place.ear.closed)
    assert not place.ear.messages


async def test_a_port_is_free_again_at_once_after_a_restart(place: Place) -> None:
    connection, ear = await place.call()
    port = place.server.port
    place.server.close()
    await ear.until(lambda: ear.closed)
    assert connection.closed
    again = await serve("127.0.0.1", port, token=TOKEN, decode=ToMaster, on_message=place.ear.on_message)
    again.close()


async def test_nobody_there_gets_one_sentence(place: Place) -> None:
    place.server.close()
    with pytest.raises(CannotConnect) as refused:
        await place.call()
    assert str(refused.value) == f"cannot connect to 127.0.0.1:{place.server.port}: connection refused"


async def test_a_name_that_does_not_exist_gets_one_sentence() -> None:
    with pytest.raises(CannotConnect, match=r"^cannot connect to no-such-host\.invalid:1: \S"):
        await connect("no-such-host.invalid", 1, token=TOKEN, decode=ToMaster, on_message=lambda *_: None)


async def _fake_server(answer: bytes, *, hang_up: bool = False) -> asyncio.Server:
    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read(1)
        if not hang_up:
            await reader.read()
        writer.close()

    return await asyncio.start_server(serve_one, "127.0.0.1", 0)


async def test_a_silent_server_costs_the_timeout_and_no_more() -> None:
    fake = await _fake_server(b"")
    port = fake.sockets[0].getsockname()[1]
    with pytest.raises(CannotConnect, match=rf"^the server at 127.0.0.1:{port} did not answer within 0.05 s$"):
        await connect("127.0.0.1", port, token=TOKEN, decode=ToMaster, on_message=lambda *_: None, timeout=0.05)
    fake.close()
    await asyncio.sleep(0.01)


async def test_a_server_that_hangs_up_may_be_tried_again() -> None:
    fake = await _fake_server(b"", hang_up=True)
    port = fake.sockets[0].getsockname()[1]
    with pytest.raises(CannotConnect, match=r"closed the connection without a word|broke: Connection reset"):
        await connect("127.0.0.1", port, token=TOKEN, decode=ToMaster, on_message=lambda *_: None)
    fake.close()


async def test_a_server_of_another_kind_is_not_tried_again() -> None:
    fake = await _fake_server(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    port = fake.sockets[0].getsockname()[1]
    with pytest.raises(HandshakeRefused, match=rf"^the server at 127.0.0.1:{port} does not speak resile's protocol$"):
        await connect("127.0.0.1", port, token=TOKEN, decode=ToMaster, on_message=lambda *_: None)
    fake.close()
    await asyncio.sleep(0.01)


async def test_a_server_without_the_token_is_seen_through(serving: Serve) -> None:
    place = await serving(token=b"another job's")
    with pytest.raises(HandshakeRefused, match="refused this peer: wrong or missing job token"):
        await place.call()


async def test_the_kernel_watches_accepted_connections(place: Place) -> None:
    connection, _ = await place.call()
    await soon(lambda: place.opened)
    for end in (place.opened[0], connection):
        assert end._transport is not None
        sock = end._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == KEEPALIVE_IDLE


async def test_the_token_is_in_no_text_of_what_holds_it(place: Place) -> None:
    connection, _ = await place.call()
    for holder in (connection, connection._endpoint, place.server):
        assert TOKEN.decode() not in repr(holder)


async def test_a_burst_of_connections_is_served_without_a_task_each(place: Place) -> None:
    calls = await asyncio.gather(*(place.call() for _ in range(500)))
    await soon(lambda: len(place.opened) == 500)
    assert len(place.server.connections) == 500
    assert len(asyncio.all_tasks()) == 1
    for connection, _ in calls:
        connection.abort()
    await place.ear.until(lambda: len(place.ear.closed) == 500)
    assert not place.ear.refused
    del calls, connection
    gc.collect()


def test_importing_the_messages_and_the_worker_channel_costs_no_asyncio() -> None:
    program = "import sys, resile.wire.agent_client; sys.exit('asyncio' in sys.modules or 'ssl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
