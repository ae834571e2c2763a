"""What is imported ahead for a script is told from its source: torch, if nothing it does before could matter to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from resile.agent.standby.script_imports import PROMPTED, WITHOUT_TORCH, files_of, read


def source(directory: Path, text: str, **modules: str):  # type: ignore[no-untyped-def]
    for name, words in modules.items():
        path = directory.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(words)
    (directory / "train.py").write_text(text)
    return read([str(directory / "train.py")], str(directory))


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import torch", ["torch"]),
        ("import numpy, torch.nn as nn", ["torch", "torch.nn"]),
        ("from torch.utils.data import DataLoader\nimport torch", ["torch", "torch.utils.data"]),
        ("from resile.torch import Elastic", ["torch", "resile.torch"]),
        ("from resile.torch import Elastic, report_step", ["torch", "resile.torch"]),
        ("import resile.torch.elastic", ["torch", "resile.torch.elastic"]),
        ("from resile import torch", ["torch", "resile.torch"]),
        ("from resile.torch import report_step", []),
        ("from resile.torch.progress import report_step", []),
        ("import resile.torch.sampler", []),
        ("def main():\n    import torch", ["torch"]),
        ("from lightning.pytorch import Trainer", ["torch"]),
        ("from resile.torch.lightning import ElasticTrainer", ["torch"]),
        ("import resile.torch.huggingface", ["torch"]),
        ("import transformers", []),
        ("print('import torch')", []),
        ("this is not Python", []),
    ],
)
def test_the_modules_of_torch_that_a_source_names(tmp_path: Path, text: str, modules: list[str]) -> None:
    found = source(tmp_path, text)
    assert found.modules == (*modules, *(PROMPTED if modules else ()))
    assert not found.sets_variables


def test_what_is_said_not_to_import_torch_does_not() -> None:
    names = [name.removeprefix("resile.torch.") for name in WITHOUT_TORCH]
    said = f"import sys; from resile.torch import {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch",
        "from os import environ\nenviron.setdefault('A', 'b')\nimport torch",
        "import os\nos.environ |= {'A': 'b'}\nimport torch",
        "import os\nos.putenv('A', 'b')\nimport torch",
        "import os\ndel os.environ['A']\nimport torch",
        "import dotenv\ndotenv.load_dotenv()\nimport torch",
    ],
)
def test_a_script_that_sets_variables_first_imports_torch_itself(tmp_path: Path, text: str) -> None:
    found = source(tmp_path, text)
    assert found.sets_variables == f"{tmp_path}/train.py line 2"


def test_variables_that_are_read_or_set_later_do_not_matter(tmp_path: Path) -> None:
    found = source(tmp_path, "import os\nrank = os.environ['RANK']\nimport torch\nos.environ['A'] = 'b'")
    assert found.modules[0] == "torch"
    assert not found.sets_variables


def test_own_modules_are_followed_in_the_order_of_their_import(tmp_path: Path) -> None:
    found = source(
        tmp_path,
        "from lib import model\nimport torch",
        lib____init__="",
        lib__model="from .deep import layer",
        lib__deep="import setup\nimport torch.nn",
        setup="import os\nos.environ['A'] = 'b'\nimport train",
    )
    assert found.sets_variables == f"{tmp_path}/setup.py line 2"
    assert {Path(path).name for path in found.files} >= {"train.py", "model.py", "deep.py", "setup.py"}


def test_modules_are_found_without_importing_them(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name in ("__init__", "train", "__main__"):
        (tmp_path / "package" / f"{name}.py").write_text("raise SystemExit")
    below = str(tmp_path / "package")
    roots = ["/nowhere", str(tmp_path)]
    assert files_of("package.train", roots) == [f"{below}/__init__.py", f"{below}/train.py"]
    assert files_of("package", roots) == [f"{below}/__main__.py"]
    assert files_of("package.missing", roots) == []
