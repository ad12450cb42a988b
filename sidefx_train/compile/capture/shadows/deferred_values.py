"""Deferred values, which exist only after the step has run, and deferred calls."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import fx

from sidefx_train.compile.capture.interpreter.frame_objects import Place
from sidefx_train.compile.common.type_checks import attribute_of, safe_isinstance
from sidefx_train.errors import Location, Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI


class DeferredValue:
    """A Python value (usually a string) that the epilogue computes: ``fn(*args, **kwargs)`` on the step's real values.

    The step may store it, return it or pass it to a deferred call. It cannot compute with it during the capture: C code
    that compares, hashes or reads it stops the capture.

    Args:
        fn: the callable.
        args: its arguments.
        kwargs: its keyword arguments.
        dtype: torch's default dtype during the call, by which tensors are shown; ``None`` if it is that of the step's
            start.
    """

    __slots__ = ("args", "dtype", "fn", "kwargs")

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.fn = fn
        self.args = args
        self.kwargs = kwargs or {}
        self.dtype = dtype


def _stopping(name: str) -> Callable[..., NoReturn]:
    def stop(self: DeferredValue, *args: Any) -> NoReturn:
        raise Unsupported("SFX106", f"computes {name} of a value that is known only after the step")

    return stop


_LOOKING_IN = (
    "eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "len", "iter", "getitem", "contains", "add", "radd", "mul",
    "rmul", "mod", "int", "float", "index", "str", "repr", "format",
)  # fmt: skip
for _name in _LOOKING_IN:
    setattr(DeferredValue, f"__{_name}__", _stopping(_name))


def passed_on(value: Any) -> DeferredValue:
    """Returns what stands for a string or another value that changes at every call. Its sample is an empty one; a date
    is its own."""
    parts: Any = ()
    if safe_isinstance(value, (datetime.date, datetime.time, datetime.timedelta)):
        parts = value.__reduce__()[1]
    return DeferredValue(type(value), parts)


class LimitedShadow(DeferredValue):
    """Shadow of an outside object that the step mostly passes on. What asks for more stops the capture."""

    __slots__ = ()

    def refuse(self, heap: ShadowTableAPI) -> NoReturn:
        """Stops the capture."""
        raise NotImplementedError


class PassedItem(LimitedShadow):
    """An item that is a tensor in some calls and ``None`` in others."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(repr, ())

    def refuse(self, heap: ShadowTableAPI) -> NoReturn:
        """Stops the capture at code that asks for its class or its value."""
        record = heap.record_of(self)
        what = "an item" if record is None else record.source.label
        heap.refuse("SFX106", f"looks at {what}, which is a tensor in some calls and None in others")


class DeferredArray(DeferredValue):
    """An array of NumPy over a tensor's memory, or what pure functions make of one: the epilogue computes it.

    Args:
        fn: the callable: ``torch.Tensor.numpy``, or a function of arrays and numbers.
        args: its arguments; the tensor itself for ``torch.Tensor.numpy``.
        kwargs: its keyword arguments.
        sample: a value of the same class, dtype and shape.
        exact: the shape is the same at every call.
        is_view: it is memory of a tensor, or a view of another array.
        place: makes the call on behalf of the program's line, which a warning of NumPy's names.
    """

    __slots__ = ("exact", "is_view", "place", "sample")

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sample: Any,
        exact: bool,
        *,
        is_view: bool = False,
        place: Place | None = None,
    ) -> None:
        super().__init__(fn, args, kwargs)
        self.sample = sample
        self.exact = exact
        self.is_view = is_view
        self.place = place


class DeferredResult(DeferredValue):
    """Result of a deferred call."""

    def __init__(self) -> None:
        super().__init__(repr, ())


class TraceKey:
    """A dict key created in the trace, rebuilt like any value."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass
class TensorSnapshot:
    """Snapshot of a tensor at one point of the trace: later in-place changes must not show.

    Attributes:
        fake: the tensor.
        node: the node that computed it.
        writes: number of earlier operations that had written to its storage.
        after: the last operation before that point.
    """

    fake: Any
    node: fx.Node
    writes: int
    after: fx.Node


@dataclass
class DeferredCall:
    """A call with effects outside, replayed after the graph in the order of the step.

    Attributes:
        fn: the callable.
        args: its arguments, with containers copied at the time of the call.
        kwargs: its keyword arguments, copied the same way.
        location: the user's line.
        place: makes the call for functions that inspect the stack.
        result: replaces the returned value in the rest of the step: a :class:`DeferredResult`, or a similar object.
        dtype: torch's default dtype during the call, by which tensors are shown and made; ``None`` if it is that of the
            step's start.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    location: Location | None
    place: Place | None = None
    result: Any = None
    dtype: torch.dtype | None = None

    def describe(self) -> str:
        name = attribute_of(self.fn, "__qualname__") or attribute_of(self.fn, "__name__", repr(self.fn))
        return f"calls {name} after the graph"


class RangeOfNumber:
    """``range(n)`` of a number that changes, which only a draw reads (``random.sample(range(n), 4)``).

    Args:
        length: the number.
    """

    __slots__ = ("length",)

    def __init__(self, length: Any) -> None:
        self.length = length


def message_of(error: BaseException) -> str:
    """Returns ``str(error)``; empty if that needs deferred values."""
    try:
        return str(error)
    except Unsupported:
        return ""


class Shown:
    """Replaces an object that a deferred call only formats.

    Args:
        as_str: its ``str`` at that time.
        as_repr: its ``repr``.
    """

    def __init__(self, as_str: str, as_repr: str) -> None:
        self.as_str = as_str
        self.as_repr = as_repr

    def __str__(self) -> str:
        return self.as_str

    def __repr__(self) -> str:
        return self.as_repr


def join_text(parts: tuple[Any, ...]) -> str:
    return "".join(parts)


def percent(text: str, values: Any) -> str:
    return text % values


TEXT_METHODS = frozenset(
    vars(str)[name]
    for name in (
        "capitalize", "casefold", "center", "expandtabs", "ljust", "lower", "lstrip", "removeprefix", "removesuffix",
        "replace", "rjust", "rstrip", "strip", "swapcase", "title", "upper", "zfill",
    )
)  # fmt: skip
"""Methods of strings that make another string, and raise for no string: they are called when the string exists."""
