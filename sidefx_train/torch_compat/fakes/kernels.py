"""Fake kernels that torch lacks or has wrong: CTC loss, grouped products; for symbolic numbers also variances,
resampling, tests whether all or any are true, and operators whose C++ kernel wants plain numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch._prims_common import suggest_memory_format


def know_grouped_products() -> None:
    """Registers fake grouped products for the dtypes of CPU kernels: torch's own accepts only bfloat16."""
    from torch._subclasses import fake_impls

    op = torch.ops.aten._grouped_mm.default
    if op not in fake_impls.op_implementations_dict:
        fake_impls.register_op_impl(op)(_grouped_product)


def know_kernels_for_symbols() -> None:
    """Registers the Python kernels of :data:`FOR_SYMBOLS` for calls with symbolic sizes."""
    from torch._subclasses import fake_impls

    for op in FOR_SYMBOLS:
        if op not in fake_impls.FAST_OP_IMPLEMENTATIONS:  # which torch asks only for symbolic sizes
            kernel = op.py_kernels[torch._C.DispatchKey.Meta]
            fake_impls.register_fast_op_impl(op)(partial(_by_python, kernel))


def know_draws_by_generators() -> None:
    """Registers fake kernels of :data:`BY_GENERATORS` that do not read symbolic bounds: torch runs the operators."""
    from torch._subclasses import fake_impls

    for op in BY_GENERATORS:
        fake_impls.op_implementations_dict[op] = _without_generator


def _without_generator(mode: Any, op: Any, *args: Any, generator: Any = None, **named: Any) -> Any:
    with mode:
        return BY_GENERATORS[op](*args, **named)


def _by_python(kernel: Any, mode: Any, *args: Any, **named: Any) -> Any:
    with mode:
        return kernel(*args, **named)


def _with_python_kernels(*names: str) -> frozenset[Any]:
    parts = (each.split(".") for each in names)
    found = (getattr(getattr(torch.ops.aten, name), overload) for name, overload in parts)
    return frozenset(op for op in found if torch._C.DispatchKey.Meta in op.py_kernels)


_POLYNOMIALS = (
    *(f"special_{shifted}chebyshev_polynomial_{kind}" for shifted in ("", "shifted_") for kind in "tuvw"),
    *("special_hermite_polynomial_h", "special_hermite_polynomial_he", "special_laguerre_polynomial_l"),
    "special_legendre_polynomial_p",
)
_COPIES_OF_VIEWS = tuple(f"{view}_copy" for view in ("expand", "narrow", "permute", "split_with_sizes", "unfold"))

FOR_SYMBOLS = _with_python_kernels(
    *(f"{name}.default" for name in (*_POLYNOMIALS, *_COPIES_OF_VIEWS, "_fft_r2c", "_fft_c2c", "_fft_c2r")),
    *("constant_pad_nd.default", "im2col.default", "masked_scatter.default", "_chunk_cat.default", "unbind_copy.int"),
    *("complex.default", "polar.default"),
    *(f"{name}{kind}" for name in ("addcmul", "addcdiv") for kind in (".default", "_.default")),
    *(f"{name}.{kind}" for name in ("lerp", "lerp_") for kind in ("Scalar", "Tensor")),
    *("linalg_solve_triangular.default", "cholesky_solve.default"),
    *("_unsafe_index.Tensor", "_unsafe_masked_index.default"),
)
"""Operators whose C++ kernel, or the operators that it calls, asks for symbolic sizes as plain numbers.

Their Python kernels give the same strides without. A scan of all operators with symbolic sizes found these.
"""


BY_GENERATORS = {
    torch.ops.aten.randint.generator: torch.ops.aten.randint.default,
    torch.ops.aten.randint.low_generator: torch.ops.aten.randint.low,
}
"""Draws between bounds by a generator, with the operators without one."""


def know_numbers() -> None:
    """Registers fake kernels of :data:`FOR_NUMBERS` that do not read symbolic floats: torch's own specialize them."""
    from torch._subclasses import fake_impls

    for op in FOR_NUMBERS:
        if op not in fake_impls.op_implementations_dict:
            fake_impls.register_op_impl(op)(_without_numbers)
    for op in _VARIANCES:
        if op not in fake_impls.FAST_OP_IMPLEMENTATIONS:
            fake_impls.register_fast_op_impl(op)(partial(_variance_of_symbolic_sizes, op))


_VARIANCES = tuple(getattr(torch.ops.aten, name).correction for name in ("std", "std_mean", "var", "var_mean"))
FOR_NUMBERS: frozenset[Any] = frozenset(
    (*_VARIANCES, torch.ops.aten.multi_margin_loss.default, torch.ops.aten.multi_margin_loss_backward.default)
)
"""Operators whose fake kernels :func:`know_numbers` registers.

Sizes and strides of their results do not depend on a number, and all of their numbers may be 1.
"""


def _without_numbers(mode: Any, func: Any, *args: Any, **named: Any) -> Any:
    if not any(isinstance(value, torch.SymFloat) for value in (*args, *named.values())):
        return NotImplemented
    with mode:
        return func(*map(_plain, args), **{name: _plain(value) for name, value in named.items()})


def _variance_of_symbolic_sizes(op: Any, mode: Any, *args: Any, **named: Any) -> Any:
    from torch._decomp import decomposition_table

    with mode:
        return decomposition_table[op](*args, **{name: _plain(value) for name, value in named.items()})


def _plain(value: Any) -> Any:
    return 1.0 if isinstance(value, torch.SymFloat) else value


def know_trilinear() -> None:
    """Registers a fake kernel of the sums behind ``F.bilinear`` that accepts symbolic sizes."""
    from torch._subclasses import fake_impls

    op = torch.ops.aten._trilinear.default
    if op not in fake_impls.op_implementations_dict:
        fake_impls.register_op_impl(op)(_trilinear)


def _trilinear(
    mode: Any, func: Any, a: Any, b: Any, c: Any, one: Any, two: Any, three: Any, summed: Any, unroll_dim: int = 1
) -> Any:
    if not any(isinstance(length, torch.SymInt) for each in (a, b, c) for length in each.shape):
        return NotImplemented
    size = []
    left = [iter(each.shape) for each in (a, b, c)]
    for dim in range(a.dim() + len(one)):
        given = [next(left[i]) for i, expanded in enumerate((one, two, three)) if dim not in expanded]
        if dim not in summed:
            size.append(next((length for length in given if not _is_one(length)), 1))
    with mode:
        return torch.empty(size, dtype=a.dtype, device=a.device)


def _is_one(length: Any) -> bool:
    return type(length) is int and length == 1


def know_resampling() -> None:
    """Registers fake kernels of resampling that accept symbolic sizes; torch's own need plain ones."""
    from torch._decomp import meta_table
    from torch._subclasses import fake_impls

    for op in RESAMPLING:
        if op not in fake_impls.op_implementations_dict:
            fake_impls.register_op_impl(op)(_resampled)
            meta_table.setdefault(op, _resampled)  # else a decomposition takes precedence


RESAMPLING: frozenset[Any] = frozenset(
    getattr(torch.ops.aten, name + suffix).default
    for name in (
        *("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d", "upsample_bilinear2d"),
        *("upsample_bicubic2d", "_upsample_bicubic2d_aa", "upsample_nearest3d", "_upsample_nearest_exact3d"),
        "upsample_trilinear3d",
    )
    for suffix in ("", "_backward")
)
"""Resampling operators, and their backwards, whose fake kernels :func:`know_resampling` registers."""

_LOSES_LAYOUT = torch.ops.aten.upsample_bicubic2d_backward.default
"""Returns a contiguous tensor; the others keep the memory format of their argument."""


def _resampled(mode: Any, func: Any, x: Any, output_size: Any, *rest: Any, **named: Any) -> Any:
    with mode:
        return empty_resampled(func, x, output_size, *rest)


def empty_resampled(func: Any, x: Any, output_size: Any, *rest: Any) -> Any:
    """Returns an empty result of a resampling operator; :data:`NotImplemented` if no size is symbolic."""
    backward = func._schema.name.endswith("_backward")
    size = tuple(rest[0]) if backward else (*x.shape[:2], *output_size)
    if not any(isinstance(length, torch.SymInt) for length in (*x.shape, *size)) or len(size) != x.dim():
        return NotImplemented
    layout = torch.contiguous_format if func is _LOSES_LAYOUT else suggest_memory_format(x)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=layout)


def know_truth_tests() -> None:
    """Registers fake kernels that accept symbolic sizes: torch's own fails in its C++ code before 2.15."""
    from torch._subclasses import fake_impls

    for op in TRUTH_TESTS:
        if op not in fake_impls.op_implementations_dict:
            fake_impls.register_op_impl(op)(_truth_test)


TRUTH_TESTS: frozenset[Any] = frozenset((torch.ops.aten._is_all_true.default, torch.ops.aten._is_any_true.default))
"""Operators whose fake kernels :func:`know_truth_tests` registers; ``torch.distributions`` calls one."""


def _truth_test(mode: Any, func: Any, x: Any) -> Any:
    if x.dtype is not torch.bool or not any(isinstance(length, torch.SymInt) for length in x.shape):
        return NotImplemented
    with mode:
        return torch.empty((), dtype=torch.bool, device=x.device)


def know_ctc_loss() -> None:
    """Registers fake kernels of CTC loss on the CPU, which torch lacks.

    The saved probabilities have the size that the longest target needs; if lengths are in a tensor, the size that the
    batch of targets could hold.
    """
    from torch._subclasses import fake_impls

    forward, backward = torch.ops.aten._ctc_loss, torch.ops.aten._ctc_loss_backward
    if getattr(fake_impls.op_implementations_dict.get(forward.default), "__module__", None) == __name__:
        return
    for op in (forward.default, forward.Tensor):
        fake_impls.op_implementations_dict[op] = _ctc_loss
    for op in (backward.default, backward.Tensor):
        fake_impls.op_implementations_dict[op] = _ctc_loss_backward


def _ctc_loss(
    mode: Any, func: Any, log_probs: Any, targets: Any, _: Any, lengths: Any, *rest: Any, **named: Any
) -> Any:
    if log_probs.device.type != "cpu":
        return NotImplemented
    time, batch = log_probs.shape[:2]
    if isinstance(lengths, torch.Tensor):
        columns = 2 * targets.shape[1] + 1 if targets.dim() == 2 else 0
    else:
        columns = 2 * max(lengths, default=0) + 1
    with mode:
        return log_probs.new_empty(batch), log_probs.new_empty(batch, time, columns)


def _ctc_loss_backward(mode: Any, func: Any, grad: Any, log_probs: Any, *rest: Any, **more: Any) -> Any:
    if log_probs.device.type != "cpu":
        return NotImplemented
    with mode:
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _grouped_product(
    mode: Any, func: Any, a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    if (
        a.device.type != "cpu"
        or a.dtype not in (torch.float32, torch.float16)
        or b.dtype != a.dtype
        or bias is not None
    ):
        return NotImplemented
    groups = (a if a.dim() == 3 else b).shape[:1] if a.dim() == 3 or b.dim() == 3 else offs.shape
    size = (*(groups if a.dim() == b.dim() else ()), a.shape[-2], b.shape[-1])
    dtype = out_dtype or a.dtype
    alignment = 16 // dtype.itemsize  # rows begin at multiples of 16 bytes
    row = (size[-1] + alignment - 1) // alignment * alignment
    with mode:
        return torch.empty_strided(size, (size[-2] * row, row, 1)[-len(size) :], dtype=dtype, device=a.device)
