"""Let the training processes that tests start leave parts of torch out until something asks for them.

Two parts are left out, 2.1 of the 4 seconds of CPU that the start of a training process costs, in hundreds of them:
- torch's compiler, `torch._dynamo`, which the first optimizer of a process imports. All that plain training asks of it
  is to leave functions alone, and that much is answered here.
- the shapes that operators give to tensors without data, `torch._meta_registrations`, which torch imports last. The
  compiler and DTensor ask for them, and import `torch._decomp` for it.
What else Python asks of them imports the real ones at that moment. Only an operator on a tensor of the device "meta"
may fail here that works in a whole torch, if it has no other rule for shapes. A test of that has to import
`torch._decomp` first.

Python runs a module of this name at every start; `tests/conftest.py` puts its folder on PYTHONPATH. It imports nothing
that an interpreter does not have by then, since most of those that tests start have no torch.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec

ModuleType = type(sys)
COMPILER = "torch._dynamo"
SHAPES = "torch._meta_registrations"
WITH_SHAPES = (
    "torch._decomp",
    "torch._prims",
    "torch._prims_common.wrappers",
    "torch._refs",
    "torch.utils._content_store",
)
"""What comes with the real shapes. It imports them, too, and whatever asks for shapes imports some of it."""


class Stub(ModuleType):
    """Stands in for a module until it is asked for something that is not here."""

    def __getattr__(self, name: str) -> object:
        if sys.modules.get(self.__name__) is self and (name == "__path__" or not name.startswith("__")):
            import_real(self.__name__)
        if self.__name__ in Finder.real:
            return getattr(sys.modules[self.__name__], name)
        raise AttributeError(name)


class CompilerStub(Stub):
    """What plain training asks of the compiler."""

    @property
    def trace_rules(self) -> object:
        """The end of a process group clears a cache there."""
        return sys.modules[COMPILER].trace_rules if COMPILER in Finder.real else self

    @property
    def utils(self) -> object:
        """DDP asks there whether it is to be compiled."""
        return sys.modules[COMPILER].utils if COMPILER in Finder.real else self

    def clear_lru_cache(self) -> None: ...

    def get_optimize_ddp_mode(self) -> str:
        return "no_optimization"

    def graph_break(self, msg: str = "") -> None: ...

    def disable(self, fn: object = None, *_: object, **__: object) -> object:
        return fn if fn is not None else lambda function: function


class ShapesStub(Stub):
    """What comes with the shapes and plain training needs: `torch.Generator` works only with a metaclass.

    Torch imports little after it, so this is also the moment to take torch's modules from the garbage collector, as
    resile does for standbys. Otherwise it goes through all of them at the end of the process, for 0.4 s.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        import gc

        gc.freeze()
        from torch._C import _set_generator_metaclass
        from torch._opaque_base import OpaqueBaseMeta

        _set_generator_metaclass(OpaqueBaseMeta)


STUBS = {COMPILER: CompilerStub, SHAPES: ShapesStub}


def import_real(name: str) -> None:
    """Import the real module in place of its stub."""
    del sys.modules[name]
    Finder.real.add(name)
    __import__(name)


class Loader:
    """Makes a stub, or hands out a module that came with the one that was asked for."""

    def __init__(self, there: ModuleType | None = None) -> None:
        self._there = there
        if there is not None:
            self._spec = vars(there)["__spec__"]
            vars(there)["__spec__"] = None  # or the import system would load it again by that

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._there if self._there is not None else STUBS[spec.name](spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if self._there is not None:
            vars(module)["__spec__"] = self._spec  # which some of its modules refuse as an assignment


class Finder:
    """Finds the stubs as long as the real modules have not been asked for."""

    real: set[str] = set()  # noqa: RUF012 - there is one interpreter

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name in STUBS and name not in self.real:
            return ModuleSpec(name, Loader())
        if name in WITH_SHAPES and isinstance(sys.modules.get(SHAPES), Stub):
            import_real(SHAPES)
        if name.startswith((f"{COMPILER}.", *WITH_SHAPES)) and name in sys.modules:  # it came a moment ago
            return ModuleSpec(name, Loader(sys.modules[name]))
        return None


sys.meta_path.insert(0, Finder())
