"""Converts values to Python source: the only way generated code contains values."""

from __future__ import annotations

import keyword
import math
from typing import Any

_DIGITS = 1 << 1024
"""Larger integers are written in hexadecimal: Python limits decimal conversion."""


def literal(value: Any) -> str | None:
    """Returns source that evaluates to an equal value of the same class in any namespace with Python's builtins.

    ``repr`` does not: ``nan`` and ``inf`` are names, a subclass may override it, ``-0j`` loses its sign.

    Args:
        value: anything.

    Returns:
        The source, in parentheses if it is not an atom; ``None`` for a value without a literal, to which a name must be
        bound.
    """
    kind = type(value)
    if value is None or kind in (bool, str, bytes):
        return repr(value)
    if kind is int:
        text = repr(value) if -_DIGITS < value < _DIGITS else hex(value)
        return f"({text})" if value < 0 else text
    if kind is float:
        return _float(value)
    if kind is complex:
        return f"complex({_float(value.real)}, {_float(value.imag)})"
    if kind is tuple:
        items = [literal(item) for item in value]
        known = [item for item in items if item is not None]
        return f"({', '.join(known)}{',' if len(items) == 1 else ''})" if len(known) == len(items) else None
    return None


def _float(value: float) -> str:
    if math.isfinite(value):
        return f"({value!r})" if math.copysign(1.0, value) < 0 else repr(value)
    text = f"float({'nan' if value != value else 'inf'!r})"
    return f"(-{text})" if math.copysign(1.0, value) < 0 else text


def is_name(text: Any) -> bool:
    """Returns True for a string that is an identifier and no keyword."""
    return type(text) is str and text.isidentifier() and not keyword.iskeyword(text) and text.isascii()
