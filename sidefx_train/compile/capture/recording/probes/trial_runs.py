"""Trial runs of a call on other fake tensors, with derivatives: which operations it makes, with which constants."""

from __future__ import annotations

from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.derived_numbers import Derived, derived_of_single

aten = torch.ops.aten
Stream = list[tuple[Any, ...]]

_HIDING = frozenset({aten.lift_fresh.default, aten.lift.default, aten.lift_fresh_copy.default})
"""Operations on tensors that Python or C++ code filled without the dispatcher."""
ORDERS = 2
"""Derivatives compared."""
_ANY = 0.37
"""A number that most calls accept."""


def with_values(numbers: list[Any], values: list[Any], given: Any) -> Any:
    args, kwargs = given
    instead = {id(number): value for number, value in zip(numbers, values, strict=True)}
    return tuple(instead.get(id(a), a) for a in args), {name: instead.get(id(a), a) for name, a in kwargs.items()}


def with_single(value: float, known: dict[float, Derived]) -> dict[float, Derived]:
    """Adds what is computed from a probe rounded to float32."""
    single = derived_of_single(value)
    return {**known, **single} if known.keys().isdisjoint(single) else known


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
        self.stream.append((func, *constants_in((args, kwargs or {})), *shapes))
        return made


def specializes(fn: Any, numbers: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True if a call, or its derivative, turns a symbolic number into a constant, or into a tensor.

    From torch 2.14 on, the derivative of ``pow`` does the latter: other operations than eager's, which round otherwise.
    """
    env = compat.new_shape_env()
    hints = [float(compat.hint_of(number)) for number in numbers]
    others = [compat.new_symbolic_number(env, hint, "trial") for hint in hints]
    try:
        symbolic = stream_of(fn, *with_values(numbers, others, (args, kwargs)))
        if any(compat.is_equality(condition) for condition in compat.recorded_conditions(env)):
            return True
        eager = stream_of(fn, *with_values(numbers, hints, (args, kwargs)))
    except Exception:
        return True
    return [op for op, *_ in symbolic] != [op for op, *_ in eager]


def reads_unknown(fn: Any, number: Any, args: tuple[Any, ...], kwargs: dict[str, Any], orders: int) -> bool:
    """Returns True if a call, or a derivative up to an order, reads a number that only the graph knows, or turns it
    into a tensor."""
    unknown = compat.new_unknown_number(compat.new_shape_env())
    try:
        given, named = with_values([number], [unknown], (args, kwargs))
        symbolic = stream_of(fn, given, named, orders)
    except compat.data_dependent_errors():
        return True
    except Exception:  # as without a probe
        return False
    try:
        given, named = with_values([number], [_ANY], (args, kwargs))
        eager = stream_of(fn, given, named, orders)
    except Exception:
        return False
    return [op for op, *_ in symbolic] != [op for op, *_ in eager]


def stream_of(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], orders: int = ORDERS) -> Stream:
    """Runs a call on new fake tensors, with derivatives up to an order, and returns its operations."""
    stream: Stream = []
    for create_graph in (False, True)[:orders]:
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
            for order in range(orders if create_graph else 1):
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


def is_explained(first: Stream, second: Stream, known: list[Any], again: list[Any]) -> bool:
    """Returns True if two runs differ only in constants that are the same function of their probes, and in each of
    them."""
    if len(first) != len(second):
        return False
    before, after = names_of(known), names_of(again)
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


def is_unused(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True for functions that only check the number: dropout that does not train, ``eps`` of a Poisson loss of
    logarithms."""
    if "dropout" in name:
        trains = kwargs.get("training", kwargs.get("train", "alpha" not in name))
        return (args[2] if len(args) > 2 else trains) is False
    return name == "poisson_nll_loss" and (args[2] if len(args) > 2 else kwargs.get("log_input", True)) is True


def names_of(known: list[dict[float, Derived]]) -> dict[float, set[tuple[int, str]]]:
    """Returns the names of constants, with the position of their number."""
    return {
        constant: {(i, name) for name in names}
        for i, table in enumerate(known)
        for constant, (_, names) in table.items()
    }


def constants_in(value: Any) -> list[Any]:
    """Returns the numbers in nested arguments, and the type of everything else."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        return [constant for item in value for constant in constants_in(item)]
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
