"""The capturing world: every access of the interpreted program goes to shadows, and what it read is guarded."""

from __future__ import annotations

import builtins
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.specialization import Specialization
from sidefx_train.compile.capture.interpreter.exceptions import HandledOutside
from sidefx_train.compile.capture.interpreter.interpreter import Interpreter
from sidefx_train.compile.capture.interpreter.object_model import operators
from sidefx_train.compile.capture.interpreter.object_model.attributes import is_static
from sidefx_train.compile.capture.recording import symbolic_indexing
from sidefx_train.compile.capture.recording.tracer import GraphTracer
from sidefx_train.compile.capture.recording.write_log import WriteLog
from sidefx_train.compile.capture.shadows import finalizers
from sidefx_train.compile.capture.shadows.containers.iterators import OutsideIterator
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import DictRecord, ListRecord
from sidefx_train.compile.capture.shadows.deferred_values import (
    NUMBERS,
    DeferredCall,
    DeferredValue,
    join_text,
    percent,
)
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord
from sidefx_train.compile.capture.shadows.shadow_table import ShadowTable
from sidefx_train.compile.capture.world import backward_reads
from sidefx_train.compile.capture.world.argument_snapshot import deferred_string
from sidefx_train.compile.capture.world.attribute_access import AttributeWorld
from sidefx_train.compile.capture.world.inlining_policy import TraceRulesPolicy
from sidefx_train.compile.capture.world.native_call_facts import HASHED
from sidefx_train.compile.capture.world.native_calls import (
    builtin_methods,
    contextvars_and_locks,
    deferred_warnings,
)
from sidefx_train.compile.capture.world.native_calls.deferred_strings import as_shown, deferred_in
from sidefx_train.compile.capture.world.native_calls.dunder_reentry import Reentry
from sidefx_train.compile.capture.world.native_calls.global_state_queries import Queries
from sidefx_train.compile.capture.world.native_calls.lru_cache import Caches
from sidefx_train.compile.capture.world.symbolic_numbers import number_subclasses
from sidefx_train.compile.capture.world.symbolic_numbers.domain_errors import needs_values, operator_raises
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.plain_values import is_definition
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.errors import Location

_BUILTINS = vars(builtins)


class TraceWorld(AttributeWorld):
    """Implements :class:`~sidefx_train.compile.capture.interpreter.world.World` over a :class:`ShadowTable`.

    Attributes:
        heap: the shadows.
        specialization: which outside values are treated as changing, and what is not captured.
        running: objects of its opaque classes whose method is being interpreted.
        deferred: calls to replay after the graph, in order.
        mutated_after_graph: by the address of objects (held by those calls), the deferred method that changes them.
        context: context variables that the step reads, sets and resets.
        locks: locks that it takes and releases.
        reads: what Python that runs in a recorded backward reads.
        freed: autograd nodes whose graph a backward pass has freed.
        hooked: autograd nodes of tensors on which the step registered a hook.
        replayed: how often the replay of views after the graph will move the version counter of what they are made of.
        reentry_callbacks: what C code calls in place of functions of the step.
        queries: what the step asked of global state.
        warns: code that was seen to warn.
        class_views: namespaces of classes that the program holds, with the class.
        last_error: the exception that C code raised last, with the callable and the user's line.
        class_writes: attributes the step set on classes: ``(class, name) -> value``.
        branching: a branch of ``torch.cond`` is being interpreted.
        granted: where one is.
        writes: operations that write to tensors.
        inference: contexts of inference mode that the step has entered.
        twins: stand-ins of ``torch.autograd.Function`` classes, whose methods are interpreted.
        module_namespaces: namespaces of modules that the program holds as dicts.
        own_namespaces: dicts of the trace that executed code uses as its globals.
        defined_at: where the step is defined.
        tagged: tensors made in the step on which it set attributes of its own, with their names.
        pending_state: (commit, undo) pairs of optimizer state made early, for right before the first run.
    """

    def __init__(
        self, tracer: GraphTracer, specialization: Specialization | None = None, is_part: bool = False
    ) -> None:
        self.specialization = specialization = specialization or Specialization()
        self.defined_at: Location | None = None
        self.running: set[int] = set()
        self.tracer = tracer
        self.heap = ShadowTable(tracer, self.locate, self._written_names, specialization, is_part)
        self.interp = Interpreter(self, TraceRulesPolicy())
        self.interp.handled = HandledOutside(self._outside_exception)

        self.heap.reenter = self.interp.reentering
        self.heap.dropped = self.interp.note_dropped
        self.heap.own_key = self.own_key
        self.heap.memory.warn = lambda text: deferred_warnings.warn(self, (text,), {})
        self.reentry = Reentry(self)
        self.reentry_callbacks: list[Callable[..., Any]] = []
        self.queries = Queries(self.heap)
        self.warns: frozenset[types.CodeType] = frozenset()
        self.caches = Caches(self)
        self.deferred: list[DeferredCall] = []
        self.mutated_after_graph: dict[int, str] = {}
        self.context = contextvars_and_locks.ContextVariables(self)
        self.locks = contextvars_and_locks.Locks(self)
        self.reads = backward_reads.Reads(self)
        self.freed: set[Any] = set()
        self.hooked: set[Any] = set()
        self.replayed: list[tuple[torch.Tensor, int]] = []
        self.last_error: tuple[Exception, Any, Location | None] | None = None
        self.class_writes: dict[tuple[type, str], Any] = {}
        self.class_snapshot: dict[tuple[type, str], Any] = {}
        self.pending_state: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self.writes = WriteLog(tracer.graph)
        self.branching = False
        self.assumptions: dict[Location, None] = {}
        self.inference: list[Any] = []
        self.reentering_classes: dict[type, type] = {}
        self.module_namespaces: dict[int, dict[str, Any]] = {}
        self.own_namespaces: dict[int, dict[str, Any]] = {}
        self.class_views: dict[int, tuple[Any, type]] = {}
        self.given_memos: list[Any] = []
        self.deep_copies: list[tuple[Any, torch.Tensor]] = []
        self.tagged: dict[int, tuple[torch.Tensor, dict[str, None]]] = {}
        self.new_cells: dict[int, types.CellType] = {}
        self.new_classes: dict[int, type] = {}
        self.new_descriptors: dict[int, Any] = {}
        self.new_modules: dict[int, types.ModuleType] = {}
        self.new_functions: dict[int, types.FunctionType] = {}
        self._class_namespaces: dict[type, Any] = {}
        self._methods: dict[str, list[tuple[type, registry.Interceptor]]] = {}
        registry.plug_late()
        for base, name, handler in registry.METHOD_INTERCEPTORS:
            self._methods.setdefault(name, []).append((base, handler))
        self._attribute_hooks: dict[str, list[tuple[type, registry.AttributeHook]]] = {}
        for base, name, hook in registry.ATTRIBUTE_HOOKS:
            self._attribute_hooks.setdefault(name, []).append((base, hook))

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Leaves inference mode for a step that stopped inside it: none of its ``__exit__`` methods is run then.

        Shadows whose class has ``__del__`` are retired, and generators that are still suspended never run again.
        """
        try:
            yield
        finally:
            self.interp.close()
            self.heap.retire()
            for context in reversed(self.inference):
                guard = vars(context).get("_inference_mode_context")
                if guard is not None:
                    guard.__exit__(None, None, None)  # does nothing the second time

    def _outside_exception(self) -> BaseException | None:
        """What was being handled when the step was entered."""
        sources, error = self.heap.sources, self.interp.handled_natively
        source = sources.call(sources.const(sys.exception, "sys.exception"))
        if error is None:
            self.heap.guard("is", source, None)
            return None
        shadow: BaseException = self.heap.shadow(error, source)
        return shadow

    def _written_names(self) -> frozenset[str]:
        frame = self.interp.current_frame
        return frozenset() if frame is None else self.interp.written_names(frame)

    # --- globals and cells ---------------------------------------------------------------------------------------

    def run_in(self, space: dict[str, Any]) -> None:
        if any(id(space) in known for known in (self.own_namespaces, self.module_namespaces, self.heap.namespaces)):
            return
        frame = self.interp.current_frame
        while frame is not None:
            if frame.globals is space:
                return
            frame = frame.back
        self.touch(space, deep=False)
        self.own_namespaces[id(space)] = space

    def load_global(self, namespace: dict[str, Any], name: str) -> Any:
        if id(namespace) in self.own_namespaces:
            return namespace[name] if name in namespace else _BUILTINS.get(name, ABSENT)
        if name in namespace:
            value = namespace[name]
            record = self.heap.namespaces.get(id(namespace))
            if (record is None or name not in record.values) and is_definition(value) and self.heap.trusts(namespace):
                self.heap.definitions.took(namespace, name, value)
                return value
        value = self.heap.namespace(namespace).get(name)
        if self.reads.listening and (value is not ABSENT or name not in _BUILTINS):
            self.reads.variable(namespace, name, value)
        if value is ABSENT:
            value = _BUILTINS.get(name, ABSENT)
            self.heap.definitions.took(_BUILTINS, name, value)
        return value

    def imported(self, name: str, space: dict[str, Any], level: int) -> None:
        self.heap.definitions.imported(name, space, level)

    def not_imported(self, error: ImportError, name: str) -> None:
        missing = error.name
        if type(error) is not ModuleNotFoundError or not missing or not f"{name}.".startswith(f"{missing}."):
            self.heap.refuse("SFX103", f"imports {name}, which fails in its own code")
        self.queries.failed_import(missing)

    def found_module(self, name: str) -> Any:
        return self.heap.definitions.found_module(name)

    def runs(self, fn: types.FunctionType, natively: bool) -> bool:
        if id(fn) in self.new_functions:
            return True
        if trace_rules.is_atomic(fn):
            self._refuse_call(fn)
        if natively and fn.__code__ not in self.specialization.inlined_code:
            return self.heap.definitions.runs_natively(fn)
        self.heap.definitions.runs(fn)
        return not natively

    def watched(self, value: Any) -> bool:
        return id(type(value)) not in self.new_classes and finalizers.finalization_observable(self.heap, value)

    def store_global(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        if id(namespace) in self.own_namespaces:
            namespace[name] = value
            return
        self.heap.namespace(namespace).set(name, value)

    def delete_global(self, namespace: dict[str, Any], name: str) -> bool:
        if id(namespace) in self.own_namespaces:
            return namespace.pop(name, ABSENT) is not ABSENT
        return self.heap.namespace(namespace).delete(name)

    def new_cell(self, cell: types.CellType) -> None:
        self.new_cells[id(cell)] = cell

    def new_function(self, fn: types.FunctionType) -> None:
        self.new_functions[id(fn)] = fn

    def load_cell(self, cell: types.CellType) -> Any:
        if id(cell) in self.new_cells:
            try:
                value = cell.cell_contents
            except ValueError:
                return ABSENT
            if self.reads.listening:
                self.reads.variable(cell, "", value)
            return value
        name = self._cell_name(cell)
        value = self.heap.cell(cell, name).get(name)
        if self.reads.listening:
            self.reads.variable(cell, name, value)
        return value

    def store_cell(self, cell: types.CellType, value: Any) -> None:
        if id(cell) not in self.new_cells:
            self.heap.cell(cell, self._cell_name(cell)).set(value)
        elif value is ABSENT:
            del cell.cell_contents
        else:
            cell.cell_contents = value

    def _cell_name(self, cell: types.CellType) -> str:
        frame = self.interp.current_frame
        if frame is not None and frame.closure:
            for name, held in zip(frame.code.co_freevars, frame.closure, strict=True):
                if held is cell:
                    return name
        return "cell"

    # --- operators -----------------------------------------------------------------------------------------------

    def override_operator(self, name: str, args: tuple[Any, ...]) -> Any:
        first = args[0] if args else None
        if self.reads.listening:
            self.reads.containers(args)
        if safe_isinstance(first, OutsideIterator) and name in ("iter", "next"):
            return first if name == "iter" else first.__next__()
        if name in _TEXT:
            return self._text(name, args)
        if name == "mod" and safe_isinstance(first, str):
            found = self._percent(first, args[1])
            if found is not ABSENT:
                return found
        if name == "is_":
            self.heap.identities.guard_distinct(*args)
            return builtin_methods.one_object(*args)
        if name in ("add", "iadd") and all(type(value) is str or _is_text(value) for value in args):
            return deferred_string(self, operator.add, args) if any(map(_is_text, args)) else ABSENT
        for value in args[:2] if name == "setitem" else args:  # any value may be stored
            if issubclass(type(value), DeferredValue):
                self.heap.refuse("SFX106", f"computes {name} of a value that is known only after the step")
        if name == "contains" and type(args[1]) is torch.SymBool:
            return operators.contains(self.interp, first, builtin_methods.concrete(args[1]))
        if name == "contains" and type(args[1]) is torch.SymInt:
            found = builtin_methods.among(self, first, args[1])
            if found is not ABSENT:
                return found
        if id(first) in self.module_namespaces and name in ("getitem", "setitem", "delitem", "contains"):
            return builtin_methods.namespace_operator(self, name, args)
        if id(first) in self.class_views and name in ("getitem", "contains"):
            return builtin_methods.class_view_operator(self, name, args)
        record = self.heap.by_shadow.get(id(first))
        if (
            name == "getitem"
            and safe_isinstance(record, ListRecord)
            and record.shadow is first
            and type(args[1]) is int
        ):
            item = record.from_end(args[1])
            if item is not ABSENT:
                return item
        if safe_isinstance(record, DictRecord) and record.shadow is first and record.plain:
            return builtin_methods.dict_operator(self, record, name, args)
        if self.heap.definitions.operator_replaced(name) and any(type(value) is compat.FakeTensor for value in args):
            return ABSENT
        traced = any(type(value) in _TRACED for value in args)
        if (
            traced
            and name in builtin_methods.OPERATORS
            and not (any(map(_decides, args[:2])) or number_subclasses.decides(self, name, args))
        ):
            self._touch_operands(name, args)
            if name in ("getitem", "setitem") and safe_isinstance(first, torch.Tensor):
                self._refuse_unknown_index(args[1])
                view = symbolic_indexing.view_of(first, args[1], self._run)
                if view is not ABSENT:
                    return (
                        view
                        if name == "getitem"
                        else self._run(builtin_methods.OPERATORS[name], (view, ..., args[2]), {})
                    )
            by_value = number_subclasses.needs_value(args) or (
                name in _COMPARES and any(type(value) is torch.SymBool for value in args)
            )
            if by_value or operator_raises(self, name, args) or needs_values(self, name, args):
                args = builtin_methods.concrete_within(args)
            if not (name in ("getitem", "setitem") and safe_isinstance(first, (list, tuple))):
                return self._run(builtin_methods.OPERATORS[name], args, {})
        for value in args:
            array = self.heap.by_shadow.get(id(value))
            if safe_isinstance(array, ArrayRecord) and array.shadow is value:
                array.operate(name if value is first else "")
        if name in _SHALLOW:
            self.touch(first, deep=False, asked=name)
        else:
            self._touch_operands(name, args)
        if name in ("getitem", "setitem", "delitem") and type(first) in (list, tuple, deque):
            if name == "setitem" and type(args[1]) is slice:
                self.touch(args[2], deep=False)
            return self.guarded(
                builtin_methods.OPERATORS[name], (first, builtin_methods.concrete(args[1]), *args[2:]), {}
            )
        if name == "next" and record is not None and record.shadow is record.real:
            self.heap.refuse("SFX103", f"advances the outside iterator {record.source.label}")
        return ABSENT

    def _touch_operands(self, name: str, args: tuple[Any, ...]) -> None:
        keyed = name == "contains" and type(args[0]) in HASHED
        for i, value in enumerate(args):
            self.touch(value, deep=i > 0 or not keyed, asked=name)

    def _refuse_unknown_index(self, index: Any) -> None:
        for item in index if safe_isinstance(index, tuple) else (index,):
            if safe_isinstance(item, torch.SymInt) and compat.is_unbacked(item):
                self.heap.refuse("SFX106", "indexes a tensor by a number that exists only when the graph runs")

    def _text(self, name: str, args: tuple[Any, ...]) -> Any:
        for value in args:
            self.touch(value)  # numbers that change are only then to be seen
        if name == "build_string":
            parts = tuple(args[0])
            return deferred_string(self, join_text, (parts,)) if deferred_in(parts) else ABSENT
        found = deferred_in(args[0], name)
        self._check_hidden(name, found)
        return deferred_string(self, _TEXT[name], args) if found else ABSENT

    def _check_hidden(self, name: str, found: str) -> None:
        if found == "hidden":
            self.heap.refuse("SFX106", f"{name} of a value that is known only after the step, within an object of C")

    def _percent(self, text: str, values: Any) -> Any:
        """``text % values``, where it shows what is only known later; else :data:`ABSENT`."""
        if safe_isinstance(values, tuple):  # a tuple of any class is a tuple of values
            values = tuple(tuple.__iter__(values))
        self.touch(values)
        found = deferred_in(values)
        self._check_hidden("%", found)
        return deferred_string(self, percent, (text, values)) if found else ABSENT

    def wrapped_text(self, method: str, value: Any) -> Any:
        """The text that a slot wrapper (``list.__repr__``, say) makes of a value; else :data:`ABSENT`."""
        self.touch(value)
        found = deferred_in(value)
        if not found:
            return ABSENT
        shown = as_shown(value, method)
        if shown is None:
            found = "hidden"
        self._check_hidden(method, found)
        return deferred_string(self, repr, (shown,))


def _decides(value: Any) -> bool:
    """True for an instance of a class written in Python, whose own methods say what an operator does."""
    cls = type(value)
    return cls not in _TRACED and not is_static(cls) and not issubclass(cls, _VALUES)


_VALUES = (int, float, complex, str, tuple, list, dict, torch.Tensor)


def _is_text(value: Any) -> bool:
    return type(value) is DeferredValue and value.fn in _MAKES_TEXT


_COMPARES = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "invert", "xor"})
"""Operators that torch's symbolic truth values have not, or not with Python's own."""
_SHALLOW = frozenset({"getitem", "setitem", "delitem", "iter", "next"})
_TRACED = frozenset({compat.FakeTensor, *NUMBERS})
_TEXT: dict[str, Callable[..., Any]] = {
    "format": format,
    "str": str,
    "repr": repr,
    "ascii": ascii,
    "build_string": join_text,
}
_MAKES_TEXT = frozenset({*_TEXT.values(), percent, join_text, operator.add})
