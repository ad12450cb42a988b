"""CUDA's math library for Triton's interpreter, which has none: the functions are torch's on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "abs": torch.abs,
    "acos": torch.acos,
    "acosh": torch.acosh,
    "asin": torch.asin,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "atan2": torch.atan2,
    "atanh": torch.atanh,
    "ceil": torch.ceil,
    "copysign": torch.copysign,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "div_rn": torch.div,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "erfcx": torch.special.erfcx,
    "erfinv": torch.erfinv,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "float2int_rn": lambda x: torch.round(x).to(torch.int32),
    "floor": torch.floor,
    "fmod": torch.fmod,
    "hypot": torch.hypot,
    "isinf": torch.isinf,
    "isnan": torch.isnan,
    "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1,
    "lgamma": torch.lgamma,
    "llrint": lambda x: torch.round(x).to(torch.int64),
    "log": torch.log,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "mul_rn": torch.mul,
    "nearbyint": torch.round,
    "nextafter": torch.nextafter,
    "pow": torch.pow,
    "rint": torch.round,
    "rsqrt": torch.rsqrt,
    "signbit": torch.signbit,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "sqrt": torch.sqrt,
    "sqrt_rn": torch.sqrt,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "trunc": torch.trunc,
    "y0": torch.special.bessel_y0,
    "y1": torch.special.bessel_y1,
}
"""By the name in CUDA's library; rounding to nearest is to even, as it is there."""

_TRUTHS = ("isinf", "isnan", "signbit")
"""Functions that return an integer which is 0 or 1."""


def functions() -> dict[str, Callable[..., Any]]:
    """Returns the functions over the interpreter's values, by name."""
    return {name: partial(_call, function, name in _TRUTHS) for name, function in _FUNCTIONS.items()}


def _call(function: Callable[..., torch.Tensor], is_truth: bool, *args: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, interpreter_semantic

    values = [interpreter_semantic.to_tensor(arg) for arg in args]
    made = function(*(torch.from_numpy(value.handle.data) for value in values))
    if is_truth:
        made = made.to(torch.int32)
    dtype = values[0].dtype.scalar if made.dtype.is_floating_point else getattr(tl, str(made.dtype).split(".")[1])
    shape = list(made.shape)
    kind = tl.block_type(dtype, shape) if values[0].type.is_block() or (len(values) > 1 and shape) else dtype
    return tl.core.tensor(TensorHandle(made.numpy(), dtype), kind)
