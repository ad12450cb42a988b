"""Records the definitions that a step reads from modules and classes: functions, classes, and missing names.

A value read from outside has its own guard. Definitions of libraries are too many for that and rarely change: they are
recorded by namespace, together with code and defaults of the functions that ran.
"""

from __future__ import annotations

import abc
import builtins
import dis
import functools
import importlib.util
import sys
import types
from collections.abc import Iterator, KeysView
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.capture.guards.abc_guards import Registered
from sidefx_train.compile.capture.guards.definition_guards import FunctionFacts, NamespaceFacts, entries_of
from sidefx_train.compile.capture.guards.guard import Guard
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.errors import Location

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


IMMUTABLE_CLASS = 1 << 8
"""Flag of classes whose attributes cannot be set."""
_HOOKS = ("__getattribute__", "__setattr__", "__delattr__")
"""Attributes that every attribute access reads first."""
_OPERATORS = frozenset(
    {
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "and", "or", "xor",
        "lt", "le", "eq", "ne", "gt", "ge", "neg", "pos", "invert", "getitem", "setitem", "delitem", "contains",
    }
)  # fmt: skip
_NOT_FOLLOWED = ("torch._dynamo", "torch._inductor", "torch.fx", "torch.overrides", "torch.distributed", "torch._jit")
"""Modules of torch that its functions mention but plain tensors do not reach."""


class Definitions:
    """Definitions read during one capture.

    Attributes:
        replaced: names of ``torch.Tensor`` that the user has replaced.
    """

    def __init__(self, heap: ShadowTableAPI) -> None:
        self._heap = heap
        self._taken: dict[int, tuple[Any, dict[str, Any], Location | None]] = {}
        self._bodies: dict[int, tuple[types.FunctionType, Location | None]] = {}
        self._native: dict[int, bool] = {}
        self._looked_at: dict[int, type] = {}
        self._checked = False
        self._registered = Registered()
        self.replaced = frozenset(name for name, value in vars(torch.Tensor).items() if _is_foreign(value))

    # --- recording ---------------------------------------------------------------------------------------------------

    def took(self, space: Any, name: str, value: Any) -> None:
        """Records that ``name`` in a namespace (a class, or the dict of a module) had ``value``."""
        known = self._taken.get(id(space))
        if known is None:
            known = self._taken[id(space)] = (space, {}, self._heap.locate())
        known[1].setdefault(name, value)

    def gave(self, value: Any) -> bool:
        """Returns True if a namespace lookup returned this very value."""
        return any(value is each for _, names, _ in self._taken.values() for each in names.values())

    def looked_at(self, cls: type) -> None:
        """Records that an attribute of a class is being looked up."""
        if id(cls) in self._looked_at:
            return
        self._looked_at[id(cls)] = cls
        for base in type.__getattribute__(cls, "__mro__"):
            if not base.__flags__ & IMMUTABLE_CLASS:
                entries = entries_of(base)
                for name in _HOOKS:
                    self.took(base, name, entries.get(name, ABSENT))

    def runs(self, fn: types.FunctionType) -> None:
        """Records code and defaults of a function that is about to run, unless it is transient and guarded by its
        parts."""
        record = self._heap.record_of(fn)
        if id(fn) not in self._bodies and (record is None or record.base.kind == "const"):
            self._bodies[id(fn)] = (fn, self._heap.locate())
        if not self._checked:
            self._checked = True
            self._check_tensor()

    def imported(self, name: str, space: Any, level: int) -> None:
        """Records the modules that an ``import`` found; the importer runs only for modules that were never imported."""
        if level:
            name = importlib.util.resolve_name("." * level + name, space.get("__package__") or space.get("__name__"))
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            self.found_module(".".join(parts[:count]))

    def found_module(self, name: str) -> Any:
        """Records and returns the entry of ``sys.modules`` for a name."""
        found = sys.modules.get(name, ABSENT)
        self.took(sys.modules, name, found)
        return found

    def asked(self, fn: Any, args: tuple[Any, ...], answer: Any, made: KeysView[int]) -> None:
        """Records an abstract base class's subclass answer, which ``register`` may change.

        Args:
            fn: C code, or a method of ``abc.ABCMeta``.
            args: its arguments.
            answer: its result.
            made: ids of the classes created in the step.
        """
        sources = self._heap.sources
        if fn is abc.get_cache_token:
            self._heap.guard("equal", sources.call(sources.const(fn, "abc.get_cache_token")), answer)
        if fn not in _CHECKS or len(args) != 2:
            return
        value, kinds = args if fn in (builtins.isinstance, issubclass) else args[::-1]
        asked = [each for each in _classes(kinds) if safe_isinstance(each, abc.ABCMeta)]
        if not asked:
            return
        kind = value if _CHECKS[fn] else getattr(value, "__class__", None)
        if not safe_isinstance(kind, type) or not made.isdisjoint(map(id, (kind, *asked))):
            return
        self._registered.ask(asked, kind)
        holds = self._registered.holds
        source = sources.const(self._registered, "subclass registrations of abstract classes")
        self._heap.guard("is", sources.call(sources.slot(source, holds.__name__)), True)

    def runs_natively(self, fn: types.FunctionType) -> bool:
        """Records the definitions that a natively run torch function reads.

        Returns:
            False if the user has replaced one of them: the function must be interpreted.
        """
        known = self._native.get(id(fn))
        if known is not None:
            return known
        self._native[id(fn)] = True  # for mutual recursion
        self.runs(fn)
        own = not self.replaced.intersection(_names(fn.__code__))
        for chain in chains_of(fn.__code__):
            for value in self._follow(fn.__globals__, chain):
                if _is_foreign(value):
                    own = False
                elif type(value) is types.FunctionType and _is_followed(value):
                    own = self.runs_natively(value) and own
        self._native[id(fn)] = own
        return own

    def _follow(self, space: dict[str, Any], chain: tuple[str, ...]) -> Iterator[Any]:
        """Yields the values of ``name.name...`` along modules and classes."""
        owner: Any = space
        for name in chain:
            entries = entries_of(owner)
            value = entries.get(name, ABSENT)
            if not (safe_isinstance(owner, type) and owner.__flags__ & IMMUTABLE_CLASS):
                self.took(owner, name, value)
            if value is ABSENT and owner is space:
                value = vars(builtins).get(name, ABSENT)
                self.took(vars(builtins), name, value)
            if value is ABSENT:
                return
            yield value
            if safe_isinstance(value, types.ModuleType):
                owner = vars(value)
            elif safe_isinstance(value, type):
                owner = value
            else:
                return

    def _check_tensor(self) -> None:
        """Records the operators and methods of tensors, which C code looks up by itself."""
        entries = vars(torch.Tensor)
        inherited = set(dir(torch.Tensor)).difference(entries)
        for name in (*entries, *inherited):
            self.took(torch.Tensor, name, entries.get(name, ABSENT))
        for name in sorted(self.replaced):
            special = name.startswith("__") and name.endswith("__")
            if special and not {name[2:-2], name[3:-2]} & _OPERATORS:
                self._heap.refuse("SFX111", f"torch.Tensor.{name} was replaced by user code")

    def operator_replaced(self, name: str) -> bool:
        """Returns True if an operator of tensors (a name of :mod:`operator`) was replaced."""
        if not self.replaced:
            return False
        plain = name.rstrip("_")
        swapped = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(plain, plain)
        return any(f"__{form}__" in self.replaced for form in (plain, f"r{plain}", plain.removeprefix("i"), swapped))

    # --- guards --------------------------------------------------------------------------------------------------

    def guards(self) -> Iterator[Guard]:
        """Yields one guard for each namespace and each function."""
        for space, names, location in list(self._taken.values()):
            is_class = safe_isinstance(space, type)
            label = f"{space.__module__}.{space.__qualname__}" if is_class else _label(space)
            mro = type.__getattribute__(space, "__mro__") if is_class else None
            taken = NamespaceFacts(tuple(names), tuple(names.values()), mro)
            yield Guard("names", Source("const", None, space, label), taken, location)
        for fn, location in list(self._bodies.values()):
            source = Source("const", None, fn, f"{fn.__module__}.{fn.__qualname__}")
            yield Guard("code", source, FunctionFacts.of(fn), location)


_CHECKS = {
    builtins.isinstance: False,
    issubclass: True,
    abc.ABCMeta.__instancecheck__: False,
    abc.ABCMeta.__subclasscheck__: True,
}
"""Functions that ask abstract base classes, and whether their argument is a class instead of an instance."""


def _classes(kinds: Any) -> Iterator[Any]:
    """Yields the classes of a test for several at once."""
    if safe_isinstance(kinds, (tuple, types.UnionType)):
        for each in kinds if safe_isinstance(kinds, tuple) else kinds.__args__:
            yield from _classes(each)
    else:
        yield kinds


def _label(space: dict[str, Any]) -> str:
    return "sys.modules" if space is sys.modules else str(space.get("__name__", "globals"))


def _is_foreign(value: Any) -> bool:
    """Returns True for a callable defined by the user, not by a library."""
    while type(value) in (types.MethodType, classmethod, staticmethod, functools.partial):
        value = value.func if type(value) is functools.partial else value.__func__
    if type(value) is types.FunctionType:
        return not is_library(str(value.__globals__.get("__name__", "")))
    cls = type(value)
    return cls.__module__ == "unittest.mock" or not is_library(cls.__module__)


def _is_followed(fn: types.FunctionType) -> bool:
    module = str(fn.__globals__.get("__name__", ""))
    return module.startswith("torch") and not module.startswith(_NOT_FOLLOWED)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """Returns every name in code, including functions inside it."""
    inside = [_names(const) for const in code.co_consts if safe_isinstance(const, types.CodeType)]
    return frozenset(code.co_names).union(*inside)


@functools.lru_cache(maxsize=4096)
def chains_of(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Returns the globals that code reads, each with the chain of attributes read from it."""
    found: dict[tuple[str, ...], None] = {}
    chain: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = (instruction.argval,)
        elif chain and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found.pop(chain, None)
            chain = (*chain, instruction.argval)
        elif instruction.opname in ("CACHE", "PRECALL"):
            continue
        else:
            chain = ()
            continue
        found[chain] = None
    for const in code.co_consts:
        if safe_isinstance(const, types.CodeType):
            found.update(dict.fromkeys(chains_of(const)))
    return tuple(found)
