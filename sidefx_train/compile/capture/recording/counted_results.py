"""Operators whose result's size depends on contents, where the number of elements is known before the graph runs.

A mask may be constant (``logits[~torch.eye(n, dtype=torch.bool)]``), or the prologue counts: what the mask of padding
selects, the bins of the indices of a batch. Then operators with sizes replace them, and the graph has no size that
exists only when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.constant_folding import constant_value

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.interfaces import GraphRecorder

aten = torch.ops.aten


class Count(NamedTuple):
    """What counts the elements of a result.

    Attributes:
        tensor: the tensor whose contents decide.
        function: returns their number, given the tensor and ``args``.
        args: plain values.
    """

    tensor: torch.Tensor
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


def count_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Count | None:
    """Returns what counts the elements of a call's result; ``None`` for calls that have no operators with sizes."""
    if func is aten.index.Tensor:
        given = [index for index in args[1] if index is not None]
        return Count(given[0], _selected) if len(given) == 1 and _is_mask(given[0]) else None
    if func is aten.masked_select.default:
        return Count(args[1], _selected) if _is_mask(args[1]) and args[0].shape == args[1].shape else None
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None and _is_of_integers(args[0]):
        return Count(args[0], _total)
    if func is aten.bincount.default and not kwargs and _is_of_integers(args[0]):
        return Count(args[0], _bins, tuple(args[2:]))
    if func is aten._unique2.default and not kwargs and _is_of_integers(args[0]) and (len(args) < 2 or args[1]):
        return Count(args[0], _different) if _has_elements(args[0]) else None
    return None


def with_count(func: Any, args: Any, count: Any) -> Any:
    """Returns the result of a call, computed by operators with sizes, bit for bit.

    Args:
        func: an operator that :func:`count_of` knows.
        args: its arguments.
        count: the number of elements.
    """
    if func is aten.index.Tensor:
        return _select(args[0], args[1], count)
    if func is aten.masked_select.default:
        return _select(args[0], [args[1]], count)
    if func is aten.repeat_interleave.Tensor:
        return aten.repeat_interleave.Tensor(args[0], output_size=count)
    if func is aten.bincount.default:
        return _counts(args[0], args[1] if len(args) > 1 else None, count)
    return _unique(args[0], count, *args[2:])


def constant_count(tracer: GraphRecorder, counted: Count) -> int | None:
    """Returns the number if it depends on no input; else ``None``."""
    if type(counted.tensor) is not compat.FakeTensor:
        return None
    known = constant_value(tracer, counted.tensor)
    if known is None:
        return None
    with compat.real_world():
        return int(counted.function(known, *counted.args))


def _is_mask(tensor: Any) -> bool:
    return tensor.dtype is torch.bool and tensor.dim() > 0


def _is_of_integers(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32) and tensor.dim() > 0


def _has_elements(tensor: torch.Tensor) -> bool:
    known = all(type(size) is int or compat.hint_of(size) is not None for size in tensor.shape)
    return known and tensor.numel() > 0


def _selected(mask: torch.Tensor) -> int:
    return int(mask.sum())


def _total(repeats: torch.Tensor) -> int:
    return int(repeats.sum())


def _bins(values: torch.Tensor, minlength: int = 0) -> int:
    return torch.bincount(values, minlength=minlength).numel()


def _different(values: torch.Tensor) -> int:
    return values.unique().numel()


def _select(tensor: torch.Tensor, indices: list[torch.Tensor | None], count: Any) -> torch.Tensor:
    """Returns ``tensor[indices]``, with a mask, by the positions of its elements, which torch's own kernel computes
    too."""
    positions: list[torch.Tensor | None] = []
    for index in indices:
        if index is None:
            positions.append(None)
        else:
            positions += aten.unbind.int(aten.nonzero_static.default(index, size=count), 1)
    return aten.index.Tensor(tensor, positions)  # type: ignore[no-any-return]


def _counts(values: torch.Tensor, weights: torch.Tensor | None, count: Any) -> torch.Tensor:
    if weights is None:
        weights = torch.ones_like(values, dtype=torch.int64)
    elif weights.dtype is not torch.float32:
        weights = weights.to(torch.float64)
    return torch.zeros(count, dtype=weights.dtype, device=values.device).index_add(0, values, weights)


def _unique(values: torch.Tensor, count: Any, inverse: bool = False, counts: bool = False) -> tuple[torch.Tensor, ...]:
    flat = values.reshape(-1)
    ordered, order = flat.sort(stable=True)
    begins = torch.cat([ordered.new_ones(1, dtype=torch.bool), ordered[1:] != ordered[:-1]])
    positions = aten.nonzero_static.default(begins, size=count)[:, 0]
    none = values.new_empty(0, dtype=torch.int64)
    places = none
    if inverse or counts:
        places = torch.zeros_like(flat, dtype=torch.int64).scatter(0, order, begins.cumsum(0) - 1).view(values.shape)
    lengths = torch.cat([positions[1:], positions.new_full((1,), flat.shape[0])]) - positions if counts else none
    return ordered[positions], places, lengths
