"""Compilers that run while a graph is being lowered."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.cpp_codegen import build_library
from sidefx_train.compile.backend.cpp_codegen.compile_queue import BuildFailed, CompileQueue, Unit
from sidefx_train.compile.backend.cpp_codegen.kernel_units import LARGEST_PART, Kernels

PLAIN = ("g++", "-fPIC")


@pytest.fixture
def queue() -> Iterator[CompileQueue]:
    at = CompileQueue(most=1)
    yield at
    at.close()


def test_units_are_compiled_one_after_the_other_and_equal_ones_once(queue: CompileQueue) -> None:
    units = [Unit(f"int f{i}() {{ return {i}; }}", PLAIN) for i in range(3)]
    made = [queue.compile(unit) for unit in (*units, units[0])]
    assert made[0] == made[3] and len(set(made)) == 3
    assert not queue.idle, "one compiler runs at a time"
    queue.finish()
    assert queue.idle and all(path.stat().st_size for path in made)
    folder = queue.folder
    queue.close()
    assert not folder.exists()


def test_the_first_error_ends_all_and_the_queue_can_be_used_again(queue: CompileQueue) -> None:
    good = Unit("int f() { return 1; }", PLAIN)
    for unit in (good, Unit("#error not this\n", PLAIN), good):
        queue.compile(unit)
    folder = queue.folder
    with pytest.raises(BuildFailed, match="not this"):
        queue.finish()
    assert not folder.exists()
    made = queue.compile(good)
    queue.finish()
    assert made.exists()


def _kernel(name: str, longer: int = 0) -> str:
    filler = "".join(f"    out[0] = in[0]; // {i}\n" for i in range(longer // 24))
    return f"""#include <{compat.KERNEL_HEADER}>
extern "C"  void  cpp_fused_{name}(const float* in, float* out)
{{
{filler}    out[0] = in[0];
}}
"""


@pytest.fixture
def kernels(queue: CompileQueue) -> Kernels:
    found = Kernels(queue, [*PLAIN, "-O3", "-mavx512f", "-D CPU_CAPABILITY_AVX512"], header_free=True)
    assert found._header is not None
    return found


def test_kernels_are_compiled_before_all_are_known(queue: CompileQueue, kernels: Kernels) -> None:
    large, small, other = _kernel("a", LARGEST_PART), _kernel("b"), _kernel("c").replace("in[0];", "std::frexp(in[0]);")
    kernels.add(small)
    assert queue.idle, "it is too small to read the header for it"
    kernels.add(large)
    kernels.add(large)
    assert not queue.idle
    kernels.add(other)
    kernels.add("async_compile.cpp_pybinding([], '''")  # not a kernel of a C++ graph
    begun, late, plain = kernels.units("\n".join((small, large, other, _kernel("d"))))
    assert all(text in begun.text for text in ("cpp_fused_a(", "cpp_fused_b(")) and "fused_c" not in begun.text
    assert "cpp_fused_d(" in late.text and late.header_free and "fused_a" not in late.text
    assert "frexp" in plain.text and plain.header == compat.KERNEL_HEADER
    assert queue.compile(begun) == queue.folder / "part0.o", "it is compiled already"


def test_a_kernel_that_is_not_among_all_makes_what_was_begun_void(queue: CompileQueue, kernels: Kernels) -> None:
    first, second = _kernel("a", LARGEST_PART), _kernel("b")
    kernels.add(first)
    folder = queue.folder
    (unit,) = kernels.units(second)
    assert "cpp_fused_b(" in unit.text and "fused_a" not in unit.text and not folder.exists()


def test_something_in_front_of_all_kernels_keeps_them_together(kernels: Kernels) -> None:
    text = "static int shared;\n" + _kernel("a") + _kernel("b")
    (unit,) = kernels.units(text)
    assert unit.text == text and not unit.header_free
    assert kernels.units("\n") == []


def test_the_library_does_not_depend_on_what_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(tmp_path))
    caller = f"""
#include <{compat.WRAPPER_HEADER}>
extern "C" void cpp_fused_a(const float* in, float* out);
void inductor_entry_impl(AtenTensorHandle* input_handles, AtenTensorHandle* output_handles) {{
    auto inputs = steal_from_raw_handles_to_raii_handles(input_handles, 2);
    auto a = std::move(inputs[0]);
    auto b = std::move(inputs[1]);
    cpp_fused_a((const float*)(a.data_ptr()), (float*)(b.data_ptr()));
    output_handles[0] = b.release();
}}
"""
    kernel = _kernel("a", LARGEST_PART)
    building = build_library.Building()
    building.add(kernel)
    name = build_library.build_library(caller, kernel, 1, building=building)
    monkeypatch.setattr(CompileQueue, "finish", lambda *_: pytest.fail("built again"))
    assert build_library.build_library(caller, kernel, 1) == name


def test_compilers_that_are_ended_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither their temporary files nor the compiler proper, a child of what was started."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    queue = CompileQueue(most=1)
    body = "".join(f"double f{i}(double x) {{ return __builtin_sin(x) + {i}; }}\n" for i in range(60_000))
    queue.compile(Unit(body, ("g++", "-O3", "-fPIC")))
    (process,) = queue._running.values()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for _ in range(1000):
        found = children.read_text().split() if children.exists() else []
        if found:
            break
        time.sleep(0.01)
    else:
        pytest.skip("this system does not list the children of a process")
    began = time.perf_counter()
    queue.close()
    assert time.perf_counter() - began < 2, "it was waited for"
    assert not any(Path(f"/proc/{child}/cmdline").exists() and _is_alive(child) for child in found)
    assert list(tmp_path.iterdir()) == []


def _is_alive(process: str) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
