"""Writes the `.metadata` file of torch's distributed checkpoints (DCP) without importing torch.

DCP's format is a pickle of torch's own classes, and the agent that commits a checkpoint has no torch. This module
therefore writes the pickle's instructions by hand. It never reads a pickle; `torch/_checkpoint/dcp_reader.py` reads
them, for these classes only.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from resile.checkpoint.layout import Item, Part, TensorItem

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
                storage.append(_place(item, None, data_file(part.rank, attempt)))
    for key, pieces in tensors.items():
        entries[key] = _tensor([piece for piece, _ in pieces])
        for number, (piece, part) in enumerate(pieces):
            storage.append(_place(piece, number, data_file(part.rank, attempt)))
    fields = {
        "state_dict_metadata": _dictionary([(_plain(key), entry) for key, entry in entries.items()]),
        "planner_data": _dictionary([(_plain(key), path) for key, path in paths.items()]),
        "storage_data": _dictionary(storage),
        "storage_meta": _plain(None),
        "version": _plain("1.0.0"),
    }
    return pickle.PROTO + bytes([4]) + _new(_METADATA, "Metadata", fields) + pickle.STOP


def _tensor(pieces: Sequence[TensorItem]) -> Written:
    layout = _call("torch.serialization", "_get_layout", _plain("torch.strided"))
    memory_format = _call(_METADATA, "_MEM_FORMAT_ENCODING", _plain(0))
    properties = _tuple([_global("torch", pieces[0].dtype), layout, _plain(False), memory_format, _plain(False)])
    chunks = [
        _new(_METADATA, "ChunkStorageMetadata", {"offsets": _size(piece.origin), "sizes": _size(piece.shape)})
        for piece in pieces
    ]
    fields = {
        "properties": _build(_METADATA, "TensorProperties", properties),
        "size": _size(pieces[0].full),
        "chunks": _list(chunks),
    }
    return _new(_METADATA, "TensorStorageMetadata", fields)


def _place(item: Item, number: int | None, file: str) -> tuple[Written, Written]:
    """An entry of DCP's `storage_data`: which piece of which leaf is where in `file`. Values have no `number`."""
    origin = _size(item.origin) if isinstance(item, TensorItem) else _plain(None)
    index = {"fqn": _plain(item.key), "offset": origin, "index": _plain(number)}
    info = {"relative_path": _plain(file), "offset": _plain(item.offset), "length": _plain(item.length)}
    return _new(_METADATA, "MetadataIndex", index), _new(_FILES, "_StorageInfo", info)


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
