"""Arrays of NumPy that are made of tensors of the step, as long as the step only computes with them and keeps them.

``tensor.numpy()`` needs values that exist once the graph has run. The array, and what pure functions make of it, are
deferred values: the epilogue computes them. What the step decides or looks up by one is a graph break.
"""

from __future__ import annotations

import operator
import types
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.frame_objects import Place
from sidefx_train.compile.capture.shadows.deferred_values import DeferredArray, DeferredValue, TensorSnapshot
from sidefx_train.compile.capture.world.deferred import deferred_warnings
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.plain_values import bounds_of
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.thread_warnings import no_warnings
from sidefx_train.compile.common.type_checks import attribute_of, safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI

_METHODS = frozenset(
    {"copy", "mean", "sum", "min", "max", "argmin", "argmax", "any", "all", "std", "var", "prod", "astype", "tolist"}
    | {"item", "flatten", "round", "argsort", "cumsum", "dot"}
)
"""Methods of arrays and of NumPy's numbers that return a new object and change nothing."""

_FUNCTIONS: frozenset[Any] = frozenset(
    (np.mean, np.sum, np.min, np.max, np.argmin, np.argmax, np.any, np.all, np.std, np.var, np.median, np.prod)
    + (np.round, np.argsort, np.sort, np.cumsum, np.concatenate, np.stack, np.hstack, np.vstack, np.copy)
    + (np.count_nonzero, np.clip, np.linalg.norm, np.dot, np.array, np.average, np.percentile, np.quantile)
)
"""Functions of NumPy that return a new array or number, whose shape does not depend on contents."""

_OPERATORS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "neg", "pos", "abs", "invert")
    + ("and_", "or_", "xor", "eq", "ne", "lt", "le", "gt", "ge")
}
_COMPARISONS = frozenset((operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne))
_RINGS = frozenset((operator.mul, operator.add, operator.sub))
_FLOATS = (torch.float32, torch.float64)
_COMPARES = int(np.__version__.partition(".")[0]) >= 2
"""True if NumPy computes with Python's numbers in the precision of the array, as torch does."""
_IN_PLACE = {f"i{name.rstrip('_')}": name for name in _OPERATORS}
_MAY_RAISE = frozenset({"truediv", "floordiv", "mod", "pow"})
"""Operators that raise for some of Python's own numbers."""

_SILENT = frozenset(
    {"copy", "tolist", "item", "flatten", "argmin", "argmax", "any", "all", "argsort", "sort", "array", "count_nonzero"}
    | {"concatenate", "stack", "hstack", "vstack", "isnan", "isfinite", "isinf", "getitem", "float", "int"}
    | {"transpose", "swapaxes", "squeeze", "reshape", "ravel"}
)
"""Names of functions that never warn."""

_VIEWS = frozenset({"transpose", "swapaxes", "squeeze"})
"""Methods that return a view of the array's memory."""
_VIEWS_IF_CONTIGUOUS = frozenset({"reshape", "ravel"})
_PLACES = (int, slice, type(None), type(Ellipsis))
_ATTRIBUTES = frozenset({"shape", "size", "ndim", "dtype", "itemsize", "nbytes"})
_INTERPRETED = ("torch", "lightning", "pytorch_lightning", "sidefx_train")
"""Libraries whose functions are interpreted also with such arrays: they keep or log them."""
_MOST_ITERATED = 64
"""Limit of items of an array that a loop takes one by one."""
_MOST_ELEMENTS = 1 << 22
"""Limit of elements of a sample that a function computes."""
_MOST_DIMENSIONS = 8


class DeferredArrays:
    """The arrays of one capture that exist when its graph has run.

    Attributes:
        of_numbers: some are made of numbers that only the graph knows, not of tensors.
    """

    def __init__(self, world: CaptureWorldAPI) -> None:
        self._world = world
        self.of_numbers = False
        self._warns: bool | None = None

    def of_tensor(self, tensor: Any) -> Any:
        """Returns the array over a tensor's memory; :data:`ABSENT` if torch refuses it, or the capture cannot know."""
        world = self._world
        if type(tensor) is not compat.FakeTensor or not world.tracer.has_node(tensor):
            return ABSENT
        plain = world.interp.type_of(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not plain or tensor.requires_grad or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return ABSENT
        if tensor.is_conj() or tensor.is_neg() or world.branching or world.modes.entered or not self._may_warn():
            return ABSENT
        with compat.real_world():
            try:
                one = torch.ones((), dtype=tensor.dtype).numpy()
            except TypeError:  # NumPy has no such dtype
                return ABSENT
        symbolic = [size for size in tensor.shape if safe_isinstance(size, compat.SYMBOLS)]
        if any(map(compat.is_unbacked, symbolic)):  # it may have no elements
            return ABSENT
        sizes = [int(compat.hint_of(size)) if safe_isinstance(size, compat.SYMBOLS) else size for size in tensor.shape]
        exact = all(type(size) is int for size in tensor.shape)
        if 0 in sizes:
            return ABSENT
        with torch.no_grad():
            memory = tensor.detach()  # keeps the memory if the tensor gets another
        return DeferredArray(torch.Tensor.numpy, (memory,), {}, np.broadcast_to(one, sizes), exact, is_view=True)

    def call(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what a pure function of arrays makes; :data:`ABSENT` for another call."""
        alone = len(args) == 1 and not kwargs
        if alone and (fn is np.asarray or fn is np.array) and type(args[0]) is compat.FakeTensor:
            made = self.of_tensor(args[0])
            return made if made is ABSENT or fn is np.asarray else self._made(np.array, (made,), {})
        if not any(map(_holds, args)) and not any(map(_holds, kwargs.values())):
            return self._of_numbers(fn, args, kwargs)
        if alone and fn is np.asarray and _is_array(args[0]):
            return args[0]
        if type(fn) is types.MethodType and _holds(fn.__self__):
            fn, args = fn.__func__, (fn.__self__, *args)
        if fn is int and alone and (tensor := self._computed(args[0])) is not None:
            return self._world.interp.call(int, (tensor,), {})
        if _makes_view(fn, args) and not kwargs:
            return self._view(fn, args)
        return self._made(fn, args, kwargs) if _is_pure(fn, args, kwargs) else ABSENT

    def _of_numbers(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what a pure function of NumPy makes of numbers that only the graph knows; :data:`ABSENT` for another
        call, or for a truth, and where the prologue may know one of the numbers."""
        world = self._world
        if not _is_numpys(fn) or not any(map(_is_unknown, (*args, *kwargs.values()))) or not _is_pure(fn, args, kwargs):
            return ABSENT
        if not world.specialization.defers_numbers or world.modes.entered or not self._may_warn():
            return ABSENT
        world.random_draws.of_torch.want_read()
        world.host_reads.want(())
        if world.random_draws.of_torch.wanted or world.host_reads.wanted:
            return ABSENT
        made = self._made(fn, args, kwargs)
        if made is ABSENT or safe_isinstance(made.sample, np.bool_):
            return ABSENT
        self.of_numbers = True
        return made

    def refuse_to_library(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses to interpret another library's function of such an array: it runs natively as a whole."""
        if type(fn) is not types.FunctionType or not is_library(fn.__module__ or ""):
            return
        if fn.__module__.startswith(_INTERPRETED):
            return
        if any(map(_is_array, (*args, *kwargs.values()))):
            what = f"{trace_rules.describe(fn)} of an array of NumPy whose contents are known only after the step"
            self._world.heap.refuse("SFX106", what)

    def operator(self, name: str, args: tuple[Any, ...]) -> Any:
        """Returns the result of an operator; :data:`ABSENT` for one that changes its operand, or asks for values."""
        if name == "getitem":
            return self._item(*args)
        if name not in _OPERATORS and name not in _IN_PLACE:
            return ABSENT
        if not all(map(self._is_operand, args)):
            return ABSENT
        samples = [_sample_of(self._world, each) for each in args]
        if name in _IN_PLACE and not safe_isinstance(samples[0], (int, float, np.generic)):
            return ABSENT
        name = _IN_PLACE.get(name, name)
        of_numpy = any(safe_isinstance(each, (np.generic, np.ndarray)) for each in samples)
        if name in _MAY_RAISE and not of_numpy:
            divisor = args[1] if name != "pow" else 0
            if type(divisor) not in (int, float) or divisor == 0:
                return ABSENT
        return self._made(_OPERATORS[name], args, {})

    def _item(self, array: Any, index: Any) -> Any:
        """Returns an item or a view of an array at a constant place; :data:`ABSENT` for another place."""
        if type(array) is not DeferredArray or type(array.sample) is not np.ndarray:
            return ABSENT
        places = index if type(index) is tuple else (index,)
        if not all(type(place) in _PLACES for place in places):
            return ABSENT
        if not array.exact and any(type(place) is int for place in places):  # it may raise at another size
            return ABSENT
        bounds = [bound for each in places if type(each) is slice for bound in bounds_of(each)]
        if any(type(bound) not in (int, type(None)) for bound in bounds):
            return ABSENT
        return self._view(operator.getitem, (array, index))

    def _view(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Returns a view of an array, or an item, which is read now."""
        found = self._made(fn, args, {})
        if found is ABSENT or type(found.sample) is not np.ndarray:
            return found
        return DeferredArray(fn, args, {}, found.sample, found.exact, is_view=True)

    def attribute(self, value: DeferredArray, name: str) -> Any:
        """Returns a method of an array or number, or what is known of it without its contents; else :data:`ABSENT`."""
        if name in _METHODS:
            method = getattr(type(value.sample), name, ABSENT)
            return method if method is ABSENT else types.MethodType(method, value)
        if name in _VIEWS or name in _VIEWS_IF_CONTIGUOUS:
            return types.MethodType(getattr(np.ndarray, name), value) if _is_array(value) else ABSENT
        if name == "T" and _is_array(value):
            return self._view(np.ndarray.transpose, (value,))
        if name in ("dtype", "ndim") or (name in _ATTRIBUTES and value.exact):
            return getattr(value.sample, name, ABSENT)
        return ABSENT

    def _made(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        world = self._world
        given = (*args, *kwargs.values())
        if world.branching or not all(map(self._is_operand, given)):
            return ABSENT
        if world.context.sets_numpy_errors or deferred_warnings.sets_filters(world):
            return ABSENT
        samples = [_sample_of(world, each) for each in args]
        if (fn is np.power or fn is operator.pow) and _may_be_negative_power(samples, args[1]):
            return ABSENT
        try:
            with compat.real_world(), no_warnings(), np.errstate(all="ignore"):
                sample = fn(*samples, **{name: _sample_of(world, each) for name, each in kwargs.items()})
        except Exception:  # the program's own call raises it, after a break
            return ABSENT
        place = None
        if attribute_of(fn, "__name__") not in _SILENT and world.interp.current_frame is not None:
            place = Place(world.interp.current_frame)
        exact = all(map(_is_exact, given))
        named = {name: self._now(value) for name, value in kwargs.items()}
        return DeferredArray(fn, tuple(map(self._now, args)), named, sample, exact, place=place)

    def as_condition(self, value: Any) -> torch.Tensor | None:
        """Returns the tensor of a comparison of a number in an array with a Python number, as NumPy computes it;
        ``None`` for any other value."""
        if type(value) is not DeferredArray or value.fn not in _COMPARISONS or len(value.args) != 2 or not _COMPARES:
            return None
        tensors = [self._tensor_of(each) for each in value.args]
        numbers = [type(each) in (int, float, torch.SymFloat) for each in value.args]
        if [each is None for each in tensors] != numbers or sum(numbers) != 1:
            return None
        given = [each if made is None else made for each, made in zip(value.args, tensors, strict=True)]
        with torch.no_grad():
            made = self._world.guarded(value.fn, tuple(given), {})
        return made if safe_isinstance(made, torch.Tensor) else None

    def as_index(self, value: Any) -> Any:
        """Returns the tensor of integers whose array, or item of an array, ``value`` is, to index a tensor with; the
        value itself for any other."""
        if type(value) is tuple:
            made = tuple(map(self.as_index, value))
            return value if all(a is b for a, b in zip(made, value, strict=True)) else made
        found = self._at(value.args[0] if type(value) is DeferredArray and value.fn is int else value)
        return value if found is None or found.dtype != torch.int64 else found

    def items(self, array: DeferredArray) -> Any:
        """Returns an iterator over an array of known length; :data:`ABSENT` for a long one."""
        sample = array.sample
        if not array.exact or not _is_array(array) or not sample.ndim or not 0 < len(sample) <= _MOST_ITERATED:
            return ABSENT
        return iter([self._item(array, place) for place in range(len(sample))])

    def _computed(self, value: Any) -> torch.Tensor | None:
        """Returns the tensor that torch computes as NumPy computes a float of an array; ``None`` for another value."""
        if type(value) is not DeferredArray or value.fn not in _RINGS or not _COMPARES:
            found = self._at(value)
            return found if found is not None and not found.ndim and found.dtype in _FLOATS else None
        tensors = [self._computed(each) for each in value.args]
        plain = [type(each) in (int, float) for each in value.args]
        if [each is None for each in tensors] != plain or sum(plain) != 1:
            return None
        given = [each if made is None else made for each, made in zip(value.args, tensors, strict=True)]
        with torch.no_grad():
            made = self._world.guarded(value.fn, tuple(given), {})
        return made if safe_isinstance(made, torch.Tensor) else None

    def _at(self, value: Any) -> torch.Tensor | None:
        """Returns the tensor over whose memory an array is, or its part at constant places, if nothing has written to
        it since; ``None`` for another value."""
        if type(value) is not DeferredArray:
            return None
        if value.fn is operator.getitem:
            held = self._at(value.args[0])
            return None if held is None else self._world.interp.getitem(held, value.args[1])
        if value.fn is not torch.Tensor.numpy:
            return None
        held = value.args[0]
        if type(held) is TensorSnapshot:
            held = held.fake if len(self._world.writes.to(held.fake)) == held.writes else None
        return held if type(held) is compat.FakeTensor else None

    def _tensor_of(self, value: Any) -> torch.Tensor | None:
        """Returns the tensor of one float over whose memory an array is, if nothing has written to it since."""
        if type(value) is not DeferredArray or value.fn is not torch.Tensor.numpy or value.sample.ndim:
            return None
        held = self._at(value)
        return held if held is not None and held.dtype in _FLOATS else None

    def _is_operand(self, value: Any) -> bool:
        if type(value) is DeferredArray:
            return type(value.sample) is not np.ndarray or value.sample.size <= _MOST_ELEMENTS
        if type(value) in (list, tuple):
            self._world.touch(value)
            return len(value) > 0 and all(map(self._is_operand, value))
        if safe_isinstance(value, compat.SYMBOLS):
            return True
        if type(value) is DeferredValue:  # a number from outside that passes through
            record = self._world.heap.record_of(value)
            return record is not None and safe_isinstance(record.real, np.generic)
        known = value is None or type(value) in (bool, int, float, str, *_PLACES) or safe_isinstance(value, type)
        return known or safe_isinstance(value, (np.generic, np.dtype))

    def _now(self, value: Any) -> Any:
        """Returns an operand with its contents at this point of the step: its memory may be written to later."""
        if type(value) is DeferredArray and value.is_view:
            first = value.args[0]
            content = self._world.freeze(first) if value.fn is torch.Tensor.numpy else self._now(first)
            return DeferredArray(value.fn, (content, *value.args[1:]), {}, value.sample, value.exact, is_view=True)
        return type(value)(map(self._now, value)) if type(value) in (list, tuple) else value

    def _may_warn(self) -> bool:
        """Returns True if no floating-point error of NumPy's is an exception; that is guarded."""
        if self._warns is None:
            world = self._world
            world.context.guard_numpy_errors()
            sources = world.heap.sources
            raises = _warnings_are_errors()
            world.heap.guard("equal", sources.call(sources.const(_warnings_are_errors, "errors of NumPy")), raises)
            self._warns = not raises and {"warn", "ignore"}.issuperset(np.geterr().values())
        return self._warns


def _warnings_are_errors() -> bool:
    """Returns True if a filter may turn a warning of NumPy's into an error, wherever it is issued."""
    actions = [action for action, _, kind, *_ in warnings.filters if issubclass(RuntimeWarning, kind)]
    return "error" in (*actions, warnings.defaultaction)  # type: ignore[attr-defined]


def _sample_of(world: CaptureWorldAPI, value: Any) -> Any:
    """Returns a value like an operand."""
    if type(value) is DeferredArray:
        return value.sample
    if safe_isinstance(value, compat.SYMBOLS):
        if compat.is_unbacked(value):
            return 1.0 if type(value) is torch.SymFloat else 1
        kind, number = compat.numpy_class(value), compat.hint_of(value)
        return number if kind is None else kind(number)
    if type(value) is DeferredValue:
        record = world.heap.record_of(value)
        assert record is not None, "it is an operand"
        return record.real
    return type(value)(_sample_of(world, each) for each in value) if type(value) in (list, tuple) else value


def _makes_view(fn: Any, args: tuple[Any, ...]) -> bool:
    """Returns True for a method that returns a view of an array; its arguments are integers."""
    if type(fn) is not types.MethodDescriptorType or fn.__objclass__ is not np.ndarray or not _is_array(args[0]):
        return False
    for value in args[1:]:
        if not all(type(each) is int for each in (value if type(value) is tuple else (value,))):
            return False
    array = args[0]
    if fn.__name__ == "reshape" and not array.exact and args[1:] != (-1,):  # it may raise at another size
        return False
    if fn.__name__ in _VIEWS_IF_CONTIGUOUS:
        if array.fn is torch.Tensor.numpy:
            return bool(array.args[0].is_contiguous())
        return not array.is_view  # nothing writes to it
    return fn.__name__ in _VIEWS


def _is_array(value: Any) -> bool:
    return type(value) is DeferredArray and type(value.sample) is np.ndarray


def _holds(value: Any) -> bool:
    """Returns True for such an array, and a list or tuple of the step with one."""
    if type(value) is DeferredArray:
        return True
    return type(value) in (list, tuple) and any(type(each) is DeferredArray for each in tuple(value))


def _is_unknown(value: Any, depth: int = _MOST_DIMENSIONS) -> bool:
    """Returns True for a number that only the graph knows, and a list or tuple of the step with one."""
    if type(value) in (list, tuple):  # a list may hold itself
        return depth > 0 and any(_is_unknown(item, depth - 1) for item in tuple(value))
    is_number = type(value) in (torch.SymFloat, torch.SymInt) and not compat.is_ragged_size(value)
    return is_number and compat.is_unbacked(value)


def _is_numpys(fn: Any) -> bool:
    if safe_isinstance(fn, type):
        return issubclass(fn, np.generic)
    return type(fn) is np.ufunc or type(fn) is type(np.where) or fn is np.array


def _is_pure(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if not {"out", "copy"}.isdisjoint(kwargs) or any(safe_isinstance(each, np.ndarray) for each in args):
        return False
    if type(fn) is np.ufunc:
        counts: Any = fn
        return getattr(np, fn.__name__, None) is fn and len(args) == counts.nin and counts.nout == 1
    # Another one may be what the result is written to; an axis or a quantile that is not known may be out of range.
    one = not any(_holds(each) or _is_unknown(each) for each in (*args[1:], *kwargs.values()))
    if type(fn) is types.MethodDescriptorType:
        of_numbers = fn.__objclass__ in (np.ndarray, float, int, bool) or issubclass(fn.__objclass__, np.generic)
        return of_numbers and fn.__name__ in _METHODS and (one or fn.__name__ == "dot")
    alone = len(args) == 1 and not kwargs
    if fn is float or fn is abs or (safe_isinstance(fn, type) and issubclass(fn, np.generic)):
        return alone
    if fn is int:
        number = args[0].sample if alone and type(args[0]) is DeferredArray else None
        return type(number) in (int, bool) or safe_isinstance(number, (np.integer, np.bool_))
    if fn is round:
        return len(args) == 2 and not kwargs
    if fn is np.where:
        return len(args) == 3
    hashable = type(fn) in (type(np.where), types.BuiltinFunctionType, types.FunctionType)
    return hashable and fn in _FUNCTIONS and (one or fn is np.dot or fn is np.clip)


def _may_be_negative_power(samples: list[Any], exponent: Any) -> bool:
    """Returns True for integers to the power of integers that are not known: NumPy raises for negative ones."""
    return (_holds(exponent) or _is_unknown(exponent)) and all(np.asarray(each).dtype.kind in "biu" for each in samples)


def _is_exact(value: Any) -> bool:
    if type(value) is DeferredArray:
        return value.exact
    return all(map(_is_exact, value)) if type(value) in (list, tuple) else True
