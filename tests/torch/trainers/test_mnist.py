"""The digits example: its data, its log lines, and going on after an interruption with another number of processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "pytorch" / "mnist"
PYTHON = [sys.executable]
TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2"]


SAME_BATCH = ("--global_batch_size", 64)
"""Whatever the number of processes, so that their number does not change what is learned."""


def run(*command: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=170, check=False)


def make(output: Path) -> subprocess.CompletedProcess[str]:
    return run(*PYTHON, EXAMPLE / "make_mnist_png.py", "--output", output)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("data") / "new" / "mnist_png"
    made = make(output)
    assert made.returncode == 0, made.stderr
    assert made.stdout == f"{output} is written: 1442 images for training, 355 for testing\n"
    return output


def train(launcher: list[str], tree: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    data = ("--training_data", f"{tree}/training/", "--validation_data", f"{tree}/testing/")
    return run(*launcher, EXAMPLE / "cnn_train.py", *data, *flags)


@pytest.fixture(scope="module")
def interrupted(tree, tmp_path_factory) -> tuple[Path, str]:
    """The checkpoints and the log of two processes that stopped in mid-epoch, after 22 * 64 of 1442 samples."""
    folder = tmp_path_factory.mktemp("checkpoints")
    flags = ("--checkpoint_dir", folder, "--max_steps", 22, "--save_every", 8, *SAME_BATCH)
    done = train(TORCHRUN, tree, *flags)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture
def checkpoints(interrupted, tmp_path) -> Path:
    """A copy of them to spoil."""
    return Path(shutil.copytree(interrupted[0], tmp_path / "copy"))


def test_the_tree_has_every_digit_in_both_parts(tree):
    for split, total in (("training", 1442), ("testing", 355)):
        counts = [len(list((tree / split / str(digit)).glob("*.png"))) for digit in range(10)]
        assert sum(counts) == total
        assert max(counts) - min(counts) <= 10
    assert [path.name for path in tree.parent.iterdir()] == ["mnist_png"], "an unfinished tree was left behind"


def test_making_the_tree_again_changes_nothing(tree):
    before = {path: path.stat().st_mtime_ns for path in tree.rglob("*")}
    again = make(tree)
    assert again.stdout == f"{tree} is complete: 1442 images for training, 355 for testing\n"
    assert {path: path.stat().st_mtime_ns for path in tree.rglob("*")} == before


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("three years of work")
    refused = make(tmp_path)
    assert refused.returncode == 1
    assert refused.stderr == f"--output {tmp_path} has other things in it; name a new or an empty folder\n"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_log_of_two_processes_is_the_seeds(interrupted):
    log = interrupted[1]
    for rank in (0, 1):
        assert f"rank {rank} is initialized local_rank = {rank}\n" in log
    losses = re.findall(r"^loss = (\d\.\d+), step = (\d+)$", log, re.MULTILINE)
    assert sorted(int(step) for _, step in losses) == [0, 0, 20, 20]
    first, last = (min(float(loss) for loss, step in losses if step == at) for at in ("0", "20"))
    assert last < first
    assert "training stopped by --max_steps: epochs = 0, steps = 22" in log


def test_two_checkpoints_are_kept_and_nothing_unfinished(interrupted):
    names = sorted(path.name for path in interrupted[0].iterdir())
    assert [name[:15] for name in names] == ["step-0000000016", "step-0000000022"]


def losses_of(log: str) -> dict[int, float]:
    return {int(step): float(loss) for loss, step in re.findall(r"^loss = (\S+), step = (\d+)$", log, re.MULTILINE)}


def test_another_number_of_processes_goes_on_as_if_nothing_had_happened(tree, checkpoints):
    resumed = train(PYTHON, tree, "--checkpoint_dir", checkpoints, "--num_epochs", 3, *SAME_BATCH)
    assert resumed.returncode == 0, resumed.stderr
    load = r"\[INFO\] \[sampler.py:\d+:load_state_dict\] Load epoch = 0, completed num = 1408, num_samples = 34\n"
    assert re.search(load, resumed.stderr)
    assert re.findall(r"accuracy = \S+, epoch = (\d)", resumed.stdout) == ["0", "1", "2"]

    undisturbed = train(PYTHON, tree, "--num_epochs", 3, *SAME_BATCH)
    before, after = losses_of(undisturbed.stdout), losses_of(resumed.stdout)
    assert list(before) == [0, 20, 40, 60]
    assert list(after) == [22, 40, 60], "the first step after a restart is told"
    for step in (40, 60):
        assert after[step] == pytest.approx(before[step], rel=0.02)
    for log in (undisturbed.stdout, resumed.stdout):
        finished = re.search(r"training finished: epochs = 3, steps = 69, accuracy = (\S+)\n", log)
        assert finished is not None, log
        assert float(finished[1]) > 0.85


def spoil(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    if how == "cut short":
        data = data[: len(data) // 2]
    else:
        data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("how", ["cut short", "one bit flipped"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tree, checkpoints, how):
    newest = max(checkpoints.iterdir())
    spoil(newest, how)
    done = train(PYTHON, tree, "--checkpoint_dir", checkpoints, "--max_steps", 17, *SAME_BATCH)
    assert done.returncode == 0, done.stderr
    assert f"checkpoint {newest} is damaged; trying the one before it\n" in done.stdout
    assert "Load epoch = 0, completed num = 1024, num_samples = 418" in done.stderr


def test_a_folder_without_images_is_one_sentence(tree, tmp_path):
    refused = run(*PYTHON, EXAMPLE / "cnn_train.py", "--training_data", tmp_path, "--validation_data", tree / "testing")
    assert refused.returncode == 1
    assert refused.stderr.splitlines() == [
        f"--training_data {tmp_path} holds no images <digit>/<name>.png; make_mnist_png.py makes such a folder"
    ]
