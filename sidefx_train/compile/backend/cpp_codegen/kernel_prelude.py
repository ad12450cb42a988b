"""Kernel prelude: what Inductor's C++ kernels need, without torch's headers.

Reading Inductor's header for kernels takes more than a second, ten times as long as compiling most kernels. This
prelude contains what kernels use of it for vectors of float32, float64, integers and booleans, and for bfloat16 and
int8 that are stored and not computed with, on the compiler's own vector types: the same names, the same
order of operations, the same functions of libm and SLEEF, so that results are bitwise equal. A source with an unknown
name is compiled with torch's header.
"""

from __future__ import annotations

import re

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.cpp_codegen import simd_helpers_source, simd_register_source, simd_source
from sidefx_train.compile.backend.cpp_codegen.wrapper_prelude import FAILURE, INTEGER_DIVISION

_STEPS = """
    std::atomic<int> inductor_cpu_integer_div_error{0};
    inductor_cpu_integer_div_error_flag = &inductor_cpu_integer_div_error;
    inductor_cpu_integer_div_error_flag = nullptr;
    inductor_cpu_throw_if_integer_div_error(inductor_cpu_integer_div_error);
"""
"""Lines around the loops of each kernel, which report integer divisions by zero: left out where there are none."""

_DIVIDES = re.compile(r"\b(?:mod|remainder_integral|floor_divide_integral)\(")

_PLAIN = re.compile("|".join(rf"^[ \t]*{re.escape(line.strip())}\n" for line in _STEPS.split("\n") if line), re.M)
_QUALIFIED = re.compile(r"\b(\w+(?:::\w+)+)")
_METHOD = re.compile(r"(?:\.(?:template\s+)?)([a-z_]\w*)\s*(?:<[^<>()]*>)?\(")
_ELEMENT = re.compile(
    r"\b(?<!c10::)(?:Vectorized|VectorizedN|VecMask|cast|inductor_vec_mask_cast|to|loadu|convert|CascadeSumHelper|array"
    r"|IndexValue|IndexValueVec)"
    r"<\s*([\w:]+)"
)
_CALL = re.compile(r"(?<![\w.:>])([A-Za-z_]\w*)\s*(?:<[^<>()]*(?:\([^()]*\)[^<>()]*)*>)?\(")

_NAMES = {
    *(f"at::vec::{name}" for name in ("Vectorized", "VectorizedN", "VecMask", "maximum", "minimum", "clamp_min")),
    *(f"at::vec::{name}" for name in ("clamp_max", "convert", "vec_reduce_all")),
    *(f"std::{name}" for name in ("sqrt", "exp", "log", "tanh", "erf", "abs", "max", "min", "floor", "ceil", "trunc")),
    *(f"std::{name}" for name in ("log1p", "expm1", "sin", "cos", "pow", "fma", "isnan", "isinf", "nearbyint")),
    *(f"std::{name}" for name in ("exp2", "log2", "log10", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh")),
    *(f"std::{name}" for name in ("acosh", "atanh", "erfc", "lgamma", "fmod", "copysign", "atan2", "hypot", "signbit")),
    *(f"std::{name}" for name in ("numeric_limits", "make_unsigned_t", "array", "size_t", "unique_ptr", "make_unique")),
    "at::BFloat16",
    "c10::convert",
    "c10::div_floor_integer",
    "c10::div_mod",
    "Vectorized::loadu",
}
_METHODS = {
    *("loadu", "store", "blendv", "cast", "to", "all_zero", "all_masked", "is_masked", "data", "abs", "exp", "log"),
    *("sqrt", "rsqrt", "reciprocal", "neg", "tanh", "erf", "floor", "ceil", "trunc", "round", "sin", "cos", "log1p"),
    *("pow", "get", "expm1", "exp2", "log2", "log10", "tan", "asin", "acos", "atan"),
    *("atanh", "erfc", "atan2", "hypot", "fmod", "copysign"),
}
_CALLS = {
    *("for", "if", "while", "return", "switch", "sizeof", "alignof", "alignas", "decltype", "static_cast", "void"),
    *("C10_LIKELY", "C10_UNLIKELY", "omp_get_thread_num", "float", "int64_t", "int32_t", "bool", "double", "int"),
    *("cascade_sum_combine", "cascade_sum_final", "sum_masked_reduce", "max_masked_reduce", "min_masked_reduce"),
    *("prod_masked_reduce", "any_masked_reduce", "max_propagate_nan", "min_propagate_nan", "transpose_mxn"),
    *("cast", "inductor_vec_mask_cast", "loadu", "to", "fmadd", "atomic_add", "atomic_add_vec"),
    *("num_threads", "collapse", "schedule", "reduction", "IndexValue", "IndexValueVec"),
    *("mod", "remainder_integral", "floor_divide_integral", "inductor_cpu_throw_if_integer_div_error"),
    *(f"{name}_{kind}" for name in ("argmax", "argmin") for kind in ("combine", "combine_vec", "vec_reduce_all")),
}
_OWN = re.compile(r"(?:cpp_fused_|tmp|scalar_cascade_helper|masked_cascade_helper|cascade_helper)\w*")
_ELEMENTS = {"float", "double", "int64_t", "int32_t", "bool", "at::BFloat16", "int8_t"}
_ELEMENTS |= {"at::vec::Vectorized", "at::vec::VectorizedN"}
_NARROW = re.compile(
    r"\bat_BFloat16_\w+|at::vec::convert<(?:float,2,at::BFloat16,1|at::BFloat16(?:,1,float,2)?)>\("
    r"|at::vec::Vectorized<at::BFloat16>\(|std::numeric_limits<at::BFloat16>::\w+\("
    r"|at::vec::convert<(?:int8_t,1,int(?:32|64)_t,\d|int(?:32|64)_t,\d,int8_t,1)>\("
    r"|\b(?:c10::convert|static_cast)<(?:at::BFloat16|int8_t)>\(|at::vec::Vectorized<(?:at::BFloat16|int8_t)>::loadu\("
    r"|std::array<(?:at::BFloat16|int8_t), \d+>|\b(?:at::BFloat16|int8_t)\*"
)
"""What the prelude supports of bfloat16 and int8: numbers are copied, and computed with in other types."""
_REFUSED = re.compile(r"\b(?:BFloat16|Half|half|Welford|uint8_t|int8_t|int16_t|assert|goto|asm)\b")

HEADER = "".join(
    (
        *(FAILURE, simd_helpers_source.BEFORE, INTEGER_DIVISION),
        *(simd_register_source.SOURCE, simd_source.SOURCE, simd_helpers_source.AFTER),
    )
)

_SIZES = {"CPU_CAPABILITY_AVX512": 64, "CPU_CAPABILITY_AVX2": 32}


def header_free_header(capability: str) -> str | None:
    """Returns the prelude for :func:`header_free_kernels`; ``None`` if there is none for this CPU.

    Args:
        capability: the macro that tells Inductor's header the available vectors.
    """
    size = _SIZES.get(capability)
    return None if size is None else HEADER.replace("@BYTES@", str(size))


def header_free_kernels(kernels: str) -> str | None:
    """Returns kernels that need only this prelude; ``None`` if they need torch's header.

    Args:
        kernels: Inductor's kernels, each after an include of its header.
    """
    text = re.sub(rf"(?m)^[ \t]*#include <{re.escape(compat.KERNEL_HEADER)}>\n", "", kernels)
    if _DIVIDES.search(text):
        text = re.sub(r"std::atomic<int> (inductor_cpu_integer_div_error)\{0\};", r"int \1 = 0;", text)
    else:
        text = _PLAIN.sub("", text)
    if "#include" in text or not _is_known(text):
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
