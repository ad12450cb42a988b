"""Changing numbers as arguments whose values torch's C++ code reads.

A symbolic float passes through torch's C++ code only where a schema says ``Scalar`` and no derivative computes with
it. ``dropout(x, p)`` takes a ``double``, and the derivative of ``lerp`` computes ``1 - weight``: both would make the
number a constant. Such a call runs with a *probe* instead, a float that occurs nowhere else. A constant of a recorded
operation that is the probe, or a simple function of it (``1 - p``), is replaced by the symbolic number, in the forward
and in any derivative.

That is right if C++ code only passes the number on or computes one of the known functions. Before the call is recorded
it therefore runs twice on other fake tensors, forward and two derivatives, with two probes: operations must be the
same, and every constant that differs must be known. Code that branches on a number compares it with -1, 0, 1, 2,
infinity or another number of the call: the probe lies between the same two of them, which is guarded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import combinations, pairwise
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.derived_numbers import BOUNDS, Derived, as_single, derived, derived_of_single
from sidefx_train.compile.graph.number_arguments import replace_constants, takes_double
from sidefx_train.errors import Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.interfaces import GraphRecorder

aten = torch.ops.aten
Place = tuple[float, float]
Stream = list[tuple[Any, ...]]

_HIDING = frozenset({aten.lift_fresh.default, aten.lift.default, aten.lift_fresh_copy.default})
"""Operations on tensors that Python or C++ code filled without the dispatcher."""
_UNBOUNDED = 10.0
"""Probes above the largest finite bound, or below the smallest, are at most this far away."""
_GOLDEN = 0.6180339887498949
_PASSED_ON = (0.0, 1.0)
"""Where the probes lie whose values no code compares."""
_ORDERS = 2
"""Derivatives compared."""

_POWERS = frozenset({"pow", "rpow", "float_power"})
_BRANCHING = _POWERS | {
    "cumulative_trapezoid", "dist", "lerp", "linalg_norm", "linalg_vector_norm", "multi_margin_loss", "norm", "renorm",
    "rrelu", "special_xlog1py", "std", "std_mean", "trapezoid", "var", "var_mean", "xlogy",
}  # fmt: skip
"""Functions with a ``Scalar`` whose value C++ code reads, there or in a derivative."""
_DERIVED_ONLY = frozenset({"pow", "float_power", "lerp", "special_xlog1py", "xlogy"})
"""Those of :data:`_BRANCHING` whose forward keeps the number symbolic."""
_FUNCTIONS = frozenset({"torch.nn.functional", "torch.nn.init", "torch.functional", "torch._tensor"})
"""Modules of Python functions that run natively and pass numbers to C++ code."""
_NORMS, _LEAST_EPS = ("batch_norm", "instance_norm"), 1e-5
"""Functions that choose a kernel by ``eps`` on a GPU, and cuDNN's least."""
_VARIANCES = frozenset({"std", "std_mean", "var", "var_mean"})
"""Functions whose C++ code compares the number with the number of elements alone, and takes integers as floats."""
_SHAPING = ("interpolate", "upsample", "arange", "range", "linspace", "logspace", "_upsample", "allclose")
"""Functions that compute a size or a truth value with the number."""


class Probes:
    """The probes of one capture.

    Attributes:
        symbols: functions that compute the symbolic number, by the constant that stands for it.
        awaited: probes of a running call on ``DTensor`` objects that no operator has been recorded with.
    """

    def __init__(self, tracer: GraphRecorder) -> None:
        self.tracer = tracer
        self.symbols: dict[float, Callable[[], Any]] = {}
        self.awaited: set[float] = set()
        self._chosen: dict[tuple[fx.Node, Place], float] = {}
        self._count = 0

    # --- calls

    def given_to(
        self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], single: Callable[[Any], Any]
    ) -> tuple[Any, Any, Any]:
        """Returns a call with probes in place of its symbolic floats; unchanged where that is not needed, or wrong.

        Args:
            fn: the function.
            args: its arguments.
            kwargs: the same, by name.
            single: rounds a symbolic float to float32; ``None`` if it cannot.
        """
        if str(getattr(fn, "__name__", "")) in _VARIANCES and type(kwargs.get("correction")) is torch.SymInt:
            kwargs = {**kwargs, "correction": torch.sym_float(kwargs["correction"])}
        call = fn, args, kwargs
        owner = getattr(fn, "__self__", None)
        if safe_isinstance(owner, torch.Tensor):  # those of other classes get no probe: a trial would write to them
            fn, args = getattr(torch.Tensor, fn.__name__), (owner, *args)
        numbers = _numbers(fn, args, kwargs)
        if not numbers:
            return call
        if not compat.inside_transform() and (probed := self._probed(fn, numbers, args, kwargs, single)) is not None:
            return probed
        name = str(fn.__name__).strip("_")
        if name in _VARIANCES or (name in _POWERS and compat.POWERS_HIDE_NUMBER):
            return (fn, *_with(numbers, [float(number) for number in numbers], (args, kwargs)))
        return call

    def given_to_dtensors(self, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
        """Returns the arguments of a call on ``DTensor`` objects with probes in place of all symbolic floats.

        The last item is True if there are any.

        Torch's dispatch keeps the arguments of such calls beyond the capture, and compares them. It passes numbers on
        to the operator of the local tensors, which :meth:`check_dtensors` verifies after the call.

        Raises:
            Unsupported: an argument is a symbolic integer or truth value.
        """
        found: set[float] = set()

        def probe(value: Any) -> Any:
            if type(value) in (list, tuple):
                return type(value)(map(probe, value))
            if type(value) is torch.SymFloat:
                key = self.tracer.node_of(value), _PASSED_ON
                chosen = self._chosen.get(key)
                if chosen is None:
                    self._count += 1
                    chosen = self._chosen[key] = 0.05 + 0.9 * math.modf(self._count * _GOLDEN)[0]
                self.symbols.setdefault(chosen, lambda: value)
                found.add(chosen)
                return chosen
            if type(value) in compat.SYMBOLS:
                raise Unsupported("SFX109", "calls an operator of a DTensor with a changing integer", None)
            return value

        given = tuple(map(probe, args)), {name: probe(value) for name, value in kwargs.items()}
        self.awaited |= found
        return *given, bool(found)

    def check_dtensors(self) -> None:
        """Checks that a call on ``DTensor`` objects has passed all of its symbolic floats on.

        Raises:
            Unsupported: it has computed something else with one.
        """
        if self.awaited:
            raise Unsupported("SFX109", "calls an operator of a DTensor that computes with a changing number", None)

    def _probed(
        self, fn: Any, numbers: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], single: Callable[[Any], Any]
    ) -> Any:
        """Returns a call with probes in place of its symbolic floats; ``None`` where that is not needed, or wrong."""
        of_variance = str(fn.__name__) in _VARIANCES  # whose derivative reads the number
        totals = _reduced(*args[:2], **kwargs) if of_variance else frozenset()
        limits = (
            [-math.inf, *map(float, sorted(totals)), math.inf] if totals else _limits(str(fn.__name__), args, kwargs)
        )
        found = [_between(compat.hint_of(number), limits) for number in numbers]
        between = [place for place in found if place is not None]
        sizes = _sizes((*args, *kwargs.values()))
        if sizes is None or len(between) < len(numbers):
            return None
        if not of_variance and not _specializes(fn, numbers, args, kwargs):
            return None
        streams, constants, tried = [], [], []
        for _ in range(2):
            values = self._new(numbers, between)
            try:
                streams.append(_stream(fn, *_with(numbers, values, (args, kwargs))))
            except Exception:  # the call raises, or a derivative does: as without a probe
                return None
            tried.append(values)
            constants.append([derived(value, sizes, totals) for value in values])
        rounded: list[Any] = []
        if not _explained(*streams, *constants):
            constants = [
                [_with_single(*each) for each in zip(*pair, strict=True)] for pair in zip(tried, constants, strict=True)
            ]
            if not _explained(*streams, *constants):
                return None
            rounded = list(map(single, numbers))
            if None in rounded:
                return None
        chosen = self._chosen_for(numbers, between)
        compared = not _resamples(str(fn.__name__))
        if (compared and not _in_order(numbers, chosen)) or (
            rounded and any(as_single(value) == value for value in chosen)
        ):
            return None
        for value, number in zip(chosen, numbers, strict=True):
            self._note(derived(value, sizes, totals), number)
        for value, number in zip(chosen, rounded, strict=False):
            self._note(derived_of_single(value), number)
        _guard(numbers, between, compared)
        return (fn, *_with(numbers, chosen, (args, kwargs)))

    def _new(self, numbers: list[torch.SymFloat], between: list[Place]) -> list[float]:
        """Returns new probes, in the order of the numbers."""
        values = []
        for low, high in between:
            self._count += 1
            part = 0.05 + 0.9 * math.modf(self._count * _GOLDEN)[0]
            if math.isinf(high):
                values.append(low + _UNBOUNDED * part)
            elif math.isinf(low):
                values.append(high - _UNBOUNDED * part)
            else:
                values.append(low + (high - low) * part)
        ranks = sorted(range(len(numbers)), key=lambda i: float(compat.hint_of(numbers[i])))
        return [value for _, value in sorted(zip(ranks, sorted(values), strict=True))]

    def _chosen_for(self, numbers: list[torch.SymFloat], between: list[Place]) -> list[float]:
        """Returns the numbers' probes for the whole capture."""
        return [
            self._chosen.setdefault((self.tracer.node_of(number), place), new)
            for number, place, new in zip(numbers, between, self._new(numbers, between), strict=True)
        ]

    def _note(self, table: dict[float, Derived], number: torch.SymFloat) -> None:
        """Remembers what is computed from a number."""
        for constant, (function, _) in table.items():
            self.symbols.setdefault(constant, functools.partial(function, number))

    # --- recorded operations

    def among(self, args: Any, kwargs: Any) -> list[float]:
        """Returns the constants among the arguments that stand for symbolic numbers."""
        if not self.symbols:
            return []
        found = [value for value in _constants((args, kwargs)) if type(value) is float and value in self.symbols]
        self.awaited.difference_update(found)
        return found

    def nodes_of(self, constants: list[float]) -> dict[float, fx.Node]:
        """Returns the nodes that compute the numbers which constants stand for."""
        return {constant: self.tracer.node_of(self.symbols[constant]()) for constant in constants}

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments with symbolic numbers in place of the constants that stand for them."""

        def symbol(value: Any) -> Any:
            return self.symbols[value]() if type(value) is float and value in self.symbols else value

        return tuple(map(symbol, args)), {name: symbol(value) for name, value in kwargs.items()}

    def replace(self, nodes: dict[float, fx.Node], since: fx.Node) -> None:
        """Replaces constants of the nodes recorded after ``since``."""
        node = self.tracer.last_node()
        while node is not since:
            replace_constants(node, nodes)
            node = node.prev


def _numbers(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.SymFloat]:
    """Returns the symbolic floats of a call, if torch's C++ code would read them."""
    given = (*args, *kwargs.values())
    numbers = {id(value): value for value in given if type(value) is torch.SymFloat}
    name = str(getattr(fn, "__name__", "")).strip("_")
    if type(fn) is FunctionType:
        reads = fn.__module__ in _FUNCTIONS and not name.startswith(_SHAPING)
    else:
        reads = reads_numbers(name)
    if not (trace_rules.is_torch_callable(fn) or any(isinstance(value, torch.Tensor) for value in given)):
        return []  # arithmetic of numbers: ``pow``
    if not numbers or not reads or any(map(compat.is_unbacked, numbers.values())):
        return []
    if name in _DERIVED_ONLY and not (
        torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in given)
    ):
        return []
    return list(numbers.values())


@functools.lru_cache(maxsize=512)
def reads_numbers(name: str) -> bool:
    """Returns True if torch's C++ code reads the value of a number argument of the function ``name``."""
    if name.startswith(_SHAPING) and not _resamples(name):
        return False
    if name in _BRANCHING:
        return True
    operator = name.removesuffix(".default")
    packets = (getattr(aten, each, None) for each in (operator, f"_{operator}", f"{operator}_", f"{operator}_loss"))
    operators = (getattr(packet, each) for packet in packets if packet is not None for each in packet.overloads())
    return any(takes_double(op) for op in operators)


def _resamples(name: str) -> bool:
    """Returns True for operators that are given the size beside the number, which they compare with zero."""
    return name.strip("_").startswith("upsample") and name.endswith(".default")


def _reduced(x: Any, dim: Any = None, **_: Any) -> frozenset[int]:
    """Returns the number of elements that a variance is computed of, if it is known."""
    if not isinstance(x, torch.Tensor):
        return frozenset()
    dims = range(x.dim()) if dim is None or dim == () else (dim,) if type(dim) is int else dim
    if not all(type(each) is int and -x.dim() <= each < x.dim() for each in dims):
        return frozenset()
    sizes = [x.shape[each] for each in dims]
    return frozenset({math.prod(sizes)}) if all(type(size) is int for size in sizes) else frozenset()


def _with_single(value: float, known: dict[float, Derived]) -> dict[float, Derived]:
    """Adds what is computed from a probe rounded to float32."""
    single = derived_of_single(value)
    return {**known, **single} if known.keys().isdisjoint(single) else known


def _limits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
    """Returns what C++ code may compare the numbers of a call with: its other numbers too."""
    if _resamples(name):
        return [-math.inf, 0.0, math.inf]
    given = {float(value) for value in (*args, *kwargs.values()) if type(value) is float and value == value}
    of_kernels = {_LEAST_EPS} if name.strip("_").endswith(_NORMS) and _is_on_gpu((*args, *kwargs.values())) else set()
    return sorted({*BOUNDS, *given, *of_kernels})


def _is_on_gpu(given: tuple[Any, ...]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in given)


def _between(value: float, limits: list[float]) -> Place | None:
    """Returns the neighbors of a number among ``limits``; ``None`` for one of them and for NaN."""
    return next(((a, b) for a, b in pairwise(limits) if a < value < b), None)


def _sizes(given: tuple[Any, ...]) -> frozenset[int] | None:
    """Returns the sizes of the tensors; ``None`` if there are tensors of other classes, or numbers in lists."""
    found = set()
    for value in given:
        if isinstance(value, torch.Tensor):
            if type(value) is not compat.FakeTensor or value.layout is not torch.strided:
                return None
            found |= {size for size in value.shape if type(size) is int and size > 0}
        elif isinstance(value, (list, tuple, dict)) and any(type(item) not in (int, torch.SymInt) for item in value):
            return None
    return frozenset(found)


def _with(numbers: list[Any], values: list[Any], given: Any) -> Any:
    args, kwargs = given
    instead = {id(number): value for number, value in zip(numbers, values, strict=True)}
    return tuple(instead.get(id(a), a) for a in args), {name: instead.get(id(a), a) for name, a in kwargs.items()}


# --- order and guards


def _in_order(numbers: list[torch.SymFloat], values: list[float]) -> bool:
    """Returns True if probes are in the order of their numbers."""
    real = [float(compat.hint_of(number)) for number in numbers]
    return all(
        (real[i] < real[j], real[i] > real[j]) == (values[i] < values[j], values[i] > values[j])
        for i, j in combinations(range(len(numbers)), 2)
    )


def _guard(numbers: list[torch.SymFloat], between: list[Place], compared: bool) -> None:
    """Guards that the numbers stay between their limits, and in their order if they are compared with each other."""
    for number, (low, high) in zip(numbers, between, strict=True):
        if not math.isinf(low):
            bool(number > low)
        if not math.isinf(high):
            bool(number < high)
    for a, b in combinations(numbers, 2) if compared else ():
        bool(a < b)
        bool(a > b)


# --- trial runs


class _Listener(compat.TorchDispatchMode):
    """Notes operations, their constants and the sizes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.stream: Stream = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HIDING:
            raise TypeError(f"{func} of a tensor that may hold a probe")
        made = func(*args, **(kwargs or {}))
        shapes = [tuple(map(str, t.shape)) for t in _tensors(made)]
        self.stream.append((func, *_constants((args, kwargs or {})), *shapes))
        return made


def _specializes(fn: Any, numbers: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True if a call, or its derivative, turns a symbolic number into a constant, or into a tensor.

    From torch 2.14 on, the derivative of ``pow`` does the latter: other operations than eager's, which round otherwise.
    """
    env = compat.new_shape_env()
    hints = [float(compat.hint_of(number)) for number in numbers]
    others = [compat.new_symbolic_number(env, hint, "trial") for hint in hints]
    try:
        symbolic = _stream(fn, *_with(numbers, others, (args, kwargs)))
        if any(compat.is_equality(condition) for condition in compat.recorded_conditions(env)):
            return True
        eager = _stream(fn, *_with(numbers, hints, (args, kwargs)))
    except Exception:
        return True
    return [op for op, *_ in symbolic] != [op for op, *_ in eager]


def _stream(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stream:
    """Runs a call on new fake tensors, with derivatives, and returns its operations."""
    stream: Stream = []
    for create_graph in (False, True):
        leaves: dict[int, torch.Tensor] = {}

        def new(value: Any, leaves: dict[int, torch.Tensor] = leaves) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in leaves:
                with torch.no_grad():
                    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                leaves[id(value)] = made.requires_grad_(value.requires_grad)
            leaf = leaves[id(value)]
            return leaf.clone() if leaf.requires_grad else leaf  # a leaf could not be written

        own_hooks = torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged)  # not those of a checkpoint
        with compat.no_recording(), own_hooks, _Listener() as listener:
            out = fn(*map(new, args), **{name: new(value) for name, value in kwargs.items()})
            if not all(isinstance(t, (torch.Tensor, type(None))) for t in _items(out)):
                raise TypeError(f"{fn} returns a number")  # which would be computed from the probe
            outs = [t for t in _tensors(out) if t.requires_grad]
            wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
            for order in range(_ORDERS if create_graph else 1):
                if not outs or not wanted:
                    break
                given = [torch.empty_like(t, requires_grad=create_graph) for t in outs]
                try:
                    grads = torch.autograd.grad(outs, wanted, given, create_graph=create_graph, allow_unused=True)
                except RuntimeError as error:  # also NotImplementedError
                    if order and "derivative" in str(error):
                        break  # the program could not compute it either
                    raise
                outs = [g for g in grads if g is not None and g.requires_grad]
                wanted = [*wanted, *given]
        stream += listener.stream
    return stream


def _explained(first: Stream, second: Stream, known: list[Any], again: list[Any]) -> bool:
    """Returns True if two runs differ only in constants that are the same function of their probes, and in each of
    them."""
    if len(first) != len(second):
        return False
    before, after = _names(known), _names(again)
    seen: set[int] = set()
    for one, other in zip(first, second, strict=True):
        if len(one) != len(other):
            return False
        for a, b in zip(one, other, strict=True):
            if type(a) is not type(b):
                return False
            if a != b:
                common = before.get(a, set()) & after.get(b, set())
                if not common:
                    return False
                seen |= {number for number, _ in common}
    return len(seen) == len(known)  # another number may be hidden in a tensor that C++ code makes


def _names(known: list[dict[float, Derived]]) -> dict[float, set[tuple[int, str]]]:
    """Returns the names of constants, with the position of their number."""
    return {
        constant: {(i, name) for name in names}
        for i, table in enumerate(known)
        for constant, (_, names) in table.items()
    }


def _constants(value: Any) -> list[Any]:
    """Returns the numbers in nested arguments, and the type of everything else."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        return [constant for item in value for constant in _constants(item)]
    if type(value) in compat.SYMBOLS:
        return [str(compat.symbol_of(value))]
    if type(value) in (int, float, bool, str) or isinstance(value, torch.dtype):
        return [value]
    return [type(value).__name__]


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _items(made: Any) -> tuple[Any, ...]:
    return tuple(made) if isinstance(made, (list, tuple)) else (made,)


def _tensors(made: Any) -> list[torch.Tensor]:
    return [t for t in _items(made) if isinstance(t, torch.Tensor)]
