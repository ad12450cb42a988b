"""Code of single operations that computes other values, or that cannot be compiled."""

from __future__ import annotations

import types
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sidefx_train.torch_compat.inductor.patching import replaced, setting


@contextmanager
def casts_round() -> Iterator[None]:
    """Makes casts to float16 and bfloat16 round; operations between narrow values are computed in float32 as before.

    Upstream: the wide value is used instead of the rounded one where both are in one kernel, so that the fake
    quantization ``x + (x.half().float() - x).detach()`` does nothing. Seen in torch 2.13.
    """
    from torch._inductor import lowering
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import ops

    narrow = (torch.float16, torch.bfloat16)

    def rounding(before: Callable[..., Any]) -> Callable[..., Any]:
        def to_dtype(value: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
            wide = value.get_dtype()
            if dtype not in narrow or wide not in (torch.float32, torch.float64):
                return before(value, dtype, *args, **kwargs)

            def rounded(x: Any) -> Any:
                return ops.to_dtype(ops.to_dtype(x, dtype, src_dtype=wide, use_compute_types=False), dtype)

            return lowering.make_pointwise(rounded, override_return_dtype=dtype)(value)

        return to_dtype

    def not_known(before: Callable[..., Any]) -> Callable[..., Any]:
        return lambda kernel, wide, wide_type, rounded, narrow_type: None  # that what was rounded once was this wide

    with replaced(lowering, "to_dtype", rounding), replaced(cpp.CppKernel, "cache_dtype_convert", not_known):
        yield


@contextmanager
def small_arguments_kept() -> Iterator[None]:
    """Calls the functions of vectors for ``expm1`` and ``atanh``.

    Upstream: ``expm1(x)`` of a vector is ``exp(x) - 1``, which is 0 for 1e-8, and so is ``atanh``: the logarithm of
    either is minus infinity. Seen with ``torch.compile`` in torch 2.13.
    """
    from torch._inductor.codegen import cpp

    def expm1(x: Any) -> str:  # both keep their names, by which the functions of single numbers are found
        return f"{x}.expm1()"

    def atanh(x: Any) -> str:
        return f"{x}.atanh()"

    with (
        setting(cpp.CppVecOverrides, "expm1", staticmethod(expm1)),
        setting(cpp.CppVecOverrides, "atanh", staticmethod(atanh)),
    ):
        yield


class _ComputedBody:
    """The body of a masked operation, which seems to compute its result rather than to read it."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self._body = body
        self.graph = self

    def __call__(self) -> Any:
        return self._body()

    def find_nodes(self, op: str) -> list[Any]:
        return [types.SimpleNamespace(args=(types.SimpleNamespace(target=""),))]


@contextmanager
def masked_reads_filled() -> Iterator[None]:
    """Fills in what a masked read leaves out if the kernel of a GPU computes what it reads itself.

    Upstream: nothing is read from memory then, and only the read has the mask, so that padding has values of its
    neighbors. Seen in torch 2.13; right from 2.14 on.
    """
    from torch._inductor.codegen.triton import TritonKernelOverrides
    from torch._inductor.virtualized import V

    before = vars(TritonKernelOverrides)["masked"]

    def masked(mask: Any, body: Any, other: Any) -> Any:
        known = V.kernel.cse.store_cache
        read = {arg.args[1] for node in body.graph.find_nodes(op="output") for arg in node.args if arg.target == "load"}
        return before.__func__(mask, _ComputedBody(body) if not read.isdisjoint(known) else body, other)

    TritonKernelOverrides.masked = staticmethod(masked)  # type: ignore[method-assign]
    try:
        yield
    finally:
        TritonKernelOverrides.masked = before  # type: ignore[method-assign]


@contextmanager
def index_arrays_where_created() -> Iterator[None]:
    """Lets only the code behind it use an array of indices that a store has created.

    Upstream: the loads of a loop, which come before its stores, use the array, too. The C++ compiler refuses that:
    ``y = x.scatter(0, i, s)`` and the gradients of both in one graph. Seen with ``torch.compile`` in torch 2.13.
    """
    from torch._inductor.codegen import cpp

    def kept_apart(before: Callable[..., Any]) -> Callable[..., Any]:
        def load_or_store(kernel: Any, var: Any, index: Any, dtype: Any, buffer: Any = None, **stored: Any) -> Any:
            if buffer is None or buffer is kernel.loads:
                return before(kernel, var, index, dtype, buffer, **stored)
            known, created = kernel.cse._cache, dict[Any, Any]()
            kernel.cse._cache = ChainMap(created, known)
            try:
                made = before(kernel, var, index, dtype, buffer, **stored)
            finally:
                kernel.cse._cache = known
            known.update({key: value for key, value in created.items() if value is made})
            return made

        return load_or_store

    with replaced(cpp.CppVecKernel, "_load_or_store_non_contiguous", kept_apart):
        yield
