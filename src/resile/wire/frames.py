"""Messages to bytes and back, without I/O: a frame is a 4-byte big-endian length and a msgpack body.

A length is checked before anything is kept for it, so a peer cannot make this side hold more than one limit's worth of
bytes. Whole frames that arrive alone, as heartbeats do, are recognised without touching a buffer: that path runs 16,000
times a second in a master with 10,000 agents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from resile.api.ids import Bytes, MiB
from resile.protocol.agent_to_master import Heartbeat
from resile.protocol.message import Message

PREFIX = 4
"""Bytes of the length before each body."""

MAX_FRAME = Bytes(MiB)
"""Largest body that a server accepts. The longest message to a master, a failure with its log tail, is under 64 KiB."""

MAX_ANSWER = Bytes(16 * MiB)
"""Largest body that a client accepts from its server. A status table of 10,000 nodes takes some 2 MiB."""


class BadFrame(ValueError):
    """Bytes are no valid message, or a message is too long.

    For received bytes, the text completes the sentence `the peer at … sent`.
    """


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message, limit: int = MAX_ANSWER) -> bytes:
    """Encode a message as a frame for one or many `send_frame` calls. Raises BadFrame if the body exceeds `limit`."""
    body = _encoder.encode(message)
    if len(body) > limit:
        raise BadFrame(f"a {type(message).__name__} message of {len(body)} bytes is over the limit of {limit} bytes")
    return len(body).to_bytes(PREFIX, "big") + body


HEARTBEAT = Heartbeat()
HEARTBEAT_FRAME = encode(HEARTBEAT)


class FrameDecoder:
    """Cuts a stream of bytes into frame bodies. The bytes may arrive in any pieces. Only a partial frame is kept."""

    __slots__ = ("_limit", "_rest")

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._rest: bytearray | None = None

    @property
    def partial(self) -> bool:
        return self._rest is not None

    def feed(self, data: bytes) -> Sequence[memoryview]:
        """Return the frame bodies that `data` completes, in order. The views stay valid after later calls.

        Raises BadFrame if the length of a frame is over the limit. Frames before it in `data` are lost then, and
        nothing after it can be decoded.
        """
        if self._rest is None:
            if len(data) >= PREFIX and len(data) - PREFIX == self._check(data, 0):
                return (memoryview(data)[PREFIX:],)
            whole: bytes | bytearray = data
        else:
            whole = self._rest
            whole += data
        frames: list[memoryview] = []
        start, end = 0, len(whole)
        view: memoryview | None = None
        while end - start >= PREFIX:
            stop = start + PREFIX + self._check(whole, start)
            if stop > end:
                break
            if view is None:
                # A bytearray under a view cannot grow, so views are only made of finished bytes.
                view = memoryview(bytes(whole))
            frames.append(view[start + PREFIX : stop])
            start = stop
        if start == end:
            self._rest = None
        elif start or self._rest is None:
            self._rest = bytearray(whole[start:])
        return frames

    def _check(self, data: bytes | bytearray, at: int) -> int:
        size = int.from_bytes(data[at : at + PREFIX], "big")
        if size > self._limit:
            raise BadFrame(f"a message of {size} bytes, over the limit of {self._limit} bytes")
        return size


LONGEST_COMPLAINT = 200
"""Most characters of an error that may quote the peer, because the error goes into a log."""


def _one_line(text: str) -> str:
    short = text if len(text) <= LONGEST_COMPLAINT else text[: LONGEST_COMPLAINT - 1] + "…"
    return "".join(letter if letter.isprintable() else "?" for letter in short)


class MessageDecoder:
    """Decodes frame bodies to messages of one union of types. It never makes a value of another type."""

    __slots__ = ("_decoder", "heartbeat")

    def __init__(self, kind: Any) -> None:
        """`kind` is a message type or a union of message types."""
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)
        self.heartbeat: bytes | None = HEARTBEAT_FRAME
        """The frame of a heartbeat, which is recognised by comparison; None if the union has no heartbeat."""
        try:
            self.decode(memoryview(HEARTBEAT_FRAME)[PREFIX:])
        except BadFrame:
            self.heartbeat = None

    def decode(self, body: bytes | memoryview) -> Message:
        """The message in `body`. Raises BadFrame if it is not msgpack, or not a valid message of the union."""
        try:
            message: Message = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise BadFrame(f"a message that is not allowed here: {_one_line(str(error))}") from None
        except (ValueError, RecursionError, OverflowError):
            raise BadFrame("bytes that are no message") from None
        return message
