"""What training loops of other libraries need to go on: one commit, with what each rank has for itself."""

from __future__ import annotations

import logging
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from resile.agent.workers.ports import free_port
from resile.checkpoint.storage import Storage
from resile.torch._loop.state_codec import BadState
from resile.torch._trainers.continuation import Continuation, capture, reinstate
from resile.torch.checkpointer import Checkpointer
from tests.local.resile_run import wait_until
from tests.torch.checkpoint.checkpoint_servers import PATIENCE, VaultThread, spawning, vault_thread


@pytest.fixture
def vault() -> Iterator[VaultThread]:
    with vault_thread() as thread:
        yield thread


def drawn() -> list[float]:
    """Of every generator: two normals each, of which the second is kept from the first."""
    return [random.gauss(0, 1), random.random(), float(numpy.random.normal()), float(torch.randn(()))]


def test_random_numbers_go_on_where_they_were() -> None:
    for draw in (random.random, lambda: random.gauss(0, 1), numpy.random.normal, drawn):
        draw()
        state = capture()
        expected = [drawn() for _ in range(3)]
        drawn()
        reinstate(state)
        assert [drawn() for _ in range(3)] == expected


COMMON = {"words": "ünï", "tree": {1: [None, True, (2.5, math.inf)]}, "bytes": b"\0\1", "scores": torch.tensor(0.25)}


def test_what_was_saved_comes_back_and_only_steps_that_are_due_are_saved(vault: VaultThread) -> None:
    model = torch.nn.Linear(3, 2)
    first = Continuation(save_every=3)
    assert first.peek() is None
    assert first.restore({"model": model, "extra": {}}, begins_at=2) is None
    assert [step for step in range(2, 9) if first.is_due(step)] == [5, 6, 7, 8]
    own = {"flags": torch.tensor([True, False]), "empty": torch.empty(0), "many": torch.arange(30_000)}
    first.save(5, {"model": model, "extra": {"average": torch.ones(2)}}, COMMON, own)
    assert not first.is_due(7)
    first.close()
    first.close()

    second = Continuation(save_every=3)
    again = {"model": torch.nn.Linear(3, 2), "extra": {}}
    assert second.peek()["words"] == "ünï"
    restored = second.restore(again)
    assert restored is not None
    assert restored.step == 5
    assert torch.equal(again["model"].weight, model.weight)
    assert again["extra"]["average"].tolist() == [1.0, 1.0]
    assert restored.common["tree"] == COMMON["tree"]
    assert restored.common["scores"].item() == 0.25
    assert restored.own["flags"].tolist() == [True, False]
    assert restored.own["empty"].tolist() == []
    assert torch.equal(restored.own["many"], own["many"])
    assert [step for step in range(5, 10) if second.is_due(step)] == [8, 9]
    second.close()


def test_storage_gets_every_step_that_passes_a_multiple_and_the_last_one(tmp_path: Path) -> None:
    keeper = Continuation(tmp_path, store_every=10, keep_last=0)
    keeper.restore({"value": 0})
    for step in range(4, 36, 4):  # some loops count several steps at once
        keeper.save(step, {"value": step}, {}, {})
        if step in (12, 20):
            wait_until(lambda: Storage(tmp_path).steps()[-1:] == [step], f"step {step} in storage", PATIENCE)  # noqa: B023
    keeper.save(33, {"value": 33}, {}, {}, last=True)
    keeper.save(33, {"value": "not again"}, {}, {}, last=True)
    keeper.close()
    assert Storage(tmp_path).steps() == [12, 20, 32, 33]
    parts = {"value": 0}
    again = Continuation(tmp_path)
    assert again.restore(parts) is not None
    assert parts == {"value": 33}
    again.close()


def test_a_step_that_was_not_kept_is_not_taken_for_saved(
    tmp_path: Path, vault: VaultThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Continuation(tmp_path, save_every=2, store_every=10, keep_last=0)
    keeper.restore({"value": 0})
    saves, refused = Checkpointer.save, {10, 14}
    monkeypatch.setattr(
        Checkpointer,
        "save",
        lambda self, step, *words, **more: step not in refused and saves(self, step, *words, **more),
    )
    for step in (9, 10):
        keeper.save(step, {"value": step}, {}, {})
    assert not keeper.is_due(11), "the next one is tried when it is due, on all ranks alike"
    keeper.save(12, {"value": 12}, {}, {})
    keeper.save(14, {"value": 14}, {}, {})
    refused.clear()
    keeper.save(14, {"value": 14}, {}, {}, last=True)
    keeper.close()
    assert Storage(tmp_path).steps() == [12, 14]


def test_a_storage_that_fails_is_told_and_is_no_failure_of_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = Continuation(tmp_path / "storage")
    keeper.restore({"value": 0})
    (tmp_path / "storage").rmdir()
    (tmp_path / "storage").touch()
    keeper.save(1, {"value": 1}, {}, {}, last=True)
    keeper.close()
    assert "a checkpoint is not in storage" in caplog.text


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    keeper = Continuation(tmp_path)
    keeper.restore({"value": 0})
    with pytest.raises(BadState, match=r"state\['callbacks'\]\['Mine'\] is a PosixPath"):
        keeper.save(1, {"value": 1}, {"callbacks": {"Mine": tmp_path}}, {})
    keeper.close()
    with pytest.raises(ValueError, match=r"^save_every: must be a whole number of 1 or more, not 0"):
        Continuation(save_every=0)
    with pytest.raises(ValueError, match="0 or more"):
        Continuation(store_every=-1)


def rank_of_two(rank: int, port: int, directory: str, said: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    keeper = Continuation(directory)
    keeper.restore({"value": 0})
    keeper.save(1, {"value": 1}, {}, {"mine": "x" * (20_000 * rank)}, last=True)
    keeper.close()
    again = Continuation(directory)
    restored = again.restore({"value": 0})
    assert restored is not None
    said.put((rank, len(restored.own["mine"])))
    again.close()
    dist.destroy_process_group()


def test_every_rank_gets_its_own_back_and_a_change_of_the_world_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said, port = spawning.Queue(), free_port()
    ranks = [spawning.Process(target=rank_of_two, args=(rank, port, str(tmp_path), said)) for rank in range(2)]
    for process in ranks:
        process.start()
    heard = sorted(said.get(timeout=PATIENCE) for _ in ranks)
    for process in ranks:
        process.join(PATIENCE)
    assert heard == [(0, 0), (1, 20_000)]
    alone = Continuation(tmp_path)
    with caplog.at_level(logging.WARNING):
        restored = alone.restore({"value": 0})
    alone.close()
    assert restored is not None
    assert "saved by 2 ranks and there are 1 now" in caplog.text


@pytest.mark.parametrize(("module", "library"), [("huggingface", "transformers"), ("lightning", "lightning")])
def test_a_missing_library_is_one_clear_sentence(module: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"needs {library}.*pip install 'resile\[{module}\]'"):
        __import__(f"resile.torch.{module}")


def test_the_libraries_are_imported_only_by_their_adapters() -> None:
    names = "{'torch', 'transformers', 'accelerate', 'lightning', 'pytorch_lightning'}"
    check = f"import sys, resile.torch; sys.exit(bool({names} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
