"""Reads a checkpoint from storage into a state: verifies it, then has DCP distribute the pieces over this world.

DCP's `.metadata` is a pickle. It is read with an unpickler that constructs the few classes of the format and nothing
else, and values are read with `weights_only=True`. So a checkpoint of unknown origin can be wrong, but it cannot run
code. (`torch.distributed.checkpoint.load` by itself unpickles whatever it finds.)
"""

from __future__ import annotations

import importlib
import io
import math
import os
import pickle
import warnings
from collections.abc import Sequence
from typing import IO, Any

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, StorageMeta

from resile.checkpoint.buffer import IncompleteBuffer
from resile.checkpoint.dcp_metadata import data_file
from resile.checkpoint.errors import NotReadable, not_read
from resile.checkpoint.layout import CHUNK, Layout, Part, TensorItem, chunks
from resile.checkpoint.layout import Path as Steps
from resile.checkpoint.object_storage import ObjectStorage
from resile.checkpoint.storage import METADATA, Storage
from resile.torch._checkpoint.flatten import LoadTarget
from resile.torch._checkpoint.packing import CHECKED, Damaged, PackedState
from resile.torch._checkpoint.pickling import unpickled

AnyStorage = Storage | ObjectStorage
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    _METADATA: {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint's metadata")


def read_metadata(storage: AnyStorage, step: int) -> Any:
    """DCP's metadata of a step. Raises IncompleteBuffer if missing or damaged, NotReadable if storage is unreadable."""
    try:
        return _Unpickler(io.BytesIO(storage.metadata(step))).load()
    except (NotReadable, IncompleteBuffer):
        raise
    except Exception as error:  # a pickle of unknown origin can fail in any way
        raise Damaged(f"{METADATA} is not what DCP writes: {error}") from None


def _reader(storage: AnyStorage, step: int, contents: Any) -> Any:
    if isinstance(storage, Storage):
        reader = dcp.FileSystemReader(storage.path(step))
    else:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        reader = FsspecReader(storage.where(step))
    if getattr(contents, "storage_meta", None) is None:
        contents.storage_meta = StorageMeta()
    reader.read_metadata = lambda *_, **__: contents
    return reader


class _Planner(DefaultLoadPlanner):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.values[read_item.dest_index.fqn] = unpickled(value.read())


def check(storage: AnyStorage, step: int, share: int, shares: int) -> None:
    """Compare every `shares`-th file of a step with its checksums, beginning with file number `share`.

    So `shares` ranks can check one step together. Raises IncompleteBuffer if a part is missing, too short or altered,
    and NotReadable if storage does not return a part.
    """
    parts = storage.parts(step)
    if parts and [part.rank for part in parts] != list(range(parts[0].world)):
        raise Damaged(f"it has the parts of ranks {[part.rank for part in parts]} of {parts[0].world}")
    if any(part.step != step for part in parts):
        raise Damaged(f"it has parts of the steps {sorted({part.step for part in parts})}")
    for part in parts[share::shares]:
        if part.length:
            with storage.data(step, part) as file:
                _check_data(file, part)


def _check_data(file: IO[bytes], part: Part) -> None:
    name = data_file(part.rank)
    if len(part.sums) != chunks(part.length):
        raise Damaged(f"{name} has {len(part.sums)} checksums instead of {chunks(part.length)}")
    size = file.seek(0, os.SEEK_END)
    if size != part.length:
        raise Damaged(f"{name} has {size} bytes instead of {part.length}")
    file.seek(0)
    for at in range(0, size, CHECKED):
        block = bytearray(file.read(min(CHECKED, size - at)))
        layout = Layout(
            rank=part.rank,
            world=part.world,
            attempt="",
            replicated=False,
            length=len(block),
            stored=len(block),
            items=tuple(msgspec.structs.replace(item, offset=item.offset - at) for item in part.items),
        )
        try:
            PackedState(block, 0, layout).check(part.sums[at // CHUNK : (at + CHECKED) // CHUNK], base=at)
        except Damaged as error:
            raise Damaged(f"{name}: {error}") from None


def load(storage: AnyStorage, step: int, load_target: LoadTarget) -> None:
    """Read a step from storage into a state. This is no collective. The step may come from a world of another size.

    Raises IncompleteBuffer if the step is damaged, NotReadable if storage fails, and StateMismatch if the step does not
    fit the state.
    """
    contents = read_metadata(storage, step)
    parts = storage.parts(step)
    paths = _paths(parts, contents)
    arrays = {item.key for part in parts for item in part.items if isinstance(item, TensorItem) and item.array}
    state: dict[str, Any] = {}
    for key, entry in contents.state_dict_metadata.items():
        if not load_target.wants(paths[key]):
            continue
        if isinstance(entry, BytesStorageMetadata):
            state[key] = None
        elif sum(math.prod(chunk.sizes) for chunk in entry.chunks) < math.prod(entry.size):
            raise Damaged(f"it does not hold all of {key}")  # DCP would silently leave the rest as it is
        else:
            shape = tuple(entry.size)
            state[key] = load_target.tensor(paths[key], entry.properties.dtype, shape, array=key in arrays)
    load_target.check(paths[key] for key in state)
    planner = _Planner()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # about a single process, which is intended
            dcp.load(state, storage_reader=_reader(storage, step, contents), planner=planner, no_dist=True)
    except (Exception, CheckpointException) as error:  # DCP may raise anything for damaged files
        if isinstance(error, CheckpointException):  # of one rank, as each reads alone
            error = next(iter(error.failures.values()))[0]
        absent = isinstance(error, FileNotFoundError) and storage.has(step)
        if parts or (isinstance(error, OSError) and not absent):  # our own parts have passed `check` before
            raise not_read(error, storage.where(step)) from error
        raise Damaged(f"DCP cannot read it: {error}") from error
    for key, value in planner.values.items():
        load_target.value(paths[key], value)


def _paths(parts: Sequence[Part], contents: Any) -> dict[str, Steps]:
    """The path of each leaf in storage: as our parts have it, else as DCP noted it, else its name alone."""
    planned = getattr(contents, "planner_data", None) or {}
    paths: dict[str, Steps] = {
        key: tuple(("l", step) if isinstance(step, int) else ("d", str(step)) for step in planned.get(key) or (key,))
        for key in contents.state_dict_metadata
    }
    return paths | {item.key: item.path for part in parts for item in part.items}
