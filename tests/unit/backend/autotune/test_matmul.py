"""Matrix products by the native module, and the choice between libraries."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import sidefx_train
from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.autotune import matmul, timing
from sidefx_train.compile.backend.cpp_codegen import python_entry
from sidefx_train.compile.backend.cpp_codegen.wrapper_prelude import header_free_wrapper
from sidefx_train.compile.native import products_module
from sidefx_train.report import ChoiceRecord
from tests.support.disk_cache import new_cache

COMPILER = os.environ.get("CXX") or shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="the native module needs a C++ compiler")


def test_the_products_module_is_built() -> None:
    assert products_module() is not None, "a compiler is there, and refuses its source"


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
"""Relative error of one product: in bfloat16 half a unit of its 8th digit, in float32 the error of the sum."""

SIZES = (1, 2, 5, 7, 16, 33, 64, 65, 130)


def _stored(rows: int, columns: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    if layout == "columns":
        return torch.randn(columns, rows, dtype=dtype).t()
    if layout == "part":  # a block of a larger matrix, with gaps in both directions
        return torch.randn(2 * rows, 3 * columns + 1, dtype=dtype)[::2, 1 : 3 * columns + 1 : 3]
    if layout == "one row":
        return torch.randn(columns, dtype=dtype).expand(rows, columns)
    return torch.randn(rows, columns, dtype=dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("right", ["rows", "columns", "part", "one row"])
@pytest.mark.parametrize("left", ["rows", "columns", "part", "one row"])
@pytest.mark.every(8)
def test_every_shape_and_layout(left: str, right: str, dtype: torch.dtype) -> None:
    """Compares with float64; memory around the result stays unchanged."""
    torch.manual_seed(0)
    for height, depth, width in itertools.product(SIZES, (1, 3, 16, 40, 64), SIZES):
        a, b = _stored(height, depth, left, dtype), _stored(depth, width, right, dtype)
        for bias in (None, torch.randn(width, dtype=dtype)):
            around = torch.full((height * width + 32,), 7.0, dtype=dtype)
            out = around[16:-16].view(height, width)
            torch.ops.sidefx.product.out(a, b, bias, out=out)
            want = a.double() @ b.double() + (0 if bias is None else bias.double())
            torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[dtype], atol=1e-5)
            torch.ops.sidefx.product_relu.out(a, b, bias, out=out)
            torch.testing.assert_close(out.double(), want.relu(), rtol=TOLERANCE[dtype], atol=1e-5)
            assert (around[:16] == 7).all() and (around[-16:] == 7).all(), (height, depth, width)


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("threads", "dtype"), [(1, torch.float32), (3, torch.float32), (3, torch.bfloat16)])
@pytest.mark.every(3)
def test_batches(transposed: tuple[bool, bool], threads: int, dtype: torch.dtype) -> None:
    """Includes batches of one matrix, batches that share one matrix, and gaps between the matrices."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count, height, depth, width in itertools.product((1, 3, 40), (1, 7, 33), (1, 16, 40), (1, 16, 17, 48, 130)):
            a, b = (torch.randn(size, dtype=dtype) for size in ((count, height, depth), (count, depth, 2 * width)))
            a, b = (
                _transposed(t) if transpose else t for t, transpose in zip((a, b[..., :width]), transposed, strict=True)
            )
            for left, right in (
                (a, b),
                (a[:1].expand(count, height, depth), b),
                (a, b[-1:].expand(count, depth, width)),
            ):
                around = torch.full((count * height * width + 32,), 7.0, dtype=dtype)
                out = around[16:-16].view(count, height, width)
                torch.ops.sidefx.products.out(left, right, out=out)
                want = left.double() @ right.double()
                torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[dtype], atol=1e-5)
                assert (around[:16] == 7).all() and (around[-16:] == 7).all(), (count, height, depth, width)
                assert torch.equal(torch.ops.sidefx.products(left, right), out)
    finally:
        torch.set_num_threads(before)


def _transposed(matrices: torch.Tensor) -> torch.Tensor:
    """Returns the same numbers, stored by columns."""
    return matrices.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("operator", ["bmm", "matmul"])
def test_a_step_with_batched_products(operator: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    new_cache(tmp_path, monkeypatch)  # cached graphs that were lowered with other timings are not used
    times = lambda tasks: dict.fromkeys(tasks, {"mkl": 1.0, "tiles": 0.5})  # noqa: E731
    monkeypatch.setattr(matmul, "timings", times)
    multiply = getattr(torch, operator)
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        a, b = torch.randn(3, 5, 8, requires_grad=True), torch.randn(3, 8, 6, requires_grad=True)

        def step(x: torch.Tensor, a: torch.Tensor = a, b: torch.Tensor = b) -> torch.Tensor:
            loss = (multiply(a * x, b).tanh()).square().sum()
            loss.backward()
            return loss.detach()

        run = sidefx_train.compile(step, fullgraph=True) if compiled else step
        results.append([run(torch.tensor(1.5)), a.grad, b.grad])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    assert "3 of 3 matrix products by tiles in registers" in run.report().captures[0].notes


def test_what_time_did_not_reach_is_computed_as_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with the most work are timed first; batches and single products are separate."""
    asked: list[int] = []

    def timings(tasks: dict[str, timing.Task]) -> dict[str, timing.Times]:
        asked.extend(math.prod(task[1][0][0]) for task in tasks.values())
        large = [key for key, task in tasks.items() if task[1][0][0] in ([16, 16], [8, 8], [4, 4])]
        return {key: {"mkl": 1.0, "tiles": 0.1 if i == 0 else 2.0} for i, key in enumerate(large)}

    monkeypatch.setattr(matmul, "timings", timings)
    sizes = [(2, 2), (4, 4), (8, 8), (16, 16), (3, 2, 2)]
    given = [torch.randn(size) for size in sizes]
    graph = make_fx(lambda *all: [x @ x if x.dim() == 2 else torch.bmm(x, x) for x in all], tracing_mode="fake")(*given)
    note, choices = matmul.choose_products(graph, 2)
    targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    tiles, mkl = "sidefx.product.default", "aten.mm.default"
    assert targets == [tiles, mkl, mkl, tiles, "aten.bmm.default"]
    assert (
        note == "2 of 5 matrix products by tiles in registers" and [bool(c.seconds) for c in choices].count(False) == 2
    )
    assert [(c.what, c.chosen) for c in choices if c.what.startswith("(2, 2)")] == [("(2, 2) @ (2, 2)", "tiles")]
    assert asked[0] == 256 and asked[-1] == 4


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_products_are_divided_among_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for height, depth, width in ((200, 300, 129), (7, 1000, 640), (1000, 64, 64), (128, 512, 512)):
            a, b = torch.randn(height, depth), torch.randn(width, depth).t()
            torch.testing.assert_close(torch.ops.sidefx.product(a, b), a @ b, rtol=1e-4, atol=1e-3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_is_not_finite_stays_where_it_is(dtype: torch.dtype) -> None:
    a, b = torch.randn(8, 70, dtype=dtype), torch.randn(70, 67, dtype=dtype)
    a[2, 3], b[69, 66], b[5, 4] = float("nan"), float("inf"), float("-inf")
    got, want = torch.ops.sidefx.product(a, b), a @ b
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got[got.isinf()], want[want.isinf()])


def test_relu_lets_nan_through() -> None:
    a, b = torch.tensor([[float("nan"), 1.0], [1.0, 1.0]]), torch.tensor([[-1.0, 2.0], [0.0, 1.0]])
    got = torch.ops.sidefx.product_relu(a, b)
    assert torch.equal(got.isnan(), (a @ b).relu().isnan()) and torch.equal(got[1], torch.tensor([0.0, 3.0]))


@pytest.mark.parametrize("read_before", [False, True])
def test_a_relu_is_part_of_its_product(read_before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless another node reads the relu's input."""
    monkeypatch.setattr(matmul, "timings", lambda tasks: dict.fromkeys(tasks, {"mkl": 1.0, "tiles": 0.1}))
    a, b, bias = torch.randn(4, 6), torch.randn(6, 5), torch.randn(5)

    def net(a, b, bias):
        held = torch.addmm(bias, a, b)
        return held.relu() * 2 + (held if read_before else 0)

    module = make_fx(net, tracing_mode="fake")(a, b, bias)
    matmul.choose_products(module, 1)
    module.graph.lint()
    targets = {str(node.target) for node in module.graph.nodes}
    assert ("sidefx.product_relu.default" in targets) != read_before
    assert ("aten.relu.default" in targets) == read_before
    torch.testing.assert_close(module(a, b, bias), net(a, b, bias))


def test_no_depth_gives_the_bias() -> None:
    bias = torch.randn(5)
    assert torch.equal(torch.ops.sidefx.product(torch.empty(3, 0), torch.empty(0, 5), bias), bias.expand(3, 5))


# --- the choice --------------------------------------------------------------------------------------------------


def _targets(times: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str, list[ChoiceRecord]]:
    monkeypatch.setattr(matmul, "timings", lambda tasks: dict.fromkeys(tasks, times))
    a, b, bias = torch.randn(4, 6), torch.randn(6, 5), torch.randn(5)
    module = make_fx(lambda a, b, bias: torch.addmm(bias, a, b) + torch.mm(a, b), tracing_mode="fake")(a, b, bias)
    note, choices = matmul.choose_products(module, 1)
    torch.testing.assert_close(module(a, b, bias), torch.addmm(bias, a, b) + torch.mm(a, b))
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"], note, choices


@pytest.mark.parametrize(
    ("times", "used"),
    [
        ({"mkl": 1.0, "onednn": 2.0, "tiles": 3.0}, "aten.mm.default"),
        ({"mkl": 1.0, "onednn": 0.98, "tiles": 0.97}, "aten.mm.default"),
        ({"mkl": 1.0, "onednn": 0.5, "tiles": 0.7}, "sidefx.linear.default"),
        ({"mkl": 1.0, "onednn": 0.5, "tiles": 0.3}, "sidefx.product.default"),
        ({}, "aten.mm.default"),
    ],
)
def test_the_fastest_is_used(times: dict[str, float], used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library other than the default is used only if it is clearly faster, or nothing was measured."""
    targets, note, (choice,) = _targets(times, monkeypatch)
    assert used in targets
    assert bool(note) == (used != "aten.mm.default")
    assert (choice.what, choice.count, choice.seconds) == ("(4, 6) @ (6, 5)", 2, times)
    used_by = {"aten.mm.default": "mkl", "sidefx.linear.default": "onednn", "sidefx.product.default": "tiles"}
    assert choice.chosen == used_by[used]


def test_products_are_distinguished_by_the_layout_of_their_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "timings", lambda tasks: {})
    a, b = torch.randn(4, 6), torch.randn(8, 6)
    module = make_fx(lambda a, b: (a @ b[::2].T, a @ b.T, a.T @ a), tracing_mode="fake")(a, b)
    _, choices = matmul.choose_products(module, 1)
    shown = ["(4, 6) @ (8, 6).mT", "(4, 6) @ (6, 4) strides (1, 12)", "(4, 6).mT @ (4, 6)"]
    assert sorted(choice.what for choice in choices) == sorted(shown)


@pytest.mark.parametrize(
    ("times", "used"),
    [
        ({"torch": 1.0, "onednn": 0.98, "tiles": 0.97}, "aten.mm.default"),
        pytest.param(
            {"torch": 1.0, "onednn": 0.5, "tiles": 0.7},
            "sidefx.linear.default",
            marks=pytest.mark.skipif(not compat.multiplies_narrow(), reason="oneDNN has no bfloat16 without AVX-512"),
        ),
        ({"torch": 1.0, "onednn": 2.0, "tiles": 0.5}, "sidefx.product.default"),
    ],
)
def test_the_fastest_is_used_in_bfloat16(times: dict[str, float], used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "timings", lambda tasks: dict.fromkeys(tasks, times))
    torch.manual_seed(0)
    a, b, bias = (torch.randn(size).bfloat16() for size in ((4, 6), (6, 5), (5,)))

    def net(a, b, bias):
        return torch.addmm(bias, a, b).relu(), torch.mm(a, b)

    module = make_fx(net, tracing_mode="fake")(a, b, bias)
    matmul.choose_products(module, 1)
    module.graph.lint()
    assert used in {str(node.target) for node in module.graph.nodes}
    for have, want in zip(module(a, b, bias), net(a, b, bias), strict=True):
        assert have.dtype == want.dtype
        torch.testing.assert_close(have, want)


def test_a_step_under_autocast_rounds_where_eager_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands and results are bfloat16: with float32 intermediates, all but the last result would differ."""
    monkeypatch.setattr(matmul, "timings", lambda tasks: dict.fromkeys(tasks, {"torch": 1.0, "tiles": 0.5}))
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 8, 16), torch.randn(16, 16), torch.randn(16)

    def step(x, weight, bias):
        with torch.autocast("cpu", torch.bfloat16):
            first = nn.functional.linear(x, weight, bias)
            second = (first @ weight).relu()
            return first, second, torch.bmm(first, second.transpose(1, 2))

    compiled = sidefx_train.compile(step, on_failure="raise", fullgraph=True)
    for have, want in zip(compiled(x, weight, bias), step(x, weight, bias), strict=True):
        assert have.dtype == want.dtype == torch.bfloat16
        torch.testing.assert_close(have, want, rtol=0.004, atol=0)  # one rounding: the summation order differs
    assert "3 of 3 matrix products by tiles" in "; ".join(compiled.report().captures[0].notes)


@pytest.mark.parametrize("batch", [(), (512,)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_large_products_a_part_is_measured(
    batch: tuple[int, ...], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timing must not take long for products that take a second each."""
    asked: list[float] = []

    def measured(make: Callable[[], dict[str, Callable[[], None]]], flops: float, threads: int) -> dict[str, float]:
        for way in make().values():
            way()
        asked.append(flops)
        return {}

    def layouts(height: int, depth: int, width: int) -> list[list[list[int]]]:
        sides = (torch.empty(*batch, *side, device="meta") for side in ((height, depth), (depth, width)))
        return [[list(side.shape), list(side.stride())] for side in sides]

    monkeypatch.setattr(matmul, "measured", measured)
    matmul._measure(*layouts(1024, 2048, 4096), 2, dtype)
    matmul._measure(*layouts(64, 32, 48), 2, dtype)
    assert timing.LARGEST / 4 < asked[0] <= timing.LARGEST
    assert asked[1] == 2 * math.prod(batch) * 64 * 32 * 48


def test_measurements_are_kept_by_machine_and_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(timing, "_memory", {})
    task = {"one": ("product", [[[4, 4], [4, 1]], [[4, 4], [4, 1]], 1])}
    (times,) = timing.timings(task).values()
    assert set(times) >= {"mkl", "tiles"} and all(seconds > 0 for seconds in times.values())
    (kept,) = (tmp_path / "sidefx").glob("kernels_*.json")
    assert torch.__version__ in kept.name and json.loads(kept.read_text()) == {"one": times}
    monkeypatch.setattr(timing, "_memory", {})
    monkeypatch.setitem(timing.MEASURES, "product", lambda *_: pytest.fail("measured again"))
    assert timing.timings(task) == {"one": times}


@pytest.mark.parametrize(
    "task", [("product", [[[4, 4], [4, 1]], [[4, 4], [0, 1]], 1]), ("attention", [[1, 2, 4, 4], True, 1])]
)
def test_measuring_draws_none_of_the_programs_numbers(task: timing.Task) -> None:
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    assert all(timing.MEASURES[task[0]](*task[1]).values())
    assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize("bias", [torch.randn(10)[::2], torch.randn(1), torch.randn(1).expand(5), torch.randn(4, 5)])
def test_a_bias_with_gaps_or_broadcast_stays_torchs(bias: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "timings", lambda tasks: dict.fromkeys(tasks, {"mkl": 1.0, "tiles": 0.1}))
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    module = make_fx(torch.addmm, tracing_mode="fake")(bias, a, b)
    matmul.choose_products(module, 1)
    assert "aten.addmm.default" in {str(node.target) for node in module.graph.nodes}
    torch.testing.assert_close(sidefx_train.compile(torch.addmm)(bias, a, b), torch.addmm(bias, a, b))


def test_products_of_products() -> None:
    """Each reads the replacement of the one before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    step = sidefx_train.compile(lambda x: model(x).sum())
    x = torch.randn(16, 8)
    torch.testing.assert_close(step(x), model(x).sum())


def test_a_step_says_what_it_measured_and_chose() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled, untuned = sidefx_train.compile(step), sidefx_train.compile(step, autotune="off")
    x = torch.randn(32, 64)
    compiled(x)
    untuned(x)
    choices = compiled.report().captures[0].choices
    assert [choice.what for choice in choices] == ["(32, 64) @ (64, 64).mT", "(32, 64).mT @ (32, 64)"]
    assert all({"mkl", "tiles"} <= set(choice.seconds) and choice.chosen in choice.seconds for choice in choices)
    shown = compiled.report().details()
    assert "(32, 64) @ (64, 64).mT" in shown and choices[0].chosen in shown
    assert not untuned.report().captures[0].choices
    assert not any("matrix products" in note for note in untuned.report().captures[0].notes)
    with pytest.raises(ValueError, match="autotune_seconds"):
        sidefx_train.compile(step, autotune_seconds=-1.0)
    with pytest.raises(ValueError, match="autotune"):
        sidefx_train.compile(step, autotune="max")


@pytest.mark.parametrize(("patience", "turns"), [(60.0, (6, 6, 2)), (-60.0, (1, 1, 1))], ids=["quiet", "busy"])
def test_what_may_be_the_fastest_is_measured_longer(
    patience: float, turns: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"near": 0.0105, "nearest": 0.01, "far": 0.04}
    calls: Counter[str] = Counter()
    now = [0.0]

    def candidate(name: str) -> Callable[[], None]:
        def run() -> None:
            calls[name] += 1
            now[0] += seconds[name]

        return run

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.time, "thread_time", lambda: now[0])
    monkeypatch.setattr(timing, "_WORTH", patience)
    found = timing.measured(lambda: {name: candidate(name) for name in seconds}, 1e8, 1)
    assert found == pytest.approx(seconds)
    assert [calls[name] for name in seconds] == [2 * transpose for transpose in turns], (
        "one call, and one that is timed"
    )


def test_where_threads_wait_for_others_one_thread_is_measured_and_nothing_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(timing, "_memory", {})
    now, asked = [0.0], []

    def candidate(seconds: float) -> Callable[[], None]:
        def run() -> None:
            asked.append(torch.get_num_threads())
            now[0] += seconds if torch.get_num_threads() == 1 else 0.016  # the core is busy with another process

        return run

    def measure(flops: float) -> dict[str, float]:
        ways = {"slow": 4e-5, "fast": 1e-5}
        return timing.measured(lambda: {name: candidate(each) for name, each in ways.items()}, flops, 2)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.time, "thread_time", lambda: now[0])
    monkeypatch.setitem(timing.MEASURES, "waiting", measure)
    tasks: dict[str, timing.Task] = {"one": ("waiting", [1e6]), "two": ("waiting", [1e6])}
    found = timing.timings(tasks)
    assert found["one"] == found["two"] == pytest.approx({"slow": 4e-5, "fast": 1e-5})
    assert asked.index(1) <= 32 and 2 not in asked[asked.index(1) :], "it is found out once"
    (kept,) = (tmp_path / "sidefx").glob("kernels_*.json")
    assert json.loads(kept.read_text()) == {}, "a later process may have the machine to itself"
    asked.clear()
    assert timing.timings(tasks) == found and not asked, "this process does not measure again"


def test_a_caller_of_products_needs_no_header_of_torchs() -> None:
    assert header_free_wrapper(python_entry.kernels_called(compat.KERNEL_FUNCTION + "product")) is not None


def test_no_time_for_measuring(tmp_path, monkeypatch):
    """Products that are not measured use torch's choice, and the report states that they were not measured."""
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(timing, "_memory", {})
    step = sidefx_train.compile(lambda a, b: a @ b, fullgraph=True, autotune_seconds=0)
    step(torch.randn(24, 40), torch.randn(40, 56))
    (choice,) = step.report().captures[0].choices
    assert choice.chosen == "mkl" and not choice.seconds
    assert "the time limit was reached" in step.report().details()
