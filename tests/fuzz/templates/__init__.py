"""The templates of random training steps.

A template is Python source with holes: ``{I}`` an int, ``{B}`` a truth value, ``{L}`` a list of ints, ``{C}`` a list of
anything, ``{D}`` a dict, ``{K}`` a key, ``{S}`` a set of ints, ``{V}`` any value, ``{T}`` a (4, 3) tensor, ``{N}`` a
small literal, ``{BODY}`` an indented block. ``{+I}`` is a new local int, ``{+T}`` tensor, ``{+L}`` list, ``{+O}``
object and ``{+F}`` function, visible to later statements; ``{L1}`` is the same list throughout the statement; ``{=I}``
is a local int that may be assigned, ``{O}`` an object.
"""

from __future__ import annotations

from tests.fuzz.templates.expressions import (
    ANY_LISTS,
    BOOLS,
    DICTS,
    HELD,
    INTS,
    KEYS,
    LISTS,
    OBJECTS,
    SETS,
    TENSORS,
    VALUES,
)
from tests.fuzz.templates.mutations import MUTATIONS
from tests.fuzz.templates.prelude import PRELUDE, SETUP
from tests.fuzz.templates.statements import AFTER_BACKWARD, BEFORE_BACKWARD, BREAKS, RETURNS, STATEMENTS

__all__ = [
    "AFTER_BACKWARD",
    "ANY_LISTS",
    "BEFORE_BACKWARD",
    "BOOLS",
    "BREAKS",
    "DICTS",
    "HELD",
    "INTS",
    "KEYS",
    "LISTS",
    "MUTATIONS",
    "OBJECTS",
    "PRELUDE",
    "RETURNS",
    "SETS",
    "SETUP",
    "STATEMENTS",
    "TENSORS",
    "VALUES",
]
