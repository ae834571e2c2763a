"""Saves steps for other libraries' training loops, each in one commit, and lets them go on from the newest step.

Such a loop cannot exchange its process group, so a lost rank costs a restart of all processes. It need not cost steps:
the newest step is restored from the agent's memory, or from storage if the agent is lost too.

A step is saved when the next one begins. By then it has been logged and evaluated, so a restart neither skips nor
repeats that. Modules, optimizers and similar objects are saved as they are. Two descriptions in plain values accompany
them: `common`, which is the same on all ranks, and `own`, which belongs to one rank, such as its position in the data.
The ranks' `own` values are gathered, so that after the loss of any node another one has them all. The random number
generators (Python's, torch's and, if imported, numpy's) are saved with `own`, so that a resumed training draws the same
dropout masks as an uninterrupted one.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import msgspec
import torch

from resile.torch._checkpoint.flatten import State
from resile.torch._loop.collectives import Collectives
from resile.torch._loop.state_codec import describe, rebuild, shapes_of
from resile.torch._support.arguments import whole
from resile.torch.checkpointer import Checkpointer

log = logging.getLogger(__name__)

COMMON, OWN, RANDOM = "common", "own", "random"
ROUNDED = 16 << 10
"""Bytes. Descriptions are padded to a multiple of this, so that their growth seldom changes the checkpoint's layout."""


class Saving(TypedDict, total=False):
    """The options of `Continuation` that an adapter for a trainer passes on; they are explained there."""

    save_every: int
    store_every: int
    keep_last: int
    overlap: bool


class Restored(NamedTuple):
    """The step that was restored, and the plain values that were saved with it."""

    step: int
    common: Any
    own: Any
    """This rank's values; another rank's if there are more ranks now than at the save."""


class Continuation:
    """Saves steps of one training and restores the newest. All ranks call its methods together, at the same steps."""

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        save_every: int = 1,
        store_every: int = 0,
        keep_last: int = 3,
        overlap: bool = False,
    ) -> None:
        """Set the options. The first save or restore opens a checkpointer.

        Args:
            directory: the storage, the same for all ranks; None for memory only.
            save_every: steps between two saves into memory.
            store_every: steps between two steps that go to storage; 0 for none. The last step of the training goes
                there in any case. If processes end earlier, the agent stores their newest saved step.
            keep_last: how many steps storage keeps; 0 keeps all.
            overlap: copy parameters and optimizer state while the next step computes its gradients. Only allowed if
                nothing but the optimizer changes parameters.
        """
        self._directory = directory
        self._save_every = whole("save_every", save_every, least=1)
        self._store_every = whole("store_every", store_every)
        self._keep_last = whole("keep_last", keep_last)
        self._overlap = overlap
        self._checkpointer: Checkpointer | None = None
        self._last = 0
        """The newest step that all ranks have kept, or the step with which training began."""
        self._tried = 0
        """The last step for which `save` was called."""
        self._random: dict[str, Any] | None = None
        """States of the random number generators, to be set when the first step begins."""

    def peek(self) -> Any | None:
        """Load only the `common` values of the newest step that all ranks can load; None if there is no such step."""
        state: dict[str, Any] = {COMMON: None}
        return None if self._restored(state) is None else _unpacked(state[COMMON])

    def restore(self, parts: State, begins_at: int = 0) -> Restored | None:
        """Load the newest saved step into `parts`, and return its number and the values that were saved with it.

        Modules, optimizers and other objects with `state_dict` are loaded in place; a plain value is replaced in the
        mapping `parts` itself. If no step was saved, returns None, and `is_due` counts from step `begins_at`.
        """
        state: dict[str, Any] = {**parts, COMMON: None, OWN: None}
        step = self._restored(state)
        self._last = self._tried = begins_at if step is None else step
        if step is None:
            return None
        parts.update((name, state[name]) for name in list(parts))
        ranks, rows = Collectives(), state[OWN]
        mine = _unpacked(rows[min(ranks.rank, len(rows) - 1)])
        drawn = mine.pop(RANDOM)
        if len(rows) == ranks.world:
            self._random = drawn
        elif ranks.rank == 0:
            log.warning(
                "step %d was saved by %d ranks and there are %d now: random numbers are drawn anew, and the place in "
                "the data is that of the same step, not of the same sample",
                step,
                len(rows),
                ranks.world,
            )
        if ranks.rank == 0:
            log.info("training goes on after step %d", step)
        return Restored(step, _unpacked(state[COMMON]), mine)

    def begin_step(self) -> None:
        """Begin a step. The first call after `restore` sets the random number generators to their saved states."""
        if self._random is not None:
            reinstate(self._random)
            self._random = None

    def is_due(self, step: int) -> bool:
        return step - self._tried >= self._save_every

    def save(
        self, step: int, parts: Mapping[str, Any], common: Any, own: Mapping[str, Any], *, last: bool = False
    ) -> None:
        """Save all arguments as the state of `step`, unless that step is saved already.

        Returns after one copy of the state, or earlier with `overlap`. A rank does not keep the step if storage is
        behind or there is no memory. Then no rank counts the step as saved. If it was due for storage, the next saved
        step goes there instead.

        Raises BadState if `common` or `own` has a value that is neither plain nor a tensor; the text says where.

        Args:
            step: steps completed.
            parts: the same objects, by name, that `restore` is given.
            common: plain values and tensors, the same on all ranks.
            own: plain values and tensors of this rank, by name.
            last: True if training ends here. The step goes to storage, even if `save` has to wait for it.
        """
        if step == self._last:
            return
        crossed = bool(self._store_every) and step // self._store_every > self._last // self._store_every
        state = {**parts, COMMON: _packed(common), OWN: _gathered(_packed({**own, RANDOM: capture()}))}
        if last:
            self._settle()
        kept = self._opened().save(step, state, store=crossed or last, overlap=self._overlap and not last)
        self._tried = step
        if all(row[0] for row in Collectives().gather([int(kept)])):
            self._last = step

    def before_update(self) -> None:
        """Wait for an overlapped save that is still copying. Call it before parameters change."""
        if self._checkpointer is not None:
            self._checkpointer.before_update()

    def close(self) -> None:
        """Wait for storage and disconnect from the agent, which keeps the saved steps. Idempotent."""
        self._settle()
        self._random = None
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def _settle(self) -> None:
        try:
            if self._checkpointer is not None:
                self._checkpointer.wait()
        except OSError as error:  # including TimeoutError; training itself has not failed
            log.error("a checkpoint is not in storage: %s", error)

    def _restored(self, state: State) -> int | None:
        return self._opened().restore(state, will_store=True)  # at least the last step is stored

    def _opened(self) -> Checkpointer:
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(self._directory, keep_last=self._keep_last)
        return self._checkpointer


def _packed(value: Any) -> torch.Tensor:
    description, tensors = describe(value)
    raw = [tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    body = msgspec.msgpack.encode([description, raw])
    framed = len(body).to_bytes(8, "little") + body
    size = -(-len(framed) // ROUNDED) * ROUNDED
    return torch.frombuffer(bytearray(framed.ljust(size, b"\0")), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    everything = data.numpy().tobytes()
    body = everything[8 : 8 + int.from_bytes(everything[:8], "little")]
    description, raw = msgspec.msgpack.decode(body, type=tuple[bytes, list[bytes]])
    known = shapes_of(description)
    tensors = [shape.empty(torch.device("cpu")) for shape in known.shapes]
    for tensor, values in zip(tensors, raw, strict=True):
        if values:
            tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(values), dtype=torch.uint8))
    return rebuild(known, tensors)


def _gathered(mine: torch.Tensor) -> torch.Tensor:
    ranks = Collectives()
    if ranks.world == 1:
        return mine.unsqueeze(0)
    width = max(row[0] for row in ranks.gather([len(mine)]))
    padded = torch.zeros(width, dtype=torch.uint8)
    padded[: len(mine)] = mine
    return torch.stack(ranks.gather_alike(padded.to(ranks.device))).cpu()


def capture() -> dict[str, Any]:
    """The states of the random number generators as plain values and tensors. Takes some 50 microseconds."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, at, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, torch.from_numpy(keys.astype("int64")), at, has_gauss, cached]
    return state


def reinstate(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        name, keys, at, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), at, has_gauss, cached))
