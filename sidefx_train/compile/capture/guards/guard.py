"""Guards: what a captured step relied on, each with the line that read it."""

from __future__ import annotations

import enum
import re
import types
from dataclasses import dataclass
from typing import Any, Literal

from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.errors import Location

GuardKind = Literal[
    "is",  # the value is this object
    "equal",  # same type, equal value
    "value",  # the number or text that an instance of a derived class is
    "type",  # exactly this class
    "length",  # len(value)
    "keys",  # list(value), by equality for plain keys and identity otherwise
    "order",  # the members of a set, in the order it shows them
    "members",  # the members of a set of which the step saw no order
    "absent",  # no entry `value` in the instance __dict__ (or the mapping itself)
    "no_item",  # no key `value` in the mapping
    "same",  # the same object as another source
    "tensor",  # metadata of a tensor
    "no_overlap",  # a tensor whose memory is none of these addresses, of tensors that the entry holds
    "memory",  # tensors that the entry holds share memory as they did (a `StorageSharing`)
    "separate",  # objects that must not be one another
    "disjoint",  # objects none of which is one of some others
    "distinct",  # tensors that must not share storage
    "placed",  # tensors in one memory, so many bytes apart
    "counted",  # tensors in one memory that share their version counter, or do not
    "unset_slot",  # no value in the slot `value` of an object
    "empty_cell",  # a closure cell without contents
    "taken",  # names of a module or class that gave what they gave (a `Taken`)
    "body",  # code and defaults of a function (a `Body`)
    "method",  # a bound method of C, of this descriptor
    "has_pending_finally",  # whether code of the program runs when an iterator dies where it is
    "number",  # a condition on symbolic numbers
]


@dataclass(frozen=True)
class Guard:
    """One condition on the state at entry.

    Attributes:
        kind: what is tested.
        source: where the tested value is found.
        value: what it is compared with.
        location: the user's line that read the value.
    """

    kind: GuardKind
    source: Source
    value: Any
    location: Location | None = None

    def describe(self) -> str:
        """The condition, in words."""
        label = self.source.label
        value = shown(self.value)
        if self.kind == "is":
            return f"{label} is {value}"
        if self.kind in ("equal", "value"):
            return f"{label} == {value}"
        if self.kind == "type":
            return f"type({label}) is {_class_name(self.value)}"
        if self.kind == "length":
            return f"len({label}) == {value}"
        if self.kind in ("keys", "members", "order"):
            return f"{self.kind} of {label} are {value}"
        if self.kind in ("absent", "no_item"):
            return f"{label} has no {value}"
        if self.kind == "unset_slot":
            return f"{label}.{self.value} is not set"
        if self.kind == "same":
            return f"{label} is {self.value.label}"
        if self.kind == "tensor":
            return f"{label} is a {value}"
        if self.kind == "separate":
            return f"{', '.join(source.label for source in self.value)} are different objects"
        if self.kind == "disjoint":
            ones, others = (", ".join(source.label for source in sources) for sources in self.value)
            return f"none of {ones} is one of {others}"
        if self.kind == "no_overlap":
            return f"{label} shares no memory with {len(self.value)} tensors that the step holds"
        if self.kind == "memory":
            return f"{value} share memory as they did"
        if self.kind == "distinct":
            return f"{label} shares no memory with {self.value.label}"
        if self.kind == "taken":
            return f"{len(self.value.names)} names of {label} are what they were"
        if self.kind == "body":
            return f"{label} has the body it had"
        if self.kind == "placed":
            return f"{self.value[0].label} begins {self.value[1]} bytes after {label}"
        if self.kind == "method":
            return f"{label} is {self.value.__qualname__} of its object"
        if self.kind == "has_pending_finally":
            return f"{label} {'cleans' if self.value else 'does not clean'} up when it dies"
        if self.kind == "counted":
            return f"{label} and {self.value[0].label} {'share' if self.value[1] else 'do not share'} a version counter"
        if self.kind == "empty_cell":
            return f"{label} is unbound"
        return f"{self.value}"


def distinct_sources(guard: Guard) -> tuple[Source, ...]:
    """What a guard of the kind ``separate`` or ``disjoint`` is about."""
    return (*guard.value[0], *guard.value[1]) if guard.kind == "disjoint" else guard.value


@dataclass(frozen=True)
class TensorFacts:
    """What a tensor looked like at entry; a size or stride of ``None`` may be any."""

    cls: type
    dtype: Any
    device: Any
    shape: tuple[int | None, ...]
    stride: tuple[int | None, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Any) -> TensorFacts:
        return cls(
            type(tensor),
            tensor.dtype,
            tensor.device,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.requires_grad,
        )

    def fits(self, found: TensorFacts) -> bool:
        """True if a tensor of these facts passes."""
        return (
            (self.cls, self.dtype, self.device, self.requires_grad)
            == (found.cls, found.dtype, found.device, found.requires_grad)
            and _fit(self.shape, found.shape)
            and _fit(self.stride, found.stride)
        )

    def sizes_that_differ(self, found: TensorFacts) -> frozenset[int]:
        """Dimensions whose size alone keeps a tensor from passing; empty if something else does too."""
        same = (self.cls, self.dtype, self.device, self.requires_grad, len(self.shape))
        if same != (found.cls, found.dtype, found.device, found.requires_grad, len(found.shape)):
            return frozenset()
        pairs = zip(self.shape, found.shape, strict=True)
        return frozenset(i for i, (a, b) in enumerate(pairs) if a is not None and a != b)

    def __str__(self) -> str:
        grad = ", requires_grad" if self.requires_grad else ""
        dtype = str(self.dtype).removeprefix("torch.")
        shape, stride = (str(list(sizes)).replace("None", "any") for sizes in (self.shape, self.stride))
        return f"{self.cls.__name__} {dtype}{shape} strides {stride} on {self.device}{grad}"


def _fit(wanted: tuple[int | None, ...], found: tuple[int | None, ...]) -> bool:
    return len(wanted) == len(found) and all(a is None or a == b for a, b in zip(wanted, found, strict=True))


@dataclass(frozen=True)
class NumberCondition:
    """A condition on symbolic numbers, as Python source over ``names``."""

    code: str
    names: tuple[tuple[str, Source], ...]

    def __str__(self) -> str:
        labels = {name: source.label for name, source in self.names}
        return re.sub(r"\b[A-Za-z_]\w*\b", lambda found: labels.get(found[0], found[0]), self.code)


def same_value(a: Any, b: Any) -> bool:
    """True if a program cannot tell two plain values apart: 1 is not True, 0.0 not -0.0, frozensets have an order."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) in (tuple, frozenset):
        return len(a) == len(b) and all(map(same_value, a, b))
    if type(a) in (float, complex):
        return repr(a) == repr(b)
    return bool(a == b)


def shown(value: Any) -> str:
    """A value for people; no method of the user's runs."""
    if type(value) is TensorFacts:
        return str(value)
    cls = type(value)
    if cls in (int, float, str, bytes, bool, type(None)):
        text = repr(value)
    elif cls in (tuple, list, frozenset):
        text = "[" + ", ".join(shown(item) for item in value) + "]"
    elif issubclass(cls, enum.Enum):
        text = f"{_class_name(cls)}.{object.__getattribute__(value, '_name_')}"
    elif issubclass(cls, type):
        text = _class_name(value)
    else:
        named = issubclass(cls, (types.FunctionType, types.ModuleType, types.BuiltinFunctionType))
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) if named else None
        text = name if isinstance(name, str) else f"this {_class_name(cls)}"
    return text if len(text) <= 80 else text[:77] + "..."


def _class_name(cls: type) -> str:
    return str(type.__getattribute__(cls, "__qualname__"))
