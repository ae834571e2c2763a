"""Every command in the README and the docs is run: what is written there works, as written, from top to bottom."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from resile.operator.settings import TTL_ANNOTATION
from tests.support.paths import ROOT

BIN = Path(sys.executable).parent

ELSEWHERE = {
    "make demo": "tests/local/examples/test_demo.py runs it",
    "make setup": "this very test runs in what it made",
    "make lint": ".ci/run runs it",
    "make test": ".ci/run runs it",
    "make again": "tests/test_suite.py runs what it runs",
    "make cluster": ".ci/run runs it",
    **{
        f"resile run --standalone --nproc-per-node 2 --max-restarts 3 examples/{library}/train.py --pause 0.1": (
            "tests/local/trainers/test_adapters.py runs it, and kills one of its processes"
        )
        for library in ("huggingface", "lightning")
    },
    **{
        f"resile run --standalone --nproc-per-node 2 {words}": "tests/torch/trainers/test_examples_torchrun.py runs it"
        for words in ("examples/torchrun/ddp.py", "--max-restarts 3 examples/torchrun/elastic.py")
    },
}
"""Commands that other parts of the suite run."""

BLOCK = re.compile(r"^```bash\n(.*?)^```", re.S | re.M)


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text())


def commands(block: str) -> str:
    """A block without the lines that are run elsewhere."""
    kept = [line for line in block.splitlines() if line.split("#")[0].strip() not in ELSEWHERE]
    return "\n".join(kept).strip()


PAGES = [
    str(page.relative_to(ROOT))
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
    if any(map(commands, blocks(str(page.relative_to(ROOT)))))
]


def test_there_are_pages_with_commands() -> None:
    assert "README.md" in PAGES


@pytest.mark.timeout(450)
@pytest.mark.parametrize("page", PAGES)
def test_every_command_works_as_written(page: str, tmp_path: Path) -> None:
    script = "\n".join(filter(None, map(commands, blocks(page))))
    script = script.replace("source .venv/bin/activate", "true")  # this installation, wherever it is
    environment = os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RESILE_STATE_DIR": str(tmp_path / "state"),
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-x", "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    if page == "README.md":
        assert re.search(r"^NAME    PHASE     AGE\nhello   Running   \d+m?s", done.stdout, re.M), done.stdout
        assert re.search(r"^hello-edljob-worker-1 +1/1 +Running +0 +\d+s", done.stdout, re.M), done.stdout


def test_every_page_that_is_linked_is_there() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_every_guarantee_names_tests_that_exist() -> None:
    promises, _, _ = (ROOT / "docs/guarantees.md").read_text().partition("## What is not guaranteed")
    paragraphs = [text for text in promises.split("\n\n") if text.startswith("**")]
    assert len(paragraphs) > 5
    for paragraph in paragraphs:
        named = re.findall(r"^- `(tests/[^`]*)`", paragraph, re.M)
        assert named, f"nothing holds: {paragraph.splitlines()[0]}"
        for name in named:
            path, _, test = name.partition("::")
            assert f"def {test}(" in (ROOT / path).read_text() if test else (ROOT / path).is_file(), name


def test_every_decision_is_in_the_list_of_decisions() -> None:
    folder = ROOT / "docs/decisions"
    listed = re.findall(r"^\| \[(\d{4})\]\((\1-[^)]*\.md)\)", (folder / "README.md").read_text(), re.M)
    assert [name for _, name in listed] == sorted(page.name for page in folder.glob("0*.md"))


def test_every_folder_of_the_source_has_its_row_in_contributing() -> None:
    table = re.findall(r"^\| ((?:`\w+`,? ?)+)\|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    named = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    assert named == {folder.parent.name for folder in (ROOT / "src/resile").glob("*/__init__.py")}


def test_the_page_of_the_cluster_asks_for_what_its_check_asks_for() -> None:
    checked = (ROOT / "hack/cluster/requirements.py").read_text()
    memory, build, run = (
        re.search(rf"^{name} = (\d+) \* GIB$", checked, re.M)[1]  # type: ignore[index]
        for name in ("MEMORY", "DISK_TO_BUILD", "DISK_TO_RUN")
    )
    needs = f"{memory} GB of memory, {build} GB of disk while building and {run} GB after"
    assert needs in (ROOT / "hack/cluster/README.md").read_text()


def test_the_time_to_live_of_pods_is_spelled_as_the_operator_reads_it() -> None:
    assert f"annotation `{TTL_ANNOTATION}`" in (ROOT / "docs/kubernetes.md").read_text()


def test_no_page_has_a_placeholder() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        assert not re.search(r"^[A-Z]+_[A-Z]+$", page.read_text(), re.M), page.name


def test_every_example_is_listed() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    files = subprocess.run(["git", "ls-files", "examples"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = {name.removeprefix("examples/") for name in files.stdout.splitlines() if not name.endswith(".md")}
    plans = {name for name in names if "scaling-plan" in name}  # "and its plans"
    assert [name for name in sorted(names - plans) if f"`{name}`" not in page] == []
