"""Saves and restores of a state that is divided among ranks: all of them keep the same steps, and end alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.torch.vaults import VaultThread, in_ranks, vault_thread
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from resile.checkpoint.buffer import Buffer
from resile.torch.checkpointer import Checkpointer


@pytest.fixture
def vault() -> Iterator[VaultThread]:
    with vault_thread() as thread:
        yield thread


def sharded(step: int, world: int = 2) -> dict[str, Any]:
    """A state of which every rank has a part; every number in it is the step."""
    mesh = init_device_mesh("cpu", (world,))
    return {"weights": distribute_tensor(torch.full((64, 8), float(step)), mesh, [Shard(0)]), "step": step}


def held(checkpointer: Checkpointer) -> list[int]:
    """The steps in this rank's memory, the older first."""
    vault = checkpointer._vault
    assert vault is not None
    records = [record for buffer in vault.buffers if (record := buffer.record()) is not None]
    return [record.step for record in sorted(records, key=lambda record: record.sequence)]


def older(checkpointer: Checkpointer) -> Buffer:
    vault = checkpointer._vault
    assert vault is not None
    return min(vault.buffers, key=lambda buffer: record.sequence if (record := buffer.record()) else 0)


def with_a_slow_storage(rank: int) -> list[Any]:
    """Rank 1's storage is slow: first with the older of two saves, then with both."""
    checkpointer = Checkpointer()
    for step in (1, 2):
        assert checkpointer.save(step, sharded(step))
    said: list[Any] = [held(checkpointer)]
    busy = older(checkpointer)
    if rank == 1:
        busy.want(1)
    said += [checkpointer.save(3, sharded(3)), held(checkpointer)]
    if rank == 1:
        for buffer in checkpointer._vault.buffers:  # type: ignore[union-attr]
            buffer.want(1)
    said += [checkpointer.save(4, sharded(4)), held(checkpointer)]
    if rank == 1:
        for buffer in checkpointer._vault.buffers:  # type: ignore[union-attr]
            buffer.release()
    said += [checkpointer.save(5, sharded(5)), held(checkpointer)]
    checkpointer.close()
    return said


def test_all_ranks_keep_the_same_steps_though_the_storage_of_one_is_slow(vault: VaultThread) -> None:
    first, second = in_ranks(with_a_slow_storage, 2, vault=vault)
    assert first == second
    assert first == [[1, 2], True, [1, 3], False, [1, 3], True, [3, 5]]


def without_room(rank: int) -> list[Any]:
    """Rank 1 has no memory for a state that has grown."""
    checkpointer = Checkpointer()
    for step in (1, 2):
        assert checkpointer.save(step, sharded(step))
    if rank == 1:
        checkpointer._vault.make_room = lambda size: "there is none"  # type: ignore[union-attr,method-assign]
    said: list[Any] = [checkpointer.save(3, sharded(3)), held(checkpointer)]
    checkpointer.close()
    return said


def test_a_step_that_one_rank_has_no_room_for_is_kept_by_none(vault: VaultThread) -> None:
    assert in_ranks(without_room, 2, vault=vault) == [[False, [1, 2]]] * 2


def with_words_that_grow(rank: int) -> list[Any]:
    """Rank 1 has to lay its part out anew in the middle of a save."""
    checkpointer = Checkpointer()
    said = []
    for step in range(1, 6):
        words = "x" * (5000 if rank == 1 and step == 3 else 10)
        assert checkpointer.save(step, {**sharded(step), "words": words})
        said.append(held(checkpointer))
    checkpointer.close()
    return said


def test_ranks_hold_the_same_steps_though_the_values_of_one_outgrow_their_place(vault: VaultThread) -> None:
    assert in_ranks(with_words_that_grow, 2, vault=vault) == [[[1], [1, 2], [2, 3], [3, 4], [4, 5]]] * 2
