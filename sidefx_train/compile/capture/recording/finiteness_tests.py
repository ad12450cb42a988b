"""Tests in the graph for finite numbers: their result if all numbers are finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.type_checks import safe_isinstance

aten = torch.ops.aten


def if_finite(condition: fx.Node | None) -> bool | None:
    """Returns a condition's value if all numbers it tests are finite; ``None`` if it tests anything else."""
    return _if_finite(condition, _DEPTH)


_DEPTH = 16
"""Limit of operations between the test and the branch."""

_FALSE = frozenset({aten.isnan.default, aten.isinf.default, aten.isposinf.default, aten.isneginf.default})
_PASSED_ON = frozenset(
    f"aten::{name}"
    for name in (
        "any", "all", "_is_all_true", "_is_any_true", "alias", "detach", "view", "reshape", "squeeze", "unsqueeze",
        "select", "sum", "max", "_to_copy", "clone",
    )
)  # fmt: skip
"""Operations that map all-true to true and all-false to false."""


def _if_finite(node: Any, depth: int) -> bool | None:
    if not safe_isinstance(node, fx.Node) or not safe_isinstance(node.target, compat.OpOverload) or depth == 0:
        return None
    target, args = node.target, node.args
    if target in _FALSE:
        return False
    if target is aten.eq.Tensor and args[0] is args[1]:  # isfinite(x) is (x == x) * (abs(x) != inf)
        return True
    if target is aten.ne.Tensor and args[0] is args[1]:
        return False
    if target is aten.ne.Scalar and args[1] == float("inf"):
        return True
    name = target._schema.name
    if name in _PASSED_ON:
        found = _if_finite(args[0], depth - 1)
        return found if name != "aten::sum" or found is False else None  # the number of true values is unknown
    if target in (aten.logical_not.default, aten.bitwise_not.default):
        found = _if_finite(args[0], depth - 1)
        return None if found is None else not found
    if target in (aten.gt.Scalar, aten.ne.Scalar) and args[1] == 0:
        return _if_finite(args[0], depth - 1)
    if target is aten.eq.Scalar and args[1] == 0:
        found = _if_finite(args[0], depth - 1)
        return None if found is None else not found
    both = [_if_finite(arg, depth - 1) for arg in args[:2]] if name in _AND | _OR else []
    if name in _AND and len(both) == 2:
        return False if False in both else None if None in both else True
    if name in _OR and len(both) == 2:
        return True if True in both else None if None in both else False
    return None


_AND = frozenset({"aten::mul", "aten::logical_and", "aten::bitwise_and", "aten::__and__"})
_OR = frozenset({"aten::add", "aten::logical_or", "aten::bitwise_or", "aten::__or__"})
