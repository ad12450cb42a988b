"""What a step took from modules and classes: functions, classes, and names that were not there.

A value read from outside has a guard of its own. Definitions of libraries are far too many for that, and hardly ever
change: they are noted here by namespace, and so are the bodies of the functions that ran.
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
"""What every class is asked for before anything else."""
_OPERATORS = frozenset(
    {
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "and", "or", "xor",
        "lt", "le", "eq", "ne", "gt", "ge", "neg", "pos", "invert", "getitem", "setitem", "delitem", "contains",
    }
)  # fmt: skip
_NOT_FOLLOWED = ("torch._dynamo", "torch._inductor", "torch.fx", "torch.overrides", "torch.distributed", "torch._jit")
"""Parts of torch that its functions mention but plain tensors do not reach."""


class Definitions:
    """Notes of one capture.

    Attributes:
        replaced: names that ``torch.Tensor`` has from the user in place of its own.
    """

    def __init__(self, heap: ShadowTableAPI) -> None:
        self._heap = heap
        self._taken: dict[int, tuple[Any, dict[str, Any], Location | None]] = {}
        self._bodies: dict[int, tuple[types.FunctionType, Location | None]] = {}
        self._native: dict[int, bool] = {}
        self._checked = False
        self._registered = Registered()
        self.replaced = frozenset(name for name, value in vars(torch.Tensor).items() if _is_foreign(value))

    # --- notes ---------------------------------------------------------------------------------------------------

    def took(self, space: Any, name: str, value: Any) -> None:
        """Notes that a namespace (a class, or the dict of a module) gave ``value`` for a name."""
        known = self._taken.get(id(space))
        if known is None:
            known = self._taken[id(space)] = (space, {}, self._heap.locate())
        known[1].setdefault(name, value)

    def gave(self, value: Any) -> bool:
        """True if a namespace gave this very value."""
        return any(value is each for _, names, _ in self._taken.values() for each in names.values())

    def looked_at(self, cls: type) -> None:
        """Notes that an attribute of a class is being looked up."""
        if id(cls) not in self._taken and not cls.__flags__ & IMMUTABLE_CLASS:
            entries = entries_of(cls)
            for name in _HOOKS:
                self.took(cls, name, entries.get(name, ABSENT))

    def runs(self, fn: types.FunctionType) -> None:
        """Notes the body of a function that is about to run; one that is made anew has guards on its parts."""
        record = self._heap.record_of(fn)
        if id(fn) not in self._bodies and (record is None or record.base.kind == "const"):
            self._bodies[id(fn)] = (fn, self._heap.locate())
        if not self._checked:
            self._checked = True
            self._check_tensor()

    def imported(self, name: str, space: Any, level: int) -> None:
        """Notes which modules an ``import`` found; it runs the importer only for those that were never imported."""
        if level:
            name = importlib.util.resolve_name("." * level + name, space.get("__package__") or space.get("__name__"))
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            self.found_module(".".join(parts[:count]))

    def found_module(self, name: str) -> Any:
        """Notes what ``sys.modules`` has under a name, and gives it."""
        found = sys.modules.get(name, ABSENT)
        self.took(sys.modules, name, found)
        return found

    def asked(self, fn: Any, args: tuple[Any, ...], answer: Any, made: KeysView[int]) -> None:
        """Notes what an abstract base class said of a class, which ``register`` may change.

        Args:
            fn: C code, or one of the methods of ``abc.ABCMeta``.
            args: what it was called with.
            answer: what it gave.
            made: the step's own classes, by identity.
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
        source = sources.const(self._registered, "what abstract classes say of others")
        self._heap.guard("is", sources.call(sources.slot(source, holds.__name__)), True)

    def runs_natively(self, fn: types.FunctionType) -> bool:
        """Notes what a function of torch takes from where when it runs natively.

        Returns:
            False if it comes across something of the user's, put in the place of torch's own: it must be interpreted.
        """
        known = self._native.get(id(fn))
        if known is not None:
            return known
        self._native[id(fn)] = True  # while functions call one another
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
        """Values of ``name.name...`` as far as it goes through modules and classes."""
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
        """C code looks the operators and methods of tensors up without asking."""
        entries = vars(torch.Tensor)
        inherited = set(dir(torch.Tensor)).difference(entries)
        for name in (*entries, *inherited):
            self.took(torch.Tensor, name, entries.get(name, ABSENT))
        for name in sorted(self.replaced):
            special = name.startswith("__") and name.endswith("__")
            if special and not {name[2:-2], name[3:-2]} & _OPERATORS:
                self._heap.refuse("SFX111", f"torch.Tensor.{name} is not torch's own")

    def operator_replaced(self, name: str) -> bool:
        """True if an operator of tensors (a name of :mod:`operator`) is not torch's own."""
        if not self.replaced:
            return False
        plain = name.rstrip("_")
        swapped = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(plain, plain)
        return any(f"__{form}__" in self.replaced for form in (plain, f"r{plain}", plain.removeprefix("i"), swapped))

    # --- guards --------------------------------------------------------------------------------------------------

    def guards(self) -> Iterator[Guard]:
        """One for each namespace and each function."""
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
"""What asks an abstract base class, and whether it does so of a class instead of an instance."""


def _classes(kinds: Any) -> Iterator[Any]:
    """The classes of a test for several at once."""
    if safe_isinstance(kinds, (tuple, types.UnionType)):
        for each in kinds if safe_isinstance(kinds, tuple) else kinds.__args__:
            yield from _classes(each)
    else:
        yield kinds


def _label(space: dict[str, Any]) -> str:
    return "sys.modules" if space is sys.modules else str(space.get("__name__", "globals"))


def _is_foreign(value: Any) -> bool:
    """True for what a user, not a library, has made to be called."""
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
    """Every name that code mentions, that of functions inside it too."""
    inside = [_names(const) for const in code.co_consts if safe_isinstance(const, types.CodeType)]
    return frozenset(code.co_names).union(*inside)


@functools.lru_cache(maxsize=4096)
def chains_of(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """What code reads of its globals, each with the attributes read from there on."""
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
