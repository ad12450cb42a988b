"""Writes whose result depends on the order in which elements are visited.

Eager raises, or gives what its kernel happens to do. A functional graph would silently read everything before it
writes, so such a write is left to eager.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.strided_layout import extent, hint, hinted_layout, is_dense
from sidefx_train.compile.graph.view_chains import STRIDED
from sidefx_train.errors import Unsupported


def check_overlap(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Checks the memory that an operation writes, before it is recorded.

    Raises:
        Unsupported: several elements of a written tensor, or one of it and one of another operand, share an address.
    """
    if func in STRIDED:
        _check_reach(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags and torch.is_grad_enabled():
        _check_metadata_mutation(func, args[0])
    if torch.Tag.inplace_view in func.tags or not func._schema.is_mutable:
        return
    written: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for argument, value in _passed(func._schema, args, kwargs):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if argument.is_out and _is_part_of_nothing(value):
            raise Unsupported("SFX108", f"{func} resizes an empty view, and so the storage of its base")
        (written if writes else read).extend(_tensors(value))
    elementwise = torch.Tag.pointwise in func.tags or func.name().startswith(_ELEMENTWISE)
    by_storage: dict[int, list[tuple[torch.Tensor, bool]]] = {}  # operands by storage: an optimizer has hundreds
    for i, other in enumerate(read):
        accumulates = i == 0 and getattr(func, "overloadpacket", None) in _ACCUMULATING
        by_storage.setdefault(compat.storage_id(other), []).append((other, elementwise or accumulates))
    recorded = torch.is_grad_enabled() and any(operand.requires_grad for operand in (*written, *read))
    for target in written:
        if recorded and _is_twisted_part(target):
            reason = (
                f"{func} writes, with autograd on, to a view of another dtype than its base, which has a storage offset"
            )
            raise Unsupported("SFX107", f"{reason}: its derivative raises in eager")
        if overlaps_itself(target):
            raise _refused(func, "more than one element of the written-to tensor refers to a single memory location")
        others = by_storage.setdefault(compat.storage_id(target), [])
        for other, same_place_is_fine in others:
            if same_place_is_fine and (other is target or _layout(other) == _layout(target)):
                continue
            if _may_share(target, other):
                raise _refused(
                    func, "some elements of an operand and of the written-to tensor refer to a single memory location"
                )
        others.append((target, False))


def overlaps_itself(target: torch.Tensor) -> bool:
    """Returns True if several elements of a tensor share an address."""
    return _is_known(target) and not is_dense(target) and _several_in_one_place(target)


def _check_metadata_mutation(func: Any, mutated: torch.Tensor) -> None:
    """Refuses metadata mutations of views of another dtype: autograd regenerates the view without the mutation."""
    base = mutated._base if mutated._is_view() else None
    if base is not None and base.dtype != mutated.dtype and (base.requires_grad or mutated.requires_grad):
        raise Unsupported(
            "SFX107", f"{func} mutates the metadata of a view of another dtype than its base, with autograd on"
        )


def _is_twisted_part(target: torch.Tensor) -> bool:
    """Returns True for a view of another dtype than its base, which has a storage offset itself (``unsafe_split``).

    Autograd replays the view on a gradient, whose offset is zero, with the offset that it has in the base.
    """
    base = target._base if target._is_view() else None
    return base is not None and base.dtype != target.dtype and bool(base.storage_offset() != 0)


def _check_reach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses views past the end of a storage: fake tensors have no such limit, and an unused view is not replayed."""
    viewed, size, stride, *rest = args
    offset = rest[0] if rest else kwargs.get("storage_offset")
    offset = viewed.storage_offset() if offset is None else offset
    numbers = (*size, *stride, offset, viewed.untyped_storage().nbytes())
    if any(not isinstance(n, int) and compat.is_unbacked(n) for n in numbers) or 0 in size:
        return
    end = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
    if end * viewed.itemsize > viewed.untyped_storage().nbytes():
        raise Unsupported("SFX108", f"{func} reaches past the end of a tensor's storage")


_ACCUMULATING = frozenset(getattr(torch.ops.aten, name) for name in ("addmm", "addmv", "addr", "addbmm", "baddbmm"))
"""Operators that do in place what they do with their first operand as ``out``."""

_ELEMENTWISE = ("aten::copy_", "aten::_foreach", "aten::_fused", "aten::_amp_foreach")


def _refused(func: Any, reason: str) -> Unsupported:
    stop = Unsupported("SFX108", f"{func} has a result that depends on the order of writes: {reason}")
    # It may resize a leaf: autograd keeps the old shape for views of the leaf, even if the graph does not need them.
    stop.whole = "out" in func._overloadname
    return stop


def _passed(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    yield from zip(schema.arguments, args, strict=False)
    for argument in schema.arguments[len(args) :]:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _tensors(value: Any) -> list[torch.Tensor]:
    items = value if isinstance(value, (list, tuple)) else (value,)
    return [t for t in items if isinstance(t, torch.Tensor) and t.layout is torch.strided and not _is_empty(t)]


def _is_part_of_nothing(value: Any) -> bool:
    """Returns True for an empty tensor whose storage is not empty."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not _is_empty(value):
        return False
    size = value.untyped_storage().nbytes()
    return not isinstance(size, int) or size > 0


def _is_empty(t: torch.Tensor) -> bool:
    """Returns True if a size is zero, which is never symbolic; unbacked sizes are not tested."""
    return any(isinstance(n, int) and n == 0 for n in t.shape)


def _layout(t: torch.Tensor) -> tuple[Any, ...]:
    return (compat.storage_id(t), t.storage_offset() * t.itemsize, t.itemsize, tuple(t.shape), tuple(t.stride()))


def _is_known(t: torch.Tensor) -> bool:
    """Returns False if a size exists only when the graph runs."""
    numbers = (*t.shape, *t.stride(), t.storage_offset())
    return not any(not isinstance(n, int) and compat.is_unbacked(n) for n in numbers)


def _several_in_one_place(t: torch.Tensor) -> bool:
    dims = [(size, stride) for size, stride in hinted_layout(t) if size != 1]
    if any(stride == 0 for _, stride in dims):
        return True
    reach = 0
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    with compat.real_world():
        return int(_places(t, 0, _extent(t)[1] // t.itemsize - hint(t.storage_offset())).sum()) < t.numel()


def _extent(t: torch.Tensor) -> tuple[int, int]:
    """Returns the byte offsets of a tensor's begin and end in its storage."""
    start = hint(t.storage_offset())
    reach = sum((size - 1) * stride for size, stride in hinted_layout(t))
    return start * t.itemsize, (start + reach + 1) * t.itemsize


def _may_share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns True if two tensors in one storage share an element, or if that is unknown."""
    if not (_is_known(a) and _is_known(b)):
        return True
    (a_low, a_high), (b_low, b_high) = _extent(a), _extent(b)
    low, high = min(a_low, b_low), max(a_high, b_high)
    if a_low >= b_high or b_low >= a_high:
        _require_disjoint(a, b)
        return False
    if is_dense(a) and is_dense(b):
        return True
    if (low % a.itemsize, low % b.itemsize, a.itemsize) != (0, 0, b.itemsize):
        return True
    size = (high - low) // a.itemsize
    with compat.real_world():
        places = (_places(t, (start - low) // t.itemsize, size) for t, start in ((a, a_low), (b, b_low)))
        return bool(torch.logical_and(*places).any())


def _require_disjoint(a: torch.Tensor, b: torch.Tensor) -> None:
    """Adds guards that two tensors of symbolic size do not overlap."""
    numbers = [n for t in (a, b) for n in (*t.shape, *t.stride(), t.storage_offset())]
    if all(isinstance(n, int) for n in numbers):
        return
    (a_low, a_high), (b_low, b_high) = extent(a), extent(b)
    bool(a_low >= b_high) or bool(b_low >= a_high)


def _places(t: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """Returns a mask of the elements, among ``size``, that belong to a tensor with offset ``start``."""
    mask = torch.zeros(size, dtype=torch.bool, device="cpu")
    dims = hinted_layout(t)
    mask.as_strided([n for n, _ in dims], [s for _, s in dims], start).fill_(True)
    return mask
