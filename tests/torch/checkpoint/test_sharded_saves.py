"""Saves and restores of a state that is divided among ranks: all of them keep the same steps, and end alike."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from resile.api.ids import Round
from resile.checkpoint.buffer import Buffer
from resile.checkpoint.errors import NotReadable
from resile.checkpoint.storage import Storage
from resile.torch._checkpoint import dcp_reader, restore, save_group
from resile.torch._checkpoint.packing import Damaged
from resile.torch._loop.loop_checkpoints import LoopCheckpoints
from resile.torch._loop.rendezvous import StateLost
from resile.torch._loop.training import LoopTraining
from resile.torch.checkpointer import Checkpointer
from resile.torch.elastic import Elastic
from resile.wire.env import AGENT_SOCKET
from tests.torch.checkpoint.checkpoint_servers import VaultThread, in_ranks, vault_thread


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
    memory = checkpointer._memory
    assert memory is not None
    records = [record for buffer in memory.buffers if (record := buffer.record()) is not None]
    return [record.step for record in sorted(records, key=lambda record: record.sequence)]


def older(checkpointer: Checkpointer) -> Buffer:
    memory = checkpointer._memory
    assert memory is not None
    return min(memory.buffers, key=lambda buffer: record.sequence if (record := buffer.record()) else 0)


def with_a_slow_storage(rank: int) -> list[Any]:
    """Rank 1's storage is slow: first with the older of two saves, then with both, and that for too long."""
    checkpointer = Checkpointer()
    for step in (1, 2):
        assert checkpointer.save(step, sharded(step))
    said: list[Any] = [held(checkpointer)]
    busy = older(checkpointer)
    if rank == 1:
        busy.want(1)
    said += [checkpointer.save(3, sharded(3)), held(checkpointer)]
    if rank == 1:
        for buffer in checkpointer._memory.buffers:  # type: ignore[union-attr]
            buffer.want(1)
    said += [checkpointer.save(4, sharded(4)), held(checkpointer)]
    if rank == 1:
        save_group.HOLD = 0.0
    said += [checkpointer.save(5, sharded(5)), held(checkpointer)]
    if rank == 1:
        for buffer in checkpointer._memory.buffers:  # type: ignore[union-attr]
            buffer.release()
    said += [checkpointer.save(6, sharded(6)), held(checkpointer)]
    checkpointer.close()
    return said


def test_all_ranks_keep_the_same_steps_though_the_storage_of_one_is_slow(vault: VaultThread) -> None:
    first, second = in_ranks(with_a_slow_storage, 2, vault=vault)
    assert first == second
    assert first[:5] == [[1, 2], True, [1, 3], False, [1, 3]]
    assert first[5:] == [True, [3, 5], True, [5, 6]], "a storage that hangs is not waited for any longer"


def without_room(rank: int) -> list[Any]:
    """Rank 1 has no memory for a state that has grown."""
    checkpointer = Checkpointer()
    for step in (1, 2):
        assert checkpointer.save(step, sharded(step))
    if rank == 1:
        checkpointer._memory.make_room = lambda size: "there is none"  # type: ignore[union-attr,method-assign]
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


class Picky:
    """A part of a state that may not be willing to take what was saved."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, int]:
        return {"number": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.refuses:
            raise LookupError("there is no such number")


def saved(rank: int, directory: str | None = None) -> bool:
    checkpointer = Checkpointer(directory)
    kept = checkpointer.save(7, sharded(7) | {"picky": Picky(False)}, store=directory is not None)
    checkpointer.wait()
    checkpointer.close()
    return kept


def restored(world: int, directory: str | None = None, *, picky: bool = False, misshaped: bool = False) -> Any:
    """The step; the exception in words, if this rank meets one."""
    state = sharded(0, world) | {"picky": Picky(picky)}
    if misshaped:
        state["weights"] = torch.zeros(3, 3)
    checkpointer = Checkpointer(directory)
    try:
        return checkpointer.restore(state)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        checkpointer.close()


def met_errors(rank: int) -> list[Any]:
    """Rank 1 meets all kinds of errors, one after the other: the group stays in step."""
    said = [saved(rank), restored(2, picky=rank == 1), restored(2, misshaped=rank == 1)]
    offers = restore.Memory.offers
    if rank == 1:
        restore.Memory.offers = lambda self: 1 // 0  # type: ignore[assignment,method-assign,return-value]
    said.append(restored(2))
    restore.Memory.offers = offers  # type: ignore[method-assign]
    return [*said, restored(2)]


MISFIT = "StateMismatch: weights has the shape (64, 8) in the checkpoint and (3, 3) here"


def test_an_error_that_one_rank_meets_while_it_restores_is_told_to_all(vault: VaultThread) -> None:
    first, second = in_ranks(met_errors, 2, vault=vault)
    unforeseen = ["LookupError: there is no such number", "ZeroDivisionError: integer division or modulo by zero"]
    assert second == [True, unforeseen[0], MISFIT, unforeseen[1], 7]
    told = [f"RuntimeError: rank 1 could not restore: {words}" for words in unforeseen]
    assert first == [True, told[0], MISFIT, told[1], 7]


def met_a_misfit(rank: int) -> list[Any]:
    return [restored(3, misshaped=rank == 0), restored(3)]


def test_a_rank_that_cannot_use_a_part_goes_on_to_pass_the_other_parts_on() -> None:
    with vault_thread() as first, vault_thread() as second, vault_thread() as third:
        nodes = [first, second, third]
        assert in_ranks(saved, 2, vault=nodes) == [True, True]
        assert in_ranks(met_a_misfit, 3, vault=nodes) == [[MISFIT, 7]] * 3


def finished(rank: int, directory: str) -> list[int]:
    checkpointer = Checkpointer(directory)
    checkpoints, parts = LoopCheckpoints(checkpointer, every=1), sharded(7)
    checkpoints.enter(parts)
    checkpoints.taken(7, parts)
    if rank == 1:
        checkpoints._saved = None  # as if it had not been able to keep it
    checkpoints.finish(7, parts)
    checkpoints.wait_stored()
    checkpointer.close()
    return Storage(directory).steps()


def test_the_last_step_is_saved_again_by_all_if_one_rank_does_not_have_it(vault: VaultThread, tmp_path: Any) -> None:
    for steps in in_ranks(finished, 2, str(tmp_path), vault=vault):
        assert steps in ([], [7]), "the other rank may be writing yet"
    assert Storage(tmp_path).steps() == [7]


def finished_behind(rank: int, directory: str) -> bool:
    """When the last step was taken, storage still writes what a process before rank 1 has saved, and others wait."""
    checkpointer = Checkpointer(directory)
    checkpoints, parts = LoopCheckpoints(checkpointer, every=1), sharded(7)
    checkpoints.enter(parts)
    for step in (5, 6):
        checkpoints.taken(step, parts)
    checkpointer.wait()
    if rank == 1:
        assert checkpointer._memory is not None
        for buffer in checkpointer._memory.buffers:
            record = buffer.record()
            assert record is not None
            buffer.want(record.sequence)
            threading.Timer(1.0, buffer.release).start()
    checkpoints.taken(7, parts)
    left_out = checkpoints._saved == 6
    checkpoints.finish(7, parts)
    checkpoints.wait_stored()
    checkpointer.close()
    return left_out


def test_the_last_step_waits_for_a_storage_that_is_behind(vault: VaultThread, tmp_path: Any) -> None:
    assert in_ranks(finished_behind, 2, str(tmp_path), vault=vault) == [True, True], "the step as such was left out"
    assert Storage(tmp_path).steps() == [7]


def not_readable(rank: int, directory: str) -> list[Any]:
    """Storage that does not answer rank 0 twice, and then more often than it is asked."""
    restore.PAUSES = (0.01, 0.01)  # type: ignore[assignment]
    steps, refusals = Storage.steps, [2]

    def listing(self: Storage) -> list[int]:
        refusals[0] -= 1
        if refusals[0] >= 0:
            raise NotReadable(f"{directory} cannot be read: Stale file handle")
        return steps(self)

    Storage.steps = listing  # type: ignore[method-assign]
    said = [restored(2, directory)]
    refusals[0] = 9
    return [*said, restored(2, directory)]


def test_a_storage_that_does_not_answer_is_tried_again_and_then_one_sentence_ends_all_ranks(tmp_path: Any) -> None:
    assert in_ranks(saved, 2, str(tmp_path)) == [True, True]
    why = f"training does not begin anew because storage cannot be read: {tmp_path} cannot be read: Stale file handle"
    assert in_ranks(not_readable, 2, str(tmp_path)) == [[7, f"NotReadable: {why}"]] * 2
    assert Storage(tmp_path).steps() == [7], "and nothing was set aside"


def cannot_write_on_one(rank: int, directory: str) -> Any:
    """A training that only one of its ranks can store."""
    return Checkpointer("/proc/resile" if rank == 1 else directory, store_every=1).restore({"numbers": torch.zeros(4)})


def test_a_storage_that_one_rank_can_never_write_is_the_same_sentence_on_all(tmp_path: Path) -> None:
    why = "NotWritable: checkpoints cannot be stored in /proc/resile: No such file or directory"
    assert in_ranks(cannot_write_on_one, 2, str(tmp_path)) == [why, why]


def with_an_old_view(rank: int, directory: str) -> Any:
    """Rank 1 sees a step as it was before its files were all there."""

    def stale(storage: Any, step: int, share: int, shares: int) -> None:
        if rank == 1 and step == 2:
            raise Damaged("__1_0.distcp is not there")
        check(storage, step, share, shares)

    check, dcp_reader.check = dcp_reader.check, stale
    return Checkpointer(directory).restore({"numbers": torch.zeros(4)})


def test_a_step_that_rank_0_finds_sound_is_not_set_aside_because_another_rank_does_not(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, {"numbers": torch.ones(4)}, store=True)
        checkpointer.wait()
    checkpointer.close()
    assert in_ranks(with_an_old_view, 2, str(tmp_path)) == [1, 1]
    assert Storage(tmp_path).steps() == [1, 2]


def with_an_old_view_of_all(rank: int, directory: str) -> Any:
    """Rank 1 sees no step as it is."""

    def stale(storage: Any, step: int, share: int, shares: int) -> None:
        if rank == 1:
            raise Damaged("__1_0.distcp is not there")
        check(storage, step, share, shares)

    check, dcp_reader.check = dcp_reader.check, stale
    restore.PAUSES = (0.01,)
    return Checkpointer(directory).restore({"numbers": torch.zeros(4)})


def test_training_does_not_begin_anew_below_steps_that_rank_0_finds_sound(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(3, {"numbers": torch.ones(4)}, store=True)
    checkpointer.wait()
    checkpointer.close()
    why = (
        f"NotReadable: training does not begin anew because step 3 in {tmp_path} is damaged as one rank reads it, "
        "but rank 0 does not find it so"
    )
    assert in_ranks(with_an_old_view_of_all, 2, str(tmp_path)) == [why, why]
    assert Storage(tmp_path).steps() == [3]


def goes_on(rank: int, steps: list[int]) -> Any:
    restore.PAUSES = ()
    checkpointer, state = Checkpointer(), sharded(0, dist.get_world_size())
    try:
        return [checkpointer.restore(state), *(checkpointer.save(step, {**state, "step": step}) for step in steps)]
    finally:
        checkpointer.close()


def test_a_step_whose_other_parts_are_not_here_is_waited_for_and_not_overwritten() -> None:
    with vault_thread() as first, vault_thread() as second:
        assert in_ranks(goes_on, 2, [100, 101], vault=[first, second]) == [[None, True, True]] * 2
        (alone,) = in_ranks(goes_on, 1, [1, 2], vault=[first])
        assert alone == (
            "PartsMissing: training does not begin anew because step 101 in memory lacks what rank 1 of 2 had, "
            "and there is no other step"
        )
        assert in_ranks(goes_on, 2, [], vault=[first, second]) == [[101], [101]]


def test_who_was_killed_in_the_very_first_save_does_not_keep_others_from_beginning() -> None:
    with vault_thread() as first, vault_thread() as second:
        assert in_ranks(goes_on, 2, [100], vault=[first, second]) == [[None, True]] * 2
        second.do(lambda: [buffer.void() for pair in second.vault._buffers.values() for buffer in pair])
        assert in_ranks(goes_on, 2, [1], vault=[first, second]) == [[None, True]] * 2


def test_a_training_that_is_lost_is_not_begun_anew_by_the_processes_that_are_started_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> tuple[Any, Any]:
        model = torch.nn.Linear(2, 2)
        return model, torch.optim.SGD(model.parameters())

    def started() -> Elastic:
        with monkeypatch.context() as patch:  # no agent is there to answer
            patch.delenv(AGENT_SOCKET, raising=False)
            return Elastic(build=build, checkpointer=Checkpointer(tmp_path / "storage", store_every=1))

    monkeypatch.setenv(AGENT_SOCKET, str(tmp_path / "agent.sock"))
    survivor = started()
    assert survivor._rendezvous._agree(0, 1).step == 0, "nothing was lost yet"
    survivor._rendezvous._holds = Round(3)
    with pytest.raises(StateLost):
        survivor._rendezvous._agree(0, 1)
    with pytest.raises(StateLost, match="training does not begin anew"):
        next(started().steps(5))
    saved, keeper = started(), Checkpointer(tmp_path / "storage")
    keeper.save(4, LoopTraining(build(), {}).parts, store=True)
    keeper.close()
    assert next(saved.steps(5)) == 4, "what has come back is gone on from"
    assert not (tmp_path / "lost-for-good").exists()
