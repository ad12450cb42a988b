"""Guards: the conditions that a captured step relies on, each with the line that read the value."""

from __future__ import annotations

import enum
import re
import types
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.errors import Location

GuardKind = Literal[
    # one object (kinds/objects.py)
    "is",
    "same",
    "equal",
    "value",
    "type",
    "absent",
    "unset_slot",
    "empty_cell",
    "method",
    "runs_code_when_freed",
    "exposes_position",
    "names",
    "code",
    # containers (kinds/containers.py)
    "length",
    "keys",
    "no_item",
    "order",
    "members",
    # tensors (kinds/tensors.py)
    "tensor",
    "tensor_or_none",
    "no_shared_storage",
    "no_overlap",
    "same_storage_offset",
    "version_counter",
    "storage_sharing",
    # several values (kinds/relations.py)
    "all_distinct",
    "disjoint_sets",
    "apart",
    "number",
]
"""Names of the kinds; each is a class in ``guards/kinds/``, which says what it tests."""


@dataclass(frozen=True)
class Guard:
    """One condition on the state at entry.

    Attributes:
        kind: the kind of test.
        source: path of the tested value.
        value: the expected value.
        location: the user's line that read the value.
    """

    kind: GuardKind
    source: Source
    value: Any
    location: Location | None = None


@dataclass(frozen=True)
class TensorFacts:
    """Metadata of a tensor at entry; a size or stride of ``None`` is not compared.

    Attributes:
        may_repeat: the tensor may be in several places; the others are all distinct.
    """

    cls: type
    dtype: Any
    device: Any
    shape: tuple[int | None, ...]
    stride: tuple[int | None, ...]
    requires_grad: bool
    may_repeat: bool = False

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
        """Returns True if a tensor with these facts passes."""
        return (
            (self.cls, self.dtype, self.device, self.requires_grad)
            == (found.cls, found.dtype, found.device, found.requires_grad)
            and _fit(self.shape, found.shape)
            and _fit(self.stride, found.stride)
        )

    def sizes_that_differ(self, found: TensorFacts) -> frozenset[int]:
        """Returns the dimensions whose sizes are the only difference; empty if something else differs too."""
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


SHOWN_EXACTLY = (float, complex, range, slice)
"""Types of values that may be equal and not the same, and whose text tells them apart."""


def same_value(a: Any, b: Any) -> bool:
    """Returns True if no program can distinguish two plain values.

    1 is not True, 0.0 not -0.0, frozensets have an order, ranges a stop, dates of NumPy a unit.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) in (tuple, frozenset):
        return len(a) == len(b) and all(map(same_value, a, b))
    if type(a) in SHOWN_EXACTLY or issubclass(type(a), np.generic):
        return repr(a) == repr(b)
    return bool(a == b)


def shown(value: Any) -> str:
    """Describes a value for people; runs no method of the user's."""
    if type(value) is TensorFacts:
        return str(value)
    cls = type(value)
    if cls in (int, float, str, bytes, bool, type(None)):
        text = repr(value)
    elif cls in (tuple, list, frozenset):
        text = "[" + ", ".join(shown(item) for item in value) + "]"
    elif issubclass(cls, enum.Enum):
        text = f"{class_name(cls)}.{object.__getattribute__(value, '_name_')}"
    elif issubclass(cls, type):
        text = class_name(value)
    else:
        named = issubclass(cls, (types.FunctionType, types.ModuleType, types.BuiltinFunctionType))
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) if named else None
        text = name if isinstance(name, str) else f"this {class_name(cls)}"
    return text if len(text) <= 80 else text[:77] + "..."


def class_name(cls: type) -> str:
    """Returns the qualified name of a class; no method of its metaclass runs."""
    return str(type.__getattribute__(cls, "__qualname__"))
