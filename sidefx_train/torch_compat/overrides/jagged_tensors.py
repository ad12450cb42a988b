"""Jagged nested tensors: a tensor class over a dense tensor of values and the offsets of its rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx._symbolic_trace import is_fx_tracing
from torch.fx.experimental.proxy_tensor import maybe_enable_thunkify
from torch.fx.operator_schemas import normalize_function
from torch.nested._internal import nested_tensor as _nested
from torch.nested._internal import sdpa as _sdpa
from torch.nested._internal.nested_int import NestedIntNode
from torch.utils.weak import WeakTensorKeyDictionary

from sidefx_train.torch_compat.autograd import alias_hidden_from_autograd

IS_FX_TRACING = is_fx_tracing
NORMALIZE_ARGUMENTS = normalize_function
JAGGED = _nested.NestedTensor
RAGGED_SIZE_OF = _nested.get_tensor_symint
"""Returns the size of a ragged dimension: a number that equals only that of the same tensor of offsets or lengths."""
RAGGED_SIZES = _nested._tensor_symint_registry
ATTENTION = _sdpa.jagged_scaled_dot_product_attention
CHECKS_ATTENTION = _sdpa._validate_sdpa_input
CHOOSES_ATTENTION = _sdpa._select_sdp_backend
VIEW_OF_ROWS = _nested.nested_view_from_values_offsets_lengths
IDENTITY_KEYED = WeakTensorKeyDictionary
VIEW_DUMMY = _nested._nt_view_dummy
"""Returns the nested tensor that torch's view operators get only to be dispatched by."""
THUNKIFY = maybe_enable_thunkify
VALUES_OF_JAGGED = torch._nested_get_values  # type: ignore[attr-defined]
JAGGED_DISPATCH = JAGGED.__torch_dispatch__
aten = torch.ops.aten
_LAYOUT = frozenset(
    {
        aten.is_non_overlapping_and_dense.default,
        aten.sym_size.default,
        aten.dim.default,
        aten.sym_stride.default,
        aten.sym_storage_offset.default,
        torch.ops.prim.layout.default,
    }
)
_NUMBERS = itertools.count(1 << 40)  # torch counts from zero


def is_jagged_class(cls: Any) -> bool:
    """Returns True for exactly torch's class of jagged tensors."""
    return cls is JAGGED


def is_jagged(value: Any) -> bool:
    """Returns True for instances of exactly torch's class of jagged tensors."""
    return type(value) is JAGGED


def asks_layout(func: Any) -> bool:
    """Returns True for operators by which C++ code asks a jagged tensor for its sizes."""
    return func in _LAYOUT


def layout_of(func: Any, jagged: torch.Tensor) -> Any:
    """Returns the answer to such an operator; nothing is recorded."""
    return JAGGED_DISPATCH(func, (JAGGED,), (jagged,), {})


def forget_layout(jagged: Any) -> None:
    """Removes the attributes in which C++ code keeps sizes that it has asked for; it asks again."""
    jagged._clear_non_serializable_cached_data()


def number_ragged_size(fake: Any) -> torch.SymInt:
    """Returns the size of the ragged dimension that a fake tensor of offsets or lengths stands for."""
    known = fake.nested_int_memo
    if known is None or known.node.is_symbolic():  # of an outside tensor of which torch knows a size
        known = fake.nested_int_memo = torch.SymInt(NestedIntNode(next(_NUMBERS), 1))  # type: ignore[call-arg]
    return known  # type: ignore[no-any-return]


def is_ragged_size(number: Any) -> bool:
    """Returns True for the size of a ragged dimension, and for a multiple of one."""
    return type(number) is torch.SymInt and type(number.node) is NestedIntNode


def among_ragged_sizes(args: tuple[Any, ...]) -> bool:
    """Returns True if there is such a size among arguments, or in a list among them."""
    for value in args:
        if is_ragged_size(value) or (isinstance(value, (list, tuple)) and any(map(is_ragged_size, value))):
            return True
    return False


def parts_of_ragged_size(number: torch.SymInt) -> tuple[int, int]:
    """Returns the number of the ragged dimension, and by what its size is multiplied."""
    return number.node.t_id, number.node.coeff


def make_jagged(
    values: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor | None,
    ragged: int,
    cache: dict[str, Any],
    requires_grad: bool = False,
) -> Any:
    """Returns a jagged tensor, without the notes for torch's own compiler.

    Args:
        values: the rows, one after another.
        offsets: where each row begins, and the end of the last.
        lengths: lengths of rows that have holes between them.
        ragged: the ragged dimension.
        cache: the lengths of the shortest and the longest row, if known, as sizes of tensors.
        requires_grad: the result requires gradients.
    """
    named = {"lengths": lengths, "requires_grad": requires_grad, "_ragged_idx": ragged}
    made = JAGGED.__new__(JAGGED, values, offsets, **named)
    made._values, made._offsets, made._lengths, made._metadata_cache = values, offsets, lengths, cache
    return made


class _Values(torch.autograd.Function):
    """The values of a jagged tensor; their gradient is a jagged tensor."""

    @staticmethod
    def forward(ctx: Any, jagged: Any) -> torch.Tensor:
        ctx.layout = jagged._offsets, jagged._lengths, jagged._ragged_idx, dict(jagged._metadata_cache)
        return alias_hidden_from_autograd(jagged._values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return make_jagged(grads[0], *ctx.layout)


def inner_values(jagged: Any) -> torch.Tensor:
    """Returns the values of a jagged tensor with its autograd history; no operator of its class runs."""
    with torch.enable_grad():
        return _Values.apply(jagged)  # type: ignore[no-any-return]


@functools.cache
def _with_layout(name: str) -> Callable[..., Any]:
    """Returns a function that makes a jagged tensor of values, whose autograd node has a name."""

    class Jagged(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor, *layout: Any) -> Any:
            return make_jagged(alias_hidden_from_autograd(values), *layout)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return inner_values(grads[0]), None, None, None, None

    node = getattr(Jagged, "_backward_cls", None)
    if node is not None:
        node.__name__ = name
    return Jagged.apply


def jagged_with_history(
    name: str,
    values: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor | None,
    ragged: int,
    cache: dict[str, Any],
) -> Any:
    """Returns a jagged tensor over values, to which its gradient is passed on.

    Args:
        name: name of its autograd node.
        values: as of :func:`make_jagged`, like those that follow.
        offsets: of the rows.
        lengths: of the rows.
        ragged: the ragged dimension.
        cache: what is known of the lengths.
    """
    with torch.enable_grad():
        return _with_layout(name)(values, offsets, lengths, ragged, cache)


def view_as_jagged(
    values: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor | None,
    ragged: int,
    cache: dict[str, Any],
    differentiable: bool,
) -> Any:
    """Returns a jagged tensor that autograd knows as a view of its values; arguments as of :func:`make_jagged`."""
    known = cache.get("min_seqlen"), cache.get("max_seqlen")
    with torch.set_grad_enabled(differentiable):
        made = torch._nested_view_from_jagged(values, offsets, VIEW_DUMMY(), lengths, ragged, *known)  # type: ignore[attr-defined]
    made._metadata_cache = cache
    return made


def attention_of_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns the attention of nested tensors of strided layout."""
    return torch._scaled_dot_product_attention_math(query, key, value, None, 0.0, False, scale=scale)[0]  # type: ignore[attr-defined,no-any-return]
