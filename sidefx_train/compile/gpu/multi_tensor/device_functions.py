"""Functions that kernels call, for values whose rounding Triton's operators leave open. Importing it needs Triton."""

import triton
import triton.language as tl


@triton.jit
def divided(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    if b.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def root(a: tl.tensor) -> tl.tensor:
    if a.dtype == tl.float64:
        return tl.sqrt(a)
    else:
        return tl.sqrt_rn(a)


@triton.jit
def inverse(a: tl.tensor) -> tl.tensor:
    return divided(tl.full([], 1.0, a.dtype), a)


@triton.jit
def signum(a: tl.tensor) -> tl.tensor:
    return (a > 0).to(a.dtype) - (a < 0).to(a.dtype)
