"""Generates code that builds real values from values of the trace, after the graph has run."""

from __future__ import annotations

import datetime
import functools
import types
import typing
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import same_value
from sidefx_train.compile.capture.guards.source import stored_keys
from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.capture.interpreter.frame_objects import Place
from sidefx_train.compile.capture.interpreter.generators import InterpretedGenerator
from sidefx_train.compile.capture.interpreter.object_model.attributes import is_static
from sidefx_train.compile.capture.interpreter.object_model.iteration import PythonIterable, PythonIterator
from sidefx_train.compile.capture.recording.dispatch_mode import RandomState
from sidefx_train.compile.capture.resume.native_generators import hand_out, resume
from sidefx_train.compile.capture.shadows.containers.instance_dicts import check_hidden_dict
from sidefx_train.compile.capture.shadows.containers.iterators import (
    HANDED_ON,
    REBUILT,
    VIEWS,
    iterated_container,
    iteration_is_invalid,
    left_over,
    walk,
)
from sidefx_train.compile.capture.shadows.containers.sets import insertion, wide_set
from sidefx_train.compile.capture.shadows.deferred_values import (
    DeferredCall,
    DeferredValue,
    TensorSnapshot,
    TraceKey,
)
from sidefx_train.compile.capture.shadows.objects.outside_exceptions import CHAIN, fields_of
from sidefx_train.compile.capture.shadows.objects.weak_references import ShadowRef
from sidefx_train.compile.capture.shadows.records import Record, TensorRecord
from sidefx_train.compile.capture.shadows.shadow_table import BY_IDENTITY, BY_VALUE, PASSED_THROUGH
from sidefx_train.compile.capture.side_effects.custom_functions import FunctionCall
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.plain_values import (
    DERIVED_FROM,
    PLAIN_TYPES,
    base_container,
    bounds_of,
    exact_value,
    instance_dict_of_plain,
    is_derived,
    is_plain,
    is_set,
    make_tuple,
    slot_names,
)
from sidefx_train.compile.common.sentinels import ABSENT, NATIVE_CODE
from sidefx_train.compile.common.source_literals import is_name
from sidefx_train.compile.common.type_checks import attribute_of, bound, descriptor_of, safe_isinstance, shows_another
from sidefx_train.compile.distributed.collective_calls import PendingCollective
from sidefx_train.compile.graph.freed_history import is_freed
from sidefx_train.compile.residual.autograd_nodes import freed_result
from sidefx_train.compile.residual.construction_order import ConstructionOrder
from sidefx_train.compile.residual.jagged_outputs import JaggedOutputs
from sidefx_train.compile.residual.native_functions import PlannedFunction
from sidefx_train.compile.residual.tensor_outputs import TensorRebuilder
from sidefx_train.compile.residual.view_replay import KnownOutputs
from sidefx_train.compile.residual.wrapper_outputs import Shells, WrapperLayout

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


class Rebuilder(ConstructionOrder, TensorRebuilder):
    """Generates expressions for values of the trace.

    Attributes:
        shells: wrappers with a history that leave the step.
        apply: writes the effects on an outside object before everything that is written later.
    """

    apply: Callable[[Record], None]

    def __init__(self, world: TraceWorld, writer: Writer, known_outputs: KnownOutputs) -> None:
        super().__init__(world, writer, known_outputs)
        self._made: dict[int, str] = {}
        self._keep: list[Any] = []
        self._constructed: list[Any] = []
        self.shells = Shells()
        self._jagged = JaggedOutputs(world, writer, self.expression, self.made)

    def expression(self, value: Any) -> str:
        """Returns code for a value of the trace."""
        plain = type(value) in PLAIN_TYPES or safe_isinstance(value, (*BY_IDENTITY, *BY_VALUE))
        if plain and not is_derived(type(value)):
            if not safe_isinstance(value, torch.Size) or not any(
                safe_isinstance(size, compat.SYMBOLS) for size in value
            ):
                return self.writer.constant(value)
            return f"{self.writer.constant(torch.Size)}(({', '.join(map(self.expression, value))},))"
        if safe_isinstance(value, torch.Tensor):
            self.asked[id(value)] += 1
        made = self._made.get(id(value))
        if made is not None:
            return made
        record = self.world.heap.record_of(value)
        if record is not None:
            if safe_isinstance(record, TensorRecord):
                self.given(record)
            return self.writer.value(record.source)
        if safe_isinstance(value, torch.Tensor) and (record := self.world.heap.memory.record_of(value)) is not None:
            return self.entry_alias(record)
        if safe_isinstance(value, TraceKey):
            return self.expression(value.value)
        if compat.is_dtensor(value):
            return self._dtensor(value)
        if compat.is_jagged(value):
            self._jagged.check(value)
            name = self._remember(value, self._jagged.made(value))
            self._count_writes(value, name)
            return self._with_gradient(value, name)
        if compat.is_wrapper(value):
            return self._wrapper(value)
        if safe_isinstance(value, torch.Tensor):
            self._jagged.check(value)
            if any(compat.hook_numbers(value)) and value.is_leaf:
                self.world.heap.refuse("SFX111", "leaves a hook registered on a leaf that it creates")
            made = self._remember(value, self._marked(value, self.tensor(value)))
            self._fill(functools.partial(self._tag, value, made))
            return self._with_gradient(value, made)
        if safe_isinstance(value, compat.SYMBOLS):
            return self._number(value)
        if safe_isinstance(value, TensorSnapshot):
            return self._tensor_snapshot(value)
        if safe_isinstance(value, DeferredValue):
            return self._remember(value, self._deferred(value))
        if any(value is each for each in self._constructed):
            what = f"a {type(value).__qualname__}"
            if type(value) is InterpretedGenerator:
                what = f"the generator {value.__qualname__}"
            self.world.heap.refuse(
                "SFX111", f"cannot rebuild {what}, which the step creates and which refers to itself"
            )
        self._constructed.append(value)
        try:
            return self._object(value)
        finally:
            self._constructed.pop()

    def call(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place | None = None) -> str:
        with self._reading():
            parts = [*map(self.expression, args), *self._keywords(kwargs)]
        called = self._callable(fn)
        if place is not None:
            parts, called = [called, *parts], self.writer.constant(place, "place")
        return f"{called}({', '.join(parts)})"

    def _keywords(self, given: dict[str, Any]) -> list[str]:
        """Returns keyword arguments, in order; names that are not identifiers are passed in a dict."""
        return [
            f"{name}={self.expression(value)}" if is_name(name) else
            f"**{{{self.writer.constant(name)}: {self.expression(value)}}}"
            for name, value in given.items()
        ]  # fmt: skip

    def made(self) -> frozenset[int]:
        """Returns the ids of all values that have an expression."""
        return frozenset(self._made)

    def deferred(self, call: DeferredCall) -> None:
        """Writes a deferred call as a statement, in program order."""
        code = self.call(call.fn, call.args, call.kwargs, call.place)
        if call.result is not None:
            name = self._made[id(call.result)] = self.writer.fresh("r")
            self._keep.append(call.result)
            code = f"{name} = {code}"
        self.lines.append(f"{self._with_dtype(call.dtype)}{code}  # {call.location}")

    def _with_dtype(self, dtype: torch.dtype | None) -> str:
        """Returns the head of a ``with`` statement for torch's default dtype; empty for ``None``."""
        if dtype is None:
            return ""
        return f"with {self.writer.constant(compat.default_dtype)}({self.writer.constant(dtype)}): "

    def native(self, function: FunctionCall) -> None:
        """Makes what a custom function's own node needs outside results, and writes the attributes of its context."""
        world, context = self.world, function.context
        outputs = [function.outputs[i] for i in world.custom_functions.live_outputs(function)]
        made = [self.prepared(output) for output in outputs]
        for arg in function.args:
            if safe_isinstance(arg, torch.Tensor) and arg.requires_grad:
                self.prepared(arg)
        for saved in context.saved:
            if safe_isinstance(saved, torch.Tensor) and saved.requires_grad:
                self.prepared(saved)
            elif safe_isinstance(saved, torch.Tensor) and world.heap.record_of(saved) is None:
                self._saved(saved, function)
        name = self._made[id(function.node)] = self.writer.fresh("context")
        self._keep.append(function.node)
        self.lines.append(f"{name} = {made[0]}.grad_fn")
        for key, item in vars(function.node).items():
            self.lines.append(f"{name}.__dict__[{self.writer.constant(key)}] = {self.expression(item)}")

    def _saved(self, value: torch.Tensor, function: FunctionCall) -> None:
        """Makes a tensor without history that a custom function saves a result."""
        plain = type(value) is compat.FakeTensor and not value._is_view() and not self.views.is_outside(value)
        if not plain:
            reason = f"{function.cls.__name__}, whose backward must run natively outside of the step, saves a view"
            self.world.heap.refuse("SFX107", reason)
        self.output(self.world.tracer.node_of(value))

    def natives(self) -> tuple[PlannedFunction, ...]:
        """Returns the custom functions whose own backward runs outside."""
        node_of, found = self.world.tracer.node_of, []
        for function in self.world.custom_functions.native:
            live = self.world.custom_functions.live_outputs(function)
            results = tuple((i, self._index[node_of(function.outputs[i])]) for i in live)
            values = tuple(
                self._index.get(node_of(saved))
                if safe_isinstance(saved, torch.Tensor) and not saved.requires_grad
                and self.world.heap.record_of(saved) is None else None
                for saved in function.context.saved
            )  # fmt: skip
            found.append(PlannedFunction(function, results, values))
        return tuple(found)

    def _callable(self, fn: Any) -> str:
        record = self.world.heap.record_of(attribute_of(fn, "__self__"))
        if safe_isinstance(fn, (types.MethodType, types.BuiltinMethodType)) and record is not None:
            if type(fn) is types.MethodType and fn.__func__ in registry.LOOKED_UP:
                return f"{self.writer.value(record.source)}.{registry.LOOKED_UP[fn.__func__]}"
            if type(fn) is types.MethodType:
                func = self.writer.constant(fn.__func__, "function")
                return f"{self.writer.constant(types.MethodType, 'Method')}({func}, {self.writer.value(record.source)})"
            return self._bound(fn, self.writer.value(record.source))
        return self.writer.constant(fn, attribute_of(fn, "__name__", "fn"))

    def _remember(self, value: Any, expression: str) -> str:
        """Keeps identity: one value of the trace becomes one real object."""
        if not expression.startswith("o["):
            name = self.writer.fresh("r")
            self.lines.append(f"{name} = {expression}")
            expression = name
        self._made[id(value)] = expression
        self._keep.append(value)
        return expression

    def _number(self, value: Any) -> str:
        if compat.is_ragged_size(value):
            return self._remember(value, self._jagged.ragged_size(value))
        for number, source, _ in self.world.heap.numbers:
            if number is value:
                return self.writer.value(source)
        constant = value.node.maybe_as_int() if safe_isinstance(value, torch.SymInt) else None
        if constant is not None:
            return self.writer.constant(constant)
        return self.output(self.world.tracer.node_of(value))

    def _tensor_snapshot(self, snapshot: TensorSnapshot) -> str:
        node = snapshot.node
        moved = compat.storage_id(snapshot.fake) != compat.storage_id(node.meta["val"])
        if moved or len(self.world.writes.to(snapshot.fake)) != snapshot.writes:
            held = self.output(self.world.tracer.clone_after(snapshot.fake, node, snapshot.after))
            if safe_isinstance(snapshot.fake, (torch.nn.Parameter, torch.nn.Buffer)):
                return self._marked(snapshot.fake, held)
            return self._with_autograd(snapshot.fake, held)
        return self.expression(snapshot.fake)

    def _marked(self, value: torch.Tensor, expression: str) -> str:
        """Returns a tensor as the parameter, buffer or instance of a subclass that the step made of it."""
        shown = self.world.heap.shown.of(value)
        if shown is not None:
            return f"{self.writer.constant(compat.with_class)}({expression}, {self.writer.constant(shown.cls)})"
        if safe_isinstance(value, torch.nn.Parameter):
            return f"{self.writer.constant(torch.nn.Parameter, 'Parameter')}({expression}, {value.requires_grad})"
        if safe_isinstance(value, torch.nn.Buffer):
            persistent = getattr(value, "persistent", True)
            return f"{self.writer.constant(torch.nn.Buffer, 'Buffer')}({expression}, persistent={persistent})"
        return expression

    def _dtensor(self, value: Any) -> str:
        """Returns a ``DTensor`` that the step created, over its local tensor."""
        if value.grad_fn is not None or value.grad is not None:
            self.world.heap.refuse("SFX107", "a DTensor with a gradient or an autograd history leaves the step")
        maker, spec = self.writer.constant(compat.make_dtensor), self.writer.constant(compat.spec_of(value), "spec")
        local = self.expression(compat.local_of(value))
        name = self._remember(value, f"{maker}({local}, {spec}, {value.requires_grad})")
        self._count_writes(value, name)
        return name

    def _count_writes(self, value: torch.Tensor, name: str) -> None:
        """Gives a new object the version counter that it has in eager."""
        if not value.is_inference() and value._version:
            self.lines.append(f"{self.writer.constant(compat.count_writes)}({name}, {value._version})")

    def _wrapper(self, value: Any) -> str:
        """Returns a wrapper subclass that the step created, with its attributes; none of its class's Python runs."""
        heap, kind = self.world.heap, type(value).__qualname__
        history = value.grad_fn
        live = history is not None and not is_freed(self.world.freed, history)
        if value.is_inference() or (value._is_view() and not live):
            heap.refuse("SFX107", f"a {kind}, a tensor subclass that is a view, leaves the step")
        storage = compat.storage_id(value)
        if any(compat.storage_id(other) == storage for other in self._wrappers_around(value)):
            heap.refuse("SFX107", f"a {kind}, a tensor subclass that shares storage with another, leaves the step")
        if live:
            return self._differentiable_wrapper(value, kind)
        leaf = history is None and value.requires_grad
        layout = (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, leaf)
        maker, cls = self.writer.constant(compat.make_wrapper), self.writer.constant(type(value))
        arguments = f"{cls}, {', '.join(map(self.expression, layout))}"
        if history is None:
            name = self._remember(value, f"{maker}({arguments})")
        else:
            node = self.writer.constant(type(history).__name__)
            name = self._remember(value, f"{self.writer.constant(freed_result)}({node}, {maker}, {arguments})")
        self._attributes(name, value)
        self._count_writes(value, name)
        return self._with_gradient(value, name)

    def _differentiable_wrapper(self, value: Any, kind: str) -> str:
        """Returns a wrapper with a history: the joint graph makes it, its attributes are set here."""
        if WrapperLayout.of(value) is None:
            reason = f"a {kind}, a tensor subclass with an autograd history, leaves the step"
            self.world.heap.refuse("SFX107", f"{reason}, and holds something else than tensors and plain values")
        if value.retains_grad:
            self.world.heap.refuse("SFX107", f"a {kind}, a tensor subclass that retains its gradient, leaves the step")
        take = self.writer.constant(self.shells.take, "shell")
        name = self._remember(value, f"{take}({len(self.shells.values)})")
        self.shells.values.append(value)
        self._attributes(name, value)
        self._count_writes(value, name)
        return name

    def _wrappers_around(self, value: Any) -> list[Any]:
        """Returns the wrapper subclasses from outside, and those that leave the step too, other than ``value``."""
        outside = [record.shadow for record in self.world.heap.by_real.values()]
        return [each for each in (*outside, *self._keep) if each is not value and compat.is_wrapper(each)]

    def _tag(self, value: torch.Tensor, expression: str) -> None:
        """Sets the attributes that the step set on a tensor."""
        shown = self.world.heap.shown.of(value)
        if shown is not None:
            self._attributes(expression, shown.attributes)
        _, names = self.world.tagged.get(id(value), (value, {}))
        for name in names:
            if name in vars(value):  # not deleted again
                self.lines.append(f"{expression}.{name} = {self.expression(vars(value)[name])}")

    def _handle(self, value: Any) -> str | None:
        """Returns the handle of a hook on a tensor that the step leaves registered."""
        left, number = self.world.left_hooks, vars(value).get("id")
        if number in left.handles:
            return self.expression(left.handles[number])
        if left.is_registered(number) and not self.world.specialization.native_backward:
            left.wants_native = True
            self.world.heap.refuse(
                "SFX107", "the handle of a hook that runs in the backward of an output leaves the step"
            )
        return None

    def _deferred(self, value: DeferredValue) -> str:
        made = self.call(value.fn, value.args, value.kwargs)
        if value.dtype is None:
            return made
        name = self.writer.fresh("r")
        self.lines.append(f"{self._with_dtype(value.dtype)}{name} = {made}")
        return name

    def _object(self, value: Any) -> str:
        cls = type(value)
        if safe_isinstance(value, tuple):
            return self._tuple(value)
        if cls is slice:
            with self._constructing():
                return self._remember(value, f"slice({', '.join(map(self.expression, bounds_of(value)))})")
        if cls is set or safe_isinstance(value, frozenset):
            return self._set(value)
        if type(value) is types.MethodType and type(value.__self__) is InterpretedGenerator:
            return self._remember(value, f"{self.expression(value.__self__)}.{value.__name__}")
        if safe_isinstance(value, types.MethodType) and type(value.__func__) is types.FunctionType:
            looked_up = registry.LOOKED_UP.get(value.__func__)
            if looked_up is not None:
                return self._remember(value, f"{self.expression(value.__self__)}.{looked_up}")
        if safe_isinstance(value, types.MethodType):
            maker = self.writer.constant(types.MethodType, "Method")
            with self._constructing():
                parts = self.expression(value.__func__), self.expression(value.__self__)
                return self._remember(value, f"{maker}({', '.join(parts)})")
        if cls is torch.utils.hooks.RemovableHandle and (handle := self._handle(value)) is not None:
            return handle
        if cls is types.CellType:
            return self._cell(value)
        if cls is np.ndarray:
            return self._array(value)
        if cls in REBUILT or cls in HANDED_ON:
            return self._iterator(value)
        if cls in (PythonIterable, PythonIterator):
            return self.expression(value.obj if cls is PythonIterable else value.iterator)
        if cls is InterpretedGenerator:
            return self._generator(value)
        if safe_isinstance(value, types.FunctionType) and id(value) in self.world.new_functions:
            return self._function(value)
        if safe_isinstance(value, types.FunctionType) and id(value.__code__) in NATIVE_CODE:
            if "leads_to" in vars(value):
                return self.expression(vars(value)["leads_to"])
            self.world.heap.refuse("SFX104", "cannot rebuild a callback that was passed to C code")
        if type(value) is types.BuiltinMethodType and self.world.heap.definitions.gave(value):
            return self.writer.constant(value, value.__name__)
        if safe_isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            owner = value.__self__
            if owner is not None and not safe_isinstance(owner, (types.ModuleType, type)):
                with self._constructing():
                    return self._remember(value, self._bound(value, self.expression(owner)))
        if safe_isinstance(value, weakref.ReferenceType):
            return self._reference(value)
        if safe_isinstance(value, type) and id(value) in self.world.new_classes:
            self.world.heap.refuse("SFX111", f"cannot rebuild the class {value.__qualname__}, which the step creates")
        if id(value) in self.world.new_modules:
            made = f"{self.writer.constant(types.ModuleType.__new__, 'new_module')}({self.writer.constant(cls)})"
            made = self._remember(value, made)
            self._fill(functools.partial(self._attributes, made, value))
            return made
        if id(value) in self.world.new_descriptors:
            return self._descriptor(value)
        if safe_isinstance(value, functools.partial):
            return self._partial(value)
        if cls is RandomState:
            self.world.heap.refuse("SFX110", "cannot rebuild a random state saved in the middle of the step")
        if cls is PendingCollective:
            self.world.heap.refuse("SFX104", f"cannot rebuild the Work of torch.distributed.{value.name}")
        if cls is types.MappingProxyType:
            self.world.heap.refuse("SFX104", "cannot rebuild a mapping proxy created in the step")
        if safe_isinstance(value, _TYPE_PARAMETERS):
            self.world.heap.refuse("SFX104", f"cannot rebuild a {cls.__qualname__} created in the step")
        if safe_isinstance(value, PASSED_THROUGH) or cls.__module__ == "typing" or cls in _ALIASES or cls is _CYTHON:
            return self.writer.constant(value)
        if id(cls) in self.world.new_classes:
            self.world.heap.refuse(
                "SFX111", f"cannot rebuild an instance of the class {cls.__qualname__}, which the step creates"
            )
        _, owner = self.world.heap.new_namespaces.get(id(value), (None, None))
        if owner is not None and id(type(owner)) not in self.world.new_classes:  # such an instance does not leave
            return self._remember(value, f"{self.writer.constant(instance_dict_of_plain)}({self.expression(owner)})")
        if safe_isinstance(value, (list, deque, dict, set)):
            return self._container(value)
        if cls is datetime.timezone:
            return self.writer.constant(value)
        if cls in _DATES:
            maker, parts = value.__reduce_ex__(2)
            return self._remember(value, self.call(maker, parts, {}))
        return self._instance(value)

    def _tuple(self, value: tuple[Any, ...]) -> str:
        """Returns a tuple that the step created, of any class."""
        cls = type(value)
        with self._constructing():
            items = [self.expression(item) for item in value]
            if cls is tuple:
                return self._remember(value, f"({', '.join(items)}{',' if len(items) == 1 else ''})")
            maker = self.writer.constant(make_tuple)
            made = self._remember(value, f"{maker}({self.writer.constant(cls)}, ({', '.join(items)},))")
            self._attributes(made, value)
            return made

    def _bound(self, method: Any, owner: str) -> str:
        """Returns a bound C method: this very one, whatever the object's class has under its name."""
        descriptor = descriptor_of(method)
        if descriptor is not None:
            return f"{self.writer.constant(bound)}({self.writer.constant(descriptor, method.__name__)}, {owner})"
        if attribute_of(method.__self__, method.__name__) != method:
            self.world.heap.refuse(
                "SFX104",
                f"cannot rebuild {method.__name__}, a bound method that is not an attribute of its object",
            )
        return f"getattr({owner}, {self.writer.constant(method.__name__)})"

    def _set(self, value: Any) -> str:
        cls, table = type(value), 0
        members = tuple(value)
        if all(map(is_plain, members)):
            found = insertion(value)
            if found is None:
                self.world.heap.refuse("SFX111", "cannot rebuild a set whose order depends on its history")
            members, table = found
        else:  # objects in traversal order, most likely that of insertion
            met = {id(record.shadow): i for i, record in enumerate(self.world.heap.by_real.values())}
            members = tuple(sorted(members, key=lambda member: met.get(id(member), len(met))))
        with self._reading():
            items = [self.expression(item) for item in members]
        made = f"({', '.join(items)}{',' if items else ''})"
        if table:
            made = f"{self.writer.constant(wide_set)}({cls.__name__}, {made}, {table})"
            return self._remember(value, made)
        if cls in (set, frozenset):
            return self._remember(value, f"{cls.__name__}({made})")
        maker = self.writer.constant(frozenset.__new__, "new_frozenset")
        name = self._remember(value, f"{maker}({self.writer.constant(cls)}, {made})")
        self._fill(functools.partial(self._attributes, name, value))
        return name

    def _partial(self, value: Any) -> str:
        """Returns a partial that the step created, of any class."""
        with self._constructing():
            parts = [*map(self.expression, (value.func, *value.args)), *self._keywords(value.keywords)]
            if type(value) is functools.partial:
                maker = self.writer.constant(functools.partial, "partial")
            else:
                maker = self.writer.constant(functools.partial.__new__, "new_partial")
                parts.insert(0, self.writer.constant(type(value)))
            name = self._remember(value, f"{maker}({', '.join(parts)})")
            self._attributes(name, value)
        return name

    def _array(self, value: np.ndarray[Any, Any]) -> str:
        """Returns a copy of a NumPy array of the step: what it was computed from is guarded."""
        if value.dtype.hasobject or not (value.flags.owndata and value.flags.writeable):
            self.world.heap.refuse("SFX104", "cannot rebuild a NumPy array created in the step: a view, or of objects")
        contents = self.writer.constant(value.copy(order="K"), "array")
        return self._remember(value, f"{contents}.copy('K')")

    def _descriptor(self, value: Any) -> str:
        """Returns a property, static or class method that the step created."""
        cls = type(value)
        if cls is property:
            parts = [value.fget, value.fset, value.fdel]
            if value.__doc__ != getattr(value.fget, "__doc__", None):
                parts.append(value.__doc__)
        elif cls is staticmethod or cls is classmethod:
            parts = [value.__func__]
        else:
            self.world.heap.refuse("SFX104", f"cannot rebuild a {cls.__qualname__} created in the step")
        with self._constructing():
            name = self._remember(value, f"{self.writer.constant(cls)}({', '.join(map(self.expression, parts))})")
            for key, item in instance_dict_of_plain(value).items():  # the constructor copies those of its function
                if key not in _COPIED or getattr(value.__func__, key, None) is not item:
                    self.lines.append(f"{name}.__dict__[{self.writer.constant(key)}] = {self.expression(item)}")
        return name

    def _reference(self, value: Any) -> str:
        target = value()
        if target is None:
            return self.writer.constant(value, "dead_reference")
        maker = self.writer.constant(weakref.ref, "ref")
        with self._constructing():
            parts = [self.expression(target)]
            if safe_isinstance(value, ShadowRef):
                parts.append(self.expression(value.callback))
            return self._remember(value, f"{maker}({', '.join(parts)})")

    def _container(self, value: Any) -> str:
        cls = type(value)
        name = self.writer.fresh("n")
        self._made[id(value)] = name
        self._keep.append(value)
        if cls in (list, dict, OrderedDict, defaultdict):
            self.lines.append(f"{name} = {self.writer.constant(cls)}()")
        elif cls is deque:
            self.lines.append(f"{name} = {self.writer.constant(cls)}(maxlen={value.maxlen})")
        else:
            base: Any = base_container(cls)
            maker = self.writer.constant(base.__new__, f"new_{base.__name__}")
            self.lines.append(f"{name} = {maker}({self.writer.constant(cls)})")
            if safe_isinstance(value, deque):
                self.lines.append(f"{self.writer.constant(deque.__init__, 'init')}({name}, (), {value.maxlen})")
        self._fill(functools.partial(self._contents, name, value))
        return name

    def _contents(self, name: str, value: Any) -> None:
        """Fills a new container."""
        cls = type(value)
        if safe_isinstance(value, defaultdict):
            init = self.writer.constant(defaultdict.__init__, "init")
            self.lines.append(f"{init}({name}, {self.expression(value.default_factory)})")
        if safe_isinstance(value, dict):
            setter = name if cls in (dict, OrderedDict, defaultdict) else None
            held: Any = base_container(cls)
            for key, item in held.items(value):
                key_code, item_code = self.expression(key), self.expression(item)
                if setter:
                    self.lines.append(f"{name}[{key_code}] = {item_code}")
                else:
                    base = OrderedDict if safe_isinstance(value, OrderedDict) else dict
                    self.lines.append(
                        f"{self.writer.constant(base.__setitem__, 'set_item')}({name}, {key_code}, {item_code})"
                    )
        else:
            kind: Any = next(each for each in (list, deque, set) if safe_isinstance(value, each))
            items = ", ".join(self.expression(item) for item in kind.__iter__(value))
            adder = self.writer.constant(kind.update if kind is set else kind.extend, "extend")
            if items:
                self.lines.append(f"{adder}({name}, ({items},))")
        if cls not in (list, dict, deque, defaultdict):
            self._attributes(name, value)

    def _instance(self, value: Any) -> str:
        cls = type(value)
        base = next(base for base in cls.__mro__ if is_static(base))
        name = self.writer.fresh("n")
        made = f"{self.writer.constant(base.__new__, 'new_object')}({self.writer.constant(cls)}"
        if base is object and not _is_made_by_object(cls):
            self.world.heap.refuse("SFX104", f"cannot rebuild a {cls.__qualname__} created in the step")
        if base is object or base is types.SimpleNamespace:
            made += ")"
        elif base in DERIVED_FROM:
            made += f", {self.writer.constant(exact_value(value))})"
        elif issubclass(base, BaseException):
            made += "".join(f", {item}" for item in self._arguments(value)) + ")"
        else:
            self.world.heap.refuse("SFX104", f"cannot rebuild a {cls.__qualname__} created in the step")
        if cls.__module__ == "builtins" and not issubclass(base, BaseException):
            self.world.heap.refuse("SFX104", f"cannot rebuild a {cls.__qualname__} created in the step")
        self._made[id(value)] = name
        self._keep.append(value)
        self.lines.append(f"{name} = {made}")
        if safe_isinstance(value, BaseException):
            self._fill(functools.partial(self._raised, name, value))
        self._fill(functools.partial(self._attributes, name, value))
        return name

    def _arguments(self, error: BaseException) -> list[str]:
        """Returns what an exception is made with."""
        with self._reading():
            return [self.expression(item) for item in error.args]

    def _raised(self, name: str, error: BaseException) -> None:
        """Sets what an exception records about how it was raised."""
        for field in (*CHAIN, "__suppress_context__", *fields_of(type(error))):
            value = getattr(error, field)
            if value is not None and value is not False:
                self.lines.append(f"{name}.{field} = {self.expression(value)}")
        if error.__traceback__ is not None:
            self.lines.append(f"{name}.__traceback__ = {self.writer.constant(error.__traceback__, 'traceback')}")

    def _attributes(self, name: str, value: Any) -> None:
        """Fills the instance ``__dict__`` and the slots of a new object."""
        if shows_another(type(value)):
            check_hidden_dict(self.world.heap, value)
        items = instance_dict_of_plain(value)
        if self.world.heap.record_of(items) is not None:  # of an outside object, or shared by all instances
            self.lines.append(f"object.__setattr__({name}, '__dict__', {self.expression(items)})")
        elif items:
            space = self.writer.fresh("d")
            self.lines.append(f"{space} = object.__getattribute__({name}, '__dict__')")
            for key, item in items.items():
                self.lines.append(f"{space}[{self.writer.constant(key)}] = {self.expression(item)}")
        for slot in slot_names(type(value)):
            if is_set(value, slot):
                item = self.expression(object.__getattribute__(value, slot))
                self.lines.append(f"object.__setattr__({name}, {self.writer.constant(slot)}, {item})")

    def _iterator(self, value: Any) -> str:
        """Returns a C iterator over its containers, at its position."""
        if type(value) in VIEWS:
            return self._remember(value, self._walk(value))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, since Python 3.12
            made, arguments, *state = value.__reduce__()
        with self._reading():
            parts = ", ".join(self.expression(part) for part in arguments)
        expression = self._remember(value, f"{self.writer.constant(made)}({parts})")
        if state and state[0] is not None:
            self.lines.append(f"{expression}.__setstate__({self.expression(state[0])})")
        return expression

    def _walk(self, iterator: Any) -> str:
        """Returns an iterator over a real dict or set, which detects later changes of its size."""
        view = self.writer.constant(VIEWS[type(iterator)], "view")
        container, left = iterated_container(iterator), left_over(iterator)
        if left is None:
            return f"{self.writer.constant(iteration_is_invalid)}({view})"
        ended = container is None
        container = {} if ended else container
        if safe_isinstance(container, (set, frozenset)) and len(container) > 1 and not self._in_its_order(container):
            self.world.heap.refuse("SFX111", "cannot rebuild an iterator over a set whose order depends on its history")
        record = self.world.heap.record_of(container)
        if record is not None and not self._in_its_order(container):
            self.apply(record)
        with self._reading():
            made = "{}" if ended else self.expression(container)
        return f"{self.writer.constant(walk)}({view}, {made}, {len(container) - left})"

    def _in_its_order(self, container: Any) -> bool:
        """Returns True if the real container has the keys of the shadow, in their order."""
        record = self.world.heap.record_of(container)
        outside = list(stored_keys(container if record is None else record.real))
        inside = [self.world.heap.real_key(key) for key in stored_keys(container)]
        if record is None:
            return not safe_isinstance(container, (set, frozenset)) or all(map(is_plain, inside))
        pairs = zip(inside, outside, strict=False)
        return len(inside) == len(outside) and all(a is b or (is_plain(a) and same_value(a, b)) for a, b in pairs)

    def _generator(self, value: InterpretedGenerator) -> str:
        """Returns a suspended generator, which continues natively."""
        code, state = hand_out(value)
        with self._reading():
            parts = [
                self.writer.constant(resume),
                self.writer.constant(code, "code"),
                self.writer.constant(value.frame.globals, "globals"),
                self.writer.constant(value.__name__),
                self.writer.constant(value.__qualname__),
                self.writer.constant(value.started),
                self.expression(state),
            ]
            return self._remember(value, f"{parts[0]}({', '.join(parts[1:])})")

    def _cell(self, cell: types.CellType) -> str:
        outside = self.world.heap.cells.get(id(cell))
        if outside is not None:
            return self.writer.value(outside.source)
        if id(cell) not in self.world.new_cells:
            return self.writer.constant(cell, "cell")
        known = self._made.get(id(cell))
        if known is None:
            known = self._made[id(cell)] = self.writer.fresh("cell")
            self._keep.append(cell)
            self.lines.append(f"{known} = {self.writer.constant(types.CellType, 'Cell')}()")
            self._fill(functools.partial(self._cell_contents, known, cell))
        return known

    def _cell_contents(self, name: str, cell: types.CellType) -> None:
        contents = self.world.load_cell(cell)
        if contents is not ABSENT:
            self.lines.append(f"{name}.cell_contents = {self.expression(contents)}")

    def _function(self, value: types.FunctionType) -> str:
        with self._constructing():
            cells = [self._cell(cell) for cell in value.__closure__ or ()]
            maker = self.writer.constant(types.FunctionType, "Function")
            defaults = self.expression(value.__defaults__) if value.__defaults__ else "None"
            code = self.writer.constant(value.__code__, "code")
            space = self._namespace(value)
            closure = f"({', '.join(cells)},)" if cells else "None"
            called = self.writer.constant(value.__name__)
            name = self._remember(value, f"{maker}({code}, {space}, {called}, {defaults}, {closure})")
            self._function_fields(name, value)
        return name

    def _function_fields(self, name: str, value: types.FunctionType) -> None:
        for field in ("__kwdefaults__", "__annotations__"):
            if getattr(value, field):
                self.lines.append(f"{name}.{field} = {self.expression(getattr(value, field))}")
        for field in ("__doc__", "__qualname__", "__module__"):
            if getattr(value, field) != _given(value, field):
                self.lines.append(f"{name}.{field} = {self.expression(getattr(value, field))}")
        for key, item in vars(value).items():
            self.lines.append(f"{name}.__dict__[{self.writer.constant(key)}] = {self.expression(item)}")

    def _namespace(self, fn: types.FunctionType) -> str:
        """Returns the globals of a function: real ones, if code executed in the step used them."""
        space = fn.__globals__
        if id(space) not in self.world.own_namespaces:
            return self.writer.constant(space, "namespace")
        record = self.world.heap.record_of(space)
        if record is None:
            self.world.heap.refuse("SFX111", f"cannot rebuild {fn.__qualname__}, which exec created")
        return self.writer.value(record.source)


def _given(fn: types.FunctionType, field: str) -> Any:
    """Returns the initial value of a function's field when the function is created from its code."""
    if field == "__qualname__":
        return fn.__code__.co_qualname
    if field == "__module__":
        return fn.__globals__.get("__name__")
    consts = fn.__code__.co_consts
    return consts[0] if consts and safe_isinstance(consts[0], str) else None


_COPIED = frozenset({"__module__", "__name__", "__qualname__", "__doc__", "__dict__", "__wrapped__", "__annotations__"})
"""Attributes that a static or class method copies from its function when it is created."""
_TYPE_PARAMETERS = (typing.TypeVar, typing.ParamSpec, typing.TypeVarTuple, typing.NewType)


_CYTHON = type(np.random.Generator.random)
"""Class of the functions of NumPy's generators, which are no built-in functions."""
_ALIASES = (types.GenericAlias, types.UnionType)


_DATES = (datetime.date, datetime.time, datetime.datetime, datetime.timedelta)
"""Classes whose instances are rebuilt from their pickle arguments."""


def _is_made_by_object(cls: type) -> bool:
    """Returns True if ``object.__new__`` creates instances of ``cls``; C classes may look like Python classes."""
    own = (vars(base).get("__new__") for base in cls.__mro__)
    makers = (made.__self__ for made in own if safe_isinstance(made, types.BuiltinFunctionType))
    if next(maker for maker in makers if safe_isinstance(maker, type)) is not object:
        return False
    try:
        object.__new__(cls)
    except TypeError:
        return False
    return True
