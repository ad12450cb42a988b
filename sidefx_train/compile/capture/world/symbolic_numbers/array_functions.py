"""Functions of NumPy that only compute: an array, a view or a number from their arguments."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from sidefx_train.compile.common.type_checks import attribute_of

MAKERS: frozenset[Any] = frozenset(
    (np.array, np.asarray, np.full, np.full_like, np.linspace, np.arange, np.zeros, np.ones, np.eye, np.identity)
    + (np.tri, np.tril, np.triu)
)
"""Functions of NumPy that make an array of numbers."""


def computes_arrays(fn: Any) -> bool:
    """Returns True for a function of NumPy that only computes a new array, a view or a number from its arguments."""
    if type(fn) in (types.BuiltinFunctionType, types.FunctionType) and fn in MAKERS:
        return True
    if type(fn) is np.ufunc:  # one may be made of a Python function
        return getattr(np, attribute_of(fn, "__name__", ""), None) is fn
    return type(fn) is _DISPATCHED and (fn in _ARRAY_FUNCTIONS or fn in MAKERS)


_DISPATCHED: type = type(np.where)
_ARRAY_FUNCTIONS = frozenset(
    (np.where, np.concatenate, np.stack, np.hstack, np.vstack, np.clip, np.mean, np.sum, np.std, np.var, np.min, np.max)
    + (np.argmin, np.argmax, np.argsort, np.sort, np.cumsum, np.cumprod, np.prod, np.any, np.all, np.round, np.dot)
    + (np.outer, np.expand_dims, np.squeeze, np.repeat, np.tile, np.roll, np.flip, np.reshape, np.transpose, np.interp)
    + (np.zeros_like, np.ones_like, np.searchsorted, np.count_nonzero, np.flatnonzero, np.linalg.norm, np.take, np.diff)
    + (np.median, np.percentile, np.quantile, np.average)
)
