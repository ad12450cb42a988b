"""Rebuilds what can be called: functions over real cells, bound methods, partials; and properties."""

from __future__ import annotations

import functools
import gc
import types
from typing import Any

from sidefx_train.compile.capture.interpreter.bytecode_versions import docstring
from sidefx_train.compile.capture.interpreter.generators import InterpretedGenerator
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.plain_values import instance_dict_of_plain
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.source_literals import is_name
from sidefx_train.compile.common.type_checks import attribute_of, bound, descriptor_of
from sidefx_train.compile.residual.reconstruct.attributes import fill_attributes
from sidefx_train.compile.residual.reconstruct.reconstruction import Reconstruction

_COPIED = frozenset(
    {"__module__", "__name__", "__qualname__", "__doc__", "__dict__", "__wrapped__", "__annotations__", "__annotate__"}
)
"""Attributes that a static or class method copies from its function when it is created."""


def new_function(rebuilder: Reconstruction, value: types.FunctionType) -> str:
    """Returns a function that the step created, over its real cells."""
    with rebuilder.constructing():
        cells = [new_cell(rebuilder, cell) for cell in value.__closure__ or ()]
        maker = rebuilder.constant(types.FunctionType, "Function")
        defaults = rebuilder.expression(value.__defaults__) if value.__defaults__ else "None"
        code = rebuilder.constant(value.__code__, "code")
        space = _namespace(rebuilder, value)
        closure = f"({', '.join(cells)},)" if cells else "None"
        called = rebuilder.constant(value.__name__)
        name = rebuilder.remember(value, f"{maker}({code}, {space}, {called}, {defaults}, {closure})")
        _fill_function(rebuilder, name, value)
    return name


def _fill_function(rebuilder: Reconstruction, name: str, value: types.FunctionType) -> None:
    for field in ("__kwdefaults__", _annotations_field(value)):
        if getattr(value, field):
            rebuilder.write(f"{name}.{field} = {rebuilder.expression(getattr(value, field))}")
    for field in ("__doc__", "__qualname__", "__module__"):
        if getattr(value, field) != _given(value, field):
            rebuilder.write(f"{name}.{field} = {rebuilder.expression(getattr(value, field))}")
    for key, item in vars(value).items():
        rebuilder.write(f"{name}.__dict__[{rebuilder.constant(key)}] = {rebuilder.expression(item)}")


def _annotations_field(fn: types.FunctionType) -> str:
    """Returns the field that has the annotations: from 3.14 on, what computes them, until they are read."""
    if attribute_of(fn, "__annotate__") is None:
        return "__annotations__"
    known = {id(fn.__globals__), id(attribute_of(fn, "__builtins__")), id(fn.__kwdefaults__), id(fn.__dict__)}
    computed = any(type(held) is dict and id(held) not in known for held in gc.get_referents(fn))
    return "__annotations__" if computed else "__annotate__"


def _namespace(rebuilder: Reconstruction, fn: types.FunctionType) -> str:
    """Returns the globals of a function: real ones, if code executed in the step used them."""
    space = fn.__globals__
    if id(space) not in rebuilder.world.own_namespaces:
        return rebuilder.constant(space, "namespace")
    record = rebuilder.world.heap.record_of(space)
    if record is None:
        rebuilder.refuse("SFX111", f"cannot rebuild {fn.__qualname__}, which exec created")
    return rebuilder.writer.value(record.source)


def new_cell(rebuilder: Reconstruction, cell: types.CellType) -> str:
    """Returns the cell of a variable: the real one, or a new one with the variable's value."""
    outside = rebuilder.world.heap.cells.get(id(cell))
    if outside is not None:
        return rebuilder.writer.value(outside.source)
    if id(cell) not in rebuilder.world.new_cells:
        return rebuilder.constant(cell, "cell")
    known = rebuilder.name_of(cell)
    if known is None:
        known = rebuilder.named(cell, rebuilder.writer.fresh("cell"))
        rebuilder.write(f"{known} = {rebuilder.constant(types.CellType, 'Cell')}()")
        rebuilder.fill(functools.partial(_fill_cell, rebuilder, known, cell))
    return known


def _fill_cell(rebuilder: Reconstruction, name: str, cell: types.CellType) -> None:
    contents = rebuilder.world.load_cell(cell)
    if contents is not ABSENT:
        rebuilder.write(f"{name}.cell_contents = {rebuilder.expression(contents)}")


def bound_method(rebuilder: Reconstruction, method: Any, owner: str) -> str:
    """Returns a bound C method: this very one, whatever the object's class has under its name."""
    descriptor = descriptor_of(method)
    if descriptor is not None:
        return f"{rebuilder.constant(bound)}({rebuilder.constant(descriptor, method.__name__)}, {owner})"
    if attribute_of(method.__self__, method.__name__) != method:
        rebuilder.refuse(
            "SFX104",
            f"cannot rebuild {method.__name__}, a bound method that is not an attribute of its object",
        )
    return f"getattr({owner}, {rebuilder.constant(method.__name__)})"


def new_partial(rebuilder: Reconstruction, value: Any) -> str:
    """Returns a partial that the step created, of any class."""
    with rebuilder.constructing():
        parts = [*map(rebuilder.expression, (value.func, *value.args)), *keywords(rebuilder, value.keywords)]
        if type(value) is functools.partial:
            maker = rebuilder.constant(functools.partial, "partial")
        else:
            maker = rebuilder.constant(functools.partial.__new__, "new_partial")
            parts.insert(0, rebuilder.constant(type(value)))
        name = rebuilder.remember(value, f"{maker}({', '.join(parts)})")
        fill_attributes(rebuilder, name, value)
    return name


def new_descriptor(rebuilder: Reconstruction, value: Any) -> str:
    """Returns a property, static or class method that the step created."""
    cls = type(value)
    if cls is property:
        parts = [value.fget, value.fset, value.fdel]
        if value.__doc__ != getattr(value.fget, "__doc__", None):
            parts.append(value.__doc__)
    elif cls is staticmethod or cls is classmethod:
        parts = [value.__func__]
    else:
        rebuilder.refuse("SFX104", f"cannot rebuild a {cls.__qualname__} created in the step")
    with rebuilder.constructing():
        made = ", ".join(map(rebuilder.expression, parts))
        name = rebuilder.remember(value, f"{rebuilder.constant(cls)}({made})")
        for key, item in instance_dict_of_plain(value).items():  # the constructor copies those of its function
            if key not in _COPIED or getattr(value.__func__, key, None) is not item:
                rebuilder.write(f"{name}.__dict__[{rebuilder.constant(key)}] = {rebuilder.expression(item)}")
    return name


def keywords(rebuilder: Reconstruction, given: dict[str, Any]) -> list[str]:
    """Returns keyword arguments, in order; names that are not identifiers are passed in a dict."""
    return [
        f"{name}={rebuilder.expression(value)}" if is_name(name) else
        f"**{{{rebuilder.constant(name)}: {rebuilder.expression(value)}}}"
        for name, value in given.items()
    ]  # fmt: skip


def method(rebuilder: Reconstruction, value: types.MethodType) -> str:
    """Returns a bound method that the step created."""
    if type(value.__self__) is InterpretedGenerator:
        return rebuilder.remember(value, f"{rebuilder.expression(value.__self__)}.{value.__name__}")
    if type(value.__func__) is types.FunctionType:
        looked_up = registry.LOOKED_UP.get(value.__func__)
        if looked_up is not None:
            return rebuilder.remember(value, f"{rebuilder.expression(value.__self__)}.{looked_up}")
    maker = rebuilder.constant(types.MethodType, "Method")
    with rebuilder.constructing():
        parts = rebuilder.expression(value.__func__), rebuilder.expression(value.__self__)
        return rebuilder.remember(value, f"{maker}({', '.join(parts)})")


def builtin_method(rebuilder: Reconstruction, value: Any) -> str:
    """Returns a C method bound to an object of the step."""
    with rebuilder.constructing():
        return rebuilder.remember(value, bound_method(rebuilder, value, rebuilder.expression(value.__self__)))


def named_builtin(rebuilder: Reconstruction, value: Any) -> str:
    return rebuilder.constant(value, value.__name__)


def callback(rebuilder: Reconstruction, value: types.FunctionType) -> str:
    """Returns what a callback leads to that the step passed to C code."""
    if "leads_to" in vars(value):
        return rebuilder.expression(vars(value)["leads_to"])
    rebuilder.refuse("SFX104", "cannot rebuild a callback that was passed to C code")


def _given(fn: types.FunctionType, field: str) -> Any:
    """Returns the initial value of a function's field when the function is created from its code."""
    if field == "__qualname__":
        return fn.__code__.co_qualname
    if field == "__module__":
        return fn.__globals__.get("__name__")
    return docstring(fn.__code__)
