"""Outside `api/kinds` no source file knows a kind or a role by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.paths import ROOT

SOURCE = ROOT / "src" / "resile"
KINDS = re.compile(r"elastic_?jobs?\b|edljob|scale_?plans?\b|elastic\.iml\.github\.io", re.IGNORECASE)
ROLES = {"chief", "worker", "ps", "evaluator", "master", "dlrover-master"}

ALLOWED = {
    "deploy/kustomize.py": {"ElasticJob"},  # the comment above PriorityClasses, which only that kind's users need
    "api/job_view.py": {"master"},  # the row of the master among those of the nodes, whatever the kind calls it
    "cli/commands/describe.py": {"master"},  # a key of the command's JSON
    "cli/run/options.py": {"dlrover-master"},  # a rendezvous backend of dlrover-run
    "operator/jobs/master_objects.py": {"master"},  # the name of a port
    "operator/jobs/master_pod.py": {"master"},  # the name of a port
    "sim/cluster.py": {"master"},  # what a line of the log is about
    "sim/schedule.py": {"master"},  # a fault
}
"""Words that a file may hold, and why."""


def files() -> Iterator[tuple[str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if not name.startswith("api/kinds/"):
            yield name, path.read_text()


def words(text: str) -> set[str]:
    literals = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    return {*KINDS.findall(text), *(ROLES & {literal for literal in literals if isinstance(literal, str)})}


def test_no_file_outside_the_kinds_names_one_of_them_or_a_role() -> None:
    found = {name: left for name, text in files() if (left := words(text) - ALLOWED.get(name, set()))}
    assert found == {}


def test_every_exception_is_still_needed() -> None:
    found = dict(files())
    assert {name: allowed - words(found[name]) for name, allowed in ALLOWED.items()} == {
        name: set() for name in ALLOWED
    }


def test_the_check_finds_what_it_looks_for() -> None:
    source = "KIND = 'ElasticJob'\nROLE = 'worker'\nname = f'{job}-edljob-0'\n"
    assert words(source) == {"ElasticJob", "worker", "edljob"}
    assert words("import resile.api.kinds.scaleplan.kind\n# the worker, not a literal\n") == {"scaleplan"}
