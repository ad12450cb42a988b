"""Compares two outcomes of one program: values, layout, shared memory, errors."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils import _pytree as pytree

_ADDRESS = re.compile(r"0x[0-9a-f]+")


class Differs(AssertionError):
    """The captured run differs from eager; the message says where."""


def compare(want: Any, have: Any, where: str, contents: bool = True) -> None:
    """Raises :class:`Differs` unless two results are equal.

    Args:
        want: eager's result.
        have: the captured run's result.
        where: text for the message.
        contents: compare the contents of tensors; if False, only their layout (for uninitialized memory).
    """
    wanted, structure = pytree.tree_flatten(want)
    found, other = pytree.tree_flatten(have)
    if structure != other:
        raise Differs(f"{where}: structure {other}, eager has {structure}")
    for i, (a, b) in enumerate(zip(wanted, found, strict=True)):
        place = f"{where} {i}" if len(wanted) > 1 else where
        if type(a) is not type(b):
            raise Differs(f"{place}: a {type(b).__name__}, eager has a {type(a).__name__}")
        if isinstance(a, torch.Tensor):
            _tensors(a, b, place, contents)
        elif isinstance(a, BaseException):
            _errors(a, b, place)
        elif isinstance(a, torch.Generator):
            if not torch.equal(a.get_state(), b.get_state()):
                raise Differs(f"{place}: another random state")
        elif a != b and not (a != a and b != b):
            raise Differs(f"{place}: {b!r}, eager has {a!r}")
    _memory(
        [t for t in wanted if isinstance(t, torch.Tensor)], [t for t in found if isinstance(t, torch.Tensor)], where
    )


def _errors(a: BaseException, b: BaseException, where: str) -> None:
    want, have = _ADDRESS.sub("0x", str(a)), _ADDRESS.sub("0x", str(b))
    if want != have:
        raise Differs(f"{where}: {type(b).__name__} {have[:200]!r}, eager raises {want[:200]!r}")


def _facts(t: torch.Tensor) -> dict[str, Any]:
    facts: dict[str, Any] = {"shape": tuple(t.shape), "dtype": t.dtype, "layout": t.layout}
    if t.layout is torch.strided:
        facts |= {"stride": t.stride(), "offset": t.storage_offset(), "conj": t.is_conj(), "neg": t.is_neg()}
    # Without autograd, it makes no difference whether a tensor is a view of memory that nothing else refers to.
    return facts | {"requires_grad": t.requires_grad, "leaf": t.is_leaf, "a view": t.requires_grad and t._is_view()}


def _tensors(a: torch.Tensor, b: torch.Tensor, where: str, contents: bool) -> None:
    want, have = _facts(a), _facts(b)
    for name, value in want.items():
        if value != have[name]:
            raise Differs(f"{where}: {name} {have[name]}, eager has {value}")
    if contents and not same_contents(a, b):
        raise Differs(f"{where}: other values\n{b}\neager has\n{a}")


def same_contents(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares contents bitwise; NaN equals NaN."""
    a, b = a.detach(), b.detach()
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.is_complex():
        return same_contents(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
    if a.dtype.is_floating_point:
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


def _memory(wanted: list[torch.Tensor], found: list[torch.Tensor], where: str) -> None:
    for i in range(len(wanted)):
        for j in range(i):
            want, have = _share(wanted[i], wanted[j]), _share(found[i], found[j])
            if want != have:
                raise Differs(f"{where}: tensors {j} and {i} {_WORDS[have]}, in eager they {_WORDS[want]}")


def _share(a: torch.Tensor, b: torch.Tensor) -> int:
    if a is b:
        return 2
    if (
        a._is_zerotensor()
        or b._is_zerotensor()
        or a.layout is not torch.strided
        or b.layout is not torch.strided
        or not a.numel()
        or not b.numel()
    ):
        return 0
    return int(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())


_WORDS = ("share no memory", "share memory", "are one object")
