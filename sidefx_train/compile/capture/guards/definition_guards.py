"""Expected values of guards on definitions: names in a module or class, and code and defaults of a function.

A step reads hundreds of functions and classes from libraries. One guard covers all names read from a namespace; it is
checked only if the namespace has changed at all (see ``compile/native/guards/guard_program.py``).
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

from sidefx_train.compile.common.sentinels import ABSENT


def entries_of(space: Any) -> Any:
    """Returns the dict of names of a namespace: a class, or a module given by its dict."""
    return type.__getattribute__(space, "__dict__") if isinstance(space, type) else space


@dataclass(frozen=True, eq=False)
class NamespaceFacts:
    """Expected lookups in one namespace.

    Attributes:
        names: the names, in the order of the lookups.
        values: the value of each lookup; :data:`ABSENT` where the name did not exist.
        mro: the MRO of a class; ``None`` for a module.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]
    mro: tuple[type, ...] | None

    def changed(self, space: Any) -> str:
        """Returns the first difference, or an empty string."""
        if self.mro is not None and type.__getattribute__(space, "__mro__") is not self.mro:
            return "__bases__"
        entries = entries_of(space)
        for name, value in zip(self.names, self.values, strict=True):
            if entries.get(name, ABSENT) is not value:
                return name
        return ""

    def holds(self, space: Any) -> bool:
        return not self.changed(space)

    def __str__(self) -> str:
        return "as captured"


@dataclass(frozen=True, eq=False)
class FunctionFacts:
    """Code and defaults of a function, which can be replaced while the function object stays the same.

    Attributes:
        code: its code object.
        defaults: default values of positional parameters.
        named: default values of keyword-only parameters.
        entries: keys and values of ``named``, alternating.
    """

    code: types.CodeType
    defaults: tuple[Any, ...] | None
    named: dict[str, Any] | None
    entries: tuple[Any, ...]

    @classmethod
    def of(cls, fn: types.FunctionType) -> FunctionFacts:
        return cls(fn.__code__, fn.__defaults__, fn.__kwdefaults__, _entries(fn.__kwdefaults__))

    def changed(self, fn: types.FunctionType) -> str:
        """Returns the first difference, or an empty string."""
        if fn.__code__ is not self.code:
            return "__code__"
        if fn.__defaults__ is not self.defaults:
            return "__defaults__"
        found = _entries(fn.__kwdefaults__)
        if fn.__kwdefaults__ is not self.named or len(found) != len(self.entries):
            return "__kwdefaults__"
        pairs = enumerate(zip(found, self.entries, strict=True))
        same = all(a is b or (index % 2 == 0 and a == b) for index, (a, b) in pairs)
        return "" if same else "__kwdefaults__"

    def holds(self, fn: types.FunctionType) -> bool:
        return not self.changed(fn)

    def __str__(self) -> str:
        return "as captured"


def _entries(named: dict[str, Any] | None) -> tuple[Any, ...]:
    return tuple(part for pair in (named or {}).items() for part in pair)
