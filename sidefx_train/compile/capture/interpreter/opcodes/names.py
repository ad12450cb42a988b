"""Globals, names of class bodies, cells, attributes and imports."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.bytecode_versions import INTRINSICS_PUSH, NULL_IS_UPPER
from sidefx_train.compile.capture.interpreter.frame import NULL, Frame
from sidefx_train.compile.capture.interpreter.object_model import attributes
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.bytecode_versions import Instruction
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


def _global(interp: InterpreterAPI, frame: Frame, name: str) -> Any:
    value = interp.world.load_global(frame.globals, name)
    if value is ABSENT:
        raise NameError(f"name {name!r} is not defined", name=name)
    return value


def load_global(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    value = interp.world.load_global(frame.globals, instr.value)
    if value is ABSENT:
        raise NameError(f"name {instr.value!r} is not defined", name=instr.value)
    if instr.arg:
        _push_callable(frame, value)
    else:
        frame.push(value)


def _push_callable(frame: Frame, value: Any) -> None:
    """Fills the two callable slots of a call."""
    if NULL_IS_UPPER:
        frame.push(value)
        frame.push(NULL)
    else:
        frame.push(NULL)
        frame.push(value)


def store_global(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    interp.world.store_global(frame.globals, instr.value, frame.pop())


def delete_global(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    if not interp.world.delete_global(frame.globals, instr.value):
        raise NameError(f"name {instr.value!r} is not defined", name=instr.value)


def _in_namespace(interp: InterpreterAPI, space: Any, name: str) -> Any:
    if type(space) is dict:
        return space.get(name, ABSENT)
    try:
        return interp.getitem(space, name)
    except KeyError:
        interp.in_flight = None
        return ABSENT


def _is_module(frame: Frame) -> bool:
    """Returns True for code whose names are a module's globals; other namespaces are dicts of the program."""
    space = frame.namespace
    if space is not frame.globals:
        return False
    module = sys.modules.get(space.get("__name__", ""))
    return module is not None and getattr(module, "__dict__", None) is space


def load_name(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    space = frame.namespace
    value = ABSENT if _is_module(frame) else _in_namespace(interp, space, instr.value)
    frame.push(_global(interp, frame, instr.value) if value is ABSENT else value)


def store_name(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    space = frame.namespace
    if _is_module(frame):
        interp.world.store_global(space, instr.value, frame.pop())
    elif type(space) is dict:
        space[instr.value] = frame.pop()
    else:
        interp.setitem(space, instr.value, frame.pop())


def delete_name(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    space, name = frame.namespace, instr.value
    try:
        if _is_module(frame):
            found = interp.world.delete_global(space, name)
        else:
            interp.delitem(space, name)
            found = True
    except KeyError:
        interp.in_flight = None
        found = False
    if not found:
        raise NameError(f"name {name!r} is not defined", name=name)


def load_locals(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.push(frame.namespace)


def load_from_dict_or_globals(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    value = _in_namespace(interp, frame.pop(), instr.value)
    frame.push(_global(interp, frame, instr.value) if value is ABSENT else value)


def setup_annotations(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    space = frame.namespace
    if _in_namespace(interp, space, "__annotations__") is ABSENT:
        if _is_module(frame):
            interp.world.store_global(space, "__annotations__", {})
        else:
            interp.setitem(space, "__annotations__", {})


# Cells.


def make_cell(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    value = frame.locals[instr.arg]
    cell = types.CellType()
    interp.world.new_cell(cell)
    if value is not NULL:
        interp.world.store_cell(cell, value)
    frame.locals[instr.arg] = cell


def copy_free_vars(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    cells = frame.closure
    assert cells is not None, f"{frame.code.co_name} has free variables but no closure"
    frame.locals[-len(cells) :] = cells


def _empty_cell(frame: Frame, slot: int) -> None:
    name = frame.info.slots[slot]
    if name in frame.code.co_freevars:
        raise NameError(
            f"cannot access free variable {name!r} where it is not associated with a value in enclosing scope",
            name=name,
        )
    raise UnboundLocalError(f"cannot access local variable {name!r} where it is not associated with a value")


def load_deref(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    value = interp.world.load_cell(frame.locals[instr.arg])
    if value is ABSENT:
        _empty_cell(frame, instr.arg)
    frame.push(value)


def store_deref(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    interp.world.store_cell(frame.locals[instr.arg], frame.pop())


def delete_deref(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    cell = frame.locals[instr.arg]
    if interp.world.load_cell(cell) is ABSENT:
        _empty_cell(frame, instr.arg)
    interp.world.store_cell(cell, ABSENT)


def load_classderef(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    space = frame.namespace if instr.name == "LOAD_CLASSDEREF" else frame.pop()
    value = _in_namespace(interp, space, frame.info.slots[instr.arg])
    if value is ABSENT:
        value = interp.world.load_cell(frame.locals[instr.arg])
    if value is ABSENT:
        _empty_cell(frame, instr.arg)
    frame.push(value)


# Attributes.


def load_attr(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.stack[-1] = attributes.load(interp, frame.stack[-1], instr.value)


def load_method(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    value = attributes.load(interp, frame.pop(), instr.value)
    _push_callable(frame, value)


def store_attr(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    obj = frame.pop()
    attributes.store(interp, obj, instr.value, frame.pop())


def delete_attr(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    attributes.delete(interp, frame.pop(), instr.value)


def load_super_attr(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    function, cls, instance = frame.take(3)
    is_method = instr.arg & 1
    made = interp.call(function, (cls, instance) if instr.arg & 2 else (), {})
    value = attributes.load(interp, made, instr.value)
    if is_method:
        _push_callable(frame, value)
    else:
        frame.push(value)


# Imports.


def import_name(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    level, names = frame.take(2)
    importer = interp.world.load_global(frame.globals, "__import__")
    if importer is ABSENT:
        raise ImportError("__import__ not found")
    space = frame.globals
    around: dict[str, Any] = {
        key: space.get(key) for key in ("__name__", "__package__", "__spec__", "__path__") if key in space
    }
    try:
        frame.push(interp.call(importer, (instr.value, around, None, names, level), {}))
    except ImportError as error:
        name = "." * level + instr.value
        if level and around.get("__package__"):
            name = importlib.util.resolve_name(name, around["__package__"])
        interp.world.not_imported(error, name)
        raise
    interp.world.imported(instr.value, around, level)


def import_from(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    module, name = frame.stack[-1], instr.value
    value = interp.getattr_or(module, name, ABSENT)
    frame.push(_submodule(interp, module, name) if value is ABSENT else value)


def _submodule(interp: InterpreterAPI, module: Any, name: str) -> Any:
    own = getattr(module, "__name__", "<unknown module name>")
    found = interp.world.found_module(f"{own}.{name}")
    if found is not ABSENT:
        return found
    file = getattr(module, "__file__", None)
    raise ImportError(
        f"cannot import name {name!r} from {own!r} ({file or 'unknown location'})", name=own, path=file
    )  # fmt: skip


def import_star(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    module = frame.pop()
    listed = getattr(module, "__all__", None)
    names = list(listed) if listed is not None else [n for n in vars(module) if not n.startswith("_")]
    for name in names:
        value = attributes.load(interp, module, name)
        if _is_module(frame):
            interp.world.store_global(frame.globals, name, value)
        else:
            interp.setitem(frame.namespace, name, value)
    if INTRINSICS_PUSH:
        frame.push(None)


TABLE: dict[str, Any] = {
    "LOAD_GLOBAL": load_global,
    "STORE_GLOBAL": store_global,
    "DELETE_GLOBAL": delete_global,
    "LOAD_NAME": load_name,
    "STORE_NAME": store_name,
    "DELETE_NAME": delete_name,
    "LOAD_LOCALS": load_locals,
    "LOAD_FROM_DICT_OR_GLOBALS": load_from_dict_or_globals,
    "SETUP_ANNOTATIONS": setup_annotations,
    "MAKE_CELL": make_cell,
    "COPY_FREE_VARS": copy_free_vars,
    "LOAD_DEREF": load_deref,
    "STORE_DEREF": store_deref,
    "DELETE_DEREF": delete_deref,
    "LOAD_CLASSDEREF": load_classderef,
    "LOAD_FROM_DICT_OR_DEREF": load_classderef,
    "LOAD_ATTR": load_attr,
    "LOAD_METHOD": load_method,
    "STORE_ATTR": store_attr,
    "DELETE_ATTR": delete_attr,
    "LOAD_SUPER_ATTR": load_super_attr,
    "IMPORT_NAME": import_name,
    "IMPORT_FROM": import_from,
    "IMPORT_STAR": import_star,
}
