"""The names that scripts may import are those that the modules of `resile.torch` list."""

from __future__ import annotations

import ast

from tests.support.paths import ROOT


def test_every_module_for_scripts_lists_its_public_names() -> None:
    for path in sorted((ROOT / "src" / "resile" / "torch").glob("*.py")):
        tree = ast.parse(path.read_text())
        listed = [node.value for node in tree.body if isinstance(node, ast.Assign) and _assigns(node, "__all__")]
        assert len(listed) == 1, f"{path.name} has no __all__"
        defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
        assert set(ast.literal_eval(listed[0])) <= defined | imported, path.name


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
