"""The capturing world: every access of the interpreted program goes to shadows, and reads are guarded."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.specialization import Specialization
from sidefx_train.compile.capture.interpreter.exceptions import HandledOutside
from sidefx_train.compile.capture.interpreter.frame import Frame
from sidefx_train.compile.capture.interpreter.interpreter import Interpreter
from sidefx_train.compile.capture.recording.tracer import GraphTracer
from sidefx_train.compile.capture.resume.native_rest import Decisions
from sidefx_train.compile.capture.resume.suspension import StopPoint
from sidefx_train.compile.capture.shadows import finalizers
from sidefx_train.compile.capture.shadows.deferred_values import DeferredCall, DeferredResult
from sidefx_train.compile.capture.shadows.shadow_table import ShadowTable
from sidefx_train.compile.capture.side_effects.custom_functions import CustomFunctions
from sidefx_train.compile.capture.side_effects.left_hooks import LeftHooks
from sidefx_train.compile.capture.world import backward_reads
from sidefx_train.compile.capture.world.attribute_access import Attributes
from sidefx_train.compile.capture.world.attributes.attribute_overrides import AttributeOverrides
from sidefx_train.compile.capture.world.attributes.native_attributes import NativeAttributes
from sidefx_train.compile.capture.world.branches import Branches
from sidefx_train.compile.capture.world.call_handling import Calls
from sidefx_train.compile.capture.world.deferred import deferred_warnings
from sidefx_train.compile.capture.world.deferred.deferral import Deferral
from sidefx_train.compile.capture.world.deferred.deferred_arrays import DeferredArrays
from sidefx_train.compile.capture.world.inlining_policy import TraceRulesPolicy
from sidefx_train.compile.capture.world.interception import Interception
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.capture.world.keys import Keys
from sidefx_train.compile.capture.world.native_calls import contextvars_and_locks
from sidefx_train.compile.capture.world.native_calls.callbacks import Callbacks
from sidefx_train.compile.capture.world.native_calls.dunder_reentry import Reentry
from sidefx_train.compile.capture.world.native_calls.global_state_queries import Queries
from sidefx_train.compile.capture.world.native_calls.lru_cache import Caches
from sidefx_train.compile.capture.world.native_calls.torch_overrides.dispatch_modes import DispatchModes
from sidefx_train.compile.capture.world.native_calls.torch_overrides.function_overrides import FunctionOverrides
from sidefx_train.compile.capture.world.native_calls.torch_overrides.wrapper_dispatch import WrapperDispatch
from sidefx_train.compile.capture.world.operator_overrides import Operators
from sidefx_train.compile.capture.world.random_draws import RandomDraws
from sidefx_train.compile.capture.world.symbolic_numbers.computed_numbers import ComputedNumbers
from sidefx_train.compile.capture.world.symbolic_numbers.computed_objects import ComputedObjects
from sidefx_train.compile.capture.world.symbolic_numbers.host_reads import HostReads
from sidefx_train.compile.capture.world.variables import Variables
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.sentinels import transparent
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.errors import Location, Unsupported


class TraceWorld(CaptureWorldAPI):
    """Implements :class:`~sidefx_train.compile.capture.interpreter.world.World` over a :class:`ShadowTable`.

    It holds the state of one capture. Its collaborators do the work, a topic each.

    Attributes:
        attributes, native_attributes, attribute_overrides, branches, calls, deferral, keys, operators, variables: the
            collaborators.
        heap: the shadow table.
        decisions: where the step decides on numbers.
        specialization: the outside values treated as changing, and the calls that are not captured.
        running: objects of its opaque classes whose method is being interpreted.
        deferred: calls to replay after the graph, in program order.
        mutated_after_graph: deferred method that changes an object, by the object's ``id`` (the call keeps it alive).
        context: context variables that the step reads, sets and resets.
        locks: locks that it acquires and releases.
        reads: what Python code in a recorded backward reads.
        freed: autograd nodes whose graph a backward pass has freed.
        kept_apart: ids of outside tensors that must not share storage with others, as if they were written.
        hooked: autograd nodes of tensors on which the step registered a hook.
        left_hooks: hooks on tensors that the step leaves registered.
        custom_functions: calls of custom autograd functions.
        native_backward_wanted: Python code in a recorded backward must run natively.
        replayed: by how much replaying views after the graph will increment the version counter of their base.
        native_generators: generators of torch that run natively: contexts, which are left at the end.
        callbacks: functions that C code calls in place of those of the step.
        answers_values: these return values of symbolic numbers to the C code that runs now.
        queries: queries of global state.
        random_draws: random numbers that the step draws in Python.
        host_reads: values of inputs that the step reads in Python.
        computed_numbers: results of C code that is called on numbers that change.
        computed_objects: strings, decimals and the like that C code makes of such numbers.
        deferred_arrays: arrays of NumPy over tensors of the step, and what it computes of them.
        warns: code that has called ``warnings.warn``.
        class_views: namespaces of classes that the program holds, with the class.
        last_error: the exception that C code raised last, with the callable and the user's line.
        class_writes: attributes the step set on classes: ``(class, name) -> value``.
        branching: a branch of ``torch.cond`` is being interpreted.
        closures_given: an operator that is called gets the tensors of its functions' closures as operands in eager.
        listed: numbers of a tensor were listed by ``tolist``.
        array_functions: code of library functions that got an array whose contents change.
        assumptions: locations of assumed conditions.
        writes: operations that write to tensors.
        inference: inference mode contexts that the step has entered.
        reentering_classes: re-entering subclasses of ``torch.autograd.Function`` classes.
        module_namespaces: namespaces of modules that the program holds as dicts.
        own_namespaces: dicts of the trace that executed code uses as its globals.
        defined_at: location of the step's definition.
        tagged: tensors created in the step on which it set attributes, with the names.
        pending_collectives: collectives started with ``async_op=True``.
        private_memory: storages that must not leave the step, with a function that refuses that.
        unwritten: tensors that nothing may write to any more, with the number of operations that have.
        wrappers: models wrapped in ``DistributedDataParallel`` whose forward the step has called, by the shadow's id.
        sharded_groups: groups of parameters of ``fully_shard`` that the step has used, by the shadow's id.
        left_jagged: jagged tensors that leave the step, by id.
        wrapper_dispatch: operators of wrapper subclasses.
        modes: dispatch modes that the step has entered.
        functions: function modes that it has entered, and classes that override functions of torch.
        undo_rules: ends the ``loss_parallel`` that the step has entered.
        pending_state: (commit, undo) pairs of optimizer state created early, to run right before the first run.
    """

    def __init__(
        self,
        tracer: GraphTracer,
        specialization: Specialization | None = None,
        is_part: bool = False,
        point: StopPoint | None = None,
    ) -> None:
        self.specialization = specialization = specialization or Specialization()
        self.defined_at: Location | None = None
        self.running: set[int] = set()
        self.tracer = tracer
        self.heap = ShadowTable(tracer, self.locate, self._written_names, specialization, is_part)
        self.interp = Interpreter(self, TraceRulesPolicy())
        self.interp.handled = HandledOutside(self._outside_exception)

        self.attributes = Attributes(self)
        self.native_attributes = NativeAttributes(self)
        self.attribute_overrides = AttributeOverrides(self)
        self.branches = Branches(self)
        self.calls = Calls(self)
        self.interception = Interception(self)
        self.deferral = Deferral(self)
        self.keys = Keys(self)
        self.operators = Operators(self)
        self.variables = Variables(self)

        self.decisions = Decisions(self.interp, specialization.graph_decisions, point)
        tracer.touches = self.decisions.touch
        self.wrapper_dispatch = WrapperDispatch(self)
        self.modes = DispatchModes(self)
        self.functions = FunctionOverrides(self)
        self.undo_rules: Callable[[], None] | None = None
        tracer.wrapper_dispatch = self.wrapper_dispatch.run
        compat.on_condition(tracer.shape_env, self.decisions.note)

        self.heap.reenter = self.interp.reentering_hook
        self.heap.dropped = self.interp.note_dropped
        self.heap.decides = self.decisions.note
        self.heap.own_key = self.own_key
        self.heap.memory.warn = lambda text: deferred_warnings.warn(self, (text,), {})
        self.reentry = Reentry(self)
        self.native_generators: list[types.GeneratorType[Any, Any, Any]] = []
        self.callbacks = Callbacks(self)
        self.answers_values = False
        self.queries = Queries(self.heap)
        self.random_draws = RandomDraws(self)
        self.host_reads = HostReads(self)
        tracer.read_by_code, tracer.count_before = self.host_reads.read_by_code, self.host_reads.count
        self.computed_numbers = ComputedNumbers(self)
        self.computed_objects = ComputedObjects(self)
        self.deferred_arrays = DeferredArrays(self)
        self.warns: frozenset[types.CodeType] = frozenset()
        self.caches = Caches(self)
        self.deferred: list[DeferredCall] = []
        self.mutated_after_graph: dict[int, str] = {}
        self.context = contextvars_and_locks.ContextVariables(self)
        self.locks = contextvars_and_locks.Locks(self)
        self.reads = backward_reads.Reads(self)
        self.freed: set[Any] = set()
        self.hooked: set[Any] = set()
        self.left_hooks = LeftHooks(self)
        self.custom_functions = CustomFunctions(self)
        self.native_backward_wanted = False
        self.replayed: list[tuple[torch.Tensor, int]] = []
        self.last_error: tuple[Exception, Any, Location | None] | None = None
        self.class_writes: dict[tuple[type, str], Any] = {}
        self.class_snapshot: dict[tuple[type, str], Any] = {}
        self.pending_collectives: list[Any] = []
        self.private_memory: dict[int, Callable[[], NoReturn]] = {}
        self.unwritten: list[tuple[torch.Tensor, int]] = []
        self.wrappers: dict[int, Any] = {}
        self.left_jagged: dict[int, Any] = {}
        self.sharded_groups: dict[int, Any] = {}
        self.pending_state: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self.writes = tracer.writes
        self.branching = False
        self.closures_given = False
        self.listed = False
        self.array_functions: set[types.CodeType] = set()
        self.assumptions: dict[Location, None] = {}
        self.inference: list[Any] = []
        self.reentering_classes: dict[type, type] = {}
        self.module_namespaces: dict[int, dict[str, Any]] = {}
        self.own_namespaces: dict[int, dict[str, Any]] = {}
        self.class_views: dict[int, tuple[Any, type]] = {}
        self.given_memos: list[Any] = []
        self.deep_copies: list[tuple[Any, torch.Tensor]] = []
        self.kept_apart: set[int] = set()
        self.tagged: dict[int, tuple[torch.Tensor, dict[str, None]]] = {}
        self.new_cells: dict[int, types.CellType] = {}
        self.new_classes: dict[int, type] = {}
        self.new_descriptors: dict[int, Any] = {}
        self.new_modules: dict[int, types.ModuleType] = {}
        self.new_functions: dict[int, types.FunctionType] = {}
        self.class_namespaces: dict[type, Any] = {}
        self.method_interceptors: dict[str, list[tuple[type, registry.Interceptor]]] = {}
        registry.plug_late()
        for base, name, handler in registry.METHOD_INTERCEPTORS:
            self.method_interceptors.setdefault(name, []).append((base, handler))
        self.attribute_hooks: dict[str, list[tuple[type, registry.AttributeHook]]] = {}
        for base, name, hook in registry.ATTRIBUTE_HOOKS:
            self.attribute_hooks.setdefault(name, []).append((base, hook))

    def locate(self) -> Location | None:
        """Returns the user's line that is being interpreted, or the line of the step's definition."""
        return self.interp.location() if self.interp.current_frame is not None else self.defined_at

    def refusal(self, error: BaseException) -> Unsupported | None:
        if safe_isinstance(error, compat.data_dependent_errors()):
            self.random_draws.of_torch.want_read()
            self.host_reads.want(())
            return Unsupported("SFX101", "needs a value that exists only when the graph runs", None)
        if type(error) is RuntimeError and str(error) == compat.NOT_FOR_NUMPY:
            return Unsupported("SFX106", "NumPy reads a tensor, whose values exist only when the graph runs", None)
        return None

    def unheard(self, error: BaseException) -> bool:
        return False  # it is reported: an effect

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Leaves inference mode for a step that stopped inside it, since none of its ``__exit__`` methods runs then.

        Retires shadows whose class has ``__del__``; generators that are still suspended never run again, except torch's
        own, which have run natively: a context of torch is left.
        """
        try:
            yield
        finally:
            compat.on_condition(self.tracer.shape_env, None)  # compiled graphs keep it
            self.interp.close()
            while self.native_generators:
                self.native_generators.pop().close()
            self.modes.close()
            self.context.close()
            self.end_rules()
            for wrapper in self.wrappers.values():
                wrapper.close()
            self.wrappers.clear()
            self.sharded_groups.clear()
            self.heap.retire()
            for context in reversed(self.inference):
                guard = vars(context).get("_inference_mode_context")
                if guard is not None:
                    guard.__exit__(None, None, None)  # no effect the second time

    def end_rules(self) -> None:
        """Takes back the rules of torch's dispatch of DTensors that ``loss_parallel`` has added in the step."""
        if self.undo_rules is not None:
            self.undo_rules()
            self.undo_rules = None

    def at_end(self) -> None:
        """Calls what must check or finish a step that has been interpreted to its end."""
        for check in registry.AT_END:
            check(self)

    def _outside_exception(self) -> BaseException | None:
        """Returns the exception handled when the step was entered."""
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

    def imported(self, name: str, space: dict[str, Any], level: int) -> None:
        self.heap.definitions.imported(name, space, level)

    def not_imported(self, error: ImportError, name: str) -> None:
        missing = error.name
        if type(error) is not ModuleNotFoundError or not missing or not f"{name}.".startswith(f"{missing}."):
            self.heap.refuse("SFX103", f"imports {name}, which fails in its own code")
        self.queries.failed_import(missing)

    def found_module(self, name: str) -> Any:
        return self.heap.definitions.found_module(name)

    def runs(self, fn: types.FunctionType, natively: bool, answered: bool = False) -> bool:
        if id(fn) in self.new_functions:
            return True
        if not answered and trace_rules.is_atomic(fn):
            self.calls.refuse_call(fn)
        if natively and fn.__code__ not in self.specialization.inlined_code:
            return self.heap.definitions.runs_natively(fn)
        self.heap.definitions.runs(fn)
        return not natively

    def watched(self, value: Any) -> bool:
        return id(type(value)) not in self.new_classes and finalizers.finalization_observable(self.heap, value)

    def new_cell(self, cell: types.CellType) -> None:
        self.new_cells[id(cell)] = cell

    def new_function(self, fn: types.FunctionType) -> None:
        self.new_functions[id(fn)] = fn

    def truth(self, value: Any) -> Any:
        return self.branches.truth(value)

    def grant(self, condition: Any, holds: bool) -> bool:
        return self.branches.grant(condition, holds)

    def usual_truth(self, frame: Frame) -> bool | None:
        return self.branches.usual_truth(frame)

    def grant_finite(self, number: Any, *, infinite: bool, nan: bool) -> bool:
        return self.branches.grant_finite(number, infinite=infinite, nan=nan)

    def as_key(self, key: Any) -> Any:
        return self.keys.as_key(key)

    def own_key(self, key: Any, pin: bool = True) -> Any:
        return self.keys.own_key(key, pin)

    def defer(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.deferral.defer(fn, args, kwargs)

    def defer_change(self, fn: Callable[..., Any], args: tuple[Any, ...], what: str) -> None:
        self.deferral.defer_change(fn, args, what)

    def defer_for_result(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeferredResult:
        return self.deferral.defer_for_result(fn, args, kwargs)

    def freeze(self, value: Any) -> Any:
        return self.deferral.freeze(value)

    def changed_dtype(self) -> torch.dtype | None:
        return self.deferral.changed_dtype()

    def touch(self, value: Any, deep: bool = True, asked: str = "") -> None:
        self.calls.reads.touch(value, deep, asked)

    @transparent
    def intercept_call(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.interception.intercept(fn, args, kwargs)

    def native_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.calls.native_call(fn, args, kwargs)

    def guarded(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.calls.guarded(fn, args, kwargs)

    def callback(self, fn: Any, reenter: Callable[..., Any]) -> Any:
        return self.callbacks.make(fn, reenter)

    def type_of(self, obj: Any) -> type:
        return self.attributes.type_of(obj)

    def class_attr(self, cls: type, name: str) -> Any:
        return self.attributes.class_attr(cls, name)

    def class_entry(self, cls: type, name: str) -> Any:
        return self.attributes.class_entry(cls, name)

    def instance_attr(self, obj: Any, name: str) -> Any:
        return self.attributes.instance_attr(obj, name)

    def set_instance_attr(self, obj: Any, name: str, value: Any) -> None:
        self.attributes.set_instance_attr(obj, name, value)

    def del_instance_attr(self, obj: Any, name: str) -> None:
        self.attributes.del_instance_attr(obj, name)

    def native_getattr(self, obj: Any, name: str) -> Any:
        return self.native_attributes.load(obj, name)

    def override_getattr(self, obj: Any, name: str) -> Any:
        return self.attribute_overrides.load(obj, name)

    def override_setattr(self, obj: Any, name: str, value: Any) -> bool:
        return self.attribute_overrides.store(obj, name, value)

    def override_delattr(self, obj: Any, name: str) -> bool:
        return self.attribute_overrides.delete(obj, name)

    def run_in(self, space: dict[str, Any]) -> None:
        self.variables.run_in(space)

    def load_global(self, namespace: dict[str, Any], name: str) -> Any:
        return self.variables.load_global(namespace, name)

    def store_global(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        self.variables.store_global(namespace, name, value)

    def delete_global(self, namespace: dict[str, Any], name: str) -> bool:
        return self.variables.delete_global(namespace, name)

    def load_cell(self, cell: types.CellType) -> Any:
        return self.variables.load_cell(cell)

    def store_cell(self, cell: types.CellType, value: Any) -> None:
        self.variables.store_cell(cell, value)

    def globals_dict(self, space: dict[str, Any]) -> dict[str, Any]:
        return self.variables.globals_dict(space)

    def override_operator(self, name: str, args: tuple[Any, ...]) -> Any:
        return self.operators.override_operator(name, args)

    def wrapped_text(self, method: str, value: Any) -> Any:
        return self.operators.wrapped_text(method, value)
