"""Let the training processes that tests start leave torch's compiler out until something asks for it.

torch imports its compiler, `torch._dynamo`, for the first optimizer that a process makes. That is 1.7 of the 3.6
seconds of CPU that the start of a training process costs, in hundreds of processes. All that plain training asks of the
compiler is to leave functions alone, and that much is answered here. Anything else imports the real one at that moment.

Python runs a module of this name at every start; `tests/conftest.py` puts its folder on PYTHONPATH. It imports nothing
that an interpreter does not have by then, since most of those that tests start have no torch.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec

NAME = "torch._dynamo"
ModuleType = type(sys)


class Stub(ModuleType):
    """Stands in for the compiler until it is asked for something that is not here."""

    def __getattr__(self, name: str) -> object:
        standing = sys.modules.get(NAME) is self
        if standing and (name == "__path__" or not name.startswith("__")):
            del sys.modules[NAME]
            Finder.is_real = True
            __import__(NAME)
        if Finder.is_real:
            return getattr(sys.modules[NAME], name)
        raise AttributeError(name)

    @property
    def trace_rules(self) -> object:
        """The end of a process group clears a cache there."""
        return sys.modules[NAME].trace_rules if Finder.is_real else self

    @property
    def utils(self) -> object:
        """DDP asks there whether it is to be compiled."""
        return sys.modules[NAME].utils if Finder.is_real else self

    def clear_lru_cache(self) -> None: ...

    def get_optimize_ddp_mode(self) -> str:
        return "no_optimization"

    def graph_break(self, msg: str = "") -> None: ...

    def disable(self, fn: object = None, *_: object, **__: object) -> object:
        return fn if fn is not None else lambda function: function


class Loader:
    """Makes the stub, or hands out a part of the compiler that is there already."""

    def __init__(self, there: ModuleType | None = None) -> None:
        self._there = there
        self._spec = vars(there)["__spec__"] if there is not None else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._there if self._there is not None else Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if self._there is not None:
            vars(module)["__spec__"] = self._spec  # which some of its modules refuse as an assignment


class Finder:
    """Finds the stub as long as the real compiler has not been asked for."""

    is_real = False

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name == NAME and not self.is_real:
            return ModuleSpec(name, Loader())
        if name.startswith(f"{NAME}.") and name in sys.modules:  # it came with its package, a moment ago
            return ModuleSpec(name, Loader(sys.modules[name]))
        return None


sys.meta_path.insert(0, Finder())
