"""docs/kubernetes.md as a reader would follow it: line by line, on a real cluster.

A reader waits until a thing is there before going on. So a line is repeated until it succeeds and, where the page shows
what it prints, until it prints that: the same words in the same columns, whatever the ages and counts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kube.namespace import IMAGE, ROOT, environment, kubectl, until
from tests.kube.seeds.seed_lines import PATIENCE, pod_rows

PAGES = ("docs/kubernetes.md",)
BLOCK = re.compile(r"^```bash cluster\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.S | re.M)
FIXTURE = ("make cluster", "make deploy", "make undeploy", "export KUBECONFIG", "source .venv/bin/activate")
"""What the fixture `deployed` and the environment of this test do."""


def lines(page: str) -> list[tuple[str, str]]:
    """Every command of a page with what it shows, which belongs to the last one of its block."""
    found: list[tuple[str, str]] = []
    for block, shown in BLOCK.findall((ROOT / page).read_text()):
        commands = [line.split("  #")[0].strip() for line in block.splitlines() if line.strip()]
        found += [(command, "") for command in commands[:-1]]
        found.append((commands[-1], shown))
    return found


def pattern(shown: str) -> str:
    """What is shown, with numbers, shares and ages left open; nothing more and nothing less than its lines."""
    rows = []
    for row in shown.strip().splitlines():
        cells = [
            r"[\d.]+[smh\d]*" if re.fullmatch(r"\d[\d.]*(s|m\d*s?)?", cell) else re.escape(cell) for cell in row.split()
        ]
        rows.append(r"[ ]+".join(cells) + "[ ]*")
    return r"\A" + r"\n".join(rows) + r"\n?\Z"


def followed(command: str, shown: str) -> bool:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=ROOT,
        env=environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    print(f"$ {command}\n{done.stdout}{done.stderr}")
    return done.returncode == 0 and (not shown or re.search(pattern(shown), done.stdout) is not None)


def nothing_left() -> None:
    """Other tests may have a job of this name: none of its pods may be taken for one of the page."""
    kubectl("-n", "dlrover", "delete", "scaleplan,elasticjob", "sample", "sample-plan", "--ignore-not-found")
    until("the end of the pods of an earlier sample", lambda: not pod_rows("sample"), PATIENCE)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_every_line_of_the_page_does_what_it_says(page: str, deployed: None) -> None:
    commands = [(line, shown) for line, shown in lines(page) if not line.startswith(FIXTURE)]
    assert commands, f"{page} has no line for a cluster"
    if IMAGE != "resile:dev":
        pytest.skip("the page's jobs run resile:dev")
    nothing_left()
    for command, shown in commands:
        until(f"`{command}` with\n{shown}", lambda command=command, shown=shown: followed(command, shown))


def test_a_line_that_shows_something_else_is_told_apart() -> None:
    shown = "NAME     PHASE     AGE\nsample   Running   9s\n"
    assert re.search(pattern(shown), "NAME     PHASE     AGE\nsample   Running   1m12s\n")
    assert not re.search(pattern(shown), "NAME     PHASE     AGE\nsample   Pending   9s\n")
    assert not re.search(pattern(shown), "NAME     PHASE     AGE\nsample   Running   9s\nother    Running   9s\n")
