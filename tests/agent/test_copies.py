"""A copy on another node is whole or not there, and only a node of the same job and of no older round brings one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import msgspec
import pytest
from tests.checkpoint.parts import filled, layout_of
from tests.local.runs import wait_until

from resile.agent.copies import Copies
from resile.agent.partner import RATE, Partner
from resile.api.ids import Round
from resile.api.reports import Door
from resile.checkpoint.buffer import Buffer
from resile.checkpoint.sums import sums_of
from resile.wire.handshake import NotWelcome
from resile.wire.messages import Copy, CopyAnswer
from resile.wire.stream import call

TOKEN = b"secret"
HERE = "127.0.0.1"


@contextlib.contextmanager
def keeping(*, tls: bool = False, room: str = "") -> Iterator[tuple[Copies, Door]]:
    copies = Copies(lambda need: room)
    copies.open(HERE, lambda: TOKEN, tls=tls)
    door = copies.door(HERE)
    assert door is not None
    try:
        yield copies, door
    finally:
        copies.close()


def partner(door: Door, token: bytes = TOKEN, round_: int = 3, **environ: str) -> Partner:
    made = Partner(environ)
    made.know(lambda: token)
    made.enter(Round(round_), door)
    return made


def held(copies: Copies) -> dict[int, bytes]:
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
    with keeping(tls=tls) as (copies, door):
        assert bool(door.fingerprint) is tls
        for step in (5, 6, 7):
            assert partner(door).copy(0, *source(step)) == ""
        length = layout_of().length
        assert held(copies) == {step: bytes([step]) * length for step in (6, 7)}
        for buffer in copies.buffers:
            record = buffer.record()
            assert record is not None
            assert buffer.layout(record) == layout_of(rank=1, world=2)
            assert buffer.sums(record) == tuple(sums_of(buffer.map(), record.data_at, buffer.layout(record)))


def test_a_stranger_brings_nothing_and_is_told_why() -> None:
    with keeping() as (copies, door):
        said = partner(door, token=b"other").copy(0, *source(5))
        assert "wrong or missing job token" in said
        assert held(copies) == {}


def test_a_copy_goes_to_nobody_who_shows_another_certificate() -> None:
    with keeping(tls=True) as (copies, door), keeping(tls=True) as (_, other):
        wrong = msgspec.structs.replace(door, fingerprint=other.fingerprint)
        assert "showed another certificate" in partner(wrong).copy(0, *source(5))
        with pytest.raises(NotWelcome, match="showed another certificate"):
            call(wrong, TOKEN)
        assert held(copies) == {}


def test_a_node_that_was_left_behind_by_a_newer_round_overwrites_nothing() -> None:
    with keeping() as (copies, door):
        assert partner(door, round_=3).copy(0, *source(5)) == ""
        copies.enter(Round(4))
        said = partner(door, round_=3).copy(0, *source(9))
        assert said == "step 9 was not copied: it is of round 3, and this node is in round 4"
        assert list(held(copies)) == [5]


def test_a_copy_cut_short_leaves_the_one_before_it_whole() -> None:
    with keeping() as (copies, door):
        for step in (5, 6):
            assert partner(door).copy(0, *source(step)) == ""
        text = msgspec.json.encode(layout_of())
        stream, deadline = call(door, TOKEN), time.monotonic() + 30
        words = Copy(round=Round(3), local_rank=0, sequence=7, step=7, layout=len(text), sums=0, data=1 << 20)
        stream.say(words, deadline)
        assert stream.hear(CopyAnswer, deadline).error == ""
        stream.write(memoryview(text + bytes(1 << 19)), deadline)
        wait_until(lambda: list(held(copies)) == [6], "the older one to give way")
        assert "another copy of this rank is coming in" in partner(door).copy(0, *source(8))
        stream.close()
        wait_until(lambda: partner(door).copy(0, *source(8)) == "", "its place to be free")
        assert sorted(held(copies)) == [6, 8]


def test_without_memory_for_it_a_copy_is_refused_in_one_sentence() -> None:
    with keeping(room="there is no room") as (copies, door):
        assert partner(door).copy(0, *source(5)) == "step 5 was not copied: there is no room"
        assert held(copies) == {}


def test_what_was_overwritten_meanwhile_is_not_copied() -> None:
    with keeping() as (copies, door):
        buffer, sequence = source(5)
        filled(layout_of(), 6, buffer=buffer)
        assert "a newer step took its place" in partner(door).copy(0, buffer, sequence)
        assert held(copies) == {}


def test_nobody_there_is_one_sentence() -> None:
    with keeping() as (_, door):
        pass
    assert "cannot connect to" in partner(door).copy(0, *source(5))
    assert Partner({}).copy(0, *source(5)) == "there is no other node to copy to"


def test_copies_take_no_more_of_the_network_than_allowed() -> None:
    with keeping() as (_, door):
        layout = layout_of()
        began = time.monotonic()
        assert partner(door, **{RATE: "16Mi"}).copy(0, *source(5)) == ""
        assert time.monotonic() - began >= 0.9 * layout.length / (16 << 20)
