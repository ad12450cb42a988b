"""Raising and handling exceptions, ``with`` statements."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter import exceptions
from sidefx_train.compile.capture.interpreter.bytecode_versions import ENTRIES_OF_EXIT, INTRINSICS_PUSH
from sidefx_train.compile.capture.interpreter.frame import NULL, Frame
from sidefx_train.compile.capture.interpreter.object_model import attributes, iteration
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance, set_field

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.bytecode_versions import Instruction
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


def raise_varargs(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    if instr.arg == 0:
        current = interp.handled.topmost()
        if current is None:
            raise RuntimeError("No active exception to reraise")
        interp.in_flight = current
        raise current
    cause: Any = frame.pop() if instr.arg == 2 else ABSENT
    error = exceptions.as_exception(interp, frame.pop())
    if cause is not ABSENT:
        if safe_isinstance(cause, type) and issubclass(cause, BaseException):
            kind, cause = cause, interp.call(cause, (), {})
            if not safe_isinstance(cause, BaseException):
                shown = interp.type_of(cause)
                raise TypeError(f"calling {kind!r} should have returned an instance of BaseException, not {shown!r}")
        elif cause is not None and not safe_isinstance(cause, BaseException):
            raise TypeError("exception causes must derive from BaseException")
        set_field(error, "__cause__", cause)
    exceptions.set_context(error, interp.handled.topmost())
    interp.in_flight = error
    raise error


def reraise(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    error = frame.pop()
    interp.in_flight = error
    raise error


def push_exc_info(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    error = frame.pop()
    frame.push(interp.handled.value)
    interp.handled.value = error
    frame.push(error)


def pop_except(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    interp.handled.value = frame.pop()


def check_exc_match(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    kinds = frame.stack[-1]
    _check_kinds(kinds)
    frame.stack[-1] = _matches(frame.stack[-2], kinds)


def _check_kinds(kinds: Any) -> None:
    for kind in kinds if safe_isinstance(kinds, tuple) else (kinds,):
        if not (safe_isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError("catching classes that do not inherit from BaseException is not allowed")


def _matches(error: Any, kinds: Any) -> bool:
    if safe_isinstance(kinds, tuple):
        return any(issubclass_without_hooks(type(error), kind) for kind in kinds)
    return issubclass_without_hooks(type(error), kinds)


def issubclass_without_hooks(kind: type, other: type) -> bool:
    """Subclass test of ``except``: along the MRO, without ``__subclasscheck__``."""
    return other in type.__getattribute__(kind, "__mro__")


def check_eg_match(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    kinds = frame.pop()
    error = frame.pop()
    for kind in kinds if safe_isinstance(kinds, tuple) else (kinds,):
        if not (safe_isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError("catching classes that do not inherit from BaseException is not allowed")
        if issubclass(kind, BaseExceptionGroup):
            raise TypeError("catching ExceptionGroup with except* is not allowed. Use except instead.")
    match: Any = None
    rest: Any = error
    if error is not None:
        if _matches(error, kinds):
            match, rest = error, None
            if not safe_isinstance(error, BaseExceptionGroup):
                match = (
                    ExceptionGroup("", [error])
                    if safe_isinstance(error, Exception)
                    else BaseExceptionGroup("", [error])
                )
                set_field(match, "__traceback__", error.__traceback__)
        elif safe_isinstance(error, BaseExceptionGroup):
            match, rest = interp.call(interp.getattr(error, "split"), (kinds,), {})
    frame.push(rest)
    frame.push(match)
    if match is not None:
        interp.handled.value = match


def prep_reraise_star(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    original, raised = frame.take(2)
    frame.push(_reraise_star(original, iteration.to_list(interp, raised)))


def _reraise_star(original: BaseException, raised: list[Any]) -> Any:
    """Returns what to raise after all ``except*`` clauses: the new exceptions and the unhandled rest."""
    kept = [item for item in raised if item is not None]
    if not kept:
        return None
    if not safe_isinstance(original, BaseExceptionGroup):
        return kept[0]  # a naked exception was wrapped: at most one
    new = [item for item in kept if not _part_of(item, original)]
    left = [item for item in kept if _part_of(item, original)]
    if left:
        leaves = {id(leaf) for item in left for leaf in _leaves(item)}
        new.append(original.subgroup(lambda leaf: id(leaf) in leaves))
    return BaseExceptionGroup("", new) if len(new) > 1 else new[0]


def _part_of(item: Any, original: BaseException) -> bool:
    """Returns True if a clause re-raised a part of ``original``: such parts keep its metadata."""
    return (
        safe_isinstance(item, BaseExceptionGroup)
        and getattr(item, "__notes__", None) is getattr(original, "__notes__", None)
        and item.__traceback__ is original.__traceback__
        and item.__cause__ is original.__cause__
        and item.__context__ is original.__context__
    )


def _leaves(item: BaseException) -> list[BaseException]:
    if safe_isinstance(item, BaseExceptionGroup):
        return [leaf for part in item.exceptions for leaf in _leaves(part)]
    return [item]


def stopiteration_error(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    error = frame.stack[-1]
    if safe_isinstance(error, StopIteration):
        wrapped = RuntimeError("generator raised StopIteration")
        set_field(wrapped, "__cause__", error)
        set_field(wrapped, "__context__", error)
        frame.stack[-1] = wrapped


# with


def before_with(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    manager = frame.pop()
    kind = interp.type_of(manager)
    world = interp.world
    enter, leave = world.class_attr(kind, "__enter__"), world.class_attr(kind, "__exit__")
    if enter is ABSENT:
        raise TypeError(f"{kind.__name__!r} object does not support the context manager protocol")
    if leave is ABSENT:
        raise TypeError(
            f"{kind.__name__!r} object does not support the context manager protocol (missed __exit__ method)"
        )
    bound_leave = attributes.bind(interp, leave, manager, kind)
    frame.push(bound_leave)
    frame.push(interp.call(attributes.bind(interp, enter, manager, kind), (), {}))


def load_special(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    """3.14: looks up a method that a ``with`` statement calls."""
    manager, name = frame.pop(), instr.value
    kind = interp.type_of(manager)
    method = interp.world.class_attr(kind, name)
    if method is ABSENT:
        raise TypeError(_misses(interp, kind, name))
    frame.push(attributes.bind(interp, method, manager, kind))
    frame.push(NULL)


def _misses(interp: InterpreterAPI, kind: type, name: str) -> str:
    shown = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = f"{shown!r} object does not support the context manager protocol (missed {name} method)"
    asynchronous = name.replace("__", "__a", 1)
    if interp.world.class_attr(kind, asynchronous) is ABSENT:
        return text
    return f"{text} but it supports the asynchronous context manager protocol. Did you mean to use 'async with'?"


def with_except_start(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    leave, error = frame.stack[-3 - ENTRIES_OF_EXIT], frame.stack[-1]
    frame.push(interp.call(leave, (type(error), error, error.__traceback__), {}))


def cleanup_throw(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    error = frame.stack[-1]
    if not safe_isinstance(error, StopIteration):
        interp.in_flight = error
        raise error
    del frame.stack[-3:]
    frame.push(None)
    frame.push(error.value)


def print_expr(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    interp.call(sys.displayhook, (frame.pop(),), {})
    if INTRINSICS_PUSH:
        frame.push(None)


TABLE: dict[str, Any] = {
    "RAISE_VARARGS": raise_varargs,
    "RERAISE": reraise,
    "PUSH_EXC_INFO": push_exc_info,
    "POP_EXCEPT": pop_except,
    "CHECK_EXC_MATCH": check_exc_match,
    "CHECK_EG_MATCH": check_eg_match,
    "PREP_RERAISE_STAR": prep_reraise_star,
    "STOPITERATION_ERROR": stopiteration_error,
    "BEFORE_WITH": before_with,
    "LOAD_SPECIAL": load_special,
    "WITH_EXCEPT_START": with_except_start,
    "CLEANUP_THROW": cleanup_throw,
    "PRINT_EXPR": print_expr,
}
