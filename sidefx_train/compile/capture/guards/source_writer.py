"""Writes Python source line by line, with constants bound by name."""

from __future__ import annotations

import re
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.source import Source, stored_item
from sidefx_train.compile.common.source_literals import is_name, literal
from sidefx_train.compile.common.type_checks import attribute_of

_LONG = 200
"""Length of a string from which generated source refers to it by name."""


class Writer:
    """One function that is being generated.

    Attributes:
        names: globals of the generated code.
        fetched: lines that fetch sources, in dependency order.
    """

    def __init__(self, names: dict[str, Any] | None = None) -> None:
        self.names: dict[str, Any] = dict(names or {})
        self.fetched: list[str] = []
        self._constants: dict[int, str] = {}
        self._keep: list[Any] = []
        self._variables: dict[int, str] = {}
        self._spaces: dict[int, str] = {}
        self._count = 0

    def fresh(self, stem: str = "v") -> str:
        self._count += 1
        return f"{stem}{self._count}"

    def constant(self, value: Any, label: str = "") -> str:
        """Returns an expression for an object: a literal, or a name bound to it."""
        if value is None or type(value) in (bool, int) or (type(value) in (str, bytes) and len(value) < _LONG):
            text = literal(value)
            assert text is not None, f"a {type(value).__name__} has a literal"
            return text
        known = self._constants.get(id(value))
        if known is None:
            stem = re.sub(r"\W+", "_", label or attribute_of(value, "__name__", "") or type(value).__name__).strip("_")
            stem = stem[-40:] or "const"
            known = self.fresh(f"c_{stem}_" if stem[0].isdigit() else f"{stem}_")
            self._constants[id(value)] = known
            self._keep.append(value)
            self.names[known] = value
        return known

    def space(self, source: Source) -> str:
        """Returns the variable of the instance ``__dict__`` of the object at ``source``."""
        known = self._spaces.get(id(source))
        if known is None:
            parent = self.value(source)
            known = self._spaces[id(source)] = self.fresh("d")
            space = f"object.__getattribute__({parent}, '__dict__')" if source.hooked else f"{parent}.__dict__"
            self.fetched.append(f"{known} = {space}  # {source.label}")
        return known

    def value(self, source: Source) -> str:
        """Returns an expression for the object at ``source``; fetches it (and its parents) once."""
        if source.kind == "const":
            return self.constant(source.key, source.label)
        known = self._variables.get(id(source))
        if known is None:
            expression = self.access(source)
            known = self._variables[id(source)] = self.fresh("v")
            self.fetched.append(f"{known} = {expression}  # {source.label}")
        return known

    def is_fetched(self, source: Source) -> bool:
        return source.kind == "const" or id(source) in self._variables

    def access(self, source: Source) -> str:
        """Returns an expression that reads ``source`` again."""
        if source.kind == "arg":
            return f"args[{source.key}]"
        if source.kind == "kwarg":
            return f"kwargs[{self.constant(source.key)}]"
        parent = source.parent
        assert parent is not None, f"{source.kind} source without a parent"
        if source.kind == "attr":
            return f"{self.space(parent)}[{self.constant(source.key)}]"
        if source.kind == "item" and parent.hooked:
            stored = self.constant(stored_item, "stored_item")
            return f"{stored}({self.value(parent)}, {self.constant(source.key)})"
        if source.kind == "item":
            return f"{self.value(parent)}[{self.constant(source.key)}]"
        if source.kind == "cell":
            return f"{self.value(parent)}.cell_contents"
        if source.kind == "grad":
            return f"{self.value(parent)}.grad"
        if source.kind == "values":
            return f"{self.constant(compat.inner_values, 'values_of')}({self.value(parent)})"
        if source.kind == "array":
            return f"{self.constant(torch.from_numpy, 'from_numpy')}({self.value(parent)})"
        if source.kind == "computed":
            operands = ", ".join(map(self.value, source.key.operands))
            return f"{self.constant(source.key, 'on_host')}({operands})"
        if source.kind == "picked":
            operands = ", ".join(map(self.value, (parent, *source.key.operands)))
            return f"{self.constant(source.key, 'pick')}({operands})"
        if source.kind == "call":
            return f"{self.value(parent)}()"
        if parent.hooked:
            return f"object.__getattribute__({self.value(parent)}, {self.constant(source.key)})"
        if not is_name(source.key):
            return f"getattr({self.value(parent)}, {self.constant(source.key)})"
        return f"{self.value(parent)}.{source.key}"
