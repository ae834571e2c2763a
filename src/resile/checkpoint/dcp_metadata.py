"""Writes the `.metadata` file of torch's distributed checkpoints (DCP) without importing torch.

DCP's format is a pickle of torch's own classes, and the agent that commits a checkpoint has no torch. This module
therefore writes the pickle's instructions by hand. It never reads a pickle; `torch/_checkpoint/dcp_reader.py` reads
them, for these classes only.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from resile.checkpoint.layout import Part, TensorItem

_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"

Written = bytes
"""Pickle instructions that leave one value on the unpickler's stack."""


def data_file(rank: int, attempt: str = "") -> str:
    """The name of the DCP file with a rank's data. Pass `attempt` only for object stores; the name then contains it."""
    return f"__{rank}_0.{attempt}.distcp" if attempt else f"__{rank}_0.distcp"


def metadata(parts: Sequence[Part], attempt: str = "") -> bytes:
    tensors: dict[str, list[tuple[TensorItem, Part]]] = {}
    storage: list[tuple[Written, Written]] = []
    entries: dict[str, Written] = {}
    paths: dict[str, Written] = {}
    for part in sorted(parts, key=lambda part: part.rank):
        for item in part.items:
            paths.setdefault(item.key, _plain(tuple(str(key) if kind == "d" else key for kind, key in item.path)))
            if isinstance(item, TensorItem):
                pieces = tensors.setdefault(item.key, [])
                if all(piece.origin != item.origin for piece, _ in pieces):
                    pieces.append((item, part))
            elif item.key not in entries:
                entries[item.key] = _new(_METADATA, "BytesStorageMetadata", {})
                storage.append(
                    (_index(item.key, None, None), _info(data_file(part.rank, attempt), item.offset, item.length))
                )
    for key, pieces in tensors.items():
        entries[key] = _tensor(pieces)
        for number, (piece, part) in enumerate(pieces):
            storage.append(
                (_index(key, piece.origin, number), _info(data_file(part.rank, attempt), piece.offset, piece.length))
            )
    fields = {
        "state_dict_metadata": _dictionary([(_plain(key), entry) for key, entry in entries.items()]),
        "planner_data": _dictionary([(_plain(key), path) for key, path in paths.items()]),
        "storage_data": _dictionary(storage),
        "storage_meta": _plain(None),
        "version": _plain("1.0.0"),
    }
    return pickle.PROTO + bytes([4]) + _new(_METADATA, "Metadata", fields) + pickle.STOP


def _tensor(pieces: Sequence[tuple[TensorItem, Part]]) -> Written:
    first = pieces[0][0]
    properties = _tuple(
        [
            _global("torch", first.dtype),
            _call("torch.serialization", "_get_layout", _plain("torch.strided")),
            _plain(False),
            _call(_METADATA, "_MEM_FORMAT_ENCODING", _plain(0)),
            _plain(False),
        ]
    )
    chunks = [
        _new(_METADATA, "ChunkStorageMetadata", {"offsets": _size(piece.origin), "sizes": _size(piece.shape)})
        for piece, _ in pieces
    ]
    return _new(
        _METADATA,
        "TensorStorageMetadata",
        {
            "properties": _build(_METADATA, "TensorProperties", properties),
            "size": _size(first.full),
            "chunks": _list(chunks),
        },
    )


def _index(key: str, origin: tuple[int, ...] | None, number: int | None) -> Written:
    offset = _plain(None) if origin is None else _size(origin)
    return _new(_METADATA, "MetadataIndex", {"fqn": _plain(key), "offset": offset, "index": _plain(number)})


def _info(file: str, offset: int, length: int) -> Written:
    fields = {"relative_path": _plain(file), "offset": _plain(offset), "length": _plain(length)}
    return _new(_FILES, "_StorageInfo", fields)


def _size(numbers: tuple[int, ...]) -> Written:
    return _call("torch", "Size", _plain(list(numbers)))


# instructions of the pickle format ---------------------------------------------------------------------------------


def _plain(value: Any) -> Written:
    """Make the pickle instructions for a value of builtin types.

    The instructions of several values can be joined. All use the same memo numbers, but each reads only what it wrote.
    """
    return pickle.dumps(value, protocol=2)[2:-1]


def _global(module: str, name: str) -> Written:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _tuple(values: Sequence[Written]) -> Written:
    return pickle.MARK + b"".join(values) + pickle.TUPLE


def _list(values: Sequence[Written]) -> Written:
    return pickle.EMPTY_LIST + pickle.MARK + b"".join(values) + pickle.APPENDS


def _dictionary(pairs: Sequence[tuple[Written, Written]]) -> Written:
    return pickle.EMPTY_DICT + pickle.MARK + b"".join(key + value for key, value in pairs) + pickle.SETITEMS


def _call(module: str, name: str, argument: Written) -> Written:
    return _global(module, name) + argument + pickle.TUPLE1 + pickle.REDUCE


def _build(module: str, name: str, state: Written) -> Written:
    return _global(module, name) + pickle.EMPTY_TUPLE + pickle.NEWOBJ + state + pickle.BUILD


def _new(module: str, name: str, fields: Mapping[str, Written]) -> Written:
    if not fields:
        return _global(module, name) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    return _build(module, name, _dictionary([(_plain(field), value) for field, value in fields.items()]))
