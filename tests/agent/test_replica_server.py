"""A copy on another node is whole or not there, and only a node of the same job and of no older round brings one."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from resile.agent.checkpoints.replica_client import RATE, ReplicaClient
from resile.agent.checkpoints.replica_server import GIVE_WAY, PROOF, UNPROVEN, ReplicaServer
from resile.api.ids import Round
from resile.checkpoint.buffer import Buffer
from resile.checkpoint.checksums import sums_of
from resile.checkpoint.memory_client import COPY_GRACE
from resile.protocol.replicas import ReplicaAnswer, ReplicaOffer
from resile.protocol.reports import ReplicaEndpoint
from resile.wire import bulk_stream
from resile.wire.bulk_stream import BulkStream, admit, call
from resile.wire.handshake import HandshakeRefused
from tests.checkpoint.buffers import filled, layout_of
from tests.local.resile_run import wait_until

TOKEN = b"secret"
HERE = "127.0.0.1"


@contextlib.contextmanager
def keeping(*, tls: bool = False, room: str = "") -> Iterator[tuple[ReplicaServer, ReplicaEndpoint]]:
    copies = ReplicaServer(lambda need: room, lambda: TOKEN)
    copies.open(HERE, tls=tls)
    replica_endpoint = copies.replica_endpoint(HERE)
    assert replica_endpoint is not None
    try:
        yield copies, replica_endpoint
    finally:
        copies.close()


def partner(replica_endpoint: ReplicaEndpoint, token: bytes = TOKEN, round_: int = 3, **environ: str) -> ReplicaClient:
    made = ReplicaClient(lambda: token, environ)
    made.enter(Round(round_), replica_endpoint)
    return made


def held(copies: ReplicaServer) -> dict[int, bytes]:
    """What is kept: data by step."""
    found = {}
    for buffer in copies.buffers:
        if record := buffer.record():
            found[record.step] = buffer.map()[record.data_at : record.data_at + record.length]
    return found


def source(step: int) -> tuple[Buffer, int]:
    buffer, record = filled(layout_of(rank=1, world=2), step)
    buffer.seal(record, sums_of(buffer.map(), record.data_at, buffer.layout(record)))
    return buffer, record.sequence


@pytest.mark.parametrize("tls", [False, True])
def test_the_last_two_copies_are_kept_byte_by_byte_with_layout_and_checksums(tls: bool) -> None:
    with keeping(tls=tls) as (copies, replica_endpoint):
        assert bool(replica_endpoint.fingerprint) is tls
        for step in (5, 6, 7):
            assert partner(replica_endpoint).copy(0, *source(step)) == ""
        length = layout_of().length
        assert held(copies) == {step: bytes([step]) * length for step in (6, 7)}
        for buffer in copies.buffers:
            record = buffer.record()
            assert record is not None
            assert buffer.layout(record) == layout_of(rank=1, world=2)
            assert buffer.sums(record) == tuple(sums_of(buffer.map(), record.data_at, buffer.layout(record)))


def test_a_stranger_brings_nothing_and_is_told_why() -> None:
    with keeping() as (copies, replica_endpoint):
        said = partner(replica_endpoint, token=b"other").copy(0, *source(5))
        assert "wrong or missing job token" in said
        assert held(copies) == {}


def test_a_copy_goes_to_nobody_who_shows_another_certificate() -> None:
    with keeping(tls=True) as (copies, replica_endpoint), keeping(tls=True) as (_, other):
        wrong = msgspec.structs.replace(replica_endpoint, fingerprint=other.fingerprint)
        assert "showed another certificate" in partner(wrong).copy(0, *source(5))
        with pytest.raises(HandshakeRefused, match="showed another certificate"):
            call(wrong, TOKEN)
        assert held(copies) == {}


def test_a_node_that_was_left_behind_by_a_newer_round_overwrites_nothing() -> None:
    with keeping() as (copies, replica_endpoint):
        assert partner(replica_endpoint, round_=3).copy(0, *source(5)) == ""
        copies.enter(Round(4))
        said = partner(replica_endpoint, round_=3).copy(0, *source(9))
        assert said == "step 9 was not copied: it is of round 3, and this node is in round 4"
        assert list(held(copies)) == [5]


def test_a_copy_cut_short_leaves_the_one_before_it_whole() -> None:
    with keeping() as (copies, replica_endpoint):
        for step in (5, 6):
            assert partner(replica_endpoint).copy(0, *source(step)) == ""
        text = msgspec.json.encode(layout_of())
        bulk_stream, deadline = call(replica_endpoint, TOKEN), time.monotonic() + 30
        words = ReplicaOffer(round=Round(3), local_rank=0, sequence=7, step=7, layout=len(text), sums=0, data=1 << 20)
        bulk_stream.say(words, deadline)
        assert bulk_stream.hear(ReplicaAnswer, deadline).error == ""
        bulk_stream.write(memoryview(text + bytes(1 << 19)), deadline)
        wait_until(lambda: list(held(copies)) == [6], "the older one to give way")
        bulk_stream.close()
        assert partner(replica_endpoint).copy(0, *source(8)) == ""
        assert sorted(held(copies)) == [6, 8]


def half_a_copy(replica_endpoint: ReplicaEndpoint, step: int, round_: int = 3) -> tuple[BulkStream, bytes]:
    """From a node that freezes in the middle of it; and what it has not sent."""
    text = msgspec.json.encode(layout_of())
    sums, data = bytes(8 * layout_of().sums), bytes([step]) * layout_of().length
    bulk_stream, deadline = call(replica_endpoint, TOKEN), time.monotonic() + 30
    words = {"local_rank": 0, "sequence": step, "step": step, "layout": len(text), "sums": len(sums), "data": len(data)}
    bulk_stream.say(ReplicaOffer(round=Round(round_), **words), deadline)
    assert bulk_stream.hear(ReplicaAnswer, deadline).error == ""
    bulk_stream.write(memoryview(text + sums + data[:1000]), deadline)
    return bulk_stream, data[1000:]


@pytest.mark.parametrize("round_", [3, 4])
@pytest.mark.parametrize("tls", [False, True])
def test_the_half_copy_of_a_frozen_node_gives_way_to_the_next(tls: bool, round_: int) -> None:
    with keeping(tls=tls) as (copies, replica_endpoint):
        frozen, _ = half_a_copy(replica_endpoint, 7)
        began = time.monotonic()
        assert partner(replica_endpoint, round_=round_).copy(0, *source(8)) == ""
        assert time.monotonic() - began < GIVE_WAY
        assert list(held(copies)) == [8]
        frozen.close()


def test_a_new_round_ends_what_is_coming_in_of_older_ones() -> None:
    with keeping() as (copies, replica_endpoint):
        frozen, _ = half_a_copy(replica_endpoint, 7)
        copies.enter(Round(4))
        with pytest.raises(OSError, match=r"closed|reset"):
            frozen.hear(ReplicaAnswer, time.monotonic() + 10)
        frozen.close()


def test_a_copy_whose_round_is_over_when_its_last_byte_arrives_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BulkStream, "cut", lambda stream: None)  # as if the last byte were there already
    with keeping() as (copies, replica_endpoint):
        bulk_stream, rest = half_a_copy(replica_endpoint, 7)
        copies.enter(Round(4))
        bulk_stream.write(memoryview(rest), time.monotonic() + 10)
        with pytest.raises(OSError, match=r"closed|reset"):
            bulk_stream.hear(ReplicaAnswer, time.monotonic() + 10)
        assert held(copies) == {}
        bulk_stream.close()


def test_a_new_round_ends_what_goes_out_to_a_frozen_node() -> None:
    listener = socket.create_server((HERE, 0))
    replica_endpoint = ReplicaEndpoint(address=HERE, port=listener.getsockname()[1])
    going = partner(replica_endpoint)
    layout = msgspec.structs.replace(layout_of(), length=64 << 20, stored=0, items=())  # more than sockets hold
    buffer, record = filled(layout, 5)
    with ThreadPoolExecutor(1) as pool, contextlib.closing(listener):
        said = pool.submit(going.copy, 0, buffer, record.sequence)
        frozen = admit(listener.accept()[0], HERE, TOKEN, None)
        frozen.hear(ReplicaOffer, time.monotonic() + 10)
        frozen.say(ReplicaAnswer(), time.monotonic() + 10)
        going.enter(Round(4), replica_endpoint)
        assert "step 5 was not copied" in said.result(10)
        frozen.close()


@pytest.mark.parametrize("tls", [False, True])
def test_a_copy_of_which_nothing_goes_out_any_more_ends_long_before_its_size_would_have_it(
    tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_stream, "STALL", 2.0)
    monkeypatch.setattr(ReplicaServer, "_fill", lambda *_: frozen.wait())
    frozen = threading.Event()
    layout = msgspec.structs.replace(layout_of(), length=64 << 20, stored=0, items=())  # more than sockets hold
    buffer, record = filled(layout, 5)
    with keeping(tls=tls) as (_, replica_endpoint), ThreadPoolExecutor(1) as pool:
        said = pool.submit(partner(replica_endpoint).copy, 0, buffer, record.sequence)
        try:
            words = said.result(COPY_GRACE)
        finally:
            frozen.set()
    where = f"the agent at {HERE}:{replica_endpoint.port}"
    assert words == f"step 5 was not copied to another node: {where} took nothing for 2 s"


def test_a_copy_of_which_nothing_comes_in_any_more_ends_as_well(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bulk_stream, "STALL", 2.0)
    with keeping() as (_, replica_endpoint):
        half, _ = half_a_copy(replica_endpoint, 7)
        wait_until(lambda: "gave nothing for 2 s" in caplog.text, "a sentence about it", COPY_GRACE)
        half.close()


def test_silent_strangers_do_not_close_the_door() -> None:
    with keeping() as (copies, replica_endpoint), contextlib.ExitStack() as stack:
        for _ in range(3 * UNPROVEN):
            stack.enter_context(socket.create_connection((replica_endpoint.address, replica_endpoint.port)))
        began = time.monotonic()
        assert partner(replica_endpoint).copy(0, *source(5)) == ""
        assert time.monotonic() - began < PROOF
        wait_until(lambda: len(threads()) <= UNPROVEN, "the others to be cut off", PROOF)
        assert list(held(copies)) == [5]
    wait_until(lambda: not threads(), "all of them to end")


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "resile-copy-in"]


def test_a_moment_without_descriptors_does_not_close_the_door_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(socket.socket):
        left = 2

        def accept(self) -> tuple[socket.socket, object]:
            if self.left:
                self.left -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    def short(address: tuple[str, int], **_: object) -> socket.socket:
        made = Short()
        made.bind(address)
        made.listen()
        return made

    monkeypatch.setattr(socket, "create_server", short)
    with keeping() as (_, replica_endpoint):
        assert partner(replica_endpoint).copy(0, *source(5)) == ""


@pytest.mark.parametrize(
    "numbers",
    [
        {"sums": 1 << 40},
        {"sums": -8},
        {"layout": 1 << 40},
        {"data": -1},
        {"data": 1 << 63},
        {"local_rank": 1 << 20},
        {"sequence": -1},
    ],
)
def test_numbers_that_are_no_checkpoints_are_refused_before_memory_is_taken(numbers: dict[str, int]) -> None:
    with keeping() as (copies, replica_endpoint):
        bulk_stream, deadline = call(replica_endpoint, TOKEN), time.monotonic() + 10
        sound = {"local_rank": 0, "sequence": 7, "step": 7, "layout": 100, "sums": 16, "data": 1000}
        bulk_stream.say(ReplicaOffer(round=Round(3), **(sound | numbers)), deadline)
        assert bulk_stream.hear(ReplicaAnswer, deadline).error == "it is no checkpoint"
        assert copies.sizes() == (0, 0)
        bulk_stream.close()


@pytest.mark.parametrize("change", [{"length": 1000}, {"stored": 1 << 40}, {"world": 1 << 40}, {"rank": -1}])
def test_a_table_of_contents_that_does_not_fit_is_not_kept(
    change: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    with keeping() as (copies, replica_endpoint):
        buffer, record = filled(layout_of(rank=1, world=2), 5)
        buffer.seal(record, sums_of(buffer.map(), record.data_at, buffer.layout(record)))
        text = msgspec.json.encode(msgspec.structs.replace(layout_of(rank=1, world=2), **change))
        table = array("q", buffer.sums(record) or ()).tobytes()
        bulk_stream, deadline = call(replica_endpoint, TOKEN), time.monotonic() + 10
        words = {"sequence": 5, "step": 5, "layout": len(text), "sums": len(table), "data": record.length}
        bulk_stream.say(ReplicaOffer(round=Round(3), local_rank=0, **words), deadline)
        assert bulk_stream.hear(ReplicaAnswer, deadline).error == ""
        data = buffer.map()[record.data_at : record.data_at + record.length]
        bulk_stream.write(memoryview(text + table + data), deadline)
        with pytest.raises(OSError, match=r"closed|reset"):
            bulk_stream.hear(ReplicaAnswer, deadline)
        wait_until(lambda: "its table of contents is not usable" in caplog.text, "it to be said")
        assert held(copies) == {}
        bulk_stream.close()


def test_memory_for_another_node_is_given_back_when_it_has_a_new_one() -> None:
    with keeping() as (copies, replica_endpoint):
        for rank, step in ((0, 5), (1, 5), (0, 6), (1, 6)):
            assert partner(replica_endpoint, round_=3).copy(rank, *source(step)) == ""
        copies.enter(Round(4))
        assert partner(replica_endpoint, round_=4).copy(0, *source(7)) == ""
        assert len(copies.buffers) == 4, "the next round may need what was kept before it"
        assert partner(replica_endpoint, round_=4).copy(0, *source(8)) == ""
        assert sorted(held(copies)) == [7, 8]
        assert len(copies.buffers) == 2


def test_without_memory_for_it_a_copy_is_refused_in_one_sentence() -> None:
    with keeping(room="there is no room") as (copies, replica_endpoint):
        assert partner(replica_endpoint).copy(0, *source(5)) == "step 5 was not copied: there is no room"
        assert held(copies) == {}


def test_what_was_overwritten_meanwhile_is_not_copied() -> None:
    with keeping() as (copies, replica_endpoint):
        buffer, sequence = source(5)
        filled(layout_of(), 6, buffer=buffer)
        assert "a newer step took its place" in partner(replica_endpoint).copy(0, buffer, sequence)
        assert held(copies) == {}


def test_nobody_there_is_one_sentence() -> None:
    with keeping() as (_, replica_endpoint):
        pass
    assert "cannot connect to" in partner(replica_endpoint).copy(0, *source(5))
    assert ReplicaClient(lambda: TOKEN, {}).copy(0, *source(5)) == "there is no other node to copy to"


def test_copies_take_no_more_of_the_network_than_allowed() -> None:
    with keeping() as (_, replica_endpoint):
        layout = layout_of()
        began = time.monotonic()
        assert partner(replica_endpoint, **{RATE: "16Mi"}).copy(0, *source(5)) == ""
        assert time.monotonic() - began >= 0.9 * layout.length / (16 << 20)
