"""``match`` statements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.builtins import introspection
from sidefx_train.compile.capture.interpreter.frame import Frame
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.bytecode_versions import Instruction
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


_SELF_MATCHING = (bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple)
_IS_MAPPING, _IS_SEQUENCE = 1 << 6, 1 << 5


def match_mapping(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.push(bool(interp.type_of(frame.stack[-1]).__flags__ & _IS_MAPPING))


def match_sequence(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.push(bool(interp.type_of(frame.stack[-1]).__flags__ & _IS_SEQUENCE))


def get_len(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.push(interp.call(len, (frame.stack[-1],), {}))


def match_keys(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    subject, keys = frame.stack[-2:]
    seen: set[Any] = set()
    values: list[Any] = []
    get = interp.getattr(subject, "get") if keys else None
    for key in keys:
        if key in seen:
            raise ValueError(f"mapping pattern checks duplicate key ({key!r})")
        seen.add(key)
        value = interp.call(get, (key, ABSENT), {})
        if value is ABSENT:
            frame.push(None)
            return
        values.append(value)
    frame.push(tuple(values))


def match_class(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    subject, cls, names = frame.take(3)
    if not safe_isinstance(cls, type):
        raise TypeError("called match pattern must be a class")
    if not introspection.is_instance(interp, subject, cls):
        frame.push(None)
        return
    frame.push(_class_attributes(interp, subject, cls, instr.arg, names))


def _class_attributes(interp: InterpreterAPI, subject: Any, cls: type, count: int, names: tuple[str, ...]) -> Any:
    """Returns the values of a class pattern's sub-patterns, ``None`` if an attribute is missing."""
    values: list[Any] = []
    seen: set[str] = set()
    positional: list[str] = []
    if count:
        listed = interp.getattr_or(cls, "__match_args__", ABSENT)
        if listed is ABSENT:
            listed = ()
            if any(issubclass(cls, kind) for kind in _SELF_MATCHING):
                if count > 1:
                    raise TypeError(f"{cls.__name__}() accepts 1 positional sub-pattern ({count} given)")
                values.append(subject)
                count = 0
        if not safe_isinstance(listed, tuple):
            raise TypeError(f"{cls.__name__}.__match_args__ must be a tuple (got {type(listed).__name__})")
        if len(listed) < count:
            plural = "" if len(listed) == 1 else "s"
            raise TypeError(f"{cls.__name__}() accepts {len(listed)} positional sub-pattern{plural} ({count} given)")
        for name in listed[:count]:
            if not safe_isinstance(name, str):
                raise TypeError(f"__match_args__ elements must be strings (got {type(name).__name__})")
            positional.append(name)
    for name in (*positional, *names):
        if name in seen:
            raise TypeError(f"{cls.__name__}() got multiple sub-patterns for attribute {name!r}")
        seen.add(name)
        value = interp.getattr_or(subject, name, ABSENT)
        if value is ABSENT:
            return None
        values.append(value)
    return tuple(values)


TABLE: dict[str, Any] = {
    "MATCH_MAPPING": match_mapping,
    "MATCH_SEQUENCE": match_sequence,
    "GET_LEN": get_len,
    "MATCH_KEYS": match_keys,
    "MATCH_CLASS": match_class,
}
