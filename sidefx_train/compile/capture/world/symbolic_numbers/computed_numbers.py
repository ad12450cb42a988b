"""Functions of C code on numbers that change: the prologue computes their results, which are numbers that change, too.

``math.gamma(self.temperature)``, ``np.clip(step / 1000, 0, 1)`` and arithmetic with NumPy's scalars have no symbolic
form. Without this, each value of the number would need a capture of its own.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import same_value
from sidefx_train.compile.capture.world.symbolic_numbers.program_writer import ProgramWriter
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.host_programs import OF_NUMPY, HostProgram, NumberCall, PythonCall, Slot, Step
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import attribute_of, safe_isinstance
from sidefx_train.compile.graph.derived_numbers import as_single
from sidefx_train.compile.ops.sequences_of_numbers import range_length, triangle_size

if TYPE_CHECKING:
    from sidefx_train.compile.capture.guards.source import Source
    from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI

_MODULES = frozenset({"math", "numpy", "operator", "_operator"})
_OF_BUILTINS = frozenset({divmod, pow, round, abs, hash})
_CHOICES = frozenset({max, min})
_CLASSES: frozenset[Any] = frozenset({float, int, *OF_NUMPY})
_OF_FLOATS = ("as_integer_ratio", "is_integer")
_OF_NUMPY_SCALARS = (
    ("item", "astype", "round", "clip", "copy", "squeeze", "conj", "conjugate")
    + ("sum", "prod", "mean", "min", "max", "std", "var")
)  # fmt: skip
NUMBER_METHODS: frozenset[Any] = frozenset(
    (
        int.to_bytes,
        int.bit_length,
        int.bit_count,
        int.conjugate,
        int.as_integer_ratio,
        float.is_integer,
        float.conjugate,
    )
    + (float.as_integer_ratio,)
    + tuple(getattr(np.generic, name) for name in _OF_NUMPY_SCALARS)
    + tuple(getattr(kind, name) for kind in (np.float16, np.float32, np.float64) for name in _OF_FLOATS)
)
"""Methods of numbers that return numbers."""

_OWN = frozenset({as_single, range_length, triangle_size})
_LITERALS = (bool, int, float, str, type(None), np.bool_, *OF_NUMPY)
_LARGEST_ARRAY = 256
"""Elements of an array that a program holds, such as the table of ``np.interp``."""


class ComputedNumbers:
    """The numbers that one capture leaves to functions of C code, and to such of the program.

    Attributes:
        tables: ids of lists and dicts whose contents at entry are guarded for functions of the program.
    """

    def __init__(self, world: CaptureWorldAPI) -> None:
        self._world = world
        self._programs: dict[Any, tuple[Source, Any]] = {}
        self.tables: set[int] = set()

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a function of numbers, some of them symbolic; :data:`ABSENT` if it is to be called on
        their values, which are guarded then."""
        if not self._world.host_reads.allowed:
            return ABSENT
        given = _Arguments()
        if not given.take((args, tuple(kwargs.values()))) or not given.symbols or not _is_known(fn, given.symbols):
            return ABSENT
        tracer = self._world.tracer
        if not all(tracer.has_node(each) and not compat.is_unbacked(each) for each in given.symbols):
            return ABSENT
        nodes = {id(each): tracer.node_of(each) for each in given.symbols}
        written = ProgramWriter(self._world).of(nodes.values())
        if written is None:
            return ABSENT
        places = {ident: written.slots[node] for ident, node in nodes.items()}
        # NumPy's own numbers among the operands are its own again when the prologue fetches them.
        made = fn if type(fn) is PythonCall else NumberCall(fn)
        step = Step(made, given.filled(args, places), given.filled(kwargs, places))
        program = HostProgram(written.sources, (*written.steps, step))
        key: Any = program if given.has_arrays else (written.key, repr(step))
        if key not in self._programs:
            with compat.real_world():
                values = program(*written.operands)
            if not values:
                return ABSENT
            name = fn.name if type(fn) is PythonCall else trace_rules.describe(fn)
            source = self._world.heap.sources.computed(program, f"{name}(...)")
            self._programs[key] = source, values[0]
        source, value = self._programs[key]
        return self.number(value, self._world.heap.sources.item(source, 0, source.label))

    def number(self, value: Any, source: Source) -> Any:
        """Returns a computed value: a symbolic number, or several; the value itself where it is a truth."""
        heap = self._world.heap
        if type(value) is tuple:
            heap.guard("type", source, tuple)
            return tuple(
                self.number(item, heap.sources.item(source, position, f"{source.label}[{position}]"))
                for position, item in enumerate(value)
            )
        if type(value) in (bool, np.bool_):
            heap.guard("is", source, value)
            return value
        if same_value(value, -0.0):  # sympy has no negative zero
            heap.guard("equal", source, value)
            return value
        heap.guard("type", source, type(value))
        numbers = heap.numbers
        return numbers.number_of_numpy(value, source) if type(value) in OF_NUMPY else numbers.length(value, source)


class _Arguments:
    """The arguments of a call.

    Attributes:
        symbols: the symbolic numbers among them.
        has_arrays: there are arrays among them.
    """

    def __init__(self) -> None:
        self.symbols: list[Any] = []
        self.has_arrays = False

    def take(self, value: Any) -> bool:
        """Notes a value and what it contains; returns False for one that a program cannot hold."""
        if type(value) in (tuple, list):
            return all(map(self.take, value))
        if type(value) is np.ndarray:
            self.has_arrays = True
            return not value.dtype.hasobject and value.size <= _LARGEST_ARRAY
        if type(value) in (torch.SymInt, torch.SymFloat):
            self.symbols.append(value)
            return True
        return type(value) in _LITERALS or (safe_isinstance(value, type) and value in _CLASSES)

    def filled(self, value: Any, places: dict[int, Slot]) -> Any:
        """Returns a value with positions in place of symbolic numbers, and copies of what the step may write to.

        The copies are read-only: a function that writes to one (``out=``) raises, and is not left to the prologue.
        """
        kind = type(value)
        if kind in (tuple, list):
            return kind(self.filled(item, places) for item in value)
        if kind is dict:
            return {name: self.filled(item, places) for name, item in value.items()}
        if kind is np.ndarray:
            copied = value.copy()
            copied.flags.writeable = False
            return copied
        return places[id(value)] if kind in (torch.SymInt, torch.SymFloat) else value


def _is_known(fn: Any, numbers: list[Any]) -> bool:
    """Returns True for pure functions, of C code unless they are marked, that compute numbers from numbers."""
    if type(fn) is PythonCall:
        return True
    if type(fn).__hash__ is None:
        return False
    if safe_isinstance(fn, type):
        return fn in _CLASSES
    if fn in _OWN:
        return True
    if type(fn) is np.ufunc:  # one may be made of a Python function
        return getattr(np, attribute_of(fn, "__name__", ""), None) is fn
    if type(fn) is types.BuiltinFunctionType and fn in _OF_BUILTINS:
        return True
    if type(fn) is types.BuiltinFunctionType and fn in _CHOICES:  # others are compared, or chosen by the graph
        return any(map(compat.numpy_class, numbers))
    if safe_isinstance(fn, types.MethodDescriptorType) and fn in NUMBER_METHODS:
        return True
    return attribute_of(fn, "__module__", "") in _MODULES and trace_rules.is_pure(fn)
