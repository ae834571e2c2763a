"""Copies checkpoints to the partner node, one buffer at a time and no faster than RESILE_COPY_RATE."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from array import array
from collections.abc import Callable, Mapping

from resile.agent.checkpoints.replica_server import copy_deadline
from resile.api import quantity
from resile.api.ids import NO_ROUND, Round
from resile.checkpoint.buffer import PAGE, Buffer, IncompleteBuffer, Record
from resile.checkpoint.memory_client import COPY_SLOWEST
from resile.checkpoint.storage import sealed
from resile.protocol.replicas import ReplicaAnswer, ReplicaOffer
from resile.protocol.reports import ReplicaEndpoint
from resile.wire.bulk_stream import BulkStream, call
from resile.wire.handshake import HandshakeRefused

log = logging.getLogger("resile.agent")

RATE = "RESILE_COPY_RATE"
"""The variable that limits the bytes of replicas sent per second, as in `500Mi`; at least 16Mi."""
USUAL_RATE = 1 << 30
BLOCK = 4 << 20
"""Bytes that are sent before the rate and the buffer are checked again."""


class ReplicaClient:
    def __init__(self, token: Callable[[], bytes], environ: Mapping[str, str] = os.environ) -> None:
        self._round: Round = NO_ROUND
        self._partner: ReplicaEndpoint | None = None
        self._token = token
        self._rate = _rate(environ)
        self._stream: BulkStream | None = None

    @property
    def there(self) -> bool:
        return self._partner is not None

    def enter(self, round_: Round, replica_endpoint: ReplicaEndpoint | None) -> None:
        """Send copies to the partner at `replica_endpoint` from `round_` on. None means that there is no partner.

        A copy that is being sent is cut off.
        """
        self._round, self._partner = round_, replica_endpoint
        if (stream := self._stream) is not None:  # the partner refuses copies of an older round
            stream.cut()

    def copy(self, local_rank: int, buffer: Buffer, sequence: int) -> str:
        """Copy the checkpoint `sequence` in `buffer` to the partner. Returns an empty string, or why that failed."""
        round_, replica_endpoint, record = self._round, self._partner, buffer.record()
        if replica_endpoint is None:
            return "there is no other node to copy to"
        if record is None or record.sequence != sequence:
            return "it was not copied: a newer step took its place in memory"
        try:
            with contextlib.closing(call(replica_endpoint, self._token())) as self._stream:
                return self._send(self._stream, round_, local_rank, buffer, record)
        except IncompleteBuffer as error:
            return f"step {record.step} was not copied: {error}"
        except (OSError, HandshakeRefused) as error:
            return f"step {record.step} was not copied to another node: {error}"
        finally:
            self._stream = None

    def _send(self, stream: BulkStream, round_: Round, local_rank: int, buffer: Buffer, record: Record) -> str:
        deadline = copy_deadline(record.length)
        table = array("q", sealed(buffer, record)).tobytes()
        layout = bytes(buffer.map()[PAGE : PAGE + record.layout_length])
        stream.say(
            ReplicaOffer(
                round=round_,
                local_rank=local_rank,
                sequence=record.sequence,
                step=record.step,
                layout=len(layout),
                sums=len(table),
                data=record.length,
            ),
            deadline,
        )
        if error := stream.hear(ReplicaAnswer, deadline).error:
            return f"step {record.step} was not copied: {error}"
        stream.write(memoryview(layout), deadline)
        stream.write(memoryview(table), deadline)
        self._send_data(stream, buffer, record, deadline)
        stream.hear(ReplicaAnswer, deadline)
        return ""

    def _send_data(self, stream: BulkStream, buffer: Buffer, record: Record, deadline: float) -> None:
        began, sent = time.monotonic(), 0
        with memoryview(buffer.map()) as memory, memory[record.data_at : record.data_at + record.length] as data:
            while sent < record.length:
                with data[sent : sent + BLOCK] as block:
                    stream.write(block, deadline)
                    sent += len(block)
                if buffer.record() != record:
                    raise IncompleteBuffer("a newer step took its place in memory")
                ahead = began + sent / self._rate - time.monotonic()
                if ahead > 0:
                    time.sleep(ahead)


def _rate(environ: Mapping[str, str]) -> int:
    wish = environ.get(RATE, "")
    try:
        return max(2 * COPY_SLOWEST, quantity.size(wish)) if wish else USUAL_RATE
    except quantity.BadQuantity as error:
        log.warning("%s %s; copies are made at %d MiB/s", RATE, error, USUAL_RATE >> 20)
        return USUAL_RATE
