"""What guards on definitions compare with: names in a module or class, and the body of a function.

A step takes hundreds of functions and classes from libraries. Each namespace it took them from is one guard, and that
one is checked only when the namespace has changed at all (see ``compile/native/guard_program.py``).
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

from sidefx_train.compile.common.sentinels import ABSENT


def entries_of(space: Any) -> Any:
    """The names of a namespace: of a class, or of a module, which is known by its dict."""
    return type.__getattribute__(space, "__dict__") if isinstance(space, type) else space


@dataclass(frozen=True, eq=False)
class NamespaceFacts:
    """Names looked up in one namespace.

    Attributes:
        names: the names, in the order of the lookups.
        values: what each gave; :data:`ABSENT` where the name was not there.
        mro: the bases of a class, in order; ``None`` for a module.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]
    mro: tuple[type, ...] | None

    def changed(self, space: Any) -> str:
        """The first thing that differs, empty if nothing does."""
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
    """What a function does when it is called, all of which can be replaced while the function stays the same.

    Attributes:
        code: its code.
        defaults: values of parameters that were not given.
        named: the same for those given by name only.
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
        """The first thing that differs, empty if nothing does."""
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
