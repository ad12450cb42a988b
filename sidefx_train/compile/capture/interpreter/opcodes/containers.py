"""Building and unpacking containers, comprehensions, f-strings and template strings."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.builtins.mappings import for_mapping, is_read_by_keys, pairs_of
from sidefx_train.compile.capture.interpreter.bytecode_versions import UNPACKING_COUNTS
from sidefx_train.compile.capture.interpreter.frame import NULL, Frame
from sidefx_train.compile.capture.interpreter.object_model import formatting, iteration, operators
from sidefx_train.compile.capture.interpreter.object_model.attributes import is_static
from sidefx_train.compile.capture.interpreter.opcodes.calls import function_name
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.bytecode_versions import Instruction
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


def build_tuple(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.push(tuple(frame.take(instr.arg)))


def build_list(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.push(frame.take(instr.arg))


def _simple(keys: list[Any] | tuple[Any, ...]) -> bool:
    return all(type(key) in operators.SIMPLE for key in keys)


def _update_set(interp: InterpreterAPI, target: set[Any], items: list[Any]) -> None:
    if _simple(items):
        target.update(items)
    else:
        interp.world.native_call(target.update, ([interp.world.as_key(item) for item in items],), {})


def build_set(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    made: set[Any] = set()
    _update_set(interp, made, frame.take(instr.arg))
    frame.push(made)


def build_map(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    items = frame.take(2 * instr.arg)
    _push_dict(interp, frame, items[::2], items[1::2])


def build_const_key_map(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    keys = frame.pop()
    _push_dict(interp, frame, keys, frame.take(instr.arg))


def _push_dict(interp: InterpreterAPI, frame: Frame, keys: Any, values: list[Any]) -> None:
    if _simple(keys):
        frame.push(dict(zip(keys, values, strict=True)))
        return
    made: dict[Any, Any] = {}
    for key, value in zip(keys, values, strict=True):
        operators.setitem(interp, made, key, value)
    frame.push(made)


def build_slice(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.push(slice(*frame.take(instr.arg)))


def list_append(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    value = frame.pop()
    frame.stack[-instr.arg].append(value)


def set_add(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    value = frame.pop()
    _update_set(interp, frame.stack[-instr.arg], [value])


def map_add(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    value = frame.pop()
    key = frame.pop()
    if type(key) in operators.SIMPLE:
        frame.stack[-instr.arg][key] = value
    else:
        operators.setitem(interp, frame.stack[-instr.arg], key, value)


def list_extend(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    source = frame.pop()
    target = frame.stack[-instr.arg]
    iterator = iteration.try_iter(interp, source)
    if iterator is ABSENT:
        raise TypeError(f"Value after * must be an iterable, not {interp.type_of(source).__name__}")
    if not is_static(type(source)):
        iteration.length_hint(interp, source)
    while (item := iteration.step(interp, iterator)) is not ABSENT:
        target.append(item)


def set_update(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    items = iteration.to_list(interp, frame.pop())
    _update_set(interp, frame.stack[-instr.arg], items)


def list_to_tuple(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    # After a break the list is an outside object.
    frame.stack[-1] = tuple(iteration.to_list(interp, frame.stack[-1]))


def _mapping(interp: InterpreterAPI, source: Any, failure: Callable[[], str]) -> dict[Any, Any]:
    if type(source) is dict:
        answer = interp.world.override_operator("iter", (source,))
        return source if answer is ABSENT else dict(interp.native(dict, (source,), {}))
    if interp.world.class_attr(interp.type_of(source), "keys") is ABSENT:
        raise TypeError(failure())
    return interp.native(dict, (for_mapping(interp, source),), {})


def dict_update(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    source = frame.pop()
    found = _mapping(interp, source, lambda: f"{interp.type_of(source).__name__!r} object is not a mapping")
    frame.stack[-instr.arg].update(found)


def dict_merge(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    source = frame.pop()
    target = frame.stack[-instr.arg]
    callee = frame.stack[-instr.arg - 2]
    if callee is NULL:
        callee = frame.stack[-instr.arg - 3]

    def failure() -> str:
        return f"{function_name(callee)} argument after ** must be a mapping, not {interp.type_of(source).__name__}"

    if is_read_by_keys(interp, source):
        pairs = pairs_of(interp, source)
    else:
        pairs = list(_mapping(interp, source, failure).items())
    for key, value in pairs:
        if operators.contains(interp, target, key):
            raise TypeError(f"{function_name(callee)} got multiple values for keyword argument '{key}'")
        target[key] = value


def unpack_sequence(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    source, count = frame.pop(), instr.arg
    if type(source) is tuple and len(source) == count:
        frame.stack.extend(reversed(source))
        return
    iterator = _unpackable(interp, source)
    items: list[Any] = []
    while len(items) < count:
        item = iteration.step(interp, iterator)
        if item is ABSENT:
            raise ValueError(f"not enough values to unpack (expected {count}, got {len(items)})")
        items.append(item)
    if iteration.step(interp, iterator) is not ABSENT:
        raise ValueError(_too_many(source, count))
    frame.stack.extend(reversed(items))


def _too_many(source: Any, count: int) -> str:
    got = f", got {len(source)}" if UNPACKING_COUNTS and type(source) in (list, tuple, dict) else ""
    return f"too many values to unpack (expected {count}{got})"


def _unpackable(interp: InterpreterAPI, source: Any) -> Any:
    iterator = iteration.try_iter(interp, source)
    if iterator is ABSENT:
        raise TypeError(f"cannot unpack non-iterable {interp.type_of(source).__name__} object")
    return iterator


def unpack_ex(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    before, after = instr.arg & 255, instr.arg >> 8
    source = frame.pop()
    iterator = _unpackable(interp, source)
    items: list[Any] = []
    while len(items) < before:
        item = iteration.step(interp, iterator)
        if item is ABSENT:
            raise ValueError(f"not enough values to unpack (expected at least {before + after}, got {len(items)})")
        items.append(item)
    rest = iteration.to_list(interp, iterator, hinted=True)
    if len(rest) < after:
        got = before + len(rest)
        raise ValueError(f"not enough values to unpack (expected at least {before + after}, got {got})")
    tail = rest[len(rest) - after :]
    del rest[len(rest) - after :]
    frame.stack.extend(reversed([*items, rest, *tail]))


# f-strings and template strings.

_TEMPLATES = "string.templatelib"

_CONVERSIONS = {1: formatting.to_str, 2: formatting.to_repr, 3: formatting.to_ascii}


def format_value(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    spec = frame.pop() if instr.arg & 4 else ""
    value = frame.pop()
    conversion = instr.arg & 3
    if conversion:
        value = _CONVERSIONS[conversion](interp, value)
    frame.push(value if type(value) is str and spec == "" else formatting.to_format(interp, value, spec))


def convert_value(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.stack[-1] = _CONVERSIONS[instr.arg](interp, frame.stack[-1])


def format_simple(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    value = frame.stack[-1]
    if type(value) is not str:
        frame.stack[-1] = formatting.to_format(interp, value, "")


def format_with_spec(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    spec = frame.pop()
    frame.stack[-1] = formatting.to_format(interp, frame.stack[-1], spec)


def build_interpolation(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    """3.14: one replacement field of a template string."""
    spec = frame.pop() if instr.arg & 1 else ""
    value, expression = frame.take(2)
    conversion = (None, "s", "r", "a")[instr.arg >> 2]
    frame.push(importlib.import_module(_TEMPLATES).Interpolation(value, expression, conversion, spec))


def build_template(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    strings, fields = frame.take(2)
    parts = [part for pair in zip_longest(strings, fields) for part in pair]
    frame.push(importlib.import_module(_TEMPLATES).Template(*parts[:-1]))


def build_string(interp: InterpreterAPI, frame: Frame, instr: Instruction) -> None:
    frame.push(formatting.build_string(interp, tuple(frame.take(instr.arg))))


TABLE: dict[str, Any] = {
    "BUILD_TUPLE": build_tuple,
    "BUILD_LIST": build_list,
    "BUILD_SET": build_set,
    "BUILD_MAP": build_map,
    "BUILD_CONST_KEY_MAP": build_const_key_map,
    "BUILD_SLICE": build_slice,
    "LIST_APPEND": list_append,
    "SET_ADD": set_add,
    "MAP_ADD": map_add,
    "LIST_EXTEND": list_extend,
    "SET_UPDATE": set_update,
    "LIST_TO_TUPLE": list_to_tuple,
    "DICT_UPDATE": dict_update,
    "DICT_MERGE": dict_merge,
    "UNPACK_SEQUENCE": unpack_sequence,
    "UNPACK_EX": unpack_ex,
    "FORMAT_VALUE": format_value,
    "CONVERT_VALUE": convert_value,
    "FORMAT_SIMPLE": format_simple,
    "FORMAT_WITH_SPEC": format_with_spec,
    "BUILD_STRING": build_string,
    "BUILD_INTERPOLATION": build_interpolation,
    "BUILD_TEMPLATE": build_template,
}
