"""Lists of lengths that torch's code writes into a tensor item by item, which fake tensors do not support."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

_ARGUMENTS = ("input_lengths", "target_lengths")
_PARAMETERS = tuple(inspect.signature(F.ctc_loss).parameters)

Call = tuple[tuple[Any, ...], dict[str, Any]]


def takes_lengths(fn: Any) -> bool:
    """Returns True for connectionist temporal classification (CTC loss)."""
    return fn is F.ctc_loss or fn is torch.ctc_loss


def as_tensors(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Returns the arguments of such a call with tensors in place of lists; unchanged if torch would reject them.

    Args:
        run: calls a function of torch as the step does.
    """
    named = dict(zip(_PARAMETERS, args, strict=False)) | kwargs
    if not all(_is_numbers(named.get(name)) for name in _ARGUMENTS):
        return args, kwargs
    made = {name: run(torch.tensor, (list(named[name]),), {}) for name in _ARGUMENTS}
    given = tuple(made.get(name, value) for name, value in zip(_PARAMETERS, args, strict=False))
    return given, {name: made.get(name, value) for name, value in kwargs.items()}


def _is_numbers(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) > 0 and all(type(n) in (int, torch.SymInt) for n in value)
