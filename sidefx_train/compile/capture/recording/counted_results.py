"""Operators whose result's size depends on contents, where the number of elements is known before the graph runs.

A mask may be constant (``logits[~torch.eye(n, dtype=torch.bool)]``), or the prologue counts: what the mask of padding
selects, the bins of the indices of a batch. Then operators with sizes replace them, and the graph has no size that
exists only when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

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
        given = [(place, index) for place, index in enumerate(args[1]) if index is not None]
        fits = len(given) == 1 and _is_mask(given[0][1]) and _fits(args[0], *given[0])
        return Count(given[0][1], _selected) if fits else None
    if func is aten.masked_select.default:
        return Count(args[1], _selected) if _is_mask(args[1]) and args[0].shape == args[1].shape else None
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None and _is_of_integers(args[0]):
        return Count(args[0], _total)
    if func is aten.bincount.default and not kwargs and _is_of_integers(args[0]):
        return Count(args[0], _bins, tuple(args[2:]))
    if func is aten._unique2.default and not kwargs and _is_of_integers(args[0]) and (len(args) < 2 or args[1]):
        return Count(args[0], _different) if _has_elements(args[0]) else None
    if func is aten.unique_consecutive.default and not kwargs and _is_of_integers(args[0]):
        return Count(args[0], _runs) if len(args) < 4 and _has_elements(args[0]) else None
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
    if func is aten.unique_consecutive.default:
        return _unique_consecutive(args[0], count, *args[1:])
    return _unique(args[0], count, *args[2:])


def constant_results(tracer: GraphRecorder, func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """Returns the results of a call whose sizes depend on contents, if these are known now; else ``None``."""
    if torch.Tag.dynamic_output_shape not in func.tags or func._schema.is_mutable or compat.is_random(func):
        return None
    given, layout = pytree.tree_flatten((args, kwargs))
    for place, value in enumerate(given):
        if isinstance(value, torch.Tensor):
            known = constant_value(tracer, value) if type(value) is compat.FakeTensor else None
            if known is None or value.requires_grad:
                return None
            given[place] = known
        elif type(value) in compat.SYMBOLS:
            return None
    args, kwargs = pytree.tree_unflatten(given, layout)
    with compat.real_world(), torch.no_grad():
        made = func(*args, **kwargs)
    return list(made) if isinstance(made, tuple) else [made]


def with_contents(known: torch.Tensor) -> torch.Tensor:
    """Records a new tensor with these contents and strides."""
    with compat.real_world():
        lifted = aten.lift_fresh_copy.default(known)  # other strides where a size is 1
    made = aten.lift_fresh_copy.default(lifted)
    return made if lifted.stride() == known.stride() else _laid_out(made, known.stride())


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


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


def _fits(tensor: torch.Tensor, place: int, mask: torch.Tensor) -> bool:
    """Returns True if a mask has the sizes of the dimensions that it selects from; eager raises for others."""
    return tensor.shape[place : place + mask.dim()] == mask.shape


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


def _runs(values: torch.Tensor) -> int:
    return values.unique_consecutive().numel()


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
    ordered, order = values.reshape(-1).sort(stable=True)
    found, runs, lengths = _unique_consecutive(ordered, count, inverse or counts, counts)
    places = torch.zeros_like(runs).scatter(0, order, runs).view(values.shape) if inverse or counts else runs
    return found, places, lengths


def _unique_consecutive(
    values: torch.Tensor, count: Any, inverse: bool = False, counts: bool = False
) -> tuple[torch.Tensor, ...]:
    flat = values.reshape(-1)
    begins = torch.cat([flat.new_ones(1, dtype=torch.bool), flat[1:] != flat[:-1]])
    positions = aten.nonzero_static.default(begins, size=count)[:, 0]
    none = values.new_empty(0, dtype=torch.int64)
    runs = (begins.cumsum(0) - 1).view(values.shape) if inverse else none
    lengths = torch.cat([positions[1:], positions.new_full((1,), flat.shape[0])]) - positions if counts else none
    return flat[positions], runs, lengths
