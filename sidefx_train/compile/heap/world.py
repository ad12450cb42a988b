"""The capturing world: every access of the interpreted program goes to shadows, and what it read is guarded."""

from __future__ import annotations

import builtins
import contextvars
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from sidefx_train import _torch_compat as compat
from sidefx_train.compile import registry
from sidefx_train.compile.capture import policy
from sidefx_train.compile.capture.interpreter import Interpreter
from sidefx_train.compile.capture.tracer import GraphTracer
from sidefx_train.compile.capture.world import ABSENT
from sidefx_train.compile.heap import natives, opaque
from sidefx_train.compile.heap.constants import constant_value
from sidefx_train.compile.heap.heap import Heap
from sidefx_train.compile.heap.later import (
    NUMBERS,
    CallResult,
    DeferredCall,
    Later,
    TensorMoment,
    contains_later,
    join_text,
    percent,
)
from sidefx_train.compile.heap.records import (
    CONTAINERS,
    PLAIN_TYPES,
    DictRecord,
    InstanceRecord,
    ListRecord,
    SetRecord,
    TensorRecord,
    is_definition,
    is_plain,
)
from sidefx_train.errors import Location, Unsupported

_DESCRIPTORS = (property, staticmethod, classmethod, functools.cached_property, types.GetSetDescriptorType)
_BUILTINS = vars(builtins)
_COMPARES: dict[type, bool] = {}
_BARE = frozenset({id(object.__new__), id(object.__init__)})


class TraceWorld:
    """Implements :class:`~sidefx_train.compile.capture.world.World` over a :class:`Heap`.

    Attributes:
        heap: the shadows.
        whole: names of classes whose methods are not captured but replayed whole after the graph.
        running: objects of such kinds whose method is being interpreted.
        deferred: calls to replay after the graph, in order.
        context: context variables that the step sets and resets.
        freed: autograd nodes whose graph a backward pass has freed.
        last_error: the exception that C code raised last, with the callable and the user's line.
        class_writes: attributes the step set on classes: ``(class, name) -> value``.
        pending_state: (commit, undo) pairs of optimizer state made early, for right before the first run.
    """

    def __init__(
        self,
        tracer: GraphTracer,
        symbolic: frozenset[str] = frozenset(),
        moving: frozenset[str] = frozenset(),
        whole: frozenset[str] = frozenset(),
    ) -> None:
        self.whole = whole
        self.running: set[int] = set()
        self.tracer = tracer
        self.heap = Heap(tracer, self.locate, self._written_names, symbolic, moving)
        self.interp = Interpreter(self, policy.Policy())
        self.heap.reenter = self.interp.reentering
        self.deferred: list[DeferredCall] = []
        self.context = opaque.ContextVariables(self)
        self.freed: set[Any] = set()
        self.last_error: tuple[Exception, Any, Location | None] | None = None
        self.class_writes: dict[tuple[type, str], Any] = {}
        self.class_snapshot: dict[tuple[type, str], Any] = {}
        self.pending_state: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self.new_cells: dict[int, types.CellType] = {}
        self.new_classes: dict[int, type] = {}
        self.new_functions: dict[int, types.FunctionType] = {}
        self._class_spaces: dict[type, Any] = {}
        self._methods: dict[str, list[tuple[type, registry.Interceptor]]] = {}
        registry.plug_late()
        for base, name, handler in registry.METHOD_INTERCEPTORS:
            self._methods.setdefault(name, []).append((base, handler))
        self._attribute_hooks: dict[str, list[tuple[type, registry.AttributeHook]]] = {}
        for base, name, hook in registry.ATTRIBUTE_HOOKS:
            self._attribute_hooks.setdefault(name, []).append((base, hook))

    def locate(self) -> Location | None:
        return self.interp.location() if self.interp.current_frame is not None else None

    def _written_names(self) -> frozenset[str]:
        frame = self.interp.current_frame
        return frozenset() if frame is None else self.interp.written_names(frame)

    # --- globals and cells ---------------------------------------------------------------------------------------

    def load_global(self, namespace: dict[str, Any], name: str) -> Any:
        if name in namespace:
            value = namespace[name]
            record = self.heap.namespaces.get(id(namespace))
            if (record is None or name not in record.values) and is_definition(value) and self.heap.trusts(namespace):
                return value
        value = self.heap.namespace(namespace).get(name)
        return _BUILTINS.get(name, ABSENT) if value is ABSENT else value

    def store_global(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        self.heap.namespace(namespace).set(name, value)

    def delete_global(self, namespace: dict[str, Any], name: str) -> bool:
        record = self.heap.namespace(namespace)
        if record.get(name) is ABSENT:
            return False
        record.set(name, ABSENT)
        return True

    def new_cell(self, cell: types.CellType) -> None:
        self.new_cells[id(cell)] = cell

    def new_function(self, fn: types.FunctionType) -> None:
        self.new_functions[id(fn)] = fn

    def load_cell(self, cell: types.CellType) -> Any:
        if id(cell) in self.new_cells:
            try:
                return cell.cell_contents
            except ValueError:
                return ABSENT
        name = self._cell_name(cell)
        return self.heap.cell(cell, name).get(name)

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

    # --- attributes ----------------------------------------------------------------------------------------------

    def type_of(self, obj: Any) -> type:
        cls = type(obj)
        if cls is compat.FakeTensor:
            record = self.heap.record_of(obj)
            if record is not None:
                return type(record.real)
            return torch.nn.Parameter if isinstance(obj, torch.nn.Parameter) else torch.Tensor
        return _NUMBER_TYPES.get(cls, cls)

    def class_attr(self, cls: type, name: str) -> Any:
        for base in type.__getattribute__(cls, "__mro__"):
            value = self._class_entry(base, name)
            if value is not ABSENT:
                return value
        return ABSENT

    def _class_entry(self, cls: type, name: str) -> Any:
        if (cls, name) in self.class_writes:
            return self.class_writes[cls, name]
        if (cls, name) in registry.COUNTERS:
            return registry.COUNTERS[cls, name]
        space = type.__getattribute__(cls, "__dict__")
        if name not in space:
            return ABSENT
        value = space[name]
        if cls.__module__ == "builtins" or isinstance(value, (types.MemberDescriptorType, *_DESCRIPTORS)):
            return value
        definition = is_definition(value) or hasattr(type(value), "__get__")
        if definition and self.heap.trusts({"__name__": cls.__module__}):
            return value
        if id(cls) in self.new_classes:
            return value
        proxy = self._class_spaces.setdefault(cls, space)
        source = self.heap.sources.item(self.heap.sources.const(proxy, cls.__qualname__), name)
        if definition:
            self.heap.guard("is", source, value)
            return value
        value = self.class_snapshot[cls, name] = self.heap.shadow(value, source, name)
        return value

    def instance_attr(self, obj: Any, name: str) -> Any:
        if isinstance(obj, type):
            return self._class_entry(obj, name)
        if isinstance(obj, types.ModuleType):
            space = vars(obj)
            value = space.get(name, ABSENT)
            record = self.heap.namespaces.get(id(space))
            if (record is None or name not in record.values) and is_definition(value) and self.heap.trusts(space):
                return value
            return self.heap.namespace(space).get(name)
        owner = self.heap.record_of(obj)
        if isinstance(owner, InstanceRecord):
            return self.heap.instance_attr(owner, name)
        if owner is not None and owner.instance is not None:
            return self.heap.instance_attr(owner.instance, name)
        if isinstance(owner, TensorRecord):
            return self._tensor_attr(owner, name)
        try:
            space = object.__getattribute__(obj, "__dict__")
        except AttributeError:
            return ABSENT
        if owner is not None and name in space:
            return self.heap.shadow(space[name], self.heap.sources.attr(owner.base, name), name)
        return space.get(name, ABSENT)

    def _tensor_attr(self, record: TensorRecord, name: str) -> Any:
        if name in record.attributes:
            return record.attributes[name]
        space = getattr(record.real, "__dict__", {})
        if name not in space:
            return ABSENT
        value = self.heap.shadow(space[name], self.heap.sources.attr(record.source, name), name)
        record.attributes[name] = value
        return value

    def set_instance_attr(self, obj: Any, name: str, value: Any) -> None:
        if isinstance(obj, type):
            if id(obj) in self.new_classes:
                type.__setattr__(obj, name, value)
            else:
                self._class_entry(obj, name)
                self.class_writes[obj, name] = value
            return
        if isinstance(obj, types.ModuleType):
            self.heap.namespace(vars(obj)).set(name, value)
            return
        record = self.heap.record_of(obj)
        if record is not None and record.instance is not None:
            record = record.instance
        if isinstance(record, InstanceRecord):
            if record.has_dict:
                record.set(name, value)
            else:
                object.__setattr__(obj, name, value)
                record.written[name] = None
        elif isinstance(record, TensorRecord):
            record.attributes[name] = value
            record.heap.refuse("SFX111", f"sets the attribute {name!r} of an outside tensor")
        elif record is not None:
            self.heap.refuse("SFX104", f"sets {name!r} of {record.source.label}, which cannot be shadowed")
        else:
            object.__setattr__(obj, name, value)

    def del_instance_attr(self, obj: Any, name: str) -> None:
        record = self.heap.record_of(obj)
        if record is not None and record.instance is not None:
            record = record.instance
        if isinstance(record, InstanceRecord) and record.has_dict:
            if not record.delete(name):
                raise AttributeError(f"{type(obj).__name__!r} object has no attribute {name!r}")
        elif record is not None or isinstance(obj, types.ModuleType):
            self.heap.refuse("SFX111", f"deletes the attribute {name!r} of {policy.describe(obj)}")
        elif isinstance(obj, type):
            type.__delattr__(obj, name)
        else:
            object.__delattr__(obj, name)

    def native_getattr(self, obj: Any, name: str) -> Any:
        record = self.heap.record_of(obj)
        if isinstance(record, InstanceRecord):
            if name == "__dict__":
                record.fill()
                return object.__getattribute__(obj, "__dict__")
            if name == "__class__":
                return type(obj)
            if isinstance(self.class_attr(type(obj), name), types.MemberDescriptorType):
                return record.get_slot(name)
        if isinstance(obj, torch.Tensor) and name in policy.VALUE_METHODS:
            self.heap.refuse("SFX106", f"Tensor.{name} asks for values that exist only when the graph runs")
        if name == "__class__":
            return self.type_of(obj)
        value = getattr(obj, name)
        if isinstance(obj, types.FunctionType) and name in ("__defaults__", "__kwdefaults__"):
            values = value.values() if isinstance(value, dict) else value or ()
            if id(obj) in self.new_functions or all(is_plain(item) for item in values):
                return value
            held = self.heap.sources.const(obj, obj.__qualname__)
            shadow = self.heap.shadow(value, self.heap.sources.slot(held, name))
            self.touch(shadow, deep=False)
            return shadow
        if record is not None and record.shadow is record.real and not is_definition(value):
            if isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
                return value
            if isinstance(record.real, torch.Generator):
                self.heap.refuse("SFX110", f"uses the random generator {record.source.label}")
            return self.heap.shadow(value, self.heap.sources.slot(record.base, name), name)
        return value

    def override_getattr(self, obj: Any, name: str) -> Any:
        if isinstance(obj, Later):
            self.heap.refuse("SFX106", f"reads .{name} of a value that is known only after the step")
        if type(obj) is compat.FakeTensor:
            if name == "data":
                with torch.no_grad():
                    return obj.detach()
            if name == "grad":
                self.heap.read_grad(obj)
            return ABSENT
        if isinstance(obj, torch.nn.Module):
            for base, hook in self._attribute_hooks.get(name, ()):
                if isinstance(obj, base):
                    value = hook(self, obj, name)
                    if value is not ABSENT:
                        return value
            return natives.module_getattr(self, obj, name)
        return ABSENT

    def override_setattr(self, obj: Any, name: str, value: Any) -> bool:
        if type(obj) is compat.FakeTensor:
            if name == "data":
                self.heap.refuse("SFX108", "assigns Tensor.data")
            if name in ("grad", "requires_grad"):
                if name == "grad":
                    self.heap.overwrite_grad(obj)
                setattr(obj, name, value)
                return True
            return False
        if isinstance(obj, torch.nn.Module):
            return natives.module_setattr(self, obj, name, value)
        return False

    def override_delattr(self, obj: Any, name: str) -> bool:
        if isinstance(obj, torch.nn.Module):
            return natives.module_delattr(self, obj, name)
        return False

    # --- operators -----------------------------------------------------------------------------------------------

    def override_operator(self, name: str, args: tuple[Any, ...]) -> Any:
        first = args[0] if args else None
        if name in _TEXT:
            return self._text(name, args)
        if name == "mod" and isinstance(first, str) and contains_later(args[1]):
            return Later(percent, (first, self.freeze(args[1])))
        if name == "is_":
            return ABSENT
        for value in args:
            if isinstance(value, Later):
                self.heap.refuse("SFX106", f"computes {name} of a value that is known only after the step")
        record = self.heap.by_shadow.get(id(first))
        if isinstance(record, DictRecord) and record.shadow is first and record.plain:
            return natives.dict_operator(self, record, name, args)
        if name in natives.OPERATORS and any(type(value) in _TRACED for value in args):
            for value in args:
                self.touch(value)
            if not (name in ("getitem", "setitem") and isinstance(first, (list, tuple))):
                return self.guarded(natives.OPERATORS[name], args, {})
        shallow = name in _SHALLOW
        for value in args[:1] if shallow else args:
            self.touch(value, deep=not shallow)
        if name in ("getitem", "setitem", "delitem") and type(first) in (list, tuple, deque):
            if name == "setitem" and type(args[1]) is slice:
                self.touch(args[2], deep=False)
            return self.guarded(natives.OPERATORS[name], (first, natives.concrete(args[1]), *args[2:]), {})
        if name == "next" and record is not None and record.shadow is record.real:
            self.heap.refuse("SFX103", f"advances the outside iterator {record.source.label}")
        return ABSENT

    def _text(self, name: str, args: tuple[Any, ...]) -> Any:
        if not any(contains_later(value) for value in args) and not (
            name == "build_string" and any(contains_later(part) for part in args[0])
        ):
            for value in args:
                self.touch(value)
            return ABSENT
        if name == "build_string":
            return Later(join_text, (self.freeze(tuple(args[0])),))
        return Later(_TEXT[name], tuple(self.freeze(value) for value in args))

    def truth(self, value: Any) -> Any:
        record = self.heap.record_of(value)
        if isinstance(record, DictRecord):
            length = record.length()
            if length is not None:
                return length > 0
        if isinstance(value, Later):
            self.heap.refuse("SFX106", "branches on a value that is known only after the step")
        if type(value) is compat.FakeTensor:
            known = constant_value(self.tracer, value)
            if known is not None:
                return bool(known)
        self.touch(value)
        return self.guarded(bool, (value,), {})

    def touch(self, value: Any, deep: bool = True) -> None:
        """C code is about to read a container: bring its contents in, nested ones too if ``deep``."""
        record = self.heap.by_shadow.get(id(value))
        if record is not None and record.shadow is value:
            if isinstance(record, (ListRecord, DictRecord, SetRecord)):
                if not record.filled:
                    record.fill()
            elif isinstance(record, InstanceRecord) and compares_in_python(type(value)):
                record.fill()  # C code that hashes or compares it runs Python methods on the shadow itself
            else:
                return
        if not deep:
            return
        if isinstance(value, (list, tuple, set)):
            for item in value:
                if type(item) not in PLAIN_TYPES:
                    self.touch(item)
        elif isinstance(value, dict):
            for item in dict.values(value):
                if type(item) not in PLAIN_TYPES:
                    self.touch(item)

    # --- calls ---------------------------------------------------------------------------------------------------

    def intercept_call(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cls = type(fn)
        if isinstance(fn, type) or (cls in _HASHABLE and isinstance(getattr(fn, "__self__", None), _NO_OWNER)):
            handler = registry.INTERCEPTORS.get(fn)
            if handler is not None:
                answer = handler(self, args, kwargs)
                if answer is not ABSENT:
                    return answer
        if cls is types.FunctionType:
            handlers = self._methods.get(fn.__name__)
            if handlers and args:
                for base, handler in handlers:
                    if isinstance(args[0], base):
                        answer = handler(self, args, kwargs)
                        if answer is not ABSENT:
                            return answer
            if fn.__name__ == "graph_break" and fn.__module__.startswith("torch._dynamo"):
                return None
            file = fn.__code__.co_filename
            if file.endswith(_DISABLERS) and file.startswith(_TORCH_DIR):
                inner = getattr(fn, "_torchdynamo_orig_callable", None) or getattr(fn, "__wrapped__", None)
                if inner is not None:
                    return self.interp.call(inner, args, kwargs)
        if fn is int or fn is float or fn is bool:
            return natives.convert_number(self, fn, args)
        if isinstance(getattr(fn, "__self__", None), str) and contains_later([*args, *kwargs.values()]):
            return Later(fn, tuple(self.freeze(value) for value in args), self.freeze(kwargs))
        if policy.is_deferred(fn, args):
            self.defer(fn, args, kwargs)
            return None
        if cls is weakref.ReferenceType:
            record = self.heap.record_of(fn)
            if record is not None:
                return self.heap.shadow(fn(), self.heap.sources.call(record.base))
            return ABSENT
        if isinstance(getattr(fn, "__self__", None), contextvars.ContextVar):
            return self.context.call(fn.__name__, fn.__self__, args)
        if cls is types.MethodDescriptorType and args and isinstance(args[0], contextvars.ContextVar):
            return self.context.call(fn.__name__, args[0], args[1:])
        if isinstance(getattr(fn, "__self__", None), opaque.LOCKS):
            return opaque.lock_method(fn.__name__)
        if cls is types.MethodDescriptorType and args and isinstance(args[0], opaque.LOCKS):
            return opaque.lock_method(fn.__name__)
        if cls is functools._lru_cache_wrapper:
            return self.interp.call(fn.__wrapped__, args, kwargs)
        if cls is types.BuiltinFunctionType or cls is types.BuiltinMethodType:
            return natives.container_method(self, fn, args, kwargs)
        return ABSENT

    def native_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch_call = policy.is_torch_callable(fn)
        if not torch_call:
            owner = getattr(fn, "__self__", None)
            if type(owner) in CONTAINERS or self.heap.record_of(owner) is not None:
                self.touch(owner, deep=fn.__name__ in _DEEP_METHODS)
                if fn.__name__ in _STORING_METHODS:
                    args = tuple(natives.concrete(value) for value in args) if type(owner) is set else args
                    return self.guarded(fn, args, kwargs)
                if isinstance(owner, (dict, set)):
                    args = tuple(natives.concrete(value) for value in args)
            self._fill_owner(fn, args)
            self._refuse_unshadowed(fn, args)
            if not policy.is_pure(fn) and not (isinstance(fn, type) and id(fn.__new__) in _BARE):
                self._refuse_call(fn)
        elif getattr(fn, "__name__", "") in _READS_VALUE:
            owner = getattr(fn, "__self__", None)
            owner = owner if isinstance(owner, torch.Tensor) else args[0] if args else None
            known = constant_value(self.tracer, owner) if isinstance(owner, torch.Tensor) else None
            if known is not None:
                return getattr(known, fn.__name__)()
            if fn.__name__ == "tolist":
                self.heap.refuse("SFX106", "Tensor.tolist asks for values that exist only when the graph runs")
        elif getattr(fn, "__name__", "") in policy.VALUE_METHODS:
            self.heap.refuse("SFX106", f"{policy.describe(fn)} asks for values that exist only when the graph runs")
        if id(fn) in _BARE:
            return self.guarded(fn, args, kwargs)
        for value in args:
            self.touch(value)
        for value in kwargs.values():
            self.touch(value)
        if not torch_call and not isinstance(fn, type) and id(fn) not in natives.ARITHMETIC:
            substitute = natives.number_function(self, fn, args)
            if substitute is not ABSENT:
                return substitute
            for value in args:
                if isinstance(value, Later):
                    self.heap.refuse("SFX106", f"{policy.describe(fn)} of a value that is known only after the step")
        return self.guarded(fn, args, kwargs)

    def _fill_owner(self, fn: Any, args: tuple[Any, ...]) -> None:
        """C methods that every object has (``__reduce_ex__``, ``__dir__``...) read the whole instance."""
        owner = getattr(fn, "__self__", None)
        if owner is None and isinstance(fn, (types.MethodDescriptorType, types.WrapperDescriptorType)) and args:
            owner = args[0]
        record = self.heap.record_of(owner)
        if isinstance(record, InstanceRecord) and fn.__name__ not in _READS_NOTHING:
            record.fill()

    def _refuse_unshadowed(self, fn: Any, args: tuple[Any, ...]) -> None:
        """C code must not get hold of an outside object that has no shadow and could be changed."""
        for value in (getattr(fn, "__self__", None), *args):
            record = self.heap.by_shadow.get(id(value))
            if record is not None and record.shadow is value and record.unshadowed:
                kind = type(value).__qualname__
                self.heap.refuse("SFX104", f"{policy.describe(fn)} gets {record.source.label}, a {kind}")

    def guarded(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs C code; torch's complaints about values it cannot know stop the capture."""
        try:
            return fn(*args, **kwargs)
        except compat.data_dependent_errors() as error:
            raise Unsupported("SFX101", first_line(error), self.locate()) from error
        except compat.unsupported_fake_errors() as error:
            raise Unsupported("SFX102", first_line(error), self.locate()) from error
        except Exception as error:
            self.last_error = (error, fn, self.locate())
            raise

    def _refuse_call(self, fn: Any) -> None:
        owner = getattr(fn, "__self__", None)
        if isinstance(owner, torch.Generator):
            self.heap.refuse("SFX110", f"calls torch.Generator.{fn.__name__}")
        self.heap.refuse("SFX103", f"calls {policy.describe(fn)}, which may have effects outside the step")

    def callback(self, fn: Any, reenter: Callable[..., Any]) -> Any:
        return reenter

    def defer(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Replays a call after the graph, with its arguments as they are now."""
        frozen = tuple(self.freeze(value) for value in args)
        self.deferred.append(DeferredCall(fn, frozen, self.freeze(kwargs), self.locate()))

    def defer_for_result(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallResult:
        """Replays a call after the graph; what it returns may be stored, returned or given to other such calls."""
        self.defer(fn, args, kwargs)
        result = self.deferred[-1].result = CallResult()
        return result

    def freeze(self, value: Any) -> Any:
        """A copy of containers, and tensors as they are at this moment."""
        if isinstance(value, torch.Tensor) and self.tracer.has_node(value):
            return TensorMoment(value, self.tracer.node_of(value), value._version, self.tracer.last_node())
        if type(value) in (list, tuple, set, dict):
            self.touch(value)
            if type(value) is dict:
                return {key: self.freeze(item) for key, item in value.items()}
            return type(value)(self.freeze(item) for item in value)
        return value


def compares_in_python(cls: type) -> bool:
    """True if hashing or comparing an instance runs Python code that reads its attributes."""
    known = _COMPARES.get(cls)
    if known is None:
        methods = (getattr(cls, name, None) for name in ("__hash__", "__eq__", "__lt__"))
        known = any(isinstance(method, types.FunctionType) for method in methods)
        known = _COMPARES[cls] = known and not issubclass(cls, torch.nn.Module)
    return known


def first_line(error: BaseException) -> str:
    """An error's first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


_NUMBER_TYPES: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool, Later: str}
_SHALLOW = frozenset({"getitem", "setitem", "delitem", "iter", "next"})
_STORING_METHODS = frozenset({"append", "appendleft", "insert", "add", "setdefault", "__setitem__", "discard"})
_DEEP_METHODS = frozenset({"index", "count", "remove", "sort", "__eq__", "__ne__", "__lt__", "__contains__"})
_READS_NOTHING = frozenset(
    {"__init__", "__new__", "__setattr__", "__delattr__", "__getattribute__", "__init_subclass__", "__class__"}
)
_READS_VALUE = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__"})
_TRACED = frozenset({compat.FakeTensor, *NUMBERS})
_TEXT: dict[str, Callable[..., Any]] = {
    "format": format,
    "str": str,
    "repr": repr,
    "ascii": ascii,
    "build_string": join_text,
}
_HASHABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_NO_OWNER = (type(None), types.ModuleType, type)
_DISABLERS = ("_compile.py", "eval_frame.py")
_TORCH_DIR = torch.__path__[0]
