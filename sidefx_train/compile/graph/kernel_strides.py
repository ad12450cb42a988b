"""Layouts that kernels choose and fake tensors guess: strides of dimensions of size 1, and offsets of empty views.

No data depends on them, but a program can read them, and views of outputs are computed from them.
"""

from __future__ import annotations

from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.strided_layout import is_static

_MOST_ELEMENTS = 1 << 16
_KEEPS_LAYOUT = (torch.ops.aten.view.default, torch.ops.aten.empty_like.default, torch.ops.aten.clone.default)
_SYMBOLS = compat.SYMBOLS
_OF_FACTORIES = frozenset({"dtype", "layout", "device", "pin_memory"})
"""Arguments that a function which makes a tensor (``eye``, ``linspace``) has, and not with ``out=``."""


def lay_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
    """Sets the strides of a new fake tensor to the kernel's, where they may differ."""
    if not isinstance(made, torch.Tensor) or type(made) is not compat.FakeTensor:
        return
    computed = torch.Tag.pointwise in func.tags and not func._schema.is_mutable and not func.is_view
    if not computed and func not in _KEEPS_LAYOUT:
        return
    if not any(isinstance(n, int) and n == 1 for n in made.shape) or not any(map(_is_odd, _tensors(args))):
        return
    strides = _by_kernel(func, args, kwargs)
    if strides is not None and strides != tuple(made.stride()):
        compat.set_strides(made, strides)


def unfilled(func: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns empty tensors that an operation is to write, and resizes for that."""
    if not func._schema.is_mutable:
        return []
    outs = [kwargs.get(argument.name) for argument in func._schema.arguments if argument.is_out]
    return [out for out in outs if isinstance(out, torch.Tensor) and _is_empty(out)]


def _is_empty(t: torch.Tensor) -> bool:
    return any(type(n) is int and n == 0 for n in t.shape)


def lay_out_filled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], filled: list[torch.Tensor]) -> None:
    """Sets the strides of such tensors to those of a new result, like elementwise kernels."""
    new = without_outs(func) if filled else None
    if new is None or torch.Tag.pointwise not in new.tags or len(filled) > 1:
        return
    if all(_is_plain(t) for t in _tensors((*args, *kwargs.values()))):
        return
    names = {argument.name for argument in func._schema.arguments if argument.is_out}
    with compat.no_recording(), torch.no_grad():
        made = new(*args, **{name: arg for name, arg in kwargs.items() if name not in names})
    for out in filled:
        if out.shape == made.shape and out.stride() != made.stride():
            compat.set_strides(out, made.stride())


def stays_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], filled: list[torch.Tensor]) -> bool:
    """Returns True if the fake kernel may have left such a tensor as it was, although the operator resizes it."""
    if not any(map(_is_empty, filled)):
        return False
    names = [argument.name for argument in func._schema.arguments if argument.is_out]
    new = without_outs(func) or without_outs(func, _OF_FACTORIES)
    if new is None:  # unknown
        return True
    with compat.no_recording(), torch.no_grad():
        made = new(*args, **{name: arg for name, arg in kwargs.items() if name not in names})
    results = made if isinstance(made, (list, tuple)) else (made,)
    pairs = zip((kwargs.get(name) for name in names), results, strict=False)
    return any(isinstance(out, torch.Tensor) and out.shape != result.shape for out, result in pairs)


def without_outs(func: Any, left_out: frozenset[str] = frozenset()) -> Any:
    """Returns the operator overload that allocates its results for the same arguments, and others that are left out."""
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    packet = func.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)  # the packet's own ``__getattr__`` would create another object
        same = wanted == [(a.name, str(a.type)) for a in overload._schema.arguments if a.name not in left_out]
        if same and not overload._schema.is_mutable:
            return overload
    return None


def _is_plain(t: torch.Tensor) -> bool:
    """Returns True for a dense tensor in the default order of dimensions, or one of symbolic size."""
    return not is_static(t) or tuple(t.stride()) == tuple(torch.empty(t.shape, device="meta").stride())


def has_other_strides(func: Any, args: tuple[Any, ...], made: Any) -> bool:
    """Returns True for the fake of an empty view from torch's cache, which loses the view's storage."""
    if func is not torch.ops.aten.view.default or type(made) is not compat.FakeTensor:
        return False
    if not all(isinstance(n, int) for n in made.shape) or 0 not in made.shape:
        return False  # a comparison of symbols would be recorded
    return bool(compat.storage_id(made) != compat.storage_id(args[0]))


def _tensors(args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


def _is_odd(t: torch.Tensor) -> bool:
    """Returns True if a dimension of size 1 has another stride than in a dense tensor."""
    if not is_static(t) or 1 not in t.shape:
        return False  # a comparison of symbols would be recorded
    return tuple(t.stride()) != tuple(torch.empty(t.shape, device="meta").stride())


def _by_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """Returns the strides of a result of the real kernel, for operands of the same layout."""
    tensors = _tensors((*args, *kwargs.values()))
    numbers = [n for t in tensors for n in (*t.shape, *t.stride())]
    others = [arg for arg in (*args, *kwargs.values()) if not isinstance(arg, torch.Tensor)]
    if not all(isinstance(n, int) for n in numbers) or any(isinstance(arg, _SYMBOLS) for arg in others):
        return None
    if any(t.numel() > _MOST_ELEMENTS or t.device.type != "cpu" for t in tensors):
        return None
    with compat.real_world(), torch.no_grad():
        real = [_ones(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        named = {name: _ones(arg) if isinstance(arg, torch.Tensor) else arg for name, arg in kwargs.items()}
        return tuple(func(*real, **named).stride())


def _ones(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu").fill_(1)
