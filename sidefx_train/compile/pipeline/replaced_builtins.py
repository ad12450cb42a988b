"""Builtin functions that a program has replaced for the whole process."""

from __future__ import annotations

import builtins

_ARITHMETIC = {name: getattr(builtins, name) for name in ("abs", "divmod", "len", "max", "min", "pow", "round", "sum")}


def replaced_arithmetic() -> str:
    """Returns the name of a replaced function that sympy and torch compute with; empty if there is none.

    A capture would compute with it, too: conditions on numbers come out wrong.
    """
    return next((name for name, known in _ARITHMETIC.items() if getattr(builtins, name, None) is not known), "")
