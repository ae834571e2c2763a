"""A wrong argument is one sentence that names it, at the place where it was given."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resile.torch import Checkpointer, Elastic, ElasticLoader
from tests.support.paths import ROOT

MODEL = torch.nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def whole(name: str, given: str, least: int = 0) -> str:
    return f"{name}: must be a whole number of {least} or more, not {given}"


MISTAKES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: Checkpointer(store_every=10),
        ValueError,
        "store_every: 10 needs a directory for what is stored; give one, or 0",
    ),
    (lambda: Checkpointer("x", store_every=1.5), TypeError, whole("store_every", "1.5")),
    (lambda: Checkpointer("x", store_every=-1), ValueError, whole("store_every", "-1")),
    (lambda: Checkpointer("x", keep_last="10"), TypeError, whole("keep_last", "'10'")),
    (lambda: Checkpointer("x", keep_every=True), TypeError, whole("keep_every", "True")),
    (
        lambda: Checkpointer(""),
        ValueError,
        "directory: must not be empty; None is memory only, and '.' is the working directory",
    ),
    (
        lambda: Checkpointer(b"x"),
        TypeError,
        "directory: must be a path or a URL, or None for memory only, not b'x'",
    ),
    (lambda: Checkpointer().save(1.0, {}), TypeError, whole("step", "1.0")),
    (lambda: Checkpointer().save(-1, {}), ValueError, whole("step", "-1")),
    (lambda: Checkpointer().save(MODEL, 1), TypeError, whole("step", "a Linear")),
    (
        lambda: Checkpointer().save(1, MODEL),
        TypeError,
        'state: must be a dictionary, such as {"model": model}, not a Linear',
    ),
    (
        lambda: Checkpointer().restore(MODEL),
        TypeError,
        'state: must be a dictionary, such as {"model": model}, not a Linear',
    ),
    (
        lambda: Elastic(MODEL, OPTIMIZER, checkpointer="x"),
        TypeError,
        """checkpointer: must be a Checkpointer, such as Checkpointer("checkpoints"), not 'x'""",
    ),
    (
        lambda: Elastic(OPTIMIZER, MODEL),
        TypeError,
        "model: must be a torch.nn.Module, not a SGD; the optimizer comes after it",
    ),
    (lambda: Elastic(MODEL, 0.1), TypeError, "optimizer: must be an optimizer of torch, not 0.1"),
    (
        lambda: Elastic(MODEL, OPTIMIZER, every=2),
        ValueError,
        "every: steps between two checkpoints need a checkpointer to save them; give one",
    ),
    (lambda: Elastic(MODEL, OPTIMIZER, checkpointer=Checkpointer(), every=0), ValueError, whole("every", "0", 1)),
    (lambda: Elastic(MODEL, OPTIMIZER, completed=2.0), TypeError, whole("completed", "2.0")),
    (
        lambda: Elastic(torch.nn.Linear(2, 2), OPTIMIZER),
        ValueError,
        "optimizer: has no parameter of this model, so nothing would be trained; make it for this one",
    ),
    (
        lambda: Elastic(MODEL, OPTIMIZER, sampler=[1]),
        TypeError,
        "sampler: must be an ElasticBatchSampler or an ElasticLoader, not a list",
    ),
    (
        lambda: Elastic(MODEL, OPTIMIZER, scheduler="cosine"),
        TypeError,
        "scheduler: must have a step(), and 'cosine' has none",
    ),
    (lambda: Elastic(MODEL, OPTIMIZER, before_step=3), TypeError, "before_step: must be a function, not 3"),
    (
        lambda: Elastic(MODEL, OPTIMIZER, state={"x": MODEL.state_dict()}),
        TypeError,
        "state: 'x' must have state_dict() and load_state_dict(), and a OrderedDict has not",
    ),
    (
        lambda: Elastic(MODEL, OPTIMIZER, state=[MODEL]),
        TypeError,
        'state: must be a dictionary, such as {"model": model}, not a list',
    ),
    (lambda: next(Elastic(MODEL, OPTIMIZER).steps("3")), TypeError, whole("total", "'3'")),
    (lambda: next(Elastic(MODEL, OPTIMIZER).epochs(-1, [])), ValueError, whole("count", "-1")),
    (
        lambda: ElasticLoader([1], global_batchsize=4),
        TypeError,
        "global_batchsize: ElasticLoader has no such argument; did you mean global_batch_size?",
    ),
    (lambda: ElasticLoader([1], nonsense=4, batch_size=1), TypeError, "nonsense: ElasticLoader has no such argument"),
    (lambda: ElasticLoader([1], global_batch_size="64"), TypeError, whole("global_batch_size", "'64'", 1)),
    (lambda: ElasticLoader([1], batch_size=6.5), TypeError, whole("batch_size", "6.5", 1)),
    (lambda: ElasticLoader([1], batch_size=1, micro_batch_size=0), ValueError, whole("micro_batch_size", "0", 1)),
    (lambda: ElasticLoader([1], batch_size=1, shuffle_block="9"), TypeError, whole("shuffle_block", "'9'", 1)),
    (
        lambda: ElasticLoader(100, batch_size=1),
        TypeError,
        "dataset: must be a data set or something to iterate over, not a int",
    ),
]


@pytest.mark.parametrize(("wrong", "kind", "sentence"), MISTAKES, ids=[each[2][:60] for each in MISTAKES])
def test_a_wrong_argument_is_one_sentence(wrong: Callable[[], Any], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as caught:
        wrong()
    assert type(caught.value) is kind
    assert str(caught.value) == sentence


def test_whatever_can_be_an_index_is_a_number_of_steps(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, store_every=np.int64(2), keep_last=np.int32(0))
    assert checkpointer.save(np.int64(4), {"seen": 4})
    assert checkpointer.save(torch.tensor(6), {"seen": 6}, store=False) is False
    checkpointer.wait(30)
    state = {"seen": 0}
    assert checkpointer.restore(state) == 4
    assert state == {"seen": 4}
    checkpointer.close()


def test_the_page_of_arguments_is_what_the_docstrings_say() -> None:
    path = ROOT / "hack" / "arguments.py"
    spec = importlib.util.spec_from_file_location("arguments_page", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.PAGE.read_text() == made.page(), "run: python hack/arguments.py"
