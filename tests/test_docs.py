"""Every command in the README and the docs is run: what is written there works, as written, from top to bottom."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

ELSEWHERE = {
    "make demo": "tests/local/test_demo.py runs it",
    "make setup": "this very test runs in what it made",
    "make lint": ".ci/run runs it",
    "make test": ".ci/run runs it",
}
"""Commands that other parts of the suite run."""

BLOCK = re.compile(r"^```bash\n(.*?)^```", re.S | re.M)


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text())


def commands(block: str) -> str:
    """A block without the lines that are run elsewhere."""
    kept = [line for line in block.splitlines() if line.split("#")[0].strip() not in ELSEWHERE]
    return "\n".join(kept).strip()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/guarantees.md"])
def test_every_command_works_as_written(page: str, tmp_path: Path) -> None:
    script = "\n".join(filter(None, map(commands, blocks(page))))
    if not script:
        return
    script = script.replace("source .venv/bin/activate", f"export PATH={BIN}:$PATH")
    environment = os.environ | {"RESILE_STATE_DIR": str(tmp_path / "state"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-x", "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
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


def test_every_test_that_the_guarantees_name_is_there() -> None:
    named = re.findall(r"`(tests/[^`]*)`", (ROOT / "docs/guarantees.md").read_text())
    assert named
    for path in named:
        assert (ROOT / path).exists(), path
