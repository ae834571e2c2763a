"""Every command in the README and the docs is run: what is written there works, as written, from top to bottom."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from resile.api.timeouts import Timeouts
from resile.operator.intervals import TTL_ANNOTATION
from tests.support.paths import ROOT

BIN = Path(sys.executable).parent

ELSEWHERE = {
    "make demo": "tests/local/examples/test_demo.py runs it",
    "make setup": "this very test runs in what it made",
    "make lint": ".ci/run runs it",
    "make test": ".ci/run runs it",
    "make cluster": ".ci/run runs it",
    **{
        f"resile run --standalone --nproc-per-node 2 --max-restarts 3 examples/{library}/train.py --pause 0.1": (
            "tests/local/trainers/test_adapters.py runs it, and kills one of its processes"
        )
        for library in ("huggingface", "lightning")
    },
    **{
        f"resile run --standalone --nproc-per-node 2 --max-restarts 3 examples/torchrun/{script}": (
            "tests/torch/trainers/test_examples_torchrun.py runs it"
        )
        for script in ("ddp.py", "elastic.py")
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
    if page == "docs/tutorial.md":
        assert re.search(r"^NAME    PHASE     AGE\nhello   Running   \d+m?s", done.stdout, re.M), done.stdout
        assert re.search(r"^hello-edljob-worker-1 +1/1 +Running +0 +\d+s", done.stdout, re.M), done.stdout


WRITTEN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
"""Every page."""


def test_every_page_that_is_linked_is_there() -> None:
    for page in WRITTEN:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_index_links_to_every_page_of_the_docs() -> None:
    linked = re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/README.md").read_text())
    assert sorted(linked) == sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")


def tree() -> list[str]:
    """Every file of the repository, new ones included."""
    asked = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def in_backticks(page: Path) -> list[str]:
    """What a page sets in backticks outside of its code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M))


FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
PACKAGES = {path.parent.name for path in (ROOT / "src/resile").glob("*/__init__.py")}
ROOTS = (ROOT, ROOT / "src/resile", ROOT / "examples")
"""Where paths on a page may begin."""


def test_every_path_on_a_page_is_there() -> None:
    seen = 0
    for page in WRITTEN:
        for words in in_backticks(page):
            path = words.partition("::")[0]
            if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", path) and path.split("/")[0] in FOLDERS | PACKAGES:
                seen += 1
                found = any((root / path).exists() for root in (*ROOTS, page.parent))
                assert found, f"{page.relative_to(ROOT)} names {path}"
    assert seen > 100


OTHERS_FILES = {"train.py"}
"""A reader's own."""


def test_every_python_file_that_is_named_on_a_page_is_there() -> None:
    names = {Path(path).name for path in tree()} | OTHERS_FILES
    for page in WRITTEN:
        for words in in_backticks(page):
            if re.fullmatch(r"\w+\.py", words):
                assert words in names, f"{page.relative_to(ROOT)} names {words}"


def test_every_class_that_is_named_on_a_page_is_in_the_tree() -> None:
    """Ours, or one of a library or of Kubernetes that our code names."""
    suffixes = (".py", ".yaml", ".toml", ".txt")
    text = "\n".join((ROOT / path).read_text() for path in tree() if path.endswith(suffixes) and (ROOT / path).exists())
    known = set(re.findall(r"\w+", text))
    for page in WRITTEN:
        for words in in_backticks(page):
            if re.fullmatch(r"[A-Z][a-z]+([A-Z][a-z]+)+", words):
                assert words in known, f"{page.relative_to(ROOT)} names {words}"


def public_names(module: str) -> set[str]:
    """What a module of ours defines or offers, without importing it: that would import torch."""
    path = ROOT / "src" / Path(*module.split("."))
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    return set(re.findall(r"^(?:class|def) (\w+)", text, re.M)) | set(re.findall(r'"(\w+)"', text))


def test_the_python_on_every_page_can_be_parsed_and_imports_what_is_there() -> None:
    imported = 0
    for page in WRITTEN:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("resile"):
                    imported += 1
                    missing = {name.name for name in node.names} - public_names(node.module or "")
                    assert not missing, f"{page.relative_to(ROOT)} imports {missing} from {node.module}"
    assert imported > 5


def test_every_box_of_the_architecture_is_a_folder_and_every_package_has_one() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    diagrams = re.findall(r"^```mermaid\n(.*?)^```", page, re.S | re.M)
    assert len(diagrams) == 2
    boxes = [folder for diagram in diagrams for folder in re.findall(r'\w\["([^"<]+)(?:<br/>[^"]*)?"\]', diagram)]
    assert [folder for folder in boxes if not (ROOT / "src/resile" / folder / "__init__.py").exists()] == []
    assert PACKAGES - {folder.split("/")[0] for folder in boxes} == set()


def glossary() -> dict[str, str]:
    """Every term with its definition.

    Raises:
        AssertionError: a term is there twice.
    """
    entries = re.findall(r"^\*\*`?([^*`]+)`?\*\*\\\n(.+)\n$", (ROOT / "docs/glossary.md").read_text(), re.M)
    assert len(dict(entries)) == len(entries)
    return dict(entries)


def test_the_glossary_has_every_term_once_in_order_and_in_two_lines() -> None:
    page = (ROOT / "docs/glossary.md").read_text()
    terms = list(glossary())
    assert len(terms) == page.count("\n**") > 60, "an entry that is not a term and one line"
    assert terms == sorted(terms, key=str.casefold)


def test_every_term_of_the_glossary_is_used() -> None:
    text = "\n".join(
        (ROOT / path).read_text()
        for path in tree()
        if path.startswith(("src/", "docs/")) and path.endswith((".py", ".md")) and path != "docs/glossary.md"
        if (ROOT / path).exists()
    )
    words = " ".join(re.split(r"[^a-z0-9]+", text.casefold()))
    unused = [term for term in glossary() if " ".join(re.split(r"[ _]", term.casefold())) not in words]
    assert unused == []


def test_every_timeout_that_users_see_is_in_the_glossary() -> None:
    terms = {term.replace(" ", "_") for term in glossary()}
    assert {field.name for field in msgspec.structs.fields(Timeouts)} - terms == set()
    assert "docs/glossary.md" in (ROOT / "CONTRIBUTING.md").read_text()


def test_every_guarantee_names_tests_that_exist() -> None:
    _, _, promises = (ROOT / "docs/guarantees.md").read_text().partition("## What is guaranteed\n")
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
