"""Operations that fake tensors accept and the CPU kernel rejects.

A graph omits operations whose results are unused, so it would not raise there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.eager_parity.foreach import writes_lists
from sidefx_train.errors import Unsupported

aten = torch.ops.aten
_ORDERING = frozenset(
    {
        *(aten.max, aten.min, aten.argmax, aten.argmin, aten.amax, aten.amin, aten.aminmax, aten.sort, aten.median),
        *(aten.nanmedian, aten.mode, aten.kthvalue, aten.topk, aten.cummax, aten.cummin),
    }
)
"""Operations that compare magnitudes; they take the same arguments for tensors of one element."""

_TAKE_NUMBERS = frozenset({aten.smooth_l1_loss, aten.smooth_l1_loss_backward, aten.huber_loss, aten.celu, aten.celu_})
"""Operations whose kernels check numbers that a decomposition does not."""

_PICKING = frozenset({aten.kthvalue, aten.topk})
"""The operations of :data:`_ORDERING` whose second argument is a count or index: 1 for one element."""

_BITWISE = frozenset(
    getattr(getattr(aten, name), overload)
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift")
    for overload in getattr(aten, name).overloads()
)
_INDEXED_WRITES = frozenset({aten.index_put.default, aten.index_put_.default})
_TYPED = frozenset(
    {
        *(
            aten.mm,
            aten.addmm,
            aten.bmm,
            aten.baddbmm,
            aten.mv,
            aten.addmv,
            aten.addbmm,
            aten.dot,
            aten.vdot,
            aten.addr,
        ),
        *(aten.linear, aten.native_batch_norm, aten._native_batch_norm_legit, aten._batch_norm_with_update),
        *(aten.native_layer_norm, aten.native_group_norm, aten._softmax, aten._log_softmax, aten._cdist_forward),
        *(aten.nll_loss_forward, aten.nll_loss2d_forward, aten.binary_cross_entropy, aten.linalg_cross, aten.std),
        *(aten.var, aten.var_mean, aten.std_mean, aten.im2col, aten.col2im, aten.grid_sampler_2d, aten.grid_sampler_3d),
        *(aten.upsample_bilinear2d, aten.upsample_bicubic2d, aten.upsample_linear1d, aten.upsample_trilinear3d),
        *(aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_, aten.polar, aten.complex),
        *(aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_, aten.lerp, aten.lerp_),
        *(aten.cumsum_, aten.cumprod_),
    }
)
"""Operations whose kernels check dtypes and, given zeros, at worst raise."""
_SUMS_WITH_PRODUCTS = frozenset({aten.addmm.default, aten.addmv.default})
"""Operations whose first argument must expand to the product; those on fake tensors expand the product as well."""
_ADDS_SLICES = frozenset({aten.index_add.default, aten.index_add_.default})
"""Operations whose last tensor has the first one's shape, except for the dimension that is indexed."""

_MOST_ELEMENTS = 1 << 18
"""Size limit of a tensor that is created to test dtypes."""
_SCALARS = (bool, int, float, complex, str, type(None), torch.dtype)


def check_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs the real kernel on samples for cases that many kernels reject: empty tensors, mixed dtypes, dtypes other
    than floating point.

    Raises:
        Unsupported: the kernel raises, and so does eager.
    """
    if func is aten.view.default:
        _check_view(*args)
    if func in _SUMS_WITH_PRODUCTS:
        _check_summand(func, *args[:3])
    if func in _ADDS_SLICES:
        _check_slices(func, args[0], args[1], args[3])
    if func is aten._grouped_mm.default:
        compat.know_grouped_products()
    if func in compat.FOR_SYMBOLS:
        compat.know_kernels_for_symbols()
    if func in compat.BY_GENERATORS:
        compat.know_draws_by_generators()
    if func in compat.LAYOUTS:
        compat.know_layouts()
    if func in compat.RESAMPLING:
        compat.know_resampling()
    if func is aten._trilinear.default:
        compat.know_trilinear()
    if func in compat.TRUTH_TESTS:
        compat.know_truth_tests()
    if func in compat.FOR_NUMBERS:
        compat.know_numbers()
    if getattr(func, "overloadpacket", None) is aten._ctc_loss:
        compat.know_ctc_loss()
    if func in _INDEXED_WRITES and args[2].dtype != args[0].dtype:
        raise Unsupported("SFX102", f"{func} raises: it writes {args[2].dtype} to {args[0].dtype}")
    if compat.inside_transform():  # a transform would apply to the real samples
        return
    _check_empty(func, args, kwargs)
    _check_types(func, args, kwargs)
    if writes_lists(func):
        _check_lists(func, args, kwargs)
        return
    takes_numbers = getattr(func, "overloadpacket", None) in _TAKE_NUMBERS
    ordering = takes_numbers or getattr(func, "overloadpacket", None) in _ORDERING
    if not (torch.Tag.pointwise in func.tags or ordering) or torch.Tag.nondeterministic_seeded in func.tags:
        return
    given = (*args, *kwargs.values())
    tensors = [arg for arg in given if isinstance(arg, torch.Tensor)]
    special = takes_numbers or func in _BITWISE or any(not tensor.is_floating_point() for tensor in tensors)
    special = special or (func._schema.is_mutable and _narrows(tensors, given))
    if not special and not any(type(arg) in (bool, complex) for arg in given):
        return
    if any(tensor.device.type != "cpu" for tensor in tensors) or len(set(map(id, tensors))) < len(tensors):
        return
    if not all(isinstance(arg, torch.Tensor) or type(arg) in _SCALARS for arg in given):
        return
    if getattr(func, "overloadpacket", None) in _PICKING:
        args = (args[0], 1, *args[2:])
    reason = _refusal(func, tuple(map(_kind, args)), tuple((name, _kind(arg)) for name, arg in kwargs.items()))
    if reason:
        raise Unsupported("SFX102", f"{func} raises: {reason}")


def _check_types(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs an operation on tensors of mixed dtypes, or of dtypes other than floating point.

    Fake tensors multiply matrices of two dtypes, and accept the softmax of integers. The kernel rejects the dtypes if
    it accepts the same call on floats of one dtype, or on floats only; otherwise it rejects the sizes.
    """
    given = (*args, *kwargs.values())
    types = {arg.dtype for arg in given if isinstance(arg, torch.Tensor)}
    outs = frozenset(a.name for a in func._schema.arguments if a.is_out and a.name in kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return
    if not outs and (not types or (len(types) == 1 and next(iter(types)).is_floating_point)):
        return
    if not outs and getattr(func, "overloadpacket", None) not in _TYPED:
        return
    if not all(_is_plain(arg) for arg in given) or not all(map(_is_strided_on_cpu, given)):
        return
    whole = all(arg.numel() <= _MOST_ELEMENTS for arg in given if isinstance(arg, torch.Tensor))
    named = tuple((name, _type_kind(arg, whole)) for name, arg in kwargs.items())
    refusal = _refusal_of_outs if outs else _refusal_of_types
    reason = refusal(func, tuple(_type_kind(arg, whole) for arg in args), named)
    if reason:
        raise Unsupported("SFX102", f"{func} raises: {reason}")


def _check_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs an operation that writes a list of tensors with mixed dtypes or sizes: fake tensors accept all."""
    given = (*args, *kwargs.values())
    lists = [arg for arg in given if isinstance(arg, (list, tuple))]
    items = [item for arg in given for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    if not all(map(_is_strided_on_cpu, tensors)):
        return
    types = {tensor.dtype for tensor in tensors}
    same_shapes = all(
        len({t.shape for t in row if isinstance(t, torch.Tensor)}) < 2 for row in zip(*lists, strict=False)
    )
    one_type = len(types) == 1 and next(iter(types)).is_floating_point
    if same_shapes and one_type and not any(type(item) is complex for item in items):
        return
    whole = sum(tensor.numel() for tensor in tensors) <= _MOST_ELEMENTS
    named = tuple((name, _list_kind(arg, whole)) for name, arg in kwargs.items())
    reason = _refusal_of_lists(func, tuple(_list_kind(arg, whole) for arg in args), named)
    if reason:
        raise Unsupported("SFX102", f"{func} raises: {reason}")


def _list_kind(arg: Any, whole: bool) -> tuple[Any, ...]:
    if isinstance(arg, (list, tuple)):
        return ("list", tuple(_list_kind(item, whole) for item in arg))
    if isinstance(arg, torch.Tensor) or type(arg) in _SCALARS:
        return _type_kind(arg, whole)
    return _type_kind(_plain_number(arg), whole)


@lru_cache(maxsize=256)
def _refusal_of_lists(func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> str:
    """Returns the kernel's error message for such lists of tensors; empty if it accepts them."""
    with _outside():
        return _said(func, list(map(_list_of, args)), {name: _list_of(kind) for name, kind in kwargs})


def _list_of(kind: tuple[Any, ...]) -> Any:
    what, value, *rest = kind
    if what == "list":
        return list(map(_list_of, value))
    return torch.ones(value, dtype=rest[0]) if what == "tensor" else rest[0]


def _plain_number(number: Any) -> int | float:
    """Returns a number of the same type as a symbolic one."""
    return 1.0 if isinstance(number, (float, torch.SymFloat)) else 1


def _is_strided_on_cpu(arg: Any) -> bool:
    if not isinstance(arg, torch.Tensor):
        return True
    known = all(isinstance(size, int) for size in arg.shape) and arg.layout is torch.strided
    return known and arg.device.type == "cpu"


def _type_kind(arg: Any, whole: bool) -> tuple[Any, ...]:
    """Returns the description of a sample: for a tensor its dtype, and its shape or the shape of one element."""
    if isinstance(arg, torch.Tensor):
        return ("tensor", tuple(arg.shape) if whole else (1,) * arg.dim(), arg.dtype)
    return ("list", tuple(arg)) if isinstance(arg, (list, tuple)) else ("number", type(arg), arg)


@lru_cache(maxsize=1024)
def _refusal_of_types(func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> str:
    """Returns the kernel's error message for the dtypes of its tensors; empty if it accepts them."""

    def said(as_type: Callable[[torch.dtype], torch.dtype]) -> str:
        named = {name: _of_zeros(kind, as_type) for name, kind in kwargs}
        return _said(func, [_of_zeros(kind, as_type) for kind in args], named)

    with _outside():
        reason = said(lambda dtype: dtype)
        one_type = bool(reason) and said(lambda dtype: torch.float32 if dtype.is_floating_point else dtype)
        return "" if not reason or (one_type and said(lambda dtype: torch.float32)) else reason


@lru_cache(maxsize=256)
def _refusal_of_outs(func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> str:
    """Returns the kernel's error message for the dtypes of its outputs; empty if it accepts them or rejects any
    dtype."""
    outs = {a.name for a in func._schema.arguments if a.is_out}

    def said(dtype: torch.dtype | None) -> str:
        named = {name: _of_zeros(kind, lambda own: own) for name, kind in kwargs}
        empty = {name: torch.empty(0, dtype=dtype or named[name].dtype) for name in outs & named.keys()}
        return _said(func, [_of_zeros(kind, lambda own: own) for kind in args], named | empty)

    with _outside():
        reason = said(None)
        given = [rest[0] for what, _, *rest in args if what == "tensor"]
        others = (*given, torch.bool, torch.int64, torch.float32, torch.float64, torch.complex64)
        return "" if not reason or all(said(dtype) for dtype in others) else reason


def _of_zeros(kind: tuple[Any, ...], as_type: Callable[[torch.dtype], torch.dtype]) -> Any:
    """Returns a sample; tensors are zeros, which are valid indices."""
    what, value, *rest = kind
    if what == "tensor":
        return torch.zeros(value, dtype=as_type(rest[0]))
    return list(value) if what == "list" else rest[0]


@contextmanager
def _outside() -> Iterator[None]:
    """Context that runs operations on real tensors, without autocast and autograd."""
    with compat.real_world(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def _check_summand(func: Any, summand: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    product = (*a.shape[:-1], *b.shape[1:])
    missing = len(product) - summand.dim()
    sizes = zip(summand.shape, product[max(missing, 0) :], strict=False)
    if missing < 0 or any(type(own) is type(needed) is int and own not in (1, needed) for own, needed in sizes):
        raise Unsupported("SFX102", f"{func} raises: {tuple(summand.shape)} does not expand to {product}")


def _check_slices(func: Any, x: torch.Tensor, dim: int, added: torch.Tensor) -> None:
    def rest(tensor: torch.Tensor) -> list[Any]:
        return [size for i, size in enumerate(tensor.shape) if i != dim % max(x.dim(), 1)]

    sizes = zip(rest(x), rest(added), strict=False)
    if x.dim() != added.dim() or any(type(a) is type(b) is int and a != b for a, b in sizes):
        raise Unsupported("SFX102", f"{func} raises: the shape of {tuple(added.shape)} is not that of {tuple(x.shape)}")


def _check_view(viewed: torch.Tensor, shape: list[int]) -> None:
    """Checks a view of expanded memory on a meta tensor: eager's rule, which differs from that of fake tensors."""
    layout = (*viewed.shape, *viewed.stride(), *shape)
    if all(type(number) is int for number in layout) and 0 in viewed.stride():
        reason = _refusal_of_view(tuple(viewed.shape), viewed.stride(), tuple(shape))
        if reason:
            raise Unsupported("SFX102", f"aten.view raises: {reason}")


@lru_cache(maxsize=256)
def _refusal_of_view(size: tuple[int, ...], stride: tuple[int, ...], shape: tuple[int, ...]) -> str:
    with _outside():
        return _said(aten.view.default, [torch.empty_strided(size, stride, device="meta"), list(shape)], {})


def _narrows(tensors: list[torch.Tensor], given: tuple[Any, ...]) -> bool:
    """Returns True for a write of floating point numbers to a tensor of integers, the first argument."""
    return not tensors[0].is_floating_point() and any(
        arg.is_floating_point() if isinstance(arg, torch.Tensor) else type(arg) is float for arg in given
    )


def _check_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs an operation on empty tensors only: its behavior cannot depend on their contents."""
    given = (*args, *kwargs.values())
    tensors = [arg for arg in given if isinstance(arg, torch.Tensor)]
    if not tensors or not all(_is_empty(tensor) for tensor in tensors) or func._schema.is_mutable or func.is_view:
        return
    if torch.Tag.nondeterministic_seeded in func.tags or not all(_is_plain(arg) for arg in given):
        return
    named = tuple((name, _empty_kind(arg)) for name, arg in kwargs.items())
    reason = _refusal_of_empty(func, tuple(map(_empty_kind, args)), named)
    if reason:
        raise Unsupported("SFX102", f"{func} raises: {reason}")


def _is_empty(tensor: torch.Tensor) -> bool:
    known = all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride()))
    return known and tensor.device.type == "cpu" and tensor.layout is torch.strided and 0 in tensor.shape


def _is_plain(arg: Any) -> bool:
    if isinstance(arg, (list, tuple)):
        return all(type(item) in _SCALARS for item in arg)
    return isinstance(arg, torch.Tensor) or type(arg) in _SCALARS


def _empty_kind(arg: Any) -> tuple[Any, ...]:
    """Returns a key of an empty tensor, a list or a number."""
    if isinstance(arg, torch.Tensor):
        return ("tensor", tuple(arg.shape), arg.stride(), arg.dtype)
    return ("list", tuple(arg)) if isinstance(arg, (list, tuple)) else ("number", type(arg), arg)


def _made_empty(kind: tuple[Any, ...]) -> Any:
    what, value, *rest = kind
    if what == "tensor":
        stride, dtype = rest
        return torch.empty_strided(value, stride, dtype=dtype)
    return list(value) if what == "list" else rest[0]


@lru_cache(maxsize=256)
def _refusal_of_empty(func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> str:
    """Returns the kernel's error message for empty tensors; empty if it accepts them."""
    with _outside():
        return _said(func, list(map(_made_empty, args)), {name: _made_empty(kind) for name, kind in kwargs})


def _said(func: Any, args: list[Any], kwargs: dict[str, Any]) -> str:
    try:
        func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, IndexError) as error:
        return str(error).splitlines()[0]
    return ""


def _kind(arg: Any) -> tuple[str, Any, Any]:
    """Returns what selects a kernel: dtype and number of dimensions of a tensor, or a number itself."""
    return ("tensor", arg.dtype, arg.dim()) if isinstance(arg, torch.Tensor) else ("number", type(arg), arg)


def _sample(kind: tuple[str, Any, Any]) -> Any:
    what, cls, value = kind
    return torch.ones((1,) * value, dtype=cls) if what == "tensor" else value


@lru_cache(maxsize=1024)
def _refusal(func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> str:
    """Returns the kernel's error message for tensors of one element; empty if it accepts them."""
    outs = {argument.name for argument in func._schema.arguments if argument.is_out}
    with _outside():
        named = {name: torch.empty(0, dtype=kind[1]) if name in outs else _sample(kind) for name, kind in kwargs}
        return _said(func, list(map(_sample, args)), named)
