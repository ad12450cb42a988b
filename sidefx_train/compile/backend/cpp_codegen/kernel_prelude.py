"""What kernels that Inductor writes in C++ need, without torch's headers.

Inductor's header for kernels takes more than a second to read, ten times as long as most kernels take to compile. Here
is what kernels on vectors of float32, integers and booleans, on bfloat16 and int8 that are kept and not computed with,
and on single numbers of float64, use of it, on the compiler's own vector types: the same names, the same order of
operations, the same functions of libm and SLEEF, so that results are equal bit by bit. A source with a name that is not
known here is compiled with torch's header.
"""

from __future__ import annotations

import re

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.cpp_codegen import simd_helpers_source, simd_source

_STEPS = """
    std::atomic<int> inductor_cpu_integer_div_error{0};
    inductor_cpu_integer_div_error_flag = &inductor_cpu_integer_div_error;
    inductor_cpu_integer_div_error_flag = nullptr;
    inductor_cpu_throw_if_integer_div_error(inductor_cpu_integer_div_error);
"""
"""Lines of each kernel around its loops. They tell of divisions of integers by zero, which no function here does."""

_PLAIN = re.compile("|".join(rf"^[ \t]*{re.escape(line.strip())}\n" for line in _STEPS.split("\n") if line), re.M)
_QUALIFIED = re.compile(r"\b(\w+(?:::\w+)+)")
_METHOD = re.compile(r"(?:\.(?:template\s+)?)([a-z_]\w*)\s*(?:<[^<>()]*>)?\(")
_ELEMENT = re.compile(
    r"\b(?<!c10::)(?:Vectorized|VectorizedN|VecMask|cast|to|loadu|convert|CascadeSumHelper|array)<\s*([\w:]+)"
)
_CALL = re.compile(r"(?<![\w.:>])([A-Za-z_]\w*)\s*(?:<[^<>()]*(?:\([^()]*\)[^<>()]*)*>)?\(")

_NAMES = {
    *(f"at::vec::{name}" for name in ("Vectorized", "VectorizedN", "VecMask", "maximum", "minimum", "clamp_min")),
    *(f"at::vec::{name}" for name in ("clamp_max", "convert", "vec_reduce_all")),
    *(f"std::{name}" for name in ("sqrt", "exp", "log", "tanh", "erf", "abs", "max", "min", "floor", "ceil", "trunc")),
    *(f"std::{name}" for name in ("log1p", "expm1", "sin", "cos", "pow", "fma", "isnan", "isinf", "nearbyint")),
    *(f"std::{name}" for name in ("numeric_limits", "array", "size_t", "unique_ptr", "make_unique")),
    "at::BFloat16",
    "c10::convert",
    "c10::div_floor_integer",
    "Vectorized::loadu",
}
_METHODS = {
    *("loadu", "store", "blendv", "cast", "to", "all_zero", "all_masked", "is_masked", "data", "abs", "exp", "log"),
    *("sqrt", "rsqrt", "reciprocal", "neg", "tanh", "erf", "floor", "ceil", "trunc", "round", "sin", "cos", "log1p"),
    *("pow", "get"),
}
_CALLS = {
    *("for", "if", "while", "return", "switch", "sizeof", "alignof", "alignas", "decltype", "static_cast", "void"),
    *("C10_LIKELY", "C10_UNLIKELY", "omp_get_thread_num", "float", "int64_t", "int32_t", "bool", "double", "int"),
    *("cascade_sum_combine", "cascade_sum_final", "sum_masked_reduce", "max_masked_reduce", "min_masked_reduce"),
    *("prod_masked_reduce", "any_masked_reduce", "max_propagate_nan", "min_propagate_nan", "transpose_mxn"),
    *("cast", "loadu", "to", "fmadd", "atomic_add", "atomic_add_vec"),
    *("num_threads", "collapse", "schedule", "reduction"),
}
_OWN = re.compile(r"(?:cpp_fused_|tmp|scalar_cascade_helper|masked_cascade_helper|cascade_helper)\w*")
_ELEMENTS = {"float", "int64_t", "int32_t", "bool", "at::BFloat16", "int8_t"}
_ELEMENTS |= {"at::vec::Vectorized", "at::vec::VectorizedN"}
_NARROW = re.compile(
    r"\bat_BFloat16_\w+|at::vec::convert<(?:float,2,at::BFloat16,1|at::BFloat16(?:,1,float,2)?)>\("
    r"|at::vec::Vectorized<at::BFloat16>\(|std::numeric_limits<at::BFloat16>::\w+\("
    r"|at::vec::convert<(?:int8_t,1,int(?:32|64)_t,\d|int(?:32|64)_t,\d,int8_t,1)>\("
    r"|\b(?:c10::convert|static_cast)<(?:at::BFloat16|int8_t)>\(|at::vec::Vectorized<(?:at::BFloat16|int8_t)>::loadu\("
    r"|std::array<(?:at::BFloat16|int8_t), \d+>|\b(?:at::BFloat16|int8_t)\*"
)
"""All that the header has of bfloat16 and int8: numbers are moved, and computed with in other types."""
_REFUSED = re.compile(r"\b(?:BFloat16|Half|half|Welford|IndexValue|uint8_t|int8_t|int16_t|assert|goto|asm)\b")

HEADER = simd_helpers_source.BEFORE + simd_source.SOURCE + simd_helpers_source.AFTER

_SIZES = {"CPU_CAPABILITY_AVX512": 64, "CPU_CAPABILITY_AVX2": 32}


def header_free_header(capability: str) -> str | None:
    """What stands in front of kernels of :func:`header_free_kernels`; ``None`` if there is nothing for this CPU.

    Args:
        capability: the macro that tells Inductor's header which vectors there are.
    """
    size = _SIZES.get(capability)
    return None if size is None else HEADER.replace("@BYTES@", str(size))


def header_free_kernels(kernels: str) -> str | None:
    """Kernels that need no more than the header of this module; ``None`` if only torch's header will do.

    Args:
        kernels: as Inductor writes them, each behind an include of its header.
    """
    text = re.sub(rf"(?m)^[ \t]*#include <{re.escape(compat.KERNEL_HEADER)}>\n", "", kernels)
    if "#include" in text or not _is_known(text := _PLAIN.sub("", text)):
        return None
    return re.sub(r"\bstd::", "lean::", text)


def _is_known(text: str) -> bool:
    code = re.sub(r"//[^\n]*", "", text)
    if _REFUSED.search(_NARROW.sub("", code)):
        return False
    if not all(name in _NAMES for name in _QUALIFIED.findall(re.sub(r">::\w+", "", code))):
        return False
    if not all(name in _METHODS for name in _METHOD.findall(code)):
        return False
    if not all(name in _ELEMENTS for name in _ELEMENT.findall(code)):
        return False
    plain = re.sub(r"(?:at::vec|std|c10)::\w+", "", code)
    return all(name in _CALLS or _OWN.fullmatch(name) for name in _CALL.findall(plain))
