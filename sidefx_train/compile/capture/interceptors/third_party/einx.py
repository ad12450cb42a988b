"""``einx`` during a capture: its operations run natively on fake tensors.

An operation compiles a Python function for its pattern and the shapes of its arguments, keeps it in a cache, and calls
it. Nothing but that cache is changed, and the library itself gives its operations to
``torch.compiler.allow_in_graph``. Interpreted, its parser and its registry of backends would be captured too.

Shapes are plain numbers there. If sizes are symbolic, the operation runs in trials, on tensors of other sizes without
contents. The calls of torch that it makes must be the same but for numbers that are products of sizes; these calls are
made with the symbolic sizes.
"""

from __future__ import annotations

import functools
import math
import sys
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

_PLAIN = (str, int, float, bool, type(None), torch.dtype)
_FACTORS = ((101, 103, 107), (109, 113, 127))
"""What sizes are multiplied by in the trials with others than the current sizes: primes, in the order of the sizes."""


_READS = frozenset({"__get__", "size", "dim", "ndimension", "numel", "stride", "is_floating_point", "is_complex"})
"""Names of functions that return what is known of a tensor without its contents."""


@registry.late
def register() -> bool:
    """Registers the interceptor after einx was imported."""
    operations = getattr(sys.modules.get("einx._src.frontend.ops"), "ops", None)
    if operations is None:
        return False
    for operation in operations:
        registry.intercept(operation)(functools.partial(_natively, operation))
    return True


def _natively(operation: Any, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not all(map(_is_plain, (*args, *kwargs.values()))):
        return ABSENT
    made = for_all_sizes(operation, world, args, kwargs)
    return world.guarded(operation, args, kwargs) if made is ABSENT else made


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or safe_isinstance(value, torch.Tensor)


# --- symbolic sizes


class _Result(NamedTuple):
    """A tensor among the arguments of a call: one of the operation, or the result of an earlier call."""

    position: int


class _Calls(TorchFunctionMode):
    """Records the calls of torch that make tensors.

    Args:
        tensors: the tensors that the operation gets.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._known = list(tensors)
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.calls.append((func, self.named(args), self.named(kwargs or {})))
            self._known.append(made)
        elif getattr(func, "__name__", "") not in _READS or type(made) is list:
            raise TypeError(f"{func} makes no tensor, but may write to one")
        return made

    def named(self, value: Any) -> Any:
        """Returns nested arguments with positions in place of tensors."""
        if isinstance(value, (tuple, list)):
            return tuple(map(self.named, value))
        if isinstance(value, dict):
            return {name: self.named(item) for name, item in value.items()}
        if isinstance(value, torch.Tensor):
            [position, *_] = [i for i, known in enumerate(self._known) if known is value]
            return _Result(position)
        return value


def for_all_sizes(operation: Any, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an operation for all values of the symbolic sizes of its arguments; :data:`ABSENT` if there are none, or
    the calls that it makes depend on them otherwise than by products of sizes."""
    tensors = [value for value in (*args, *kwargs.values()) if safe_isinstance(value, torch.Tensor)]
    if any(type(tensor) is not compat.FakeTensor for tensor in tensors):
        return ABSENT
    sizes = [size for tensor in tensors for size in tensor.shape if type(size) is torch.SymInt]
    symbols = {compat.symbol_of(size): size for size in sizes if compat.symbol_of(size).is_symbol}
    used = set().union(*(compat.symbol_of(size).free_symbols for size in sizes))
    if not symbols or used != symbols.keys() or len(symbols) > len(_FACTORS[0]):
        return ABSENT
    if any(map(compat.is_unbacked, symbols.values())):
        return ABSENT
    hints = [compat.hint_of(size) for size in symbols.values()]
    if min(hints) < 2:
        return ABSENT
    runs = []
    for factors in (*_FACTORS, (1,) * len(hints)):
        values = [hint * factor for hint, factor in zip(hints, factors, strict=False)]
        try:
            runs.append((values, _calls_of(operation, args, kwargs, dict(zip(symbols, values, strict=True)))))
        except Exception:  # einx rejects such sizes, or more is called than these calls
            return ABSENT
    general = _General(list(symbols.values()), [values for values, _ in runs])
    (calls, result) = general.of([made for _, made in runs])
    if general.fails:
        return ABSENT
    for size in symbols.values():
        bool(size > 1)  # a dimension of size 1 may be dropped, or broadcast
    known: list[Any] = list(tensors)
    for func, given, named in calls:
        known.append(world.interp.call(func, _filled(given, known), _filled(named, known)))
    return _filled(result, known)


def _calls_of(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: dict[Any, int]) -> Any:
    """Returns the calls of torch that an operation makes with tensors of some sizes, and what it returns."""
    tensors: list[torch.Tensor] = []

    def like(value: Any) -> Any:
        if not safe_isinstance(value, torch.Tensor):
            return value
        shape = [int(compat.symbol_of(n).subs(sizes)) if type(n) is torch.SymInt else n for n in value.shape]
        tensors.append(torch.empty(shape, dtype=value.dtype, device=value.device))
        return tensors[-1]

    with compat.real_world(), compat.new_fake_mode(compat.new_shape_env()), torch.no_grad():
        given = tuple(map(like, args)), {name: like(value) for name, value in kwargs.items()}
        with _Calls(tensors) as calls:
            made = operation(*given[0], **given[1])
        if type(made) is list:
            raise TypeError("the results are in a list")
        return calls.calls, calls.named(made)


class _General:
    """Finds what several runs have in common.

    Args:
        symbols: the symbolic sizes.
        values: those of the sizes in each run.

    Attributes:
        fails: the runs differ otherwise.
    """

    def __init__(self, symbols: list[torch.SymInt], values: list[list[int]]) -> None:
        self._symbols, self._values = symbols, values
        self.fails = False

    def of(self, found: list[Any]) -> Any:
        """Returns the value of all runs, in which symbolic numbers are products of sizes."""
        first = found[0]
        if any(type(each) is not type(first) for each in found):
            self.fails = True
        elif type(first) is dict:
            values = self.of([tuple(each.values()) for each in found])
            self.fails |= any(each.keys() != first.keys() for each in found)
            return dict(zip(first, values, strict=False))
        elif type(first) in (tuple, list):
            self.fails |= any(len(each) != len(first) for each in found)
            return tuple(self.of(list(items)) for items in zip(*found, strict=False))
        elif any(each != first for each in found):
            if type(first) is int:
                return self._product(found)
            self.fails = True
        return first

    def _product(self, found: list[int]) -> Any:
        places = range(len(self._symbols))
        for chosen in (each for count in range(1, len(places) + 1) for each in combinations(places, count)):
            factors = {
                Fraction(number, math.prod(values[place] for place in chosen))
                for number, values in zip(found, self._values, strict=True)
            }
            if len(factors) == 1:
                [factor] = factors
                product = math.prod(self._symbols[place] for place in chosen)
                return product * factor.numerator // factor.denominator if factor != 1 else product
        self.fails = True
        return found[0]


def _filled(value: Any, known: list[Any]) -> Any:
    if type(value) is _Result:
        return known[value.position]
    if type(value) is tuple:
        return tuple(_filled(item, known) for item in value)
    return {name: _filled(item, known) for name, item in value.items()} if type(value) is dict else value
