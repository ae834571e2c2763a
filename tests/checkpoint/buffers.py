"""Buffers with made-up contents, for tests that need no torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from resile.checkpoint.buffer import Buffer, Record, places
from resile.checkpoint.layout import CHUNK, Layout, TensorItem

FRAME = 64


def layout_of(
    directory: Path | str = "", *, rank: int = 0, world: int = 1, attempt: str = "a", whole: bool = False, **more: int
) -> Layout:
    """Of a rank that stores its own part, or of one that has all of a step as others do."""
    nbytes = 2 * CHUNK
    item = TensorItem(
        key=f"t{rank}",
        path=(("d", f"t{rank}"),),
        offset=0,
        length=nbytes,
        data=0,
        nbytes=nbytes,
        dtype="uint8",
        shape=(nbytes,),
        full=(nbytes,),
        origin=(0,),
    )
    return Layout(
        rank=rank,
        world=world,
        attempt=attempt,
        replicated=whole,
        whole=whole,
        length=nbytes,
        stored=0 if whole and rank else nbytes,
        items=(item,),
        directory=str(directory),
        **more,
    )


def filled(layout: Layout, step: int, *, sequence: int = 0, buffer: Buffer | None = None) -> tuple[Buffer, Record]:
    """A committed buffer whose data are all `step % 256`."""
    buffer = buffer or Buffer.make("test")
    text = msgspec.json.encode(layout)
    buffer.resize(places(len(text), layout.length)[2])
    _, at = buffer.begin(text, layout.length)
    buffer.map()[at : at + layout.length] = bytes([step % 256]) * layout.length
    return buffer, buffer.commit(sequence or step, step, text, layout.length)
