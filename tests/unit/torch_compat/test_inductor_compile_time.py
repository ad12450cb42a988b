"""Changes that shorten compilation leave the results unchanged."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import nn

import sidefx_train
from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend import inductor_call
from sidefx_train.compile.backend.autotune.attention import is_written_out
from sidefx_train.compile.backend.cpp_codegen import build_library
from sidefx_train.compile.backend.cpp_codegen.wrapper_prelude import header_free_wrapper
from sidefx_train.compile.native import guards_module, native_module, products_module
from sidefx_train.gc_control import collect_younger, fewer_collections
from sidefx_train.switches import CODEGEN, without
from sidefx_train.torch_compat.inductor.speedups import known_values, within_vector
from tests.support.disk_cache import new_cache


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    with compat.inductor_options({"cpp_cache_precompile_headers": False}):
        yield tmp_path


def _trained(model: nn.Module, width: int = 8) -> torch.Tensor:
    """Returns losses and parameters of a few captured steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    x, y = torch.randn(16, width), torch.randint(0, 4, (16,))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = sidefx_train.compile(step, fullgraph=True, autotune="off")  # choices by timing may differ
    losses = [compiled().reshape(1) for _ in range(4)]
    return torch.cat([*losses, *(p.detach().flatten() for p in model.parameters())])


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 4))


# --- callers -----------------------------------------------------------------------------------------------------

CALLER = f"""
#include <{compat.WRAPPER_HEADER}>
CACHE_TORCH_DTYPE(float32);
CACHE_TORCH_DEVICE(cpu);
void inductor_entry_impl(AtenTensorHandle* input_handles, AtenTensorHandle* output_handles) {{
    py::gil_scoped_release_simple release;
    auto inputs = steal_from_raw_handles_to_raii_handles(input_handles, 2);
    auto a = std::move(inputs[0]);
    auto b = std::move(inputs[1]);
    static constexpr int64_t size[] = {{2L, 3L}};
    static constexpr int64_t stride[] = {{3L, 1L}};
    AtenTensorHandle made;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, size, stride, cached_torch_dtype_float32,
                                                         cached_torch_device_type_cpu, 0, &made));
    RAIIAtenTensorHandle out(made);
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out, a, wrap_with_raii_handle_if_needed(
        reinterpret_tensor_wrapper(b, 2, size, stride, 0L))));
    a.reset();
    output_handles[0] = out.release();
}}
"""


@pytest.fixture
def headers_read(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Records for each build whether the caller was compiled with torch's header."""
    read: list[bool] = []
    build = build_library._build

    def noted(units: list[Any], *rest: Any) -> str:
        read.append(compat.WRAPPER_HEADER in units[0].text)
        return build(units, *rest)

    monkeypatch.setattr(build_library, "_build", noted)
    return read


@pytest.mark.parametrize("more", ["", "static std::vector<int> unused;"])
def test_a_caller_runs_with_and_without_torchs_header(empty_cache: Path, headers_read: list[bool], more: str) -> None:
    name = build_library.build_library(CALLER.replace("void inductor", f"{more}\nvoid inductor"), "", 1)
    run = compat.call_aoti(build_library.load_library(name))
    a, b = torch.randn(2, 2), torch.randn(2, 3)
    torch.testing.assert_close(run([a, b])[0], a @ b)
    assert headers_read == [bool(more)]


def test_an_error_in_a_caller_is_raised_and_what_it_held_is_freed(empty_cache: Path) -> None:
    run = compat.call_aoti(build_library.load_library(build_library.build_library(CALLER, "", 1)))
    a, b = torch.randn(2, 5), torch.randn(2, 3)
    before = a._use_count()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="aoti_torch_cpu_mm_out.* failed"):
            run([a, b])
    assert a._use_count() == before


def test_a_wrapper_that_header_free_source_does_not_fit_is_compiled_with_torchs_header(
    empty_cache: Path, headers_read: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_library, "header_free_wrapper", lambda caller: "#error not enough\n")
    run = compat.call_aoti(build_library.load_library(build_library.build_library(CALLER, "", 1)))
    a, b = torch.randn(2, 2), torch.randn(2, 3)
    torch.testing.assert_close(run([a, b])[0], a @ b)
    assert headers_read == [False, True]


def test_what_is_not_declared_in_torchs_c_interface_is_left_to_its_header() -> None:
    plain = CALLER.replace(f"#include <{compat.WRAPPER_HEADER}>", "")
    assert header_free_wrapper(plain) is not None
    assert header_free_wrapper(
        "#include <torch/csrc/inductor/aoti_torch/c/shim_cpu.h>\n" + plain
    ) == header_free_wrapper(plain)
    assert header_free_wrapper(plain.replace("aoti_torch_cpu_mm_out", "aoti_torch_cpu_unheard_of")) is None
    assert header_free_wrapper(plain + "static PyObject* kept;") is None
    assert header_free_wrapper("#include <vector>\n" + plain) is None


@pytest.mark.slow  # its kernels are those of `cpp_codegen/test_kernel_prelude.py`
def test_a_step_is_compiled_without_torchs_header_and_with_equal_numbers(
    empty_cache: Path, headers_read: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    lean = _trained(_model())
    assert headers_read == [False]
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(empty_cache / "other"))
    monkeypatch.setattr(build_library, "header_free_wrapper", lambda caller: None)
    whole = _trained(_model())
    assert headers_read == [False, True]
    assert torch.equal(lean, whole)


# --- code generation ---------------------------------------------------------------------------------------------


def test_steps_of_linear_indices_are_what_inductor_finds() -> None:
    from torch._inductor.codegen.cpp import stride_at_vec_range
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    x, y, z = sympy.symbols("x0 x1 x2", integer=True, nonnegative=True)
    linear = [x, 64 * x + y, sympy.Integer(3), y + 5, 2 * x + x * 3, x + ModularIndexing(y, 1, 8), -x + z * y]
    for index in linear:
        for length in (None, 16):
            assert compat.linear_step(index, x) == stride_at_vec_range(index, x, length), index
    others = [x * y, x**2, FloorDiv(x, 4), ModularIndexing(x + y, 1, 8), sympy.Rational(1, 2) * x]
    assert [compat.linear_step(index, x) for index in others] == [None] * len(others)


def test_steps_of_limited_indices_are_no_numbers_and_those_next_to_them_are() -> None:
    from torch._inductor.codegen.cpp import stride_at_vec_range
    from torch.utils._sympy.functions import Max, Min

    x, y = sympy.symbols("d0 d1", integer=True, nonnegative=True)
    index = y + 64 * Max(-32, Min(31, x))
    mine, inductors = compat.linear_step(index, x), stride_at_vec_range(index, x, 16)
    assert not mine.is_number and mine.free_symbols == inductors.free_symbols
    assert all(mine.subs(x, value) == inductors.subs(x, value) for value in range(40))
    assert compat.linear_step(index, y) == 1


def test_steps_within_vectors_are_what_inductor_finds() -> None:
    from torch._inductor.codegen.cpp import stride_at_vec_range
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    x, y = sympy.symbols("d0 d1", integer=True, nonnegative=True)
    rest, quotient = ModularIndexing(x, 1, 32), FloorDiv(x, 32)
    for index in (64 * y + rest, quotient + y, 512 * quotient + 3 * rest, ModularIndexing(x, 16, 4) + 2 * x, rest - x):
        for length in (8, 16, 32):
            step = compat.linear_step(within_vector(index, x, length), x)
            assert step == stride_at_vec_range(index, x, length) or (step is None and length == 32)
    others = [FloorDiv(x, 8), ModularIndexing(x, 1, 24), ModularIndexing(x + y, 1, 16), ModularIndexing(x, 8, 16)]
    assert [compat.linear_step(within_vector(index, x, 16), x) for index in others] == [None] * len(others)


class Transposes(nn.Module):
    """Heads of 32, transposed: indices with quotients and remainders."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.project, self.head = nn.Embedding(4, 64), nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.table(x[:, 0].abs().long().clamp(max=3)) + self.project(x).view(2, 8, 2, 32).transpose(1, 2).reshape(
            16, 64
        )
        return self.head(torch.tanh(y))


@pytest.mark.slow
def test_what_is_read_off_leaves_the_code_as_it_was(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[list[str]] = []
    build = build_library.build_library

    def noted(caller: str, kernels: str, *rest: Any) -> str:
        sources[-1].append(kernels)
        return build(caller, kernels, *rest)

    monkeypatch.setattr(inductor_call, "build_library", noted)
    for names in ((), tuple(CODEGEN)):
        sources.append([])
        monkeypatch.setenv("SIDEFX_CACHE_DIR", str(empty_cache / str(len(names))))
        torch.manual_seed(0)
        with without(*names):
            _trained(Transposes())
    assert sources[0] == sources[1] and all(sources)


def test_loops_over_nothing_are_not_generated(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codegen.cpp import CppVecKernel
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    rests: list[Any] = []
    load = CppVecKernel.load
    monkeypatch.setattr(
        CppVecKernel, "load", lambda kernel, *given: rests.append(kernel.tail_size) or load(kernel, *given)
    )
    elements = pick_vec_isa().nelements()  # 16 with AVX-512, 8 with AVX2
    for width, left in ((64, {None}), (44, {None, 44 % elements})):
        rests.clear()
        x = torch.randn(8, width)
        step = sidefx_train.compile(lambda x: torch.softmax(x * 2, -1), fullgraph=True, autotune="off")
        torch.testing.assert_close(step(x), torch.softmax(x * 2, -1))
        assert {rest if rest is None else int(rest) for rest in rests} == left


def test_known_values_of_a_graph_are_not_computed_again() -> None:
    from torch._inductor.virtualized import V

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.neg.default, (x,))
    graph.output((y,))
    module = torch.fx.GraphModule(nn.Module(), graph)
    asked: list[Any] = []
    propagate = known_values(lambda *given: asked.append(given))
    with V.set_fake_mode("the mode"):
        x.meta["val"] = torch.zeros(1)
        propagate(module, [])
        assert asked == [(module, [])], "a value is missing"
        y.meta["val"] = torch.zeros(1)
        assert propagate(module, []) == "the mode"
    assert len(asked) == 1


class WrittenOut(nn.Module):
    """Attention written as its formula."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).view(2, 8, 3, 2, 4).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-2, -1) / 2.0, -1)
        return self.head((weights @ v).transpose(1, 2).reshape(16, 8))


FIRST = """
import sys
from torch._inductor.codecache import FxGraphCache
FxGraphCache.prepare_key = lambda *_: sys.exit("Inductor's own cache was asked for a graph that is kept in ours")
from tests.unit.torch_compat.test_inductor_compile_time import WrittenOut, _model, _trained
assert "torch._inductor.lowering" not in sys.modules
_trained(_model())
from torch._inductor.fx_passes.fuse_attention import _sfdp_init
from torch._inductor.kernel.mm import mm_template
from torch._inductor.select_algorithm import TritonTemplate
assert _sfdp_init.cache_info().currsize == 0, "a step without attention made the patterns of it"
_trained(WrittenOut())
assert _sfdp_init.cache_info().currsize == 1, "Inductor did not look for attention"
read = [t for t in TritonTemplate.all_templates.values() if t.template._made.cache_info().currsize]
assert not read, "templates of Triton's were read for the CPU"
assert callable(mm_template.template.render), "a template that is used is read then"
assert mm_template.template._made.cache_info().currsize == 1
from torch._functorch._activation_checkpointing import graph_info_provider
assert "networkx" not in sys.modules and len(graph_info_provider.nx.DiGraph([(1, 2)])) == 2
assert "networkx" in sys.modules
"""


def test_the_compilers_words_are_torchs_own() -> None:
    script = """if True:
    import sys
    from sidefx_train import torch_compat as compat
    with compat.quick_vector_probes(lambda flags: True):
        table = compat.inductor_decompositions()
        words = compat.cpp_command(True), compat.cpp_command(False)
        known = [name for name in sys.modules if name.startswith(("setuptools", "torch.utils.cpp_extension"))]
        assert not known, known
        import torch
        import torch.utils.cpp_extension
        assert words == (compat.cpp_command(True), compat.cpp_command(False))
    from torch._decomp import core_aten_decompositions
    from torch._inductor.decomposition import decomps_to_exclude, remove_decompositions
    wanted = {**core_aten_decompositions()}
    remove_decompositions(wanted, decomps_to_exclude)
    missing = {str(op) for op in wanted.keys() - table.keys() if isinstance(op, torch._ops.OpOverload)}
    checking = {"binary_cross_entropy.default", "multi_margin_loss.default", "multilabel_margin_loss_forward.default"}
    assert missing == {f"aten.{name}" for name in checking}, missing  # their kernels check values
    assert {op for op in wanted.keys() - table.keys() if not isinstance(op, torch._ops.OpOverload)} == set()
    """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


@pytest.mark.slow
def test_patterns_of_attention_and_templates_are_made_when_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_cache(tmp_path, monkeypatch)
    command = [sys.executable, "-c", FIRST]
    subprocess.run(
        command,
        check=True,
        timeout=600,
        env={**os.environ, "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"},
    )


def test_a_compiler_is_asked_once_for_all_vector_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512

    for known, asked in ((True, 1), (False, 3)):
        questions: list[Any] = []

        def accepts(flags: Any) -> bool:
            if flags not in questions:
                questions.append(flags)
            return known or len(flags) < 6  # noqa: B023

        with compat.quick_vector_probes(accepts):
            assert VecAVX2().check_build("") and VecAVX512().check_build("")
        assert len(questions) == asked


def test_attention_that_is_written_out_is_recognised() -> None:
    def graph(model: nn.Module) -> torch.fx.GraphModule:
        from torch.fx.experimental.proxy_tensor import make_fx

        return make_fx(model)(torch.randn(16, 8))

    assert is_written_out(graph(WrittenOut()))
    assert not is_written_out(graph(_model()))


# --- garbage -----------------------------------------------------------------------------------------------------


def test_old_objects_are_not_looked_through_while_a_step_is_compiled() -> None:
    done: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            done.append(info["generation"])

    before = gc.get_threshold()
    gc.callbacks.append(note)
    try:
        with fewer_collections():
            kept = [[] for _ in range(30 * before[0] * max(1, before[1]))]
            assert set(done) == {0}, "young objects are looked through, and no others"
            done.clear()
            collect_younger()
            assert done == [1], "what was made since"
            with fewer_collections():
                assert gc.get_threshold()[0] >= before[0]
            assert gc.get_threshold() != before, "the inner one leaves it to the outer one"
        del kept
    finally:
        gc.callbacks.remove(note)
    assert gc.get_threshold() == before


def test_nothing_is_collected_where_the_program_has_switched_that_off() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with fewer_collections():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_thresholds_that_the_program_sets_meanwhile_stay() -> None:
    before = gc.get_threshold()
    try:
        with fewer_collections():
            gc.set_threshold(123, 4, 5)
        assert gc.get_threshold() == (123, 4, 5)
    finally:
        gc.set_threshold(*before)


def test_they_are_the_programs_while_its_own_code_runs(empty_cache: Path) -> None:
    seen: list[Any] = []
    before = gc.get_threshold()

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        seen.append(gc.get_threshold() if float(y.sum()) > 0 else None)  # a graph break: the condition runs natively
        return y

    compiled = sidefx_train.compile(step, backend="eager")
    compiled(torch.ones(2))
    assert seen == [before] and gc.get_threshold() == before


def test_thresholds_are_the_programs_again_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), fewer_collections():
        raise KeyError
    assert gc.get_threshold() == before


def test_the_native_modules_are_three() -> None:
    found = [products_module(), native_module(), guards_module()]
    assert None not in found, "a compiler is there, and refuses the source"
    names = ["product", "adam", "guard_program"]
    assert [[hasattr(module, name) for name in names] for module in found] == [
        [True, False, False],
        [False, True, False],
        [False, False, True],
    ]


@pytest.mark.parametrize("permutes", [False, True])
def test_patterns_that_can_match_nothing_are_not_made(permutes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.fx_passes import joint_graph, misc_patterns, pad_mm

    made: list[str] = []
    for place, name in ((pad_mm, "_pad_mm_init"), (misc_patterns, "_misc_patterns_init")):
        if not hasattr(place, name):
            pytest.skip("this torch makes them in another way")
        monkeypatch.setattr(place, name, lambda input_device=None, name=name: made.append(name))
    monkeypatch.setattr(joint_graph, "joint_graph_passes", lambda module, *_: joint_graph.lazy_init() or module)
    monkeypatch.setattr("torch._inductor.compile_fx.joint_graph_passes", joint_graph.joint_graph_passes)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    order = graph.call_function(torch.ops.aten.randperm.default, (4,))
    graph.output((graph.call_function(torch.ops.aten.index.Tensor, (x, [order])) if permutes else x,))
    if not permutes:
        graph.erase_node(order)
    compat.inductor_passes(torch.fx.GraphModule({}, graph), finds_attention=False)
    assert made == (["_misc_patterns_init"] if permutes else [])
