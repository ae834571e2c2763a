"""Checks, before any process is started, that Python can find and compile the script.

Without this check, the master and all processes would start, fail with the same error, and with `--max-restarts` start
again. It finds only errors that are certain, and executes no code of the user; Python finds all others.
"""

from __future__ import annotations

import importlib.machinery
import os
import stat
import sys
import warnings

LARGEST = 4 * 1024 * 1024
"""The largest script that is checked, in bytes; no error is found in a larger one."""
_CHANGES_THE_SEARCH = (b"__path__", b"meta_path", b"sys.modules", b"import *")
"""Words in a package's `__init__.py` that may change where its modules are found. Such modules are not checked."""


def error_in_script(path: str) -> str:
    """A sentence that says why Python cannot run this file or folder; empty if no error was found."""
    try:
        kind = os.stat(path)
    except OSError:
        return f"script {path!r} does not exist"
    if stat.S_ISDIR(kind.st_mode):
        inside = os.path.join(path, "__main__.py")
        if not os.path.exists(inside):
            return f"script {path!r} is a directory without a __main__.py; name a file in it"
        return error_in_script(inside)
    if not stat.S_ISREG(kind.st_mode) or kind.st_size > LARGEST:
        return ""  # a pipe can be read once
    return _error_in_source(path)


def error_in_module(name: str) -> str:
    """A sentence that says why `python -m NAME` cannot work in this folder; empty if no error was found."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return ""
    places: list[str] | None = None
    for number in range(len(parts)):
        here = ".".join(parts[: number + 1])
        try:
            spec = _found(here, places)
        except Exception:  # an installed finder failed; Python will fail in the same way and report it
            return ""
        if spec is None:
            return f"module {name!r} does not exist" + ("" if here == name else f": there is no {here!r}")
        if number == len(parts) - 1:
            source = spec.origin if spec.submodule_search_locations is None else None
            return _error_in_source(source, f"module {name!r}") if source and source.endswith(".py") else ""
        if spec.submodule_search_locations is None or _changes_the_search(spec.origin):
            return ""
        places = list(spec.submodule_search_locations)
    return ""


def _found(name: str, places: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Find a module as Python would, in `places` or on `sys.path`, without importing its package; None if not found."""
    for finder in sys.meta_path:
        path = places
        if path is None and finder is importlib.machinery.PathFinder:
            path = [os.getcwd(), *sys.path]
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def _changes_the_search(init: str | None) -> bool:
    if init is None or not init.endswith(".py"):
        return init is not None
    with open(init, "rb") as file:
        text = file.read(LARGEST)
    return any(words in text for words in _CHANGES_THE_SEARCH)


def _error_in_source(path: str, named: str = "") -> str:
    try:
        with open(path, "rb") as file:
            source = file.read(LARGEST + 1)
    except OSError as error:
        return f"{named or f'script {path!r}'} cannot be read: {os.strerror(error.errno or 0)}"
    if b"\0" in source or len(source) > LARGEST:
        return ""  # an archive or compiled code, which Python can run, too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f" line {error.lineno}" if error.lineno else ""
        return f"{named or f'script {path!r}'} is not Python:{where}: {error.msg}"
    except (ValueError, RecursionError, MemoryError):
        return ""
    return ""
