"""``str``, ``repr``, ``ascii``, ``format`` and f-strings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.object_model.attributes import call_special, is_static, special
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI


_EXACT = frozenset({int, float, bool, complex, str, bytes, type(None)})
_ROOT_STR = object.__str__
_FORMATS = tuple(kind.__format__ for kind in (object, int, float, complex, str))


def to_str(interp: InterpreterAPI, value: Any) -> Any:
    """``str(value)``."""
    if type(value) is str:
        return value
    answer = interp.world.override_operator("str", (value,))
    if answer is not ABSENT:
        return answer
    if is_static(type(value)):
        return interp.world.native_call(str, (value,), {})
    method = special(interp, value, "__str__")
    if method is not ABSENT:
        return _text(interp, call_special(interp, method, value, ()), "__str__")
    if interp.world.class_attr(interp.type_of(value), "__str__") is _ROOT_STR:
        return to_repr(interp, value)
    return interp.world.native_call(str, (value,), {})


def to_repr(interp: InterpreterAPI, value: Any) -> Any:
    """``repr(value)``."""
    answer = interp.world.override_operator("repr", (value,))
    if answer is not ABSENT:
        return answer
    method = special(interp, value, "__repr__")
    if method is not ABSENT:
        return _text(interp, call_special(interp, method, value, ()), "__repr__")
    return interp.world.native_call(repr, (value,), {})


def to_ascii(interp: InterpreterAPI, value: Any) -> Any:
    """``ascii(value)``."""
    answer = interp.world.override_operator("ascii", (value,))
    if answer is not ABSENT:
        return answer
    if special(interp, value, "__repr__") is ABSENT:
        return interp.world.native_call(ascii, (value,), {})
    return to_repr(interp, value).encode("ascii", "backslashreplace").decode("ascii")


def to_format(interp: InterpreterAPI, value: Any, spec: Any) -> Any:
    """``format(value, spec)``."""
    kind = type(value)
    if kind in _EXACT and type(spec) is str:
        return format(value, spec)
    answer = interp.world.override_operator("format", (value, spec))
    if answer is not ABSENT:
        return answer
    if not is_static(kind):
        method = special(interp, value, "__format__")
        if method is not ABSENT:
            return _text(interp, call_special(interp, method, value, (spec,)), "__format__")
        made_in_c = interp.world.class_attr(interp.type_of(value), "__format__")
        if type(spec) is str and spec == "" and any(made_in_c is known for known in _FORMATS):
            return to_str(interp, value)  # so does the C code, unless the class is its own
    return interp.world.native_call(format, (value, spec), {})


def _text(interp: InterpreterAPI, answer: Any, name: str) -> Any:
    if not safe_isinstance(answer, str) and not issubclass(interp.type_of(answer), str):
        kind = interp.type_of(answer).__name__
        verb = "must return a str, not" if name == "__format__" else "returned non-string (type"
        raise TypeError(f"{name} {verb} {kind}" + ("" if name == "__format__" else ")"))
    return answer


def build_string(interp: InterpreterAPI, parts: tuple[Any, ...]) -> Any:
    """Joins the parts of an f-string."""
    for part in parts:
        if type(part) is not str:
            answer = interp.world.override_operator("build_string", (parts,))
            if answer is not ABSENT:
                return answer
            break
    return "".join(parts)
