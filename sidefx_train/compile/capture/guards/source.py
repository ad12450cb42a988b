"""Sources: where a value of the outside world is found at the start of every call.

A :class:`Source` is a path: a root (an object bound by identity, or an argument of the step) and the steps from it to
the value. Guards test the value at the end of a path, the prologue fetches it, the epilogue writes to it.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Literal

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.host_programs import HostProgram
from sidefx_train.compile.common.type_checks import safe_isinstance

Kind = Literal[
    "const",  # key: an object that the entry holds
    "arg",  # key: position
    "kwarg",  # key: name
    "attr",  # entry `key` of the parent's instance __dict__
    "slot",  # parent.key, by getattr
    "item",  # parent[key]
    "cell",  # parent.cell_contents
    "grad",  # parent.grad
    "call",  # parent(), for weak references
    "values",  # the values of a jagged tensor, with its autograd history
    "array",  # the tensor over the memory of a NumPy array
    "picked",  # key(parent, operands): an item of a list at a changing index
    "computed",  # key(operands): the list of numbers that a HostProgram computes, parent being one of its operands
]


class Source:
    """One step of a path. :class:`SourceTable` creates and interns them, so equal paths are the same object.

    Attributes:
        hooked: the object's class has a Python-level ``__getattribute__``, ``__getitem__`` or ``__missing__``, which
            fetching must not run.
    """

    __slots__ = ("hooked", "key", "kind", "label", "parent")

    def __init__(self, kind: Kind, parent: Source | None, key: Any, label: str) -> None:
        self.kind = kind
        self.parent = parent
        self.key = key
        self.label = label
        self.hooked = False

    def __str__(self) -> str:
        return self.label

    def __repr__(self) -> str:
        return f"<Source {self.label}>"

    @property
    def is_fixed(self) -> bool:
        """Returns True if the path leads to the same object at every call: a constant, or a weak reference's
        referent."""
        return self.kind == "const" or (self.kind == "call" and self.parent is not None and self.parent.is_fixed)

    @property
    def reads_contents(self) -> bool:
        """Returns True if the path reads the contents of a tensor, whose sizes must have been tested before."""
        source: Source | None = self
        while source is not None:
            if source.kind == "computed":
                return True
            if source.kind == "call" and source.parent is not None and source.parent.key == "item":
                return True
            source = source.parent
        return False

    @property
    def from_arguments(self) -> bool:
        """Returns True if the path starts at the step's arguments, which are new objects at every call."""
        source = self
        while source.parent is not None:
            if source.kind == "picked" and any(operand.from_arguments for operand in source.key.operands):
                return True
            source = source.parent
        return source.kind != "const"

    @property
    def is_picked(self) -> bool:
        """Returns True if the path leads through an item at a changing index: it may find another at every call."""
        source: Source | None = self
        while source is not None and source.kind != "picked":
            source = source.parent
        return source is not None

    def fetch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Evaluates the path now, without generated code (replays use generated code)."""
        if self.kind == "const":
            return self.key
        if self.kind == "arg":
            return args[self.key]
        if self.kind == "kwarg":
            return kwargs[self.key]
        assert self.parent is not None, f"{self.kind} source without a parent"
        parent = self.parent.fetch(args, kwargs)
        if self.kind == "attr":
            return object.__getattribute__(parent, "__dict__")[self.key]
        if self.kind == "item":
            return stored_item(parent, self.key)
        if self.kind == "cell":
            return parent.cell_contents
        if self.kind == "grad" or (self.kind == "slot" and issubclass(type(parent), torch.Tensor)):
            with compat.subclasses_off():  # the capture has told ``__torch_function__`` of what the step reads
                return getattr(parent, self.key or "grad")
        if self.kind == "call":
            return parent()
        if self.kind == "values":
            return compat.inner_values(parent)
        if self.kind == "array":
            return torch.from_numpy(parent)
        if self.kind == "picked":
            return self.key(parent, *(operand.fetch(args, kwargs) for operand in self.key.operands))
        if self.kind == "computed":
            return self.key(*(operand.fetch(args, kwargs) for operand in self.key.operands))
        return object.__getattribute__(parent, self.key) if self.parent.hooked else getattr(parent, self.key)


def stored_item(container: Any, key: Any) -> Any:
    """Returns the stored item of a container, bypassing overridden methods of its class.

    Raises:
        KeyError: a dict lacks the key; no default is created.
        IndexError: a list or tuple is too short.
    """
    if not safe_isinstance(container, dict):
        base: Any = next((base for base in (list, tuple, deque) if safe_isinstance(container, base)), type(container))
        return base.__getitem__(container, key)
    value = dict.get(container, key, _ABSENT)
    if value is _ABSENT:
        raise KeyError(key)
    return value


def stored_length(container: Any) -> int:
    """Returns the length of a container, bypassing the ``__len__`` of its class."""
    base: Any = next((base for base in _CONTAINERS if safe_isinstance(container, base)), type(container))
    return base.__len__(container)  # type: ignore[no-any-return]


def stored_keys(container: Any) -> tuple[Any, ...]:
    """Returns the keys of a dict or members of a set in order, bypassing the ``__iter__`` of its class."""
    base: Any = next((base for base in _CONTAINERS if safe_isinstance(container, base)), type(container))
    return tuple(base.__iter__(container))


_ABSENT = object()
NOT_FOUND = object()
"""What a :class:`Pick` returns where there is no such item: no guard accepts it."""

_CONTAINERS = (OrderedDict, dict, list, tuple, deque, set, frozenset)


_FETCHED = frozenset({"const", "arg", "kwarg", "attr", "item", "cell"})


def can_fetch(source: Source | None) -> bool:
    """Returns True for a path that can be followed before its guards are tested: it runs no code of the program."""
    while source is not None:
        if source.kind == "computed":
            return all(map(can_fetch, source.key.operands))
        parent = source.parent
        if source.kind == "call" and parent is not None and parent.kind == "slot" and parent.key == "__len__":
            source = parent.parent
            continue
        if source.kind not in _FETCHED or source.hooked:
            return False
        source = source.parent
    return True


class Pick:
    """Finds the item of a list at an index that is computed from numbers.

    Args:
        code: the index as a Python expression.
        operands: sources of the numbers, by their names in it.
        names: other names that the expression uses.

    Attributes:
        label: the index for messages.
        operands: sources of the numbers.
        index_of: computes the index from the numbers.
        makes_objects: what it returns may be a new object at every call.
    """

    makes_objects = False

    __slots__ = ("index_of", "label", "operands")

    def __init__(self, code: str, operands: dict[str, Source], names: dict[str, Any]) -> None:
        self.operands = tuple(operands.values())
        self.label = re.sub(r"\w+", lambda name: str(operands.get(name.group(), name.group())), code)
        self.index_of: Callable[..., int] = eval(f"lambda {', '.join(operands)}: {code}", dict(names))

    def __call__(self, items: Any, *numbers: Any) -> Any:
        """Returns the item, or a value that no guard accepts."""
        if type(items) not in (list, deque) or any(type(number) is not int for number in numbers):
            return NOT_FOUND
        index = self.index_of(*numbers)
        return items[index] if -len(items) <= index < len(items) else NOT_FOUND


class SourceTable:
    """Interns sources.

    Attributes:
        parameters: names of the step's positional parameters.
    """

    def __init__(self) -> None:
        self._table: dict[tuple[Any, ...], Source] = {}
        self._keep: list[Any] = []
        self.parameters: Callable[[int], str] = "args[{}]".format

    def const(self, obj: Any, label: str) -> Source:
        """Returns the path of length one to an object that the entry holds."""
        found = self._table.get(("const", None, id(obj)))
        if found is None:
            self._keep.append(obj)
            found = self._table["const", None, id(obj)] = Source("const", None, obj, label)
        return found

    def arg(self, position: int) -> Source:
        return self._intern("arg", None, position, self.parameters(position))

    def kwarg(self, name: str) -> Source:
        return self._intern("kwarg", None, name, name)

    def attr(self, parent: Source, name: str) -> Source:
        return self._intern("attr", parent, name, f"{parent.label}.{name}")

    def slot(self, parent: Source, name: str) -> Source:
        return self._intern("slot", parent, name, f"{parent.label}.{name}")

    def item(self, parent: Source, key: Any, label: str = "") -> Source:
        """Returns ``parent[key]``, with its own label if the user knows the value by another name."""
        return self._intern("item", parent, key, label or _item_label(parent, key))

    def cell(self, parent: Source) -> Source:
        return self._intern("cell", parent, None, parent.label)

    def grad(self, parent: Source) -> Source:
        return self._intern("grad", parent, None, f"{parent.label}.grad")

    def call(self, parent: Source, label: str = "") -> Source:
        return self._intern("call", parent, None, label or f"{parent.label}()")

    def values(self, parent: Source) -> Source:
        """Returns the values of a jagged tensor, a new object at every call."""
        return self._intern("values", parent, None, f"{parent.label}.values()")

    def array(self, parent: Source) -> Source:
        return self._intern("array", parent, None, f"torch.from_numpy({parent.label})")

    def computed(self, program: HostProgram, label: str) -> Source:
        """Returns the list of numbers that a program computes."""
        operands: tuple[Source, ...] = program.operands
        return self._intern(
            "computed", next((each for each in operands if each.from_arguments), operands[0]), program, label
        )

    def picked(self, parent: Source, pick: Pick) -> Source:
        """Returns the item of a list at a changing index."""
        return self._intern("picked", parent, pick, f"{parent.label}[{pick.label}]")

    def _intern(self, kind: Kind, parent: Source | None, key: Any, label: str) -> Source:
        plain = type(key) in (str, int, bytes, bool, float, type(None))
        ident = (kind, id(parent), (type(key), key) if plain else id(key))
        found = self._table.get(ident)
        if found is None:
            self._keep.append(key)
            found = self._table[ident] = Source(kind, parent, key, label)
        return found


def _item_label(parent: Source, key: Any) -> str:
    if safe_isinstance(key, str) and parent.label.endswith(("._parameters", "._modules", "._buffers")):
        return f"{parent.label.rpartition('.')[0]}.{key}"
    if _is_namespace(parent):
        return f"{parent.label}.{key}"
    text = repr(key) if safe_isinstance(key, (str, int)) else f"<{type(key).__name__}>"
    return f"{parent.label}[{text}]"


def _is_namespace(source: Source) -> bool:
    """Returns True for the ``__dict__`` of a module or class."""
    space = source.key if source.kind == "const" else None
    return type(space) is MappingProxyType or (type(space) is dict and space.get("__name__") == source.label)
