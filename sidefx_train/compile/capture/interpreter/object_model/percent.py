"""``template % values`` with values whose text is made by methods written in Python."""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.capture.interpreter.object_model import formatting
from sidefx_train.compile.capture.interpreter.object_model.attributes import is_static, special
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI

_FIELD = re.compile(
    r"%(?:\((?P<key>[^()]*)\))?[#0\- +]*(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?[hlL]?(?P<kind>.)", re.DOTALL
)
_TEXT = {"s": formatting.to_str, "r": formatting.to_repr, "a": formatting.to_ascii}
_NUMBERS: dict[str, Any] = {
    **dict.fromkeys("diu", int), **dict.fromkeys("oxX", operator.index), **dict.fromkeys("eEfFgG", float),
}  # fmt: skip
_OF_NUMBERS = ("__int__", "__index__", "__float__")


def apply(interp: InterpreterAPI, template: str, values: Any) -> Any:
    """Returns ``template % values``; :data:`ABSENT` if C code does it all, or if the template is not understood.

    Values of a mapping are looked up, and ``%s``, ``%r`` and ``%a`` applied, in the order of the template.
    """
    if not any(map(_is_of_program, (values, *(tuple.__iter__(values) if safe_isinstance(values, tuple) else ())))):
        return ABSENT
    fields = [field for field in _FIELD.finditer(template) if field["kind"] != "%"]
    if not fields or any("*" in (field["width"], field["precision"]) for field in fields):
        return ABSENT
    by_key = [field["key"] is not None for field in fields]
    if any(by_key):
        own = any(special(interp, values, name) is not ABSENT for name in ("__getitem__", "__missing__"))
        if not all(by_key) or safe_isinstance(values, tuple) or not own:
            return ABSENT
        return _joined(interp, template, fields, lambda field, index: interp.getitem(values, field["key"]))
    given = tuple(tuple.__iter__(values)) if safe_isinstance(values, tuple) else (values,)
    if len(given) != len(fields):  # raises
        return ABSENT
    return _joined(interp, template, fields, lambda field, index: given[index])


def _is_of_program(value: Any) -> bool:
    return not is_static(type(value)) and not is_library(type(value).__module__)


def _formatted(interp: InterpreterAPI, written: str, value: Any) -> Any:
    if written == "%s" and (type(value) is str or not is_static(type(value))):
        return formatting.to_str(interp, value)
    answer = interp.world.override_operator("mod", (written, (value,)))
    return interp.world.native_call(operator.mod, (written, (value,)), {}) if answer is ABSENT else answer


def _joined(interp: InterpreterAPI, template: str, fields: list[re.Match[str]], value_of: Any) -> Any:
    parts: list[Any] = []
    end = 0
    for index, field in enumerate(fields):
        parts.append(template[end : field.start()] % ())  # ``%%`` may be in it
        end = field.end()
        value, written = value_of(field, index), field[0]
        if field["key"] is not None:
            written = written.replace(f"({field['key']})", "", 1)
        if _is_of_program(value):
            convert = _TEXT.get(field["kind"])
            if convert is not None:
                value, written = convert(interp, value), written[:-1] + "s"
            number = _NUMBERS.get(field["kind"])
            exact = safe_isinstance(value, (int, float) if number is float else int)  # C code reads its value directly
            own = any(special(interp, value, name) is not ABSENT for name in _OF_NUMBERS)
            if number is not None and own and not exact:
                value = interp.call(number, (value,), {})
        parts.append(_formatted(interp, written, value))
    parts.append(template[end:] % ())
    return formatting.build_string(interp, tuple(parts))
