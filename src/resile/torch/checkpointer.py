"""Saves checkpoints with one copy in memory, so often as at every step, and stores them in the background.

    checkpointer = Checkpointer("checkpoints", store_every=1000)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler, "epoch": 0}
    step = checkpointer.restore(state) or 0
    while step < steps:
        ...
        optimizer.step()
        step += 1
        checkpointer.save(step, state)

Under an agent (`resile run`) a save goes into shared memory that the agent owns, so it survives the end of this
process. The agent writes it to storage every `store_every` steps and when the node's processes end. Under plain
torchrun or python only the steps that are due for storage are saved, by a thread of this process.

Plain tensors and values, which all ranks have alike (as in DCP), are kept once per node and stored once. Of sharded
tensors (DTensor, as `fully_shard` makes them) each rank keeps and stores its part.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from resile.checkpoint.buffer import Buffer, IncompleteBuffer, places
from resile.checkpoint.errors import StorageError, not_stored
from resile.checkpoint.layout import Layout
from resile.checkpoint.memory_client import MemoryClient, NoCheckpointServer
from resile.checkpoint.storage import open_storage
from resile.checkpoint.torchrun_buffers import ProcessBuffers
from resile.common.log_once import LogOnce
from resile.torch._checkpoint.buffer_writer import BufferWriter
from resile.torch._checkpoint.flatten import Leaf, State, flatten
from resile.torch._checkpoint.memory_parts import Memory, Verification, verify_ahead
from resile.torch._checkpoint.packing import SlotTooSmall
from resile.torch._checkpoint.rank_layout import Saver, estimate_growth, lay_out, still_fits
from resile.torch._checkpoint.restore import Restore
from resile.torch._checkpoint.save_group import BufferChoice, LeftOut, SaveGroup
from resile.torch._checkpoint.storing import check_writable, store_directly
from resile.torch._loop.collectives import Collectives
from resile.torch._support.arguments import check_directory, check_state, state_dicts_in, whole
from resile.torch._support.log_setup import show_info_logs
from resile.torch._support.sharding import is_sharded
from resile.wire.env import AGENT_SOCKET, WORKER

__all__ = ["Checkpointer"]

log = logging.getLogger(__name__)

STORE_PATIENCE = 600.0
"""Seconds that `wait` gives storage by default."""
COPY_PATIENCE = 30.0
"""Seconds that a save due for storage waits for the replicas of the previous save."""
BEHIND = "storage is two saves behind: saves are left out until it has caught up"


class Checkpointer:
    """Saves, stores and restores the state of a training. One per process; its methods are for one thread."""

    def __init__(
        self, directory: str | Path | None = None, *, store_every: int = 0, keep_last: int = 3, keep_every: int = 0
    ) -> None:
        """Ask the agent, if there is one, for memory. No checkpoint is read or written yet.

        Args:
            directory: the storage, the same for all ranks: a path, or the URL of an object store that fsspec knows
                (`s3://bucket/run`, with resile[storage] and the store's own package); None for memory only.
            store_every: steps between two that go to storage automatically; 0 for none.
            keep_last: how many steps storage keeps; 0 keeps all.
            keep_every: steps divisible by it are kept for ever; 0 for none.
        """
        store_every, keep_last = whole("store_every", store_every), whole("keep_last", keep_last)
        keep_every = whole("keep_every", keep_every)
        check_directory(directory, store_every)
        show_info_logs()
        self.directory = _absolute(directory) if directory is not None else ""
        self.storage = open_storage(self.directory, keep_last=keep_last, keep_every=keep_every) if directory else None
        self.store_every = store_every
        self._known_writable = self.storage is None
        """True if storage need not be tested: there is none, it was tested, or training goes on whatever the result."""
        self._settings = {"directory": self.directory, "keep_last": keep_last, "keep_every": keep_every}
        self._agent_socket, self._worker = os.environ.get(AGENT_SOCKET, ""), os.environ.get(WORKER, "")
        self._local_rank = _local_rank(self._worker)
        self._local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        """The number of workers of this node when none is lost."""
        self.collectives = Collectives()
        self._memory, self._leader = self._open()
        self._closed = False
        self._log_once = LogOnce(log)
        self._save_group = SaveGroup(self.collectives, self._memory, self._log_once)
        self._writer = BufferWriter(self._memory, self._log_once)
        self._layout: tuple[Layout, bytes] | None = None
        self._verifying: dict[Buffer, Verification] = {}
        self.behind = False
        """True if the last save was skipped because an earlier save is still being stored or copied."""
        for client in (self._memory, self._leader):  # while the script builds its model
            if client is not None:
                self._verifying |= verify_ahead(client.buffers, self._writer.sealer)

    @property
    def in_memory(self) -> bool:
        """True if an agent keeps saves in its memory, so that they survive the end of this process without storage."""
        return isinstance(self._memory, MemoryClient) and not self._closed

    def save(self, step: int, state: State, *, store: bool | None = None, overlap: bool = False) -> bool:
        """Save the state of `step` in memory, and in storage if due. Returns True if it was kept.

        All ranks save the same steps. This returns after one copy of the state. With `overlap` it returns at once, and
        parameters and optimizer state are copied during the next forward and backward pass. Then call `before_update()`
        before the optimizer changes them, or let `guard(optimizer)` do so.

        All ranks keep a sharded state or none does, which they agree on in a collective. So there always is a step of
        which every rank has its part. A state that is sharded over several nodes is also copied to another node, in the
        background. The next save is kept only when all nodes have copied it, so the step outlives the loss of any node.

        Storage gets one step at a time. A step that is due while another is being stored is kept in memory. It is
        stored later if it is still there at the next save or at `wait()`. If storage refuses for good, steps are still
        kept in memory, and the log and `wait()` report the reason.

        False means one of these: there is no agent and the step is not due for storage; there is no memory; storage is
        two saves behind (without an agent); or, for a sharded state, some node is still copying the previous save or
        storing the step that this save would overwrite. The last kept step is complete in any case.

        Args:
            step: steps completed; the number to go on with.
            state: modules, optimizers, anything with `state_dict`, tensors and plain values, by name.
            store: True if the step goes to storage, False if not; None follows `store_every`.
            overlap: copy parameters and optimizer state in the background.

        Raises:
            NotWritable: nothing was restored, and this first save finds that storage will never accept a step.
        """
        step = whole("step", step)
        self._check(state)
        self.before_update()
        self.behind = False
        due = self.storage is not None and (
            store if store is not None else bool(self.store_every) and step % self.store_every == 0
        )
        self._save_group.meet()
        if not due and not self.in_memory:
            return False
        if not self._known_writable:
            check_writable(self.storage)
            self._known_writable = True
        leaves, slot = flatten(state), None
        if any(is_sharded(leaf.value) for leaf in leaves):
            slot = self._agreed(leaves, due) if due or self._save_group.everywhere else None
            if slot is None:
                return False
        self._save_group.sequence += 1
        try:
            return self._save(step, leaves, slot, due, overlap)
        except SlotTooSmall:
            self._layout = None
            return self._save(step, leaves, slot, due, overlap)

    def before_update(self) -> None:
        """Wait until an overlapped save has copied everything. Call it before the optimizer steps."""
        self._writer.before_update()

    def guard(self, optimizer: Any) -> None:
        """Make every step of this optimizer call `before_update()` first."""
        optimizer.register_step_pre_hook(lambda *_: self.before_update())

    def wait(self, timeout: float = STORE_PATIENCE) -> None:
        """Wait until all work in the background is done and the last step due for storage is written.

        Raises:
            TimeoutError: the step is not written yet.
            OSError: the step could not be written; the text says why. A second call raises it again.
        """
        self._writer.wait(timeout)

    def close(self) -> None:
        """Finish saves under way and disconnect from the agent, which keeps the checkpoints. Idempotent.

        If the copy of an overlapped save failed, this raises its error after everything is closed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._writer.close()
        finally:
            for memory in (self._memory, self._leader):
                if memory is not None:
                    memory.close()
                    memory.buffers = []  # what is in storage can still be restored

    def restore(self, state: State, *, will_store: bool | None = None) -> int | None:
        """Load the newest step that all ranks can load. Returns its number; None if there is no such step.

        If it returns None, nothing has changed.

        All ranks call it together, after `init_process_group` if there are several. Among equally new steps this node's
        memory is preferred, then another node's (for state that all ranks have alike), then storage. Damaged steps are
        passed over with a warning that says what is damaged and why.

        Objects in `state` load what was saved of them; plain values in `state` are replaced. The result of a
        `state_dict()` is a plain value, too: give the object itself, or load the new value into the object yourself.

        Args:
            state: as it was given to `save`.
            will_store: True if this training is going to store steps, so that unwritable storage is reported now; None:
                True if `store_every` is not 0.

        Raises:
            StateMismatch: the checkpoint is sound, but it is of another model or another state.
            NotReadable: storage may have a step but does not return it, and memory has none.
            NotWritable: steps are to be stored, and storage will never accept one (for example, it is a read-only file
                system). All ranks raise it if one does. Storage is not tested when training goes on from memory.
            PartsMissing: memory has only some parts of a step, and there is no other step.
            RuntimeError: there are several ranks and no process group.
        """
        self._check(state)
        self.before_update()
        self._writer.wait_sealed()
        self._leave_group()
        self._save_group.meet()
        own, replicas = (
            (self._memory.buffers, self._memory.copies()) if isinstance(self._memory, MemoryClient) else ([], [])
        )
        with contextlib.ExitStack() as stack:
            others = [buffer for client in self._siblings(stack) for buffer in client.buffers]
            others += [stack.enter_context(contextlib.closing(copy)) for copy in replicas]
            memory = Memory(own, self._leader.buffers if self._leader else own, others, self._verifying)
            restoring = Restore(self.collectives, memory, self.storage)
            step = restoring.run(state)
        self._verifying = {}
        from_memory = step is not None and not restoring.from_storage
        if will_store is None:
            will_store = bool(self.store_every)
        if will_store and not from_memory:  # the same on all ranks
            check_writable(None if self._known_writable else self.storage, self.collectives.tell)
        self._known_writable = self._known_writable or will_store or from_memory
        self.reserve(state)
        return step

    def regroup(self) -> None:
        """Leave the process group, before a new one whose members take their state from a member, not by `restore`.

        Saves in the new group do not test any more whether storage can be written.
        """
        self._leave_group()
        self._known_writable = True

    def _leave_group(self) -> None:
        self._save_group.leave()
        self._layout = None
        self._writer.store_queue.deferred = None

    def reserve(self, state: State) -> None:
        """Allocate the memory for saves of `state` in the background, so that the first save is as fast as later ones.

        `restore` calls this. The tensors that an optimizer will add at its first step are estimated.
        """
        self._save_group.meet()
        if not self.in_memory:
            return
        leaves = flatten(state)
        layout, text = self._laid_out(leaves)
        size = places(len(text), layout.length)[2] + estimate_growth(state, leads=self._local_rank == 0)
        if self._room(size):
            self._writer.populate()

    def _open(self) -> tuple[MemoryClient | ProcessBuffers, MemoryClient | None]:
        if self._agent_socket and self._worker:
            try:
                own = MemoryClient(self._agent_socket, self._worker, self._local_rank)
                if not self._local_rank:
                    return own, None
                return own, MemoryClient(self._agent_socket, self._worker, 0, reads=True)
            except NoCheckpointServer as error:
                log.warning("checkpoints are kept in storage alone: %s", error)
        return ProcessBuffers(), None

    def _check(self, state: State) -> None:
        check_state(state)
        for name in state_dicts_in(state):
            self._log_once.say(
                f"state: {name!r} is a state_dict(), and restore() fills that dictionary, not its object: give "
                "save() and restore() the object itself, or load it from there yourself"
            )

    def _siblings(self, stack: contextlib.ExitStack) -> Iterator[MemoryClient]:
        """Yield clients that read the buffers of this node's other ranks; `stack` closes them.

        This process offers those buffers in a restore, because a lost process cannot offer its own.
        """
        for local_rank in range(self._local_world if self.in_memory else 0):
            if local_rank != self._local_rank:
                with contextlib.suppress(NoCheckpointServer):
                    client = MemoryClient(self._agent_socket, self._worker, local_rank, reads=True)
                    stack.callback(client.close)
                    yield client

    def _agreed(self, leaves: list[Leaf], due: bool) -> BufferChoice | None:
        """Agree with all ranks on the buffer that this save overwrites. None if all ranks skip the save. A collective.

        If the step is `due` for storage, this waits up to COPY_PATIENCE seconds for the replica of the last save. A
        step that is `due` is not skipped for lack of memory.
        """
        copied = self._save_group.copied(COPY_PATIENCE if due else 0.0)
        layout, text = self._laid_out(leaves)
        has_room = self._room(places(len(text), layout.length)[2])
        slot = self._save_group.agree(copied, has_room=has_room, due=due)
        if isinstance(slot, BufferChoice):
            return slot
        self.behind = slot is not LeftOut.NO_ROOM
        if slot is LeftOut.STORING:
            self._log_once.say(BEHIND)
        return None

    def _laid_out(self, leaves: list[Leaf]) -> tuple[Layout, bytes]:
        self._save_group.meet()
        leads = self._local_rank == 0 and self.in_memory
        saver = Saver(self.collectives.rank, self.collectives.world, leads, self._save_group.attempt)
        if self._layout is not None and still_fits(self._layout[0], leaves, saver):
            return self._layout
        layout = lay_out(leaves, saver, **self._settings)
        self._layout = (layout, msgspec.json.encode(layout))
        return self._layout

    def _save(self, step: int, leaves: list[Leaf], choice: BufferChoice | None, due: bool, overlap: bool) -> bool:
        layout, text = self._laid_out(leaves)
        if not self._room(places(len(text), layout.length)[2]):
            return due and self._store_directly(step, layout, leaves)
        choice = choice or self._save_group.free()
        if choice is None:
            self.behind = True
            self._log_once.say(BEHIND)
            return False
        sequence = self._save_group.sequence
        sent = functools.partial(self._save_group.sent, sequence, layout.length, self._local_world)
        self._writer.write(
            choice,
            leaves,
            layout,
            text,
            sequence=sequence,
            step=step,
            due=due,
            on_replication=sent if self._save_group.partnered and not layout.replicated else None,
            overlap=overlap,
        )
        return True

    def _room(self, size: int) -> bool:
        if self._closed:
            return False
        why = self._memory.make_room(size)
        if why:
            self._log_once.say(
                f"checkpoints go to storage alone, and saving waits for it: {why}"
                if self.storage
                else f"no checkpoints are kept: {why}, and no directory for storage was given",
                about="room",  # the missing amount may change from save to save
            )
        return not why

    def _store_directly(self, step: int, layout: Layout, leaves: list[Leaf]) -> bool:
        assert self.storage is not None
        try:
            store_directly(self.storage, step, layout, leaves)
            return True
        except StorageError as error:
            why = error
        except (OSError, IncompleteBuffer) as error:
            why = not_stored(error, step, self.directory)
        self._log_once.say(str(why), level=logging.ERROR)
        return False


def _absolute(directory: str | Path) -> str:
    text = str(directory)
    return text if "://" in text else str(Path(text).absolute())


def _local_rank(worker: str) -> int:
    """The local rank in `worker`, the name that the agent gave this process; 0 if it has no name."""
    with contextlib.suppress(ValueError):
        return int(worker.partition("/")[0].rpartition(".")[2])
    return 0
