"""``json.dumps`` of numbers that change or exist only after the graph: the text is made when they exist."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.deferred_values import DeferredValue
from sidefx_train.compile.capture.world.deferred.argument_snapshot import deferred_string
from sidefx_train.compile.capture.world.deferred.deferred_strings import deferred_in
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

_PLAIN = (str, int, float, bool, type(None), np.float64)
_DICTS = (dict, OrderedDict, defaultdict)
_OPTIONS = frozenset({"skipkeys", "ensure_ascii", "check_circular", "allow_nan", "indent", "separators", "sort_keys"})
_DEEPEST = 32


@registry.intercept(json.dumps)
def _dumps(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    options = {name: value for name, value in kwargs.items() if name not in ("default", "cls")}
    if len(args) != 1 or not _OPTIONS.issuperset(options) or not _encodes_as_json_does(kwargs.get("cls")):
        return ABSENT
    world.touch(args[0])
    if not deferred_in(args[0]) or not _is_plain(world, args[0], _DEEPEST):
        return ABSENT
    return deferred_string(world, json.dumps, args, options)  # nothing is left to `default`


def _encodes_as_json_does(cls: Any) -> bool:
    """Returns True for an encoder of which only ``default`` may be the program's."""
    if cls is None:
        return True
    if not safe_isinstance(cls, type) or not issubclass(cls, json.JSONEncoder):
        return False
    own = ("encode", "iterencode", "__init__", "__new__", "__getattribute__")
    return all(getattr(cls, name) is getattr(json.JSONEncoder, name) for name in own)


def _is_plain(world: TraceWorld, value: Any, depth: int) -> bool:
    """Returns True for numbers, strings, and lists and dicts of these."""
    cls = type(value)
    if cls in _PLAIN or safe_isinstance(value, compat.SYMBOLS):
        return True
    if safe_isinstance(value, DeferredValue):
        return world.interp.type_of(value) in _PLAIN
    if depth == 0:
        return False
    if cls in (list, tuple):
        return all(_is_plain(world, item, depth - 1) for item in value)
    if cls not in _DICTS:
        return False
    return all(type(key) in _PLAIN and _is_plain(world, item, depth - 1) for key, item in value.items())
