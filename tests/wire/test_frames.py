import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resile.protocol.agent_to_master import Heartbeat, Hello, NodeFinished, StepReport
from resile.protocol.commands import Answer, Failed, FromMaster, ToMaster
from resile.protocol.reports import RendezvousConfig
from resile.protocol.worker_to_agent import WorkerMessage
from resile.wire.frames import MAX_FRAME, PREFIX, BadFrame, FrameDecoder, MessageDecoder, encode


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(PREFIX, "big") + body


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 30)))
def test_any_chopping_of_a_stream_gives_the_same_frames(bodies: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(map(frame, bodies))
    decoder = FrameDecoder()
    got: list[bytes] = []
    while stream:
        size = sizes.pop() if sizes else len(stream)
        got += [bytes(body) for body in decoder.feed(stream[:size])]
        stream = stream[size:]
    assert got == bodies
    assert not decoder.partial


@given(st.binary(max_size=200), st.integers(0, 199))
def test_a_stream_cut_short_is_known_to_be_partial(body: bytes, cut: int) -> None:
    data = frame(body)
    short = data[: min(cut, len(data) - 1)]
    decoder = FrameDecoder()
    assert not decoder.feed(short)
    assert decoder.partial == bool(short)


def test_frames_outlive_later_feeding() -> None:
    decoder = FrameDecoder()
    first = decoder.feed(frame(b"one") + frame(b"two") + b"\0\0")
    decoder.feed(b"\0\5three")
    assert [bytes(body) for body in first] == [b"one", b"two"]


@pytest.mark.parametrize("before", [b"", frame(b"good")])
def test_an_oversized_length_is_refused_before_anything_is_kept_for_it(before: bytes) -> None:
    decoder = FrameDecoder(limit=100)
    with pytest.raises(BadFrame, match=r"^a message of 101 bytes, over the limit of 100 bytes$"):
        decoder.feed(before + (101).to_bytes(PREFIX, "big"))


def test_a_frame_of_exactly_the_limit_passes() -> None:
    assert [bytes(body) for body in FrameDecoder(limit=100).feed(frame(b"x" * 100))] == [b"x" * 100]


def test_a_large_frame_in_many_chunks_arrives() -> None:
    decoder = FrameDecoder()
    data = frame(bytes(MAX_FRAME))
    got = [body for at in range(0, len(data), 1000) for body in decoder.feed(data[at : at + 1000])]
    assert [len(body) for body in got] == [MAX_FRAME]


def test_a_message_comes_back_as_it_went() -> None:
    hello = Hello(
        protocol=1,
        job="j",
        incarnation="i",
        address="a",
        host="h",
        nproc=2,
        rendezvous=RendezvousConfig(min_nodes=1, max_nodes=4),
        role="worker",
    )
    assert MessageDecoder(ToMaster).decode(encode(hello)[PREFIX:]) == hello


def test_a_message_over_the_limit_is_not_even_sent() -> None:
    with pytest.raises(BadFrame, match=r"^a Answer message of \d+ bytes is over the limit of 1000 bytes$"):
        encode(Answer(request=1, result=Failed(error="x" * 1000)), limit=1000)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "bytes that are no message"),
        (b"\xc1", "bytes that are no message"),
        (b"\x81\xa4type\xa1\xff", "bytes that are no message"),
        (encode(NodeFinished(round=1))[PREFIX:-1], "bytes that are no message"),
        (encode(NodeFinished(round=1))[PREFIX:] + b"\0", "bytes that are no message"),
        (b"\x81\xa4type\xa4Nope", "a message that is not allowed here: Invalid value 'Nope' - at `$.type`"),
        (b"\x01", "a message that is not allowed here: Expected `object`, got `int`"),
        (b"\x81\xa4type\xacNodeFinished", "a message that is not allowed here: Object missing required field `round`"),
        (
            b"\x83\xa4type\xacNodeFinished\xa5round\x01\xa4evil\x01",
            "a message that is not allowed here: Object contains unknown field `evil`",
        ),
        (
            b"\x82\xa4type\xacNodeFinished\xa5round\xa1x",
            "a message that is not allowed here: Expected `int`, got `str` - at `$.round`",
        ),
        (
            b"\x83\xa4type\xa3Ask\xa7request\x01\xa7command" + b"\x91" * 100_000,
            "a message that is not allowed here: Expected `object`, got `array` - at `$.command`",
        ),
        (
            b"\x83\xa4type\xa3Ask\xa7request\x01\xa7command\xdd\xff\xff\xff\xff",
            "a message that is not allowed here: Expected `object`, got `array` - at `$.command`",
        ),
    ],
)
def test_what_is_no_message_is_refused_with_one_sentence(body: bytes, sentence: str) -> None:
    with pytest.raises(BadFrame) as refused:
        MessageDecoder(ToMaster).decode(body)
    assert str(refused.value) == sentence


@given(
    st.one_of(st.binary(max_size=100), st.binary(max_size=60).map(lambda tail: b"\x82\xa4type\xacNodeFinished" + tail))
)
def test_no_bytes_get_anything_but_a_message_or_a_bad_frame(body: bytes) -> None:
    try:
        message = MessageDecoder(ToMaster).decode(body)
    except BadFrame:
        return
    assert isinstance(message, ToMaster)


def test_a_complaint_quotes_the_peer_in_one_short_line() -> None:
    field = b"\n\x1b[2J" + b"x" * 995
    body = b"\x82\xa4type\xacNodeFinished" + b"\xda" + len(field).to_bytes(2, "big") + field + b"\x01"
    with pytest.raises(BadFrame) as refused:
        MessageDecoder(ToMaster).decode(body)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


def test_only_a_union_with_heartbeats_recognises_their_frame() -> None:
    assert MessageDecoder(ToMaster).heartbeat == encode(Heartbeat())
    assert MessageDecoder(FromMaster).heartbeat is None
    assert MessageDecoder(WorkerMessage).heartbeat is None
    assert MessageDecoder(StepReport).heartbeat is None


def test_a_hello_without_a_role_is_no_message() -> None:
    """Which roles there are is for the kind of the job to say, so none can be assumed."""
    given = {"type": "Hello", "protocol": 1, "job": "j", "incarnation": "i", "address": "a", "host": "h", "nproc": 1}
    body = msgspec.msgpack.encode({**given, "rendezvous": {"min_nodes": 1, "max_nodes": 1}})
    with pytest.raises(BadFrame, match="missing required field `role`"):
        MessageDecoder(ToMaster).decode(body)
