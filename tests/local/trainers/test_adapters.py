"""Trainers of other libraries, the real ones: a lost rank costs a restart and no step, and the model is the same bits.

The scripts of the second half run in one process without an agent. They are interrupted again and again, at awkward
moments, and compare themselves with the library on its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local.resile_run import Runs, kill, wait_until
from tests.support.paths import ROOT

SLOW = 300.0
"""Seconds for torch and a trainer to be imported, several times over, on a machine that has other work."""
pytestmark = pytest.mark.timeout(600)

TEN_STEPS = {"huggingface": "'epoch': '0.5'", "lightning": "step = 10,"}
"""What the examples say after ten steps of forty."""


@pytest.mark.parametrize("library", TEN_STEPS)
def test_a_killed_rank_costs_no_step_and_the_model_is_that_of_an_undisturbed_run(library: str, runs: Runs) -> None:
    example = f"examples/{library}/train.py"
    run = runs.start(
        "--standalone", "--nproc-per-node", "2", "--max-restarts", "3", example, "--pause", "0.1", cwd=ROOT
    )
    wait_until(lambda: TEN_STEPS[library] in run.out, f"ten steps; it says:\n{run.out}{run.err}", SLOW)
    (pid,) = re.findall(r"^rank = 1, pid = (\d+)$", run.out, re.M)
    kill(int(pid))
    assert run.wait(SLOW) == 0, run.err
    steps = [int(step) for step in re.findall(r"restored step (\d+) from memory", run.err)]
    assert steps, run.err
    assert 9 <= min(steps) == max(steps) < 40, "all ranks go on after one step, and it is a late one"
    (resumed,) = runs.story("TrainingResumed")
    assert resumed.message.startswith(f"resumed at step {steps[0] + 1},"), "steps are reported"

    torchrun = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", example],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(runs.temp)},
        capture_output=True,
        text=True,
        timeout=SLOW,
        check=False,
    )
    assert torchrun.returncode == 0, torchrun.stderr
    ends = [set(re.findall(r"steps = 40, weights = (\w+)", text)) for text in (run.out, torchrun.stdout)]
    assert len(ends[0]) == 1
    assert ends[0] == ends[1]


HUGGINGFACE = """
import sys, tempfile, warnings
warnings.simplefilter("ignore")
import torch
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from resile.torch.huggingface import ResileCallback

torch.set_num_threads(1)


class Interrupted(Exception):
    pass


class Interrupt(TrainerCallback):
    def __init__(self, moment, step):
        self.moment, self.step = moment, step

    def at(self, moment, state):
        if (moment, state.global_step) == (self.moment, self.step):
            raise Interrupted

    def on_step_end(self, args, state, control, **objects):
        self.at("step", state)

    def on_evaluate(self, args, state, control, **objects):
        self.at("evaluation", state)

    def on_epoch_end(self, args, state, control, **objects):
        self.at("epoch", state)


def trainer(*callbacks, **more):
    torch.manual_seed(0)
    data = [{"input_ids": piece, "labels": piece} for piece in torch.randint(0, 64, (48, 16))]
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments(
        output_dir=sys.argv[1] + "/output", num_train_epochs=3, per_device_train_batch_size=4, logging_steps=1,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=3, save_strategy="no", report_to="none",
        metric_for_best_model="loss", restore_callback_states_from_checkpoint=True,
        disable_tqdm=True, use_cpu=True, **more,
    )
    patience = EarlyStoppingCallback(early_stopping_patience=100)
    return Trainer(
        GPT2LMHeadModel(config), args, train_dataset=data, eval_dataset=data[:4], callbacks=[patience, *callbacks]
    )


def outcome(done):
    history = [(entry["step"], entry.get("loss"), entry.get("eval_loss")) for entry in done.state.log_history]
    # the last entry sums up one call of train(), not the whole training
    return [weight.tolist() for weight in done.model.state_dict().values()], history[:-1]


alone = trainer()
alone.train()
assert alone.state.global_step == 18
for overlap in (False, True):
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as storage:
        moments = [("step", 1), ("evaluation", 3), ("step", 6), ("epoch", 6), ("step", 7), ("evaluation", 9)]
        for moment, step in moments[1::2] if overlap else moments:
            try:
                callback = ResileCallback(storage, store_every=1, overlap=overlap)
                callback.train(trainer(Interrupt(moment, step)))
            except Interrupted:
                continue
            raise AssertionError(f"it was not interrupted at {moment} {step}")
        resumed = trainer()
        ResileCallback(storage).train(resumed)
        assert outcome(resumed) == outcome(alone)
        over = trainer(Interrupt("step", 18))
        ResileCallback(storage).train(over)
        assert outcome(over)[0] == outcome(alone)[0], "there was nothing left to do"
for wrong, words in [
    (lambda: trainer(ResileCallback()).train(), "call ResileCallback.train(trainer) instead of trainer.train()"),
    (lambda: ResileCallback().train(trainer(auto_find_batch_size=True)), "auto_find_batch_size is on"),
]:
    try:
        wrong()
    except (RuntimeError, ValueError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nobody said {words}")
print("all is well")
"""


LIGHTNING = """
import os, sys, tempfile, warnings
warnings.simplefilter("ignore")
import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader, TensorDataset
from resile.torch.lightning import ResileCallback, ResileEnvironment

torch.set_num_threads(1)


class Interrupted(Exception):
    pass


class Interrupt(lightning.Callback):
    def __init__(self, moment="", step=0):
        self.moment, self.step = moment, step

    def at(self, moment, trainer):
        if (moment, trainer.global_step) == (self.moment, self.step) and not trainer.sanity_checking:
            raise Interrupted

    def on_train_batch_end(self, trainer, *_):
        self.at("step", trainer)

    def on_validation_end(self, trainer, *_):
        self.at("validation", trainer)

    def on_train_epoch_end(self, trainer, *_):
        self.at("epoch", trainer)


class Count(lightning.Callback):
    def __init__(self):
        self.validated = []

    def on_validation_epoch_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.validated.append([trainer.current_epoch, trainer.global_step])

    def state_dict(self):
        return {"validated": list(self.validated)}

    def load_state_dict(self, state):
        self.validated = state["validated"]


class Module(lightning.LightningModule):
    def __init__(self, asks):
        super().__init__()
        self.asks = asks
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.seen = torch.zeros(())

    def training_step(self, batch, batch_idx):
        self.seen = self.seen + batch[0].sum() * (batch_idx + 1)  # notices another order
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        torch.rand(7)
        return self.layers(batch[0]).sum()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches if self.asks else 30
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(steps))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["seen"]


def train(*callbacks, asks=False, keep="", nodes=0, **more):
    lightning.seed_everything(0, verbose=False)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(44, 4))
    environment, count, average = ResileEnvironment(), Count(), EMAWeightAveraging()
    length = {"max_epochs": -1, "max_steps": 17} if asks else {"max_epochs": 3}  # Lightning's loop knows two kinds
    trainer = lightning.Trainer(
        accelerator="cpu", devices=environment.devices, num_nodes=nodes or environment.num_nodes,
        plugins=[environment], callbacks=[count, average, *callbacks], accumulate_grad_batches=2,
        val_check_interval=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **length,
    )
    module = Module(asks)
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=22), **more)
    if keep:
        trainer.save_checkpoint(keep)
    logged = trainer.fit_loop.epoch_loop._batches_that_stepped  # what loggers count by
    return [weight.tolist() for weight in module.state_dict().values()], module.seen.item(), count.validated, logged


file = sys.argv[1] + "/some.ckpt"
alone = train(keep=file)
assert len(alone[2]) == 6, alone[2]
for asks in (False, True):
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as storage:
        moments = [("step", 1), ("validation", 4), ("step", 6), ("epoch", 6), ("step", 7), ("validation", 10)]
        for moment, step in moments[1::2] if asks else moments:
            try:
                train(ResileCallback(storage, store_every=1, overlap=asks), Interrupt(moment, step), asks=asks)
            except Interrupted:
                continue
            raise AssertionError(f"it was not interrupted at {moment} {step}")
        resumed = train(ResileCallback(storage), asks=asks)
        assert resumed == (alone if not asks else train(asks=True)), (resumed, alone)
        over = train(ResileCallback(storage), Interrupt("step", 17), asks=asks)
        assert over == resumed, "there was nothing left to do"
for wrong, words in [
    (lambda: train(ResileCallback(), ckpt_path=file), "would undo what ResileCallback restores"),
    (lambda: os.environ.update(WORLD_SIZE="2") or train(ResileCallback(), nodes=1), "2 training processes"),
    (lambda: ResileEnvironment().validate_settings(1, 1), "give the Trainer devices=1, num_nodes=2"),
]:
    try:
        wrong()
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nobody said {words}")
print("all is well")
"""


@pytest.mark.parametrize("script", [HUGGINGFACE, LIGHTNING], ids=TEN_STEPS)
def test_alone_it_goes_on_from_storage_whenever_it_was_interrupted(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=SLOW, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all is well\n")
