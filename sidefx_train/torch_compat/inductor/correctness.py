"""Workarounds for bugs of Inductor that make results wrong.

Each has a name in ``sidefx_train/switches.py`` and a program in ``tests/unit/torch_compat/test_upstream_bugs.py`` that
fails once upstream is right. The docstrings say what comes out wrong upstream, and in which versions of torch that was
seen.

| switch | upstream | seen in torch |
|---|---|---|
| ``kernel_order`` | a buffer is read before an in-place write of it; unused draws are dropped | 2.11 to 2.13 |
| ``mutations_by_index`` | a buffer is overwritten in the loop that reads other places of it | 2.11 to 2.13 |
| ``no_write_while_read`` | an operand is overwritten while a view of it, or a concatenation, is read | 2.11 to 2.13 |
| ``extern_strides`` | a called operator's result has other strides than were planned | 2.13 |
| ``result_strides`` | a result that lies in a concatenation has the strides of the concatenation | 2.13 |
| ``rounding_casts`` | a cast to a narrow type and back does not round | 2.13 |
| ``results_own_storage`` | ``x * ones``, a copy of a written part, and from 2.14 ``x * 1``: no copies | 2.11 to 2.15 |
| ``copies_for_writes`` | an input gets the new value of another one, not the old one that was copied | 2.13 |
| ``rows_of_their_own`` | a buffer of one row is shared by the rows of a tile | 2.11 to 2.13 |
| ``masked_reads`` | on a GPU, padding has values of its neighbors | 2.13 |
| ``zero_products`` | ``x * 0`` is 0 where ``x`` is NaN or infinite | 2.13 |
| ``zero_sums`` | ``x + zeros`` (from 2.14 on ``x + 0``) is -0.0 where ``x`` is | 2.13 to 2.15 |
| ``small_arguments`` | ``atanh`` (in 2.13 ``expm1``) of vectors loses the digits of small numbers | 2.13 to 2.15 |
| ``index_arrays`` | loads use an array that a store behind them creates: C++ that cannot be compiled | 2.13 |
| (always on) | two draws with equal arguments, such as ``torch.normal``, are one; so are 0.0 and -0.0 | 2.13 |

Arguments that its patterns ignore are written out by ``compile/backend/passes/inductor_workarounds.py``.
``corrections/`` has them by topic. What CSE merges is in ``common_subexpressions.py``; what Inductor changes in the
process is put back in ``compile.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from sidefx_train.switches import enabled
from sidefx_train.torch_compat.inductor.corrections.generated_code import (
    casts_round,
    index_arrays_where_created,
    masked_reads_filled,
    small_arguments_kept,
)
from sidefx_train.torch_compat.inductor.corrections.kernel_order import (
    kernels_in_order,
    local_buffers_hold_one_row,
    mutations_fused_by_index,
)
from sidefx_train.torch_compat.inductor.corrections.reused_memory import (
    copies_for_writes,
    nothing_written_while_read,
    results_own_storage,
)
from sidefx_train.torch_compat.inductor.corrections.strides import extern_results_as_planned, results_laid_out_as_traced
from sidefx_train.torch_compat.inductor.corrections.zero_arithmetic import zero_products_computed, zero_sums_computed

_MENDED: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "kernel_order": kernels_in_order,
    "mutations_by_index": mutations_fused_by_index,
    "no_write_while_read": nothing_written_while_read,
    "extern_strides": extern_results_as_planned,
    "result_strides": results_laid_out_as_traced,
    "rounding_casts": casts_round,
    "results_own_storage": results_own_storage,
    "copies_for_writes": copies_for_writes,
    "rows_of_their_own": local_buffers_hold_one_row,
    "masked_reads": masked_reads_filled,
    "zero_products": zero_products_computed,
    "zero_sums": zero_sums_computed,
    "small_arguments": small_arguments_kept,
    "index_arrays": index_arrays_where_created,
}


@contextmanager
def right_results() -> Iterator[None]:
    """Context around lowering that applies all workarounds that are not disabled."""
    with ExitStack() as stack:
        for name, mended in _MENDED.items():
            if enabled(name):
                stack.enter_context(mended())
        yield
