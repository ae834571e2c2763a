"""Reads from a script's source which modules of torch it imports, and if it sets variables before.

A module that a template imported has read the environment already. So a script that sets variables before it imports
torch gets no standbys. The script's own modules are followed in the order in which they are imported; installed ones
are not read.

Imports nothing but the standard library, because it runs in a template that may become a training process.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_SOURCE = 4 * 1024 * 1024
MAX_MODULES = 200
PROMPTED = ("torch._dynamo",)
"""Modules that torch imports when the first optimizer is made; they take as long as torch itself."""

_WRITES = ("setdefault", "update", "pop", "clear", "popitem", "__setitem__", "__delitem__")
_TORCH = ("torch", "resile.torch")
WITHOUT_TORCH = tuple(
    f"resile.torch.{name}"
    for name in ("progress", "report_step", "sampler", "ElasticBatchSampler", "ElasticSampler", "Share")
)
"""Parts of `resile.torch` that do not import torch; a script that only needs these starts faster without it."""
_BRING_TORCH = ("accelerate", "deepspeed", "lightning", "pytorch_lightning", "timm", "torchaudio", "torchvision")
"""Libraries that import torch. A template imports the libraries themselves only if `--preload` names them."""
_FOR_LIBRARIES = ("resile.torch.huggingface", "resile.torch.lightning")
"""Modules of resile that import libraries of `_BRING_TORCH`, or others that import torch."""


class Source(NamedTuple):
    modules: tuple[str, ...] = ()
    """torch, the modules of torch and resile that the script names, and PROMPTED; empty if it needs no torch."""
    sets_variables: str = ""
    """Where the script sets variables before it imports torch, as in `train.py line 3`; empty if it does not."""
    files: tuple[str, ...] = ()


def read(paths: Sequence[str], root: str) -> Source:
    """Find out what a program imports of torch, and whether it sets environment variables before that.

    Reads the files `paths` in order, and the modules in the directory `root` that these files import.
    """
    reader = _Reader(root)
    for path in paths:
        reader.follow(path)
    modules = tuple(dict.fromkeys(["torch", *reader.modules, *PROMPTED])) if reader.modules else ()
    return Source(modules, reader.early if modules else "", tuple(reader.seen))


def files_of(module: str, roots: Sequence[str]) -> list[str]:
    """The files that `python -m MODULE` executes, packages first; empty if they are not in `roots`. Imports nothing."""
    *packages, _ = parts = module.split(".")
    for root in roots:
        stem = os.path.join(root or os.curdir, *parts)
        found = next((path for path in (f"{stem}.py", os.path.join(stem, "__main__.py")) if os.path.isfile(path)), "")
        if found:
            above = [os.path.join(root or os.curdir, *packages[: n + 1], "__init__.py") for n in range(len(packages))]
            return [*filter(os.path.isfile, above), found]
    return []


class _Reader:
    def __init__(self, root: str) -> None:
        self._root = root
        self.seen: list[str] = []
        self.modules: list[str] = []
        self.early = ""

    def follow(self, path: str) -> None:
        if path in self.seen or len(self.seen) >= MAX_MODULES:
            return
        self.seen.append(path)
        try:
            with open(path, "rb") as file:
                tree = ast.parse(file.read(MAX_SOURCE))
        except (OSError, SyntaxError, ValueError, RecursionError):
            return  # running the script will show the error
        for node in _in_order(tree):
            match node:
                case ast.Import():
                    for alias in node.names:
                        self._imported(alias.name)
                case ast.ImportFrom(module=str(module), level=0):
                    self._imported(module, [alias.name for alias in node.names])
                case ast.ImportFrom():
                    self._near(path, node)
                case _ if not self.modules and not self.early and _writes_environment(node):
                    self.early = f"{path} line {getattr(node, 'lineno', 0)}"

    def _imported(self, name: str, parts: Sequence[str] = ()) -> None:
        if name in WITHOUT_TORCH or (parts and all(f"{name}.{part}" in WITHOUT_TORCH for part in parts)):
            return
        if name.startswith(_FOR_LIBRARIES) or name.partition(".")[0] in _BRING_TORCH:
            self.modules.append("torch")
            return
        if any(name == torch or name.startswith(f"{torch}.") for torch in _TORCH):
            self.modules.append(name)
            return
        if "torch" in parts and name == "resile":
            self.modules.append("resile.torch")
            return
        for each in (name, *(f"{name}.{part}" for part in parts)):
            self._own(os.path.join(self._root, *each.split(".")))

    def _near(self, path: str, node: ast.ImportFrom) -> None:
        base = path
        for _ in range(node.level):
            base = os.path.dirname(base)
        base = os.path.join(base, *(node.module or "").split("."))
        for each in (base, *(os.path.join(base, alias.name) for alias in node.names)):
            self._own(each)

    def _own(self, stem: str) -> None:
        for path in (f"{stem}.py", os.path.join(stem, "__init__.py")):
            if os.path.isfile(path):
                self.follow(path)
                return


def _in_order(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of a tree in the order of the source, also those in functions, which may be called."""
    for child in ast.iter_child_nodes(tree):
        yield child
        yield from _in_order(child)


def _writes_environment(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            return _is_environ(value)
        case ast.AugAssign(target=target):
            return _is_environ(target)
        case ast.Call(func=ast.Attribute(value=value, attr=attr)):
            return (attr in _WRITES and _is_environ(value)) or attr in ("putenv", "unsetenv", "load_dotenv")
        case ast.Call(func=ast.Name(id="putenv" | "unsetenv" | "load_dotenv")):
            return True
    return False


def _is_environ(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )
