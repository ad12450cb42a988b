"""Layouts that kernels choose and fake tensors guess.

They are those of elementwise operations whose operands are laid out differently, strides of dimensions of size 1, and
offsets of empty views.

Whether a program, or a formula of autograd, copies before it calls a kernel depends on them: a kernel that reads its
operands as if they were contiguous computes something else if the copy is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.thread_warnings import no_warnings
from sidefx_train.compile.graph.strided_layout import is_static

_MOST_ELEMENTS = 1 << 16
_KEEPS_LAYOUT = (torch.ops.aten.view.default, torch.ops.aten.empty_like.default, torch.ops.aten.clone.default)
_SYMBOLS = compat.SYMBOLS
_OF_FACTORIES = frozenset({"dtype", "layout", "device", "pin_memory"})
"""Arguments that a function which makes a tensor (``eye``, ``linspace``) has, and not with ``out=``."""


def lay_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
    """Sets the strides of new fake tensors to the kernel's, where they may differ."""
    if func._schema.is_mutable or (func.is_view and not _keeps_layout(func)):
        return
    for index, each in enumerate(made if isinstance(made, (list, tuple)) else (made,)):
        if not isinstance(each, torch.Tensor) or type(each) is not compat.FakeTensor:
            continue
        strides = None
        single = any(isinstance(n, int) and n == 1 for n in each.shape)
        if single and _keeps_layout(func) and any(map(_is_odd, _tensors(args))):
            strides = _by_kernel(func, args, kwargs)
        if strides is None and not func.is_view and func not in compat.LAYOUTS:
            strides = _by_operands(func, args, kwargs, each, index)
        if strides is not None and strides != tuple(each.stride()):
            compat.set_strides(each, strides)


def _keeps_layout(func: Any) -> bool:
    return func in _KEEPS_LAYOUT or (torch.Tag.pointwise in func.tags and not func.is_view)


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


def _by_operands(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any, index: int
) -> tuple[int, ...] | None:
    """Returns the strides of a result of an elementwise kernel of the CPU; ``None`` if they are not in doubt."""
    if kwargs or made.device.type != "cpu" or made.dim() < 2 or func.namespace != "aten":
        return None
    if any(isinstance(arg, (list, tuple, *_SYMBOLS)) for arg in args):
        return None
    places = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.dim()]
    operands = [args[i] for i in places]
    if not 2 <= len(places) <= 3 or not all(is_static(t) and t.layout is torch.strided for t in operands):
        return None
    if all(t.shape == made.shape and t.stride() == operands[0].stride() and 0 not in t.stride() for t in operands):
        return None
    if not is_static(made) or not _broadcasts(operands, made) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    key = func, index, tuple(places), tuple(map(_kind, args))
    if key not in _orders:
        _orders[key] = _order_of_operands(func, args, places, index)
    order = _orders[key]
    if order is None or (len(order) == 1 and args[order[0]].shape != made.shape):
        return None
    return _strides_like(tuple((tuple(args[i].shape), args[i].stride()) for i in order))


@lru_cache(4096)
def _strides_like(layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> tuple[int, ...]:
    """Returns the strides of an elementwise result of operands with these shapes and strides."""
    with compat.real_world():
        like = [torch.empty_strided(*each, device="meta") for each in layouts]
        made = (torch.empty_like, torch.add, torch.addcmul)[len(like) - 1]  # type: ignore[operator]
        return tuple(made(*like).stride())


_orders: dict[Any, list[int] | None] = {}
"""Results of :func:`_order_of_operands` by operator, index of the result, operands' dtypes and the other arguments."""


def _order_of_operands(func: Any, args: Sequence[Any], places: list[int], index: int) -> list[int] | None:
    """Returns the positions of operands in the order in which a kernel asks for their layout.

    The result is laid out like :func:`torch.add` of the operands in this order, or like :func:`torch.empty_like` of the
    only one that matters. ``None``: it is no such kernel.
    """

    def columns(*in_columns: int, rows: int | None = None) -> bool:
        """Returns True if a result has columns in memory if these operands have, and another one rows."""
        given = [_filled(arg, (), ()) if isinstance(arg, torch.Tensor) else arg for arg in args]
        for place in places:
            stride = (1, 2) if place in in_columns else (3, 1) if place == rows else (0, 0)
            given[place] = _filled(args[place], (2, 3), stride)
        made = func(*given)
        made = made[index] if isinstance(made, (list, tuple)) else made
        return tuple(made.shape) == (2, 3) and tuple(made.stride()) == (1, 2)

    with compat.real_world(), torch.no_grad(), no_warnings():
        try:
            heard = [place for place in places if columns(place)]
            found = {(a, b): columns(a, rows=b) for a in heard for b in places if a != b}
        except (RuntimeError, IndexError, ValueError):  # it is no elementwise kernel
            return None
    if len(heard) == 1:
        return heard if all(found.values()) else None
    order = sorted(places, key=lambda a: -sum(found.get((a, b), False) for b in places))
    expected = {(a, b): order.index(a) < order.index(b) for a in places for b in places if a != b}
    return order if found == expected else None


def _kind(arg: Any) -> Any:
    """Returns what the layout of a result may depend on in an argument, other than the layout of an operand."""
    return arg.dtype if isinstance(arg, torch.Tensor) else (type(arg), arg if isinstance(arg, (int, str)) else None)


def _broadcasts(operands: list[torch.Tensor], made: torch.Tensor) -> bool:
    """Returns True if a result has the sizes of an elementwise operation."""
    if any(t.dim() > made.dim() for t in operands):
        return False
    sizes = zip(*(_padded(t.shape, made.dim()) for t in (*operands, made)), strict=True)
    return all(set(each[:-1]) <= {1, each[-1]} and max(each[:-1]) == each[-1] for each in sizes)


def _padded(shape: tuple[int, ...], dims: int) -> tuple[int, ...]:
    return (*[1] * (dims - len(shape)), *shape)


def _filled(t: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=t.dtype, device="cpu").fill_(1)


def _ones(t: torch.Tensor) -> torch.Tensor:
    return _filled(t, tuple(t.shape), tuple(t.stride()))
