"""Kernels compiled without torch's header compute the same results as with it, bit by bit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import sidefx_train
from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend import inductor
from sidefx_train.compile.backend.cpp_codegen import build_library, kernel_units, simd_helpers_source
from sidefx_train.compile.backend.cpp_codegen.kernel_prelude import header_free_header, header_free_kernels

aten = torch.ops.aten


def _numbers(*size: int) -> torch.Tensor:
    """Returns numbers of all kinds: large, small, denormal, zeros of both signs, infinite, NaN."""
    values = torch.randn(*size) * 3
    flat = values.view(-1)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 3e38, -3e38, 88.8, -104.0, 1.0, -1.0, 0.5, 2.5]
    for i, value in enumerate(special):
        flat[(7 * i) % flat.numel()] = value
    return values


def pointwise(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [
        x + y, x - y, x * y, x / y, -x, x.abs(), x.exp(), x.abs().log(), x.sqrt(), x.rsqrt(), x.reciprocal(),
        x.tanh(), x.erf(), x.floor(), x.ceil(), x.trunc(), x.round(), x.sin(), x.cos(), x.log1p(), x.expm1(),
        x.sigmoid(), x.sign(), x.square(), x.abs() ** y, torch.maximum(x, y), torch.minimum(x, y), x.relu(),
        x.clamp(-1.0, 2.0), F.gelu(x), F.silu(x), F.leaky_relu(x), F.softplus(x), F.elu(x),
        F.gelu(x, approximate="tanh"),
    ]  # fmt: skip


def functions(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [
        x.exp2(), x.abs().log2(), x.abs().log10(), x.tan(), x.asin(), x.acos(), x.atan(), x.asinh(), x.atanh(),
        x.erfc(), x.atan2(y), torch.hypot(x, y), x.fmod(y), x % y, x.copysign(y), x.signbit(),
    ]  # fmt: skip


def double_precision(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    a, b = x.double() * 1.000000001, y.double() * 0.999999999
    return [
        *pointwise(a, b), *functions(a, b), *conditions(a, b), *reductions(a, b), *places(a, b), a.float(), a + x,
        a.long().clamp(-9, 9),
        torch.zeros(a.shape, dtype=a.dtype).index_add(0, torch.arange(a.shape[0]).flip(0), b), (a.t() + 1).contiguous(),
        torch.where(a > x, 1, 2) * b, F.pad(a, (1, 2)), torch.cat([a, b], 1) * 2, a[:, ::2] + 1,
    ]  # fmt: skip


def places(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Arguments of the largest and the smallest: the first of equals, and of NaN."""
    finite, equal = x.nan_to_num(0.5, 9.0, -9.0), (x.nan_to_num() > 0).to(x.dtype)
    whole = finite.long()
    return [
        found
        for given in (x, x.flip(1), finite, equal, equal * 0, whole)
        for extreme in (torch.argmax, torch.argmin)
        for found in (extreme(given, 0), extreme(given, 1), extreme(given))
    ] + [*finite.max(1), *finite.min(0)]


def divisions(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Integers divided by integers of both signs."""
    a = (x.nan_to_num(0.0, 9.0, -9.0).clamp(-1e6, 1e6) * 10).long()
    b = (y.nan_to_num(0.0, 9.0, -9.0).clamp(-1e6, 1e6) * 10).long()
    b = torch.where(b == 0, -1, b)
    least = torch.full_like(a, torch.iinfo(a.dtype).min)
    return [
        result
        for left, right in (
            (a, b),
            (a.int(), b.int()),
            (a, torch.full_like(b, -1)),
            (least, b.clamp(max=-2)),
            (a, 7 + b % 3),
        )
        for result in (
            left // right,
            left % right,
            left.fmod(right),
            (left // right).sum(),
            left.div(right, rounding_mode="trunc"),
        )
    ]


def conditions(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    mask = (x > y) | (x == 0) & ~(y < 1) ^ (x != x)
    return [
        mask, x >= y, x <= y, torch.where(mask, x, y), torch.where(mask & (x < 2), 1.0, 0.0), mask.float() * x,
        mask.long() + 1, x.isnan(), x.isinf(), mask.logical_not(), mask.all(-1), mask.any(-1), (x > 1).sum(-1),
        mask > (y > 0), mask < (y > 0), mask >= (y > 0), mask <= (y > 0), mask == (y > 0), mask != (y > 0),
    ]  # fmt: skip


def reductions(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    finite = torch.where((x.abs() < 1e3) & ~x.isnan(), x, 1.0)
    return [
        finite.sum(), finite.sum(0), finite.sum(1), x.amax(0), x.amax(1), x.amin(0), x.amin(1), finite.mean(1),
        torch.softmax(finite, -1), torch.log_softmax(finite, 0), finite.var(1), finite.std(0), finite.prod(1) * 1e-8,
        F.layer_norm(finite, finite.shape[1:]), (finite * y.nan_to_num()).sum(0, keepdim=True),
        aten._softmax_backward_data(y, torch.softmax(finite, -1), -1, torch.float32),
        aten._softmax_backward_data(y.nan_to_num(), torch.softmax(finite, 0), 0, torch.float32),
    ]  # fmt: skip


def integers(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    whole = (x.nan_to_num(0.0, 9.0, -9.0).clamp(-1e6, 1e6) * 10).to(torch.int64)
    small = whole.to(torch.int32)
    place = torch.arange(x.shape[1])
    return [
        whole + 3, whole * whole, whole.abs(), whole.clamp(-5, 5), whole.float() / 7, small + 1, small.float(),
        whole.sum(), whole.sum(0), whole.amax(1), place <= place.unsqueeze(1), whole == 9, whole.to(torch.int32),
        torch.where(place > 3, x, y), whole.max(small.long()), small.to(torch.int64),
        F.one_hot(whole[0].clamp(0, 4), 5),
    ]  # fmt: skip


def wide_numbers(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Float64 numbers, like learning rates, combined with vectors."""
    finite = y.nan_to_num(0.5, 2.0, -2.0)
    a, b = finite[0, 1].double() * 0.1, finite[1, 0].double() - 0.3
    numbers = [
        a + b, a / b, -a, a.abs(), a.exp(), a.abs().sqrt(), a.abs().log(), a.tanh(), a.erf(), a.floor(), a.sin(),
        a.abs() ** b, a.abs().rsqrt(), a.reciprocal(), a.sigmoid(), a.relu(), a.clamp(-0.1, 0.1), torch.maximum(a, b),
        torch.minimum(a, b), torch.where(a > b, a, 1.0), a.isnan(), a.round(), a.log1p(), a.expm1(), a.long(), a > 0,
        a.float(), torch.where(a < b, torch.inf, -a), a.nan_to_num(),
    ]  # fmt: skip
    return [x + y * a, torch.where(b > 0, x, y), x * (a - b), finite.add(x, alpha=0.25) / (1 - a * a), *numbers]


def narrow_numbers(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Bfloat16 numbers, alone and with float32."""
    a, b = x.bfloat16(), y.bfloat16()
    finite = torch.where((a.abs() < 1e3) & ~a.isnan(), a, 1.0)
    return [
        a, a + b, a * b, a / b, -a, a.abs(), a.exp(), a.tanh(), a.sigmoid(), a.relu(), F.gelu(a), F.silu(a), a.float(),
        a + x, (x * 1.25).bfloat16().float(), torch.where(a > b, a, b), torch.maximum(a, b), a.isnan(), a > 0,
        a * a.float().exp().bfloat16(), a.sum(0), finite.sum(1), finite.sum(), torch.softmax(finite, -1), a[:, 1:] + 1,
        F.layer_norm(finite, finite.shape[1:]), a[torch.arange(a.shape[0]).flip(0)], finite.amax(1), a[0, 0] * b[1, 1],
        torch.full((5,), 1.1).bfloat16() * a[0, 0], a.flip(1), finite.mean(0), torch.cat([a, b], 1) * 2,
        (a * 0).nan_to_num(3.0), F.nll_loss(a[:5, :7], torch.tensor([-100] * 5)),
        *F.max_pool2d(a[None], 2, return_indices=True), *F.max_pool2d(x[None], 3, 2, return_indices=True),
    ]  # fmt: skip


def layouts(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    index = torch.arange(x.shape[0]).flip(0)
    return [
        (x.t() + 1).contiguous(), x.t() * y.t(), torch.cat([x, y], 1).exp(), F.pad(x, (1, 2)), x[index], x[:, ::2] + 1,
        torch.zeros(x.shape).index_add(0, index, y), F.embedding(index, y), x.flip(1), x[:, 1:] * 2, x.roll(1, 0),
        torch.zeros(x.shape).index_put((index,), y, accumulate=True), x.unfold(1, 3, 2).sum(-1),
        (x.t() + y.t() * 2).contiguous().sum(0),
    ]  # fmt: skip


def _computed(program: Callable[..., Any], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the results of a program for each pair of the tensors."""

    def step(*given: torch.Tensor) -> list[torch.Tensor]:
        return [made for x, y in zip(given[::2], given[1::2], strict=True) for made in program(x, y)]

    return sidefx_train.compile(step, fullgraph=True, autotune="off")(*given)  # type: ignore[no-any-return]


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Records for each compiled part of the kernels whether it was built without torch's header."""
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    found: list[bool] = []
    build = build_library._build

    def noted(units: list[Any], *rest: Any) -> str:
        name = build(units, *rest)  # a refused source is not recorded
        found.extend(compat.KERNEL_HEADER not in unit.text for unit in units[2:])
        return name

    monkeypatch.setattr(build_library, "_build", noted)
    return found


PROGRAMS = [
    *(pointwise, conditions, reductions, integers, wide_numbers, narrow_numbers, layouts),
    *(functions, double_precision, places, divisions),
]
RARE = [wide_numbers, narrow_numbers, layouts, functions, places, divisions]


WHOLE, TAILS = (32, 48), (37, 21)
WIDE = torch.backends.cpu.get_cpu_capability() == "AVX512"


@pytest.mark.parametrize(
    ("sizes", "bits"),
    [
        pytest.param((WHOLE, TAILS), None, id="whole and tails"),
        pytest.param(
            (TAILS,),
            256,
            id="tails, AVX2",
            marks=[pytest.mark.slow, pytest.mark.skipif(not WIDE, reason="these are its vectors anyway")],
        ),
    ],
)
@pytest.mark.parametrize(
    "program",
    [pytest.param(program, marks=pytest.mark.slow if program in RARE else ()) for program in PROGRAMS],
    ids=lambda program: program.__name__,
)
@pytest.mark.every(6)
def test_results_are_those_of_torchs_header_bit_by_bit(
    program: Any,
    sizes: tuple[tuple[int, int], ...],
    bits: int | None,
    builds: list[bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = inductor.options
    monkeypatch.setattr(inductor, "options", lambda *given: {**usual(*given), "cpp.simdlen": bits})
    torch.manual_seed(1)
    given = [numbers for size in sizes for numbers in (_numbers(*size), _numbers(*size).flip(0))]
    lean = _computed(program, given)
    own = (
        program not in (reductions, double_precision) or torch.__version__ >= "2.12"
    )  # the header lacks some helpers of 2.11
    assert builds and all(builds) is own, "kernels were compiled with torch's header"
    builds.clear()
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(kernel_units, "header_free_kernels", lambda text: None)
    whole = _computed(program, given)
    assert builds and not any(builds)
    for i, (mine, torchs) in enumerate(zip(lean, whole, strict=True)):
        assert mine.dtype == torchs.dtype and mine.stride() == torchs.stride()
        as_bits = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}
        as_bits = as_bits.get(mine.dtype, mine.dtype)
        assert torch.equal(mine.contiguous().view(as_bits), torchs.contiguous().view(as_bits)), f"result {i}"


def test_a_division_by_zero_raises_eagers_error(builds: list[bool]) -> None:
    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a % b) * 2 + a // b

    compiled = sidefx_train.compile(step, fullgraph=True)
    a, b = torch.arange(-20, 20), torch.full((40,), -3)
    for divisor in (7, -3, 0, 5):
        b[17] = divisor
        if divisor:
            assert torch.equal(compiled(a, b), step(a, b))
            continue
        for each in (step, compiled):
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                each(a, b)
    assert builds and all(builds)


def test_kernels_with_other_names_are_left_to_torchs_header() -> None:
    plain = f"""#include <{compat.KERNEL_HEADER}>
extern "C"  void  cpp_fused_0(const float* in_ptr0, float* out_ptr0)
{{
    auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + static_cast<int64_t>(0), static_cast<int64_t>(16));
    auto tmp1 = tmp0.exp();
    tmp1.store(out_ptr0 + static_cast<int64_t>(0));
}}
"""
    assert header_free_kernels(plain) is not None
    assert header_free_header("CPU_CAPABILITY_AVX512") is not None and header_free_header("CPU_CAPABILITY_NEON") is None
    changes = [
        (".exp()", ".lgamma()"),
        ("tmp0.exp()", "unheard_of(tmp0)"),
        ("const float*", "const at::Half*"),
        ("tmp0.exp()", "at::vec::Vectorized<at::BFloat16>::blendv(tmp0, tmp0, tmp0)"),
        ("tmp1 =", "tmp2 = std::frexp(1.0f); auto tmp1 ="),
        ("Vectorized<float>", "Vectorized<uint8_t>"),
        ("extern", "#include <vector>\nextern"),
    ]
    for old, new in changes:
        assert plain.replace(old, new) != plain
        assert header_free_kernels(plain.replace(old, new)) is None, new


def test_torch_computes_vectors_by_the_same_functions_of_sleef() -> None:
    """A torch that computes one otherwise would differ from it in the last bits, or in where it overflows."""
    named = re.findall(r"each\((\w+), (u\d+), (u\d+)\)", simd_helpers_source.BEFORE)
    assert len(named) > 10
    headers = Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vec" / "vec256"
    for kind, lanes, place in (("float", "f8", 1), ("double", "d4", 2)):
        called = set(re.findall(r"Sleef_(\w+)\(", (headers / f"vec256_{kind}.h").read_text()))
        assert {f"{each[0]}{lanes}_{each[place]}" for each in named} <= called
