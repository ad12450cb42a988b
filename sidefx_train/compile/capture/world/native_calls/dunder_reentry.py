"""Re-entry from C code: special methods of the user's classes are interpreted too.

C code that hashes, compares, prints, indexes or iterates over an object calls its class's Python methods directly, past
the interpreter. During such a call, shadows and objects created in the step get a class of the same layout whose
special methods re-enter the interpreter (:class:`Reentry`).

The shadow table's own bookkeeping also hashes keys of outside dicts and sets, shadows and real objects, any number of
times. This is correct only if ``__hash__`` and ``__eq__`` merely read their operands (:class:`MethodCode`); others are
refused.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import dis
import enum
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sidefx_train.compile.capture.interpreter.bytecode_versions import ATTRIBUTE_MAY_BE_METHOD
from sidefx_train.compile.capture.interpreter.object_model.attributes import is_static
from sidefx_train.compile.capture.shadows.containers.traversal import VIEWS, held_by
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord
from sidefx_train.compile.capture.world.symbolic_numbers.concrete_numbers import concrete_within
from sidefx_train.compile.common.library_modules import is_library, is_standard
from sidefx_train.compile.common.plain_values import PLAIN_TYPES, is_plain
from sidefx_train.compile.common.sentinels import ABSENT, NATIVE_CODE
from sidefx_train.compile.common.type_checks import attribute_of, safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext


_KEPT = frozenset(
    {
        "__init__", "__new__", "__del__", "__init_subclass__", "__class_getitem__", "__set_name__", "__getattr__",
        "__getattribute__", "__setattr__", "__delattr__", "__subclasshook__", "__reduce__", "__reduce_ex__",
        "__getstate__", "__setstate__", "__copy__", "__deepcopy__", "__post_init__", "__prepare__", "__dir__",
        "__sizeof__",
    }
)  # fmt: skip
"""Special methods that C code calls only through attribute access, if at all."""
_TELLS_CLASS = frozenset({"__reduce_ex__", "__reduce__", "__getstate__"})
"""Methods of ``object`` that reveal an instance's class, for copying and pickling."""
_LEFT_ALONE = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer, enum.Enum, type, BaseException)
_HOLDS = (
    list, tuple, dict, set, frozenset, collections.deque, BaseException, types.SimpleNamespace, types.MappingProxyType,
    functools.partial, slice, *VIEWS,
)  # fmt: skip
"""Classes whose C code reads what their instances hold, also in subclasses."""
_CONVERTED = (int, float, complex, str, bytes, BaseException, enum.Enum)
"""Classes whose instances pass through a capture, or keep their class in C code."""
_COPYING = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")


def _reduces_itself(cls: type) -> bool:
    """Returns True if a class defines in Python how it is copied."""
    return any(safe_isinstance(getattr(cls, name, None), types.FunctionType) for name in _COPYING)


_OF_MAPPINGS = frozenset({"keys", "items", "values"})
"""Methods that C code looks up on a mapping to call them, as NumPy does with those for arrays."""

_set_class: Callable[[Any, type], None] = object.__dict__["__class__"].__set__


class Reentry:
    """Classes with re-entering special methods, created as needed during one capture.

    Attributes:
        swapped: objects with such a class now: (object, its own class, that class).
    """

    def __init__(self, world: CaptureContext) -> None:
        self.world = world
        self.swapped: list[tuple[Any, type, type]] = []
        self._classes: dict[type, type | None] = {}
        self._quiet: dict[int, type] = {}

    def objects(self, fn: Any, values: Iterable[Any]) -> list[Any]:
        """Returns objects in ``values``, and in plain containers among them, whose methods a call of ``fn`` may run."""
        called = type(fn).__call__
        if type(fn) is types.FunctionType or type(called) is not types.WrapperDescriptorType:  # Python code is called
            return []
        values = list(values)
        if attribute_of(fn, "__name__", "") in _TELLS_CLASS and not any(
            _reduces_itself(type(value)) for value in values
        ):
            return []  # they would reveal the re-entering class
        found: dict[int, Any] = {}
        for value in values:
            if type(value) not in PLAIN_TYPES:
                self._collect(value, found, 0)
        return list(found.values())

    def _refuse_unquiet(self, value: Any) -> None:
        """Refuses to give C code an object that cannot get another class, if its methods do more than read it."""
        cls = type(value)
        if is_library(cls.__module__) or not issubclass(cls, _CONVERTED) or id(cls) in self._quiet:
            return
        if not MethodCode(cls, CONVERTING).only_looks:
            what = f"gives C code a {cls.__qualname__}, which it converts by methods written in Python"
            self.world.heap.refuse("SFX111", what)
        self._quiet[id(cls)] = cls

    @contextlib.contextmanager
    def around(self, objects: list[Any]) -> Iterator[None]:
        """Context in which special methods of ``objects`` re-enter the interpreter."""
        outer = self.swapped
        self.swapped = list(outer)
        added: list[tuple[Any, type, type]] = []
        try:
            for value in objects:
                cls = type(value)
                substitute = self._classes[cls]
                assert substitute is not None, f"{cls.__qualname__} was collected without a re-entering class"
                try:
                    _set_class(value, substitute)
                except TypeError:  # another memory layout
                    special = tuple(name for name in vars(substitute) if name.startswith("__"))
                    if not MethodCode(cls, special).only_looks:
                        what = f"gives C code a {cls.__qualname__}, whose methods written in Python it may call"
                        self.world.heap.refuse("SFX111", what)
                    continue
                added.append((value, cls, substitute))
            self.swapped += added
            yield
        finally:
            self.swapped = outer
            for value, cls, substitute in added:
                if type(value) is substitute:
                    _set_class(value, cls)

    def handed(self, value: Any) -> Any:
        """Returns a result that C code will read; an array whose numbers are only known at each call is refused."""
        record = self.world.heap.record_of(value) if type(value) is np.ndarray else None
        if safe_isinstance(record, ArrayRecord) and record.computed:
            record.fill()
        return value

    def outside(self, run: Callable[[], Any]) -> Any:
        """Calls ``run()``, interpreted code called by C code: it sees all objects with their own classes."""
        swapped = self.swapped
        self.swapped = []
        for value, cls, _ in swapped:
            _set_class(value, cls)
        try:
            return run()
        finally:
            self.swapped = swapped
            for value, cls, substitute in swapped:
                if type(value) is cls:
                    _set_class(value, substitute)

    def _collect(self, value: Any, found: dict[int, Any], depth: int) -> None:
        cls = type(value)
        if cls in (list, tuple, set, frozenset):
            if depth < 4:
                for item in value:
                    self._collect(item, found, depth + 1)
        elif cls is dict:
            if depth < 4:
                for key, item in value.items():
                    self._collect(key, found, depth + 1)
                    self._collect(item, found, depth + 1)
        elif is_static(cls):
            if depth < 4 and issubclass(cls, _HOLDS):
                for item in held_by(value):
                    if type(item) not in PLAIN_TYPES:
                        self._collect(item, found, depth + 1)
        elif id(value) not in found:
            if self._class_for(cls) is not None:
                record = self.world.heap.by_shadow.get(id(value))
                if record is None or (record.shadow is value and record.real is not value):
                    found[id(value)] = value
                else:
                    self._refuse_unquiet(value)
            else:
                self._refuse_unquiet(value)
            if depth < 4 and issubclass(cls, _HOLDS):
                for item in held_by(value):
                    if type(item) not in PLAIN_TYPES:
                        self._collect(item, found, depth + 1)

    def _class_for(self, cls: type) -> type | None:
        if cls not in self._classes:
            self._classes[cls] = self._make(cls)
        return self._classes[cls]

    def _make(self, cls: type) -> type | None:
        if issubclass(cls, _LEFT_ALONE) or is_library(cls.__module__):
            return None
        space: dict[str, Any] = {}
        special = False
        for base in reversed(type.__getattribute__(cls, "__mro__")):
            if is_static(base):
                continue
            for name, value in vars(base).items():
                if not (name.startswith("__") and name.endswith("__")) or name in _KEPT:
                    continue
                if type(value) is types.FunctionType:
                    space[name] = self._shim(value)
                    special = True
                elif type(value) is property:  # such as `__array_interface__`: read by `__getattribute__`
                    special = True
                elif value is None and name not in ("__doc__", "__module__"):
                    space[name] = None
        if not special:
            return None
        base = _base_of_layout(cls)
        space["__getattribute__"] = self._attribute()
        space["__module__"], space["__qualname__"] = cls.__module__, cls.__qualname__
        if not _adds(cls, "__dict__"):
            space["__slots__"] = ()
        try:
            return type(base)(cls.__name__, (base,), space)
        except TypeError:
            return None

    def _shim(self, fn: types.FunctionType) -> Callable[..., Any]:
        def shim(self_: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self.handed(self.outside(lambda: self._value(self.world.interp.call(fn, (self_, *args), kwargs))))

        NATIVE_CODE.add(id(shim.__code__))
        return shim

    def _value(self, answer: Any) -> Any:
        return concrete_within(answer) if self.world.answers_values else answer

    def _attribute(self) -> Callable[..., Any]:
        def attribute(self_: Any, name: str) -> Any:
            value = self.outside(lambda: self.world.interp.getattr(self_, name))
            called = type(value) is types.MethodType and (name.startswith("__array") or name in _OF_MAPPINGS)
            return self.world.interp.reentering(value) if called else self.handed(value)

        NATIVE_CODE.add(id(attribute.__code__))
        return attribute


def _base_of_layout(cls: type) -> type:
    """Returns a class whose subclass with a ``__dict__`` has the memory layout of ``cls``, and no code of the program.

    An abstract base class of a library may lie between ``object`` and the class that adds the ``__dict__``.
    """
    added: type | None = cls
    while added is not None and "__dict__" not in vars(added):
        added = added.__base__
    below = None if added is None else added.__base__
    if below is not None and is_standard(below.__module__):
        return below
    return next(base for base in type.__getattribute__(cls, "__mro__") if is_static(base))


def _adds(cls: type, name: str) -> bool:
    return any(name in vars(base) for base in type.__getattribute__(cls, "__mro__") if not is_static(base))


# --- keys of dicts and sets ----------------------------------------------------------------------------------------

_WRITES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE_", "IMPORT_")
_LOOKING = frozenset(
    {"hash", "isinstance", "len", "tuple", "id", "type", "super", "sorted", "frozenset", "str", "int", "repr", "min",
     "max", "sum", "abs", "all", "any", "zip", "bool", "float", "map", "NotImplemented", "getattr", "hasattr"}
)  # fmt: skip


COMPARING = ("__hash__", "__eq__")
CONVERTING = ("__str__", "__repr__", "__format__", "__float__", "__int__", "__index__", "__complex__", "__trunc__")
"""Methods by which C code converts an object to a string or a number."""


class MethodCode:
    """Some methods of a class and the Python code that they call, examined without running them.

    Attributes:
        only_looks: they change nothing, and read only the operands and :attr:`read_globals`.
        stays_inside: the same, except that they may change containers that attributes of the operands refer to.
        functions: the methods, and functions and properties that they name.
        attributes: names of the attributes that they may read.
        read_globals: (namespace, name) of functions and constants that they name.
    """

    def __init__(self, cls: type, names: tuple[str, ...], of_program: bool = True) -> None:
        """Examines the methods of ``cls`` with these names; those of libraries are trusted if ``of_program``."""
        self.cls = cls
        self.functions: dict[int, types.FunctionType] = {}
        self.attributes: set[str] = set()
        self.read_globals: list[tuple[dict[str, Any], str]] = []
        self._changes = False
        self.only_looks = self.stays_inside = True
        for name in names:
            method = getattr(cls, name, None)
            if not safe_isinstance(method, types.FunctionType):
                continue
            self._changes = False
            stays = self._is_quiet(method) and not self._has_own_lookup()
            if not (of_program and is_library(method.__globals__.get("__name__") or "")):
                self.stays_inside = self.stays_inside and stays
                self.only_looks = self.only_looks and stays and not self._changes

    def _has_own_lookup(self) -> bool:
        """Returns True if reading an attribute may run code of the program."""
        found = (getattr(self.cls, name, None) for name in ("__getattr__", "__getattribute__"))
        return any(
            safe_isinstance(each, types.FunctionType) and not is_library(each.__globals__.get("__name__") or "")
            for each in found
        )

    def _is_quiet(self, fn: types.FunctionType) -> bool:
        if id(fn) in self.functions:
            return True
        self.functions[id(fn)] = fn
        found = self._examine(fn.__code__, fn, frozenset())
        return found

    def _examine(self, code: types.CodeType, fn: types.FunctionType, cells: frozenset[str]) -> bool:
        """Returns True if code only looks; ``cells`` are variables of the functions around it."""
        cells = cells | frozenset(code.co_cellvars)
        self.attributes.update(code.co_names)
        quiet = True
        for instr in dis.get_instructions(code):
            if instr.opname.startswith(_WRITES) or (instr.opname.startswith("YIELD_") and code is fn.__code__):
                quiet = False
            elif instr.opname == "LOAD_GLOBAL":
                quiet = self._is_known_global(fn.__globals__, instr.argval) and quiet
            elif instr.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF", "STORE_DEREF"):
                quiet = quiet and (instr.argval == "__class__" or instr.argval in cells)
            elif instr.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                quiet = self._is_known_attribute(instr) and quiet
        for const in code.co_consts:
            if safe_isinstance(const, types.CodeType):
                quiet = self._examine(const, fn, cells) and quiet
        return quiet

    def _is_known_global(self, space: dict[str, Any], name: str) -> bool:
        value = space.get(name, ABSENT)
        if value is ABSENT:
            value = getattr(builtins, name, None)
            return name in _LOOKING or safe_isinstance(value, type)
        self.read_globals.append((space, name))
        if safe_isinstance(value, types.FunctionType):
            return self._is_quiet(value)
        return safe_isinstance(value, type) or is_plain(value)

    def _is_known_attribute(self, instr: dis.Instruction) -> bool:
        name = instr.argval
        value = getattr(self.cls, name, None)
        if safe_isinstance(value, property):
            value = value.fget
        if safe_isinstance(value, types.FunctionType):
            return self._is_quiet(value)
        called = instr.opname == "LOAD_METHOD" or (ATTRIBUTE_MAY_BE_METHOD and bool((instr.arg or 0) & 1))
        if name in _CHANGING:
            self._changes = True
            return True
        return not called or name in _READING


_CHANGING = (
    frozenset(name for kind in (list, dict, set, bytearray) for name in vars(kind) if not name.startswith("__"))
    - frozenset(vars(bytes))
    - frozenset({"get", "items", "keys", "values", "copy", "count", "index", "union", "intersection", "difference"})
)
_READING = frozenset(
    name
    for kind in (str, bytes, int, float, complex, tuple, list, dict, set, frozenset, object, torch.Size, torch.dtype)
    for name in (*vars(kind), *vars(object))
)
"""Methods of Python's own values. Those that change a value are excluded by name."""
