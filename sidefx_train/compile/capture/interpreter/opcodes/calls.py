"""Calls, and creation of functions and classes."""

from __future__ import annotations

import builtins
import types
import typing
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.builtins.mappings import for_mapping
from sidefx_train.compile.capture.interpreter.bytecode_versions import ANNOTATE_IS_NAMED
from sidefx_train.compile.capture.interpreter.frame import NULL, Frame
from sidefx_train.compile.capture.interpreter.object_model import attributes, iteration
from sidefx_train.compile.common.sentinels import ABSENT, transparent
from sidefx_train.compile.common.type_checks import attribute_of, safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.bytecode_versions import Instruction
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


def _callee(frame: Frame, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Unpacks the two callable slots: ``(NULL, f)``, ``(f, NULL)`` or ``(method, self)``."""
    second = frame.pop()
    first = frame.pop()
    if first is NULL:
        return second, args
    if second is NULL:
        return first, args
    return first, (second, *args)


@transparent
def call(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    count = instr.arg
    stack = frame.stack
    if count:
        args = tuple(stack[-count:])
        del stack[-count:]
    else:
        args = ()
    kwargs = {}
    names = instr.value
    if names:
        first = count - len(names)
        kwargs = dict(zip(names, args[first:], strict=True))
        args = args[:first]
    second = stack.pop()
    callee = stack.pop()
    if callee is NULL:
        callee = second
    elif second is not NULL:
        args = (second, *args)
    stack.append(interp.call(callee, args, kwargs))


@transparent
def call_kw(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    names = frame.pop()
    args = tuple(frame.take(instr.arg))
    first = len(args) - len(names)
    callee, positional = _callee(frame, args[:first])
    frame.push(interp.call(callee, positional, dict(zip(names, args[first:], strict=True))))


@transparent
def call_function_ex(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    kwargs = frame.pop() if instr.arg & 1 else NULL
    kwargs = {} if kwargs is NULL else kwargs
    args = frame.pop()
    second = frame.pop()
    first = frame.stack[-1] if frame.stack else NULL
    callee = second
    if second is NULL:
        callee = frame.pop()
    elif first is NULL:
        frame.pop()
    if type(args) is not tuple:
        args = _unpacked(interp, callee, args)
    if type(kwargs) is not dict:
        kwargs = dict(for_mapping(interp, kwargs))
    elif interp.world.override_operator("iter", (kwargs,)) is not ABSENT:  # after a break it is an outside object
        kwargs = interp.native(dict, (kwargs,), {})
    if not all(safe_isinstance(name, str) for name in kwargs):
        raise TypeError("keywords must be strings")
    frame.push(interp.call(callee, args, dict(kwargs)))


def _unpacked(interp: InterpreterAPI, callee: Any, args: Any) -> tuple[Any, ...]:
    """Returns ``*args`` as a tuple."""
    iterator = iteration.try_iter(interp, args)
    if iterator is ABSENT:
        shown = interp.type_of(args).__name__
        raise TypeError(f"{function_name(callee)} argument after * must be an iterable, not {shown}")
    if not attributes.is_static(type(args)):
        iteration.length_hint(interp, args)
    return tuple(iteration.to_list(interp, iterator))


def function_name(callee: Any) -> str:
    """Returns CPython's name of a callable in the errors of ``*`` and ``**``."""
    qualname = attribute_of(callee, "__qualname__")
    if not safe_isinstance(qualname, str):
        return str(callee)
    module = attribute_of(callee, "__module__")
    shown = f"{module}.{qualname}" if module is not None and module != "builtins" else qualname
    return f"{shown}()"


def make_function(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    flags = instr.arg
    code = frame.pop()
    closure = frame.pop() if flags & 8 else None
    annotations = frame.pop() if flags & 4 else None
    kwdefaults = frame.pop() if flags & 2 else None
    defaults = frame.pop() if flags & 1 else None
    made = types.FunctionType(code, frame.globals, code.co_name, defaults, closure)
    interp.world.new_function(made)
    made.__qualname__ = code.co_qualname
    if kwdefaults:
        made.__kwdefaults__ = kwdefaults
    if annotations:
        made.__annotations__ = _annotations(annotations)
    frame.push(made)


def _annotations(pairs: Any) -> dict[str, Any]:
    return pairs if safe_isinstance(pairs, dict) else dict(zip(pairs[::2], pairs[1::2], strict=True))


def make_plain_function(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    """3.13 and later: creates a function without defaults; ``SET_FUNCTION_ATTRIBUTE`` adds the rest."""
    code = frame.pop()
    if code.co_freevars:
        frame.push(Pending(code))
        return
    made = types.FunctionType(code, frame.globals, code.co_name)
    interp.world.new_function(made)
    frame.push(made)
    if not code.co_freevars:
        frame.stack[-1].__qualname__ = code.co_qualname


class Pending:
    """A function whose closure is not set yet."""

    def __init__(self, code: types.CodeType) -> None:
        self.code = code
        self.attributes: list[tuple[int, Any]] = []


def set_function_attribute(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    function, value = frame.pop(), frame.pop()
    if safe_isinstance(function, Pending):
        function.attributes.append((instr.arg, value))
        if instr.arg == 8:
            attributes = function.attributes
            function = types.FunctionType(function.code, frame.globals, function.code.co_name, None, value)
            interp.world.new_function(function)
            function.__qualname__ = function.__code__.co_qualname
            for flag, item in attributes:
                _set_attribute(function, flag, item)
    else:
        _set_attribute(function, instr.arg, value)
    frame.push(function)


def _set_attribute(function: types.FunctionType, flag: int, value: Any) -> None:
    if flag == 1:
        function.__defaults__ = value
    elif flag == 2:
        function.__kwdefaults__ = value
    elif flag == 4:
        function.__annotations__ = _annotations(value)
    elif flag == 16:
        if ANNOTATE_IS_NAMED:
            value.__qualname__ = f"{function.__qualname__}.__annotate__"
        function.__annotate__ = value  # type: ignore[attr-defined]


def load_build_class(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    space = frame.globals.get("__builtins__", builtins)
    space = vars(space) if safe_isinstance(space, types.ModuleType) else space
    if "__build_class__" not in space:
        raise NameError("__build_class__ not found")
    frame.push(space["__build_class__"])


# Type parameters (3.12). Bounds and values are evaluated eagerly: nothing in a step reads them later.


def make_type_parameter(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    kind = {"MAKE_TYPEVAR": "TypeVar", "MAKE_PARAMSPEC": "ParamSpec", "MAKE_TYPEVARTUPLE": "TypeVarTuple"}[instr.name]
    options = {} if kind == "TypeVarTuple" else {"infer_variance": True}
    frame.stack[-1] = getattr(typing, kind)(frame.stack[-1], **options)


def make_bounded_typevar(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    name, evaluate = frame.take(2)
    value = interp.call(evaluate, (), {})
    if instr.name == "TYPEVAR_WITH_BOUND":
        frame.push(typing.TypeVar(name, bound=value, infer_variance=True))  # type: ignore[misc, call-arg]
    else:
        frame.push(typing.TypeVar(name, *value, infer_variance=True))  # type: ignore[misc, call-arg]


def set_typeparam_default(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    parameter, _ = frame.take(2)
    frame.push(parameter)


def set_function_type_params(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    function, parameters = frame.take(2)
    function.__type_params__ = parameters
    frame.push(function)


def subscript_generic(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    parameters = frame.pop()
    unpacked = tuple(typing.Unpack[p] if safe_isinstance(p, typing.TypeVarTuple) else p for p in parameters)
    frame.push(typing.Generic[unpacked])  # type: ignore[misc, index]


def make_type_alias(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    name, parameters, evaluate = frame.pop()
    value = interp.call(evaluate, (), {})
    made = typing.TypeAliasType(name, value, type_params=parameters or ())  # type: ignore[attr-defined]
    frame.push(made)


TABLE: dict[str, Any] = {
    "CALL": call,
    "CALL_KW": call_kw,
    "CALL_FUNCTION_EX": call_function_ex,
    "MAKE_FUNCTION": make_function,
    "MAKE_PLAIN_FUNCTION": make_plain_function,
    "SET_FUNCTION_ATTRIBUTE": set_function_attribute,
    "LOAD_BUILD_CLASS": load_build_class,
    "MAKE_TYPEVAR": make_type_parameter,
    "MAKE_PARAMSPEC": make_type_parameter,
    "MAKE_TYPEVARTUPLE": make_type_parameter,
    "TYPEVAR_WITH_BOUND": make_bounded_typevar,
    "TYPEVAR_WITH_CONSTRAINTS": make_bounded_typevar,
    "SET_TYPEPARAM_DEFAULT": set_typeparam_default,
    "SET_FUNCTION_TYPE_PARAMS": set_function_type_params,
    "SUBSCRIPT_GENERIC": subscript_generic,
    "MAKE_TYPEALIAS": make_type_alias,
}
