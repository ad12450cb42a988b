"""Jagged nested tensors: torch's own Python for them is interpreted, over fake values and offsets.

The size of the ragged dimension is a number that equals only itself. Each fake tensor of offsets has its own.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interceptors.derivatives import once_differentiated
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.ops.jagged_attention import JaggedAttention

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept(compat.JAGGED)
def _make(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes a jagged tensor; notes for torch's own compiler are left out."""
    return _made(world, *args, **kwargs)


def _made(world: TraceWorld, values: Any, offsets: Any, *, lengths: Any = None, **kwargs: Any) -> Any:
    for tensor in (values, offsets, *(() if lengths is None else (lengths,))):
        if type(tensor) is not compat.FakeTensor:
            world.heap.refuse("SFX109", f"makes a nested tensor over a {type(tensor).__qualname__}")
    world.heap.ragged_size(offsets if lengths is None else lengths)
    cache = kwargs.get("_metadata_cache")
    if cache is not None:
        world.touch(cache, deep=False)
    given = (values, offsets, lengths, kwargs.get("_ragged_idx", 1), cache or {}, kwargs.get("requires_grad", False))
    return world.guarded(compat.make_jagged, given, {})


@registry.intercept(compat.RAGGED_SIZE_OF)
def _ragged_size(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    return world.heap.ragged_size(tensor) * kwargs.get("coeff", 1) if type(tensor) is compat.FakeTensor else ABSENT


@registry.intercept(compat.VIEW_DUMMY)
def _view_dummy(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns torch's own: nothing reads it."""
    with compat.real_world():
        return compat.VIEW_DUMMY()


@registry.intercept(compat.IS_FX_TRACING)
def _is_fx_tracing(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Asks torch, which warns once in a process."""
    return compat.IS_FX_TRACING()


@registry.intercept(compat.THUNKIFY)
def _thunkify(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answers as in eager, which records no numbers."""
    return contextlib.nullcontext()


@registry.intercept(compat.NORMALIZE_ARGUMENTS)
def _normalize(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sorts arguments by the names of parameters; torch's own code for that fills caches of the process."""
    for given in (*args, *kwargs.values()):
        world.touch(given, deep=False)
    return world.guarded(compat.NORMALIZE_ARGUMENTS, args, kwargs)


@registry.intercept(compat.IDENTITY_KEYED.__getitem__)
def _known_size(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Looks a fake tensor up among the tensors that have the size of a ragged dimension."""
    return world.heap.ragged_size(args[1]) if _is_of_sizes(world, args) else ABSENT


@registry.intercept(compat.IDENTITY_KEYED.__setitem__)
def _same_size(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gives a fake tensor such a size."""
    if not _is_of_sizes(world, args):
        return ABSENT
    if compat.parts_of_ragged_size(world.heap.ragged_size(args[1])) != compat.parts_of_ragged_size(args[2]):
        world.heap.refuse("SFX109", "moves a nested tensor to another device")
    return None


def _is_of_sizes(world: TraceWorld, args: tuple[Any, ...]) -> bool:
    record = world.heap.record_of(args[0])
    known = compat.RAGGED_SIZES
    return (args[0] is known or (record is not None and record.real is known)) and type(args[1]) is compat.FakeTensor


@registry.intercept(compat.ATTENTION)
def _attention(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the operator where torch would compute by nested tensors of strided layout."""
    return _attended(world, *args, **kwargs)


def _attended(
    world: TraceWorld,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    call = world.interp.call
    given = (query, key, value)
    if not all(map(compat.is_jagged, given)) or torch.is_autocast_enabled("cpu") or type(dropout_p) is not float:
        return ABSENT
    plain = attn_mask is None and dropout_p == 0.0 and (scale is None or type(scale) is float)
    if not plain or any(each.device.type != "cpu" or each._ragged_idx != 2 or len(each._size) != 4 for each in given):
        return ABSENT
    size = query._size[3]
    if type(size) is not int:
        return ABSENT
    call(compat.CHECKS_ATTENTION, (*given, attn_mask, dropout_p, is_causal, scale), {})
    if call(compat.CHOOSES_ATTENTION, (*given, attn_mask, dropout_p, is_causal, enable_gqa), {}) != SDPBackend.MATH:
        return ABSENT
    rows = [call(compat.JAGGED.values, (call(torch.transpose, (each, 1, 2), {}),), {}) for each in given]
    offsets = [each._offsets for each in given]
    factor = 1.0 / math.sqrt(size) if scale is None else scale
    made = world.guarded(
        JaggedAttention.apply,
        (once_differentiated(world, "attention of rows of several lengths"), *rows, *offsets, factor),
        {},
    )
    known = {name: world.interp.getattr(query, f"_maybe_{name}") for name in ("min_seqlen", "max_seqlen")}
    view = call(compat.VIEW_OF_ROWS, (made, query._offsets), {"lengths": query._lengths, **known})
    return call(torch.transpose, (view, 1, 2), {})
