"""Views and iterators that C implements: what they hold is what they walk over."""

from __future__ import annotations

import collections
import itertools
from typing import Any

_DICTS: tuple[Any, ...] = ({}, collections.OrderedDict())
_VIEWS: tuple[Any, ...] = tuple(view for empty in _DICTS for view in (empty.keys(), empty.values(), empty.items()))
_SEQUENCES: tuple[Any, ...] = ([], (), collections.deque())

WALKERS = frozenset(
    {type(view) for view in _VIEWS}
    | {type(iter(empty)) for empty in (*_VIEWS, *_SEQUENCES, set())}
    | {type(reversed(empty)) for empty in (*_VIEWS, *_SEQUENCES)}
    | {enumerate, zip, map, filter, *(made for made in vars(itertools).values() if isinstance(made, type))}
)
