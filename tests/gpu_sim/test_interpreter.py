"""What the interpreter of kernels does as a GPU would, and what it refuses."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from triton import language as tl  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402

from sidefx_train.compile.gpu.simulation.interpreter import interpreting, run_kernel  # noqa: E402
from sidefx_train.compile.gpu.simulation.kernels import HostMemoryRead, SimulatedKernel  # noqa: E402


@triton.jit
def halve(source, target, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + index, index < count, 0.0)
    tl.store(target + index, (value * 0.5).to(tl.bfloat16), index < count)


@triton.jit
def of_math_library(source, target, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    value = tl.load(source + index)
    tl.store(target + index, tl.sum(libdevice.erf(value)[None, :] + tl.zeros([2, BLOCK], tl.float32), 0))


def test_numbers_are_rounded_to_the_nearest_also_behind_the_first_block():
    source, target = torch.linspace(-3, 3, 37), torch.zeros(37, dtype=torch.bfloat16)
    with interpreting():
        run_kernel(halve, (source, target, 37), {"BLOCK": 16}, (3, 1, 1))
    assert torch.equal(target, (source * 0.5).bfloat16())


def test_functions_of_the_math_library_and_sums():
    source, target = torch.linspace(-2, 2, 16), torch.zeros(16)
    with interpreting():
        run_kernel(of_math_library, (source, target), {"BLOCK": 16}, (1, 1, 1))
    assert torch.equal(target, 2 * torch.erf(source))


def test_the_same_functions_are_compiled_afterwards():
    with interpreting():
        run_kernel(halve, (torch.ones(4), torch.zeros(4, dtype=torch.bfloat16), 4), {"BLOCK": 4}, (1, 1, 1))
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        tl.sum(1)
    signature = {"source": "*fp32", "target": "*bf16", "count": "i32", "BLOCK": "constexpr"}
    made = triton.compile(
        triton.compiler.ASTSource(halve, signature, {"BLOCK": 64}),
        target=triton.backends.compiler.GPUTarget("cuda", 90, 32),
    )
    assert "cvt.rn.bf16" in made.asm["ptx"]


def test_memory_of_the_host_is_refused_but_a_number_is_taken_from_it():
    class Autotuner:
        triton_meta = {"signature": {"source": "*fp32", "rate": "fp32"}}

    host = torch.ones(3)
    kernel = SimulatedKernel("kernel", Autotuner, {host.untyped_storage().data_ptr()})
    with pytest.raises(HostMemoryRead, match="kernel reads a tensor of the host"):
        kernel.run(host, torch.ones(()))
    with pytest.raises(AttributeError, match="configs"):  # nothing is refused
        kernel.run(torch.ones(3), host.select(0, 0))
