"""Argument snapshots of deferred calls: the arguments at the time the step made the call."""

from __future__ import annotations

import math
import re
import types
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.containers.traversal import DICT_VIEWS
from sidefx_train.compile.capture.shadows.deferred_values import (
    DeferredArray,
    DeferredResult,
    DeferredValue,
    LimitedShadow,
    Shown,
    TensorSnapshot,
    percent,
)
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord
from sidefx_train.compile.capture.world.native_calls.dunder_reentry import MethodCode
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.plain_values import PLAIN_TYPES, base_container, bounds_of, empty_like, make_tuple
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext


class ArgumentSnapshot:
    """Copies containers with their contents; an object with several references is copied once.

    Args:
        world: the world of the capture.
        shown: only the string of the value is used: objects with a ``__str__`` or ``__repr__`` of their own are
            replaced by their current strings.
        printed: the string of each argument is its ``str``.
    """

    def __init__(self, world: CaptureContext, shown: bool, printed: bool = False) -> None:
        self.world = world
        self.shown = shown
        self.printed = printed
        self._depth = 0
        self._copies: dict[int, Any] = {}
        self._keep: list[Any] = []

    def many(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(self.value, values))

    def named(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: self.value(value) for name, value in values.items()}

    def value(self, value: Any) -> Any:
        """Returns a snapshot of a value."""
        cls = type(value)
        if issubclass(cls, LimitedShadow):  # a tensor could change until then
            value.refuse(self.world.heap)
        if cls in PLAIN_TYPES or safe_isinstance(value, (*compat.SYMBOLS, DeferredValue)):
            return value
        record = self.world.heap.record_of(value)
        if safe_isinstance(record, ArrayRecord):
            record.shown = True
        tracer = self.world.tracer
        if safe_isinstance(value, torch.Tensor) and tracer.has_node(value):
            if self.world.heap.shown.any and self.world.interp.type_of(value) is not torch.Tensor:
                self.world.heap.refuse("SFX109", "prints, logs or formats a tensor of a subclass")
            writes = len(self.world.writes.to(value))
            return TensorSnapshot(value, tracer.node_of(value), writes, tracer.last_node())
        if compat.is_wrapper(value):
            kind = type(value).__qualname__
            self.world.heap.refuse(
                "SFX109", f"prints or logs a {kind}, a tensor subclass, which could change until then"
            )
        if id(value) in self._copies:
            return self._copies[id(value)]
        if self.shown and _has_own_text(cls):
            return self._text(value)
        self._depth += 1
        try:
            return self._container(value)
        finally:
            self._depth -= 1

    def _container(self, value: Any) -> Any:
        cls = type(value)
        if safe_isinstance(value, tuple):
            return self._remember(value, make_tuple(cls, map(self.value, value)))
        if cls is slice:
            return self._remember(value, slice(*map(self.value, bounds_of(value))))
        if cls is bytearray or (cls is np.ndarray and self.world.heap.record_of(value) is None):
            return self._remember(value, value.copy())
        if cls is types.SimpleNamespace:
            self.world.touch(value, deep=False)
            copied = self._remember(value, types.SimpleNamespace())
            vars(copied).update((name, self.value(item)) for name, item in vars(value).items())
            return copied
        if cls in DICT_VIEWS:
            return self._remember(value, self._view(value))
        base: Any = base_container(cls)
        if base is None:
            return value
        self.world.touch(value, deep=False)
        copy = self._remember(value, empty_like(value))
        if safe_isinstance(value, dict):
            for key, item in base.items(value):
                base.__setitem__(copy, key, self.value(item))
        else:
            adder = base.update if base is set else base.extend
            adder(copy, [self.value(item) for item in base.__iter__(value)])
        return copy

    def _view(self, view: Any) -> Any:
        """Returns a view of a dict that has what a view shows now."""
        name = type(view).__name__
        self.world.touch(view, deep=False)
        items = list(view)
        kind = OrderedDict if name.startswith("odict") else dict
        if name.endswith("items"):
            return kind((key, self.value(item)) for key, item in items).items()
        if name.endswith("keys"):
            return kind.fromkeys(items).keys()
        return kind(enumerate(map(self.value, items))).values()

    def _remember(self, value: Any, copy: Any) -> Any:
        self._copies[id(value)] = copy
        self._keep.append(value)
        return copy

    def _text(self, value: Any) -> Any:
        interp, cls = self.world.interp, type(value)
        one = self.printed or getattr(cls, "__str__", None) is object.__str__
        if not one and not MethodCode(cls, ("__str__", "__repr__")).only_looks:
            what = f"prints or logs a {cls.__qualname__}, whose __str__ or __repr__ does more than read it"
            self.world.heap.refuse("SFX103", what)
        if one:
            text = interp.call(str if self._depth == 0 else repr, (value,), {})
            return DeferredValue(Shown, (text, text))
        return DeferredValue(Shown, (interp.call(str, (value,), {}), interp.call(repr, (value,), {})))


def deferred_string(
    world: CaptureContext, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> DeferredValue:
    """Returns a deferred string, made when the values in it exist.

    Raises:
        Unsupported: formatting raises whatever the values are, so the error must not be deferred.
    """
    kwargs = kwargs or {}
    if fn is format or (fn is percent and _OTHER_THAN_NUMBERS.search(args[0]) is None):
        args = tuple(_as_number(world, value) for value in args)
    made = DeferredValue(
        fn,
        tuple(map(world.freeze, args)),
        {name: world.freeze(value) for name, value in kwargs.items()},
        world.changed_dtype(),
    )
    try:
        with compat.real_world():
            for number in (1, math.nan):
                _sample(made, number)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        world.heap.refuse("SFX106", f"formats a value that is known only after the step, which raises {message}")
    return made


def _as_number(world: CaptureContext, value: Any) -> Any:
    """Returns a tensor of which only the number is shown without its history, which would leave the step."""
    if type(value) is tuple:
        return tuple(_as_number(world, each) for each in value)
    if type(value) is not compat.FakeTensor or value.grad_fn is None or value.dim():
        return value
    if world.interp.type_of(value) is not torch.Tensor:
        return value
    with torch.no_grad():
        return value.detach()


_OTHER_THAN_NUMBERS = re.compile(r"%[^diouxXeEfFgG%]*[^diouxXeEfFgG%.*0-9 +#-]")
"""Finds a conversion like ``%s``, which shows more of a tensor than its number, and such with the names of a dict."""


def _sample(value: Any, number: float) -> Any:
    """Returns a sample of a snapshot's type, floats being ``number``; formatting it succeeds or fails as it will
    later."""
    if safe_isinstance(value, compat.SYMBOLS):
        if not compat.is_unbacked(value):
            return _KINDS[type(value)](compat.hint_of(value))
        return number if safe_isinstance(value, torch.SymFloat) else _KINDS[type(value)](1)
    if safe_isinstance(value, TensorSnapshot):
        filled = number if value.fake.dtype.is_floating_point else 1
        return torch.full((1,) * value.fake.dim(), filled, dtype=value.fake.dtype)
    if safe_isinstance(value, DeferredResult):
        return ""
    if safe_isinstance(value, DeferredArray):
        return value.sample
    if safe_isinstance(value, DeferredValue):
        named = {name: _sample(item, number) for name, item in value.kwargs.items()}
        return value.fn(*(_sample(item, number) for item in value.args), **named)
    if safe_isinstance(value, tuple):
        return make_tuple(type(value), (_sample(item, number) for item in tuple.__iter__(value)))
    if safe_isinstance(value, list):
        return [_sample(item, number) for item in list.__iter__(value)]
    if type(value) is slice:
        return slice(*(_sample(bound, number) for bound in bounds_of(value)))
    if safe_isinstance(value, dict):
        return {name: _sample(item, number) for name, item in dict.items(value)}
    return value


_KINDS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def _has_own_text(cls: type) -> bool:
    """Returns True for the user's classes whose string is made by Python code, and for optimizers: it shows their
    learning rates.

    Modules and other objects of libraries print their state, which a step does not change, so they are formatted
    afterwards.
    """
    if issubclass(cls, torch.optim.Optimizer):
        return True
    if is_library(cls.__module__) or issubclass(cls, (torch.nn.Module, torch.Tensor, type)):
        return False
    return any(safe_isinstance(getattr(cls, name, None), types.FunctionType) for name in ("__str__", "__repr__"))
