"""``template.format(...)`` and ``template.format_map(...)``, field by field.

C code would call methods of the values past the interpreter, and a value may be text that exists only after the graph.
"""

from __future__ import annotations

import _string
from typing import TYPE_CHECKING, Any, NamedTuple

from sidefx_train.compile.capture.interpreter.object_model import formatting, operators
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.interpreter.interfaces import InterpreterAPI

_PLAIN = (str, int, float, bool, complex, bytes, type(None))
_CONVERSIONS = {None: None, "s": formatting.to_str, "r": formatting.to_repr, "a": formatting.to_ascii}
_DEPTH = 2
"""How deep fields may be nested: one with others in its specification."""


class _Field(NamedTuple):
    """A field of a template.

    Attributes:
        first: the position or name of its argument.
        rest: attributes (True) and items (False) that are looked up in it.
        conversion: what is applied before the value is formatted.
        spec: the parts of the specification.
    """

    first: int | str
    rest: tuple[tuple[bool, Any], ...]
    conversion: str | None
    spec: tuple[Any, ...]


def by_fields(interp: InterpreterAPI, template: Any, args: tuple[Any, ...] | None, named: Any) -> Any:
    """Returns the formatted template; :data:`ABSENT` if C code is to do it all, which also raises for a wrong template.

    Args:
        interp: the interpreter.
        template: the string.
        args: positional arguments; ``None`` for ``format_map``.
        named: keyword arguments, or the mapping of ``format_map``.
    """
    if not safe_isinstance(template, str):
        return ABSENT
    if args is not None and all(type(value) in _PLAIN for value in (*args, *named.values())):
        return ABSENT
    parts = _parsed(template, args, named)
    return ABSENT if parts is None else _formatted(interp, parts, args or (), named)


def is_formatted_by_fields(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True for ``format`` and ``format_map`` of a string that :func:`by_fields` formats, if given more than
    plain values."""
    if fn.__name__ == "format":
        return _parsed(fn.__self__, args, kwargs) is not None
    return fn.__name__ == "format_map" and len(args) == 1 and _parsed(fn.__self__, None, args[0]) is not None


def _parsed(template: str, args: tuple[Any, ...] | None, named: Any) -> tuple[Any, ...] | None:
    try:
        return _Parser(args, named).parts(template, _DEPTH)
    except ValueError:
        return None


class _Parser:
    """Reads a template for given arguments; numbers the fields without a number."""

    def __init__(self, args: tuple[Any, ...] | None, named: Any) -> None:
        self._count = 0 if args is None else len(args)
        self._names = None if args is None else named
        self._next = 0
        self._numbers: bool | None = None

    def parts(self, template: str, depth: int) -> tuple[Any, ...]:
        """Returns strings and fields.

        Raises:
            ValueError: formatting raises, whatever the arguments' values are.
        """
        if depth <= 0:
            raise ValueError(template)
        parts: list[Any] = []
        for literal, name, spec, conversion in _string.formatter_parser(template):
            if literal:
                parts.append(literal)
            if name is None:
                continue
            first, rest = _string.formatter_field_name_split(name)
            if conversion not in _CONVERSIONS:
                raise ValueError(conversion)
            first = self._argument(first)
            nested = self.parts(spec, depth - 1) if "{" in spec or "}" in spec else (spec,)
            parts.append(_Field(first, tuple(rest), conversion, nested))
        return tuple(parts)

    def _argument(self, first: int | str) -> int | str:
        if safe_isinstance(first, str) and first:
            if self._names is not None and first not in self._names:
                raise ValueError(first)
            return first
        numbered = first == ""
        if self._numbers not in (None, numbered):
            raise ValueError(first)
        self._numbers = numbered
        place = self._next if numbered else int(first)
        self._next += numbered
        if place >= self._count:
            raise ValueError(first)
        return place


def _formatted(interp: InterpreterAPI, parts: tuple[Any, ...], args: tuple[Any, ...], named: Any) -> Any:
    made: list[Any] = []
    for part in parts:
        if type(part) is not _Field:
            made.append(part)
            continue
        value = args[part.first] if type(part.first) is int else operators.getitem(interp, named, part.first)
        for is_attribute, key in part.rest:
            value = interp.getattr(value, key) if is_attribute else operators.getitem(interp, value, key)
        convert = _CONVERSIONS[part.conversion]
        if convert is not None:
            value = convert(interp, value)
        made.append(formatting.to_format(interp, value, _formatted(interp, part.spec, args, named)))
    return made[0] if len(made) == 1 else formatting.build_string(interp, tuple(made))
