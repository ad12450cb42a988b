"""The table of outside objects and their shadows.

Every outside object that the traced program reaches passes through :meth:`ShadowTable.shadow` once. The result is safe
to change: the object itself if it is immutable, a fake tensor for a tensor, and a real object of the same class with
shadow contents for everything else.
"""

from __future__ import annotations

import enum
import functools
import itertools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.capture.guards.specialization import Specialization
from sidefx_train.compile.capture.guards.storage_guards import StorageSharing
from sidefx_train.compile.capture.recording.tracer import GraphTracer
from sidefx_train.compile.capture.recording.write_log import WriteLog
from sidefx_train.compile.capture.shadows import transient_objects
from sidefx_train.compile.capture.shadows.aliased_inputs import AliasedInputs
from sidefx_train.compile.capture.shadows.containers import iterators
from sidefx_train.compile.capture.shadows.containers.cells_and_globals import CellRecord, NamespaceRecord
from sidefx_train.compile.capture.shadows.containers.instance_dicts import InstanceDictRecord
from sidefx_train.compile.capture.shadows.containers.known_iterators import known_iterator
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import DictRecord
from sidefx_train.compile.capture.shadows.containers.mapping_views import view_shadow
from sidefx_train.compile.capture.shadows.containers.outside_counts import count_record
from sidefx_train.compile.capture.shadows.containers.traversal import DICT_VIEWS
from sidefx_train.compile.capture.shadows.definition_tracking import Definitions
from sidefx_train.compile.capture.shadows.factories import (
    builtin_method_shadow,
    container_shadow,
    derived_shadow,
    instance_shadow,
    member_shadow,
    method_shadow,
    partial_shadow,
    passthrough,
    slice_shadow,
    tuple_shadow,
    weak_shadow,
)
from sidefx_train.compile.capture.shadows.finalizers import retire
from sidefx_train.compile.capture.shadows.identity_tracking import Identities
from sidefx_train.compile.capture.shadows.interfaces import ShadowTableAPI
from sidefx_train.compile.capture.shadows.objects import outside_exceptions, weak_references
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord, MadeArrays, array_shadow
from sidefx_train.compile.capture.shadows.objects.shown_classes import ShownClasses
from sidefx_train.compile.capture.shadows.objects.storage_rebinding import StorageRebinding
from sidefx_train.compile.capture.shadows.objects.tensors import tensor_shadow
from sidefx_train.compile.capture.shadows.outside_numbers import OutsideNumbers
from sidefx_train.compile.capture.shadows.passed_values import PassedValues
from sidefx_train.compile.capture.shadows.records import (
    OVERWRITTEN,
    UNREAD,
    InstanceRecord,
    LeafRecord,
    Record,
    TensorRecord,
)
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.distributed_models import refuse_if_distributed
from sidefx_train.compile.common.host_programs import OF_NUMPY
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.plain_values import CONTAINERS, DEFINITIONS, is_derived, is_member_of_c_enum, is_plain
from sidefx_train.compile.common.positioned_iterators import TYPES, WRAPPERS, exposes_position
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import deletes, safe_isinstance
from sidefx_train.errors import Location

BY_IDENTITY: tuple[type, ...] = (
    bool,
    type(None),
    type(Ellipsis),
    type(NotImplemented),
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.qscheme,
    enum.Enum,
    *(type(info) for info in (sys.version_info, sys.flags, sys.float_info, sys.int_info, sys.hash_info)),
)
BY_VALUE: tuple[type, ...] = (str, bytes, complex, torch.device, torch.Size, range, np.generic)
PASSED_THROUGH: tuple[type, ...] = (
    *DEFINITIONS,
    types.CodeType,
    types.BuiltinMethodType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
    types.MethodWrapperType,
    property,
    staticmethod,
    classmethod,
    functools.partial,
    *compat.OPERATORS,
    *compat.DISTRIBUTED_CONSTANTS,
)


class ShadowTable(ShadowTableAPI):
    """Shadows, records and guards of one capture.

    Args:
        tracer: makes tensors and symbolic numbers graph inputs.
        locate: returns the user's line that is being interpreted.
        written_names: names that the running code stores to; a number read under such a name is symbolic.
        specialization: the values treated as changing.
        is_part: the step follows a graph break: floats among its arguments change at every call.

    Attributes:
        sizes: symbolic sizes and strides of inputs, with their sources.
        numbers: numbers from outside.
        unknown_iterators: labels of iterators whose items the step has changed.
        symbolic_roots: ids of sources below which floats are symbolic.
        iterators: sources of iterators whose position is guarded.
        watched: ids of outside objects that the step reached through weak references, with the label of one.
        memories: storage sharing of held tensors, one object per set of tensors.
        dropped: called when the program drops an iterator with a pending finally.
        decides: called when the step reads all of a list whose length has changed: like a decision on a number.
        ragged: fake tensors of offsets or lengths, by the number of their ragged dimension.
        ragged_dims: dimensions of tensors inside jagged tensors that change with the rows, by id of the source.
        fixed_roots: ids of sources below which sizes of tensors are never symbolic.
        dtensor_rules: operators that torch's dispatch of DTensors had rules for at entry; empty if that is not known.
        identities: the objects that the step distinguished.
        shown: tensors of subclasses without a ``__torch_dispatch__``.
        reenter: wraps a Python callable so that C code calling it re-enters the interpreter.
        own_key: prepares a shadow for hashing and comparison by the table's own bookkeeping.
        definitions: definitions read from modules and classes.
        memory: tensors whose storage was replaced.
        passed: values that change at every call and are passed on.
        new_namespaces: instance dicts, read by the step, of instances that it created, with the instance.
    """

    numbers: OutsideNumbers
    definitions: Definitions
    identities: Identities
    memory: StorageRebinding

    def __init__(
        self,
        tracer: GraphTracer,
        locate: Callable[[], Location | None],
        written_names: Callable[[], Iterable[str]],
        specialization: Specialization,
        is_part: bool,
    ) -> None:
        super().__init__(locate)
        self.tracer = tracer
        self.written_names = written_names
        self.specialization = specialization
        self.is_part = is_part
        self.by_real: dict[int, Record] = {}
        self.by_shadow: dict[int, Record] = {}
        self.in_memory: dict[int, list[TensorRecord]] = {}
        self.outside_nodes: dict[int, TensorRecord] = {}  # by id of the node that stands for a tensor's history
        self.leaves: list[TensorRecord] = []  # tensors whose gradients may be accumulated
        self.accumulators: list[Any] = []  # hooked nodes of shadows
        self.cells: dict[int, CellRecord] = {}
        self.namespaces: dict[int, NamespaceRecord] = {}
        self.new_namespaces: dict[int, tuple[dict[str, Any], Any]] = {}
        self.numbers = OutsideNumbers(self)
        self.reenter: Callable[[Any], Any] = _not_callable_yet
        self.dropped: Callable[[str], None] = _not_callable_yet
        self.decides: Callable[[], None] = _not_callable_yet
        self.own_key: Callable[..., Any] = _not_callable_yet
        self.identities = Identities(self)
        self.aliased = AliasedInputs(self)
        self.made_arrays = MadeArrays()
        self.shown = ShownClasses(self)
        self.ragged: dict[int, torch.Tensor] = {}
        self.ragged_dims: dict[int, int] = {}
        self.passed = PassedValues(self)
        self.iterators: list[Source] = []
        self.watched: dict[int, str] = {}
        self.memories: dict[Any, StorageSharing] = {}
        self.sizes: list[tuple[Any, Source]] = []
        self.unknown_iterators: set[str] = set()
        self.symbolic_roots: set[int] = set()
        self.static_roots: set[int] = set()
        self.host_roots: set[int] = set()
        self.fixed_roots: set[int] = set()
        self.dtensor_rules: tuple[Any, ...] = ()
        self._trusted: dict[int, bool] = {}
        self.definitions = Definitions(self)
        self.memory = tracer.memory = StorageRebinding(self)

    # --- shadows -------------------------------------------------------------------------------------------------

    def trusts(self, namespace: dict[str, Any]) -> bool:
        """Returns True for installed packages and the standard library: their definitions are guarded by namespace."""
        found = self._trusted.get(id(namespace))
        if found is None:
            found = self._trusted[id(namespace)] = is_library(str(namespace.get("__name__", "")))
        return found

    def shadow(self, real: Any, source: Source, name: str = "") -> Any:
        """Returns the shadow of an outside object.

        Args:
            real: the object.
            source: the path from which it was read.
            name: the attribute or key it was read under, if any.
        """
        cls = type(real)
        if cls is int or cls is float:
            return self.numbers.shadow(real, source, name)
        passed = self.passed.shadow(real, source)
        if passed is not ABSENT:
            return passed
        record = self.by_real.get(id(real))
        if record is not None:
            if type(record) is InstanceDictRecord:
                record.fill()
            if record.source is not source:
                copy = self.aliased.copy(record, source)
                if copy is not ABSENT:
                    return self.shadow(copy, source, name)
                self._same(record, source)
            return record.shadow
        if cls is bool and (source.label in self.specialization.symbolic_numbers or source.is_picked):
            return self.numbers.truth(real, source)
        if issubclass(cls, BY_IDENTITY):
            self.guard("is", source, real)
            return member_shadow(self, real, source) if issubclass(cls, enum.Enum) else real
        if is_member_of_c_enum(real):
            self.guard("is", source, real)
            return real
        if is_derived(cls) and not issubclass(cls, np.generic):
            return derived_shadow(self, real, source)
        if cls is np.float64 and self.below(source, self.symbolic_roots):
            return self.numbers.shadow(real, source, name)
        if cls in OF_NUMPY and source.label in self.specialization.symbolic_numbers:
            return self.numbers.shadow_of_numpy(real, source)
        if cls is np.ndarray and not real.dtype.hasobject:
            return self.register(array_shadow(self, real, source))
        if issubclass(cls, BY_VALUE) or cls is frozenset:
            if cls is frozenset and not all(is_plain(item) or safe_isinstance(item, DEFINITIONS) for item in real):
                self.refuse("SFX104", f"{source.label} is a frozenset of objects that are not plain values")
            self.guard("equal", source, real)
            return real
        if issubclass(cls, torch.Tensor):
            return tensor_shadow(self, real, source)
        if issubclass(cls, tuple):
            return tuple_shadow(self, real, source)
        if cls is slice:
            return slice_shadow(self, real, source)
        if cls in CONTAINERS or issubclass(cls, (dict, list, deque, set)):
            return container_shadow(self, real, source)
        if cls is types.MethodType:
            return method_shadow(self, real, source)
        if cls is types.CellType:
            return self._cell(real, source)
        handed_in = source.from_arguments or source.label in self.specialization.refetched
        if cls is itertools.count and not (self.is_part and handed_in):
            counted = count_record(self, real, source)
            if counted is not None:
                return self.register(counted)
        if (cls is itertools.cycle or cls in TYPES) and not handed_in:
            known = known_iterator(self, real, source, iterators.refusal(self, source))
            if known is not None:
                return self.register(known)
        if cls in iterators.OPAQUE:
            return self.register(iterators.outside_iterator(self, real, source))
        if cls in TYPES:
            native = not handed_in or source.label in self.specialization.native_iterators
            if native or not exposes_position(real):
                return self.register(iterators.outside_iterator(self, real, source))
            self.iterators.append(source)
            if cls in WRAPPERS:
                self.guard("exposes_position", source, True)
            made = iterators.shadow_iterator(self, real, source)
            return self.register(iterators.IteratorRecord(self, real, made, source))
        if cls in (types.BuiltinMethodType, types.MethodWrapperType) and _has_owner(real):
            return builtin_method_shadow(self, real, source)
        if type(real) is functools.partial:
            return partial_shadow(self, real, source)
        if issubclass(cls, weakref.ReferenceType):
            return weak_shadow(self, real, source)
        if issubclass(cls, BaseException):
            return outside_exceptions.exception_record(self, real, source, self.bind(real, source)).shadow
        if cls is types.MappingProxyType or cls in DICT_VIEWS:
            return view_shadow(self, real, source)
        if cls is types.FunctionType and transient_objects.is_transient(self, real, source):
            return transient_objects.function(self, real, source).shadow
        if issubclass(cls, PASSED_THROUGH) or cls.__module__ == "typing" or compat.is_operator_of_functions(cls):
            return passthrough(self, real, source)
        if issubclass(cls, torch.nn.Module):
            refuse_if_distributed(real, source.label, self.locate())
        return instance_shadow(self, real, source)

    def shadows(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the shadows of the step's positional arguments."""
        return tuple(self.shadow(value, self.sources.arg(i)) for i, value in enumerate(args))

    def record_of(self, shadow: Any) -> Record | None:
        """Returns the record of a shadow, or ``None`` for an object created in the trace."""
        record = self.by_shadow.get(id(shadow))
        return record if record is not None and record.shadow is shadow else None

    def real_key(self, key: Any) -> Any:
        """Returns the outside object of a dict key of the trace, or :data:`ABSENT`."""
        record = self.record_of(key)
        if record is not None:
            return record.real
        if safe_isinstance(key, weakref.ReferenceType):
            return weak_references.real_ref(self, key)
        if safe_isinstance(key, tuple) and not is_plain(key):
            parts = [self.real_key(part) for part in key]
            return ABSENT if any(part is ABSENT for part in parts) else tuple(parts)
        if safe_isinstance(key, torch.Tensor):
            return ABSENT
        return key

    def shadow_key(self, real_key: Any, base: Source, position: int) -> Any:
        """Returns the shadow of a dict's key; the dict's ``keys`` guard covers keys."""
        if is_plain(real_key) or safe_isinstance(real_key, (*BY_IDENTITY, *BY_VALUE, *PASSED_THROUGH)):
            return real_key
        place = self.sources.const(real_key, f"key {position} of {base.label}")
        return self.own_key(self.shadow(real_key, place), pin=False)

    def cell(self, cell: types.CellType, label: str) -> CellRecord:
        record = self.cells.get(id(cell))
        if record is None:
            record = self.cells[id(cell)] = CellRecord(self, cell, self.sources.const(cell, label))
        return record

    def _cell(self, real: types.CellType, source: Source) -> types.CellType:
        """Returns the shadow of a cell reached as a value: by its own path, since a part gets new cells at every
        call."""
        known = self.cells.get(id(real))
        if known is not None:
            if known.source is not source:
                self.guard("is" if known.source.kind == "const" else "same", source, _identity(known))
            return real
        self.guard("type", source, types.CellType)
        self.cells[id(real)] = CellRecord(self, real, source)
        return real

    def namespace(self, space: dict[str, Any]) -> NamespaceRecord:
        record = self.namespaces.get(id(space))
        if record is None:
            label = str(space.get("__name__", "globals"))
            record = self.namespaces[id(space)] = NamespaceRecord(self, space, self.sources.const(space, label))
        return record

    def register(self, record: Record) -> Any:
        """Adds the record of a new object and returns its shadow."""
        self.by_real[id(record.real)] = record
        self.by_shadow[id(record.shadow)] = record
        return record.shadow

    def _same(self, record: Record, source: Source) -> None:
        by_identity = record.kind == "static" if safe_isinstance(record, TensorRecord) else record.base.kind == "const"
        if by_identity:
            self.guard("is", source, record.real)
        else:
            self.guard("same", source, record.source)

    def bind(self, real: Any, source: Source) -> Source:
        """Guards the identity of an object and returns the path that starts at it; guards arguments by type."""
        if source.kind == "const":
            return source
        if source.kind == "call":  # a weak reference has one referent, which must be free to die
            self.guard("type", source, type(real))
            return source
        by_type = source.from_arguments and not issubclass(type(real), (torch.nn.Module, torch.optim.Optimizer))
        if by_type or source.label in self.specialization.refetched:
            self.guard("type", source, type(real))
            return source
        self.guard("is", source, real)
        base = self.sources.const(real, source.label)
        self.guard("type", base, type(real))  # ``obj.__class__ = ...`` keeps the identity
        self._inherit(source, base)
        return base

    def _inherit(self, source: Source, base: Source) -> None:
        if self.below(source, self.symbolic_roots):
            self.symbolic_roots.add(id(base))
        if self.below(source, self.static_roots):
            self.static_roots.add(id(base))
        if self.below(source, self.host_roots):
            self.host_roots.add(id(base))

    def ragged_size(self, fake: torch.Tensor) -> torch.SymInt:
        """Returns the size of the ragged dimension that a fake tensor of offsets or lengths stands for."""
        size = compat.number_ragged_size(fake)
        self.ragged[compat.parts_of_ragged_size(size)[0]] = fake
        return size

    def read_grad(self, fake: Any) -> None:
        """Reads and guards the gradient of a leaf before anything uses it or accumulates into it."""
        record = self.record_of(fake)
        if not safe_isinstance(record, (TensorRecord, LeafRecord)) or record.grad is not UNREAD:
            return
        grad = record.real.grad
        shadow = self.shadow(grad, self.sources.grad(record.source))
        if grad is not None:
            fake.grad = shadow
        record.grad = shadow

    def entry_grad(self, fake: Any) -> Any:
        """Returns the shadow of the gradient that a leaf had at the beginning, also after the step has replaced it."""
        record = self.record_of(fake)
        assert safe_isinstance(record, TensorRecord), "a leaf from outside"
        self.read_grad(fake)
        if record.grad is OVERWRITTEN:
            record.grad = self.shadow(record.real.grad, self.sources.grad(record.source))
        return record.grad

    def overwrite_grad(self, fake: Any) -> None:
        """Records that a gradient is replaced: its old value does not matter if nothing has read it."""
        record = self.record_of(fake)
        if safe_isinstance(record, (TensorRecord, LeafRecord)) and record.grad is UNREAD:
            record.grad = OVERWRITTEN

    def retire(self) -> None:
        """Prevents ``__del__`` of shadows: only the real object runs it.

        Remains of the capture may live for a while; they must not keep real objects alive.
        """
        for record in self.by_real.values():
            shadow = record.shadow
            if safe_isinstance(record, InstanceRecord) and shadow is not record.real and deletes(type(shadow)):
                retire(shadow)
            record.real = None
        for table in (self.by_real, self.by_shadow, self.cells):
            table.clear()

    # --- special attributes ---------------------------------------------------------------------------------------

    def instance_attr(self, record: InstanceRecord, name: str) -> Any:
        """Returns an entry of an instance's ``__dict__``; marks values below optimizer groups, parameters and
        buffers."""
        value = record.get(name)
        if value is not ABSENT and name in _MARKED_NAMES:
            source = self.sources.attr(record.base, name)
            for cls, attribute in registry.SYMBOLIC_FLOATS:
                if attribute == name and safe_isinstance(record.real, cls):
                    self.symbolic_roots.add(id(source))
            for cls, attribute in registry.STATIC_ATTRIBUTES:
                if attribute == name and safe_isinstance(record.real, cls):
                    self.static_roots.add(id(source))
            for cls, attribute in registry.READ_ON_HOST:
                if attribute == name and safe_isinstance(record.real, cls):
                    self.host_roots.add(id(source))
        return value

    def below(self, source: Source | None, roots: set[int]) -> bool:
        while source is not None:
            if id(source) in roots:
                return True
            source = source.parent
        return False

    def check_arrays(self, writes: WriteLog) -> None:
        """Checks the uses of arrays in the step.

        Raises:
            Unsupported: an array is read and written, or shares memory with a tensor and leaves the step.
        """
        self.made_arrays.check(self, writes)
        for record in list(self.by_real.values()):
            if safe_isinstance(record, ArrayRecord):
                record.check(writes)

    def dict_record(self, shadow: Any) -> DictRecord | None:
        record = self.record_of(shadow)
        return record if safe_isinstance(record, DictRecord) else None


def _not_callable_yet(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the heap has no interpreter to call back into")


_MARKED_NAMES = {"param_groups", "state", "_parameters", "_buffers"}


def _identity(record: CellRecord) -> Any:
    return record.real if record.source.kind == "const" else record.source


def _has_owner(method: types.BuiltinMethodType) -> bool:
    return method.__self__ is not None and not safe_isinstance(method.__self__, (types.ModuleType, type))
