"""Lowers a captured graph for a GPU that does not exist, by the functions that lower it for one that does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend import inductor
from sidefx_train.compile.backend.compile_graph import build
from sidefx_train.compile.gpu.replaying import records_on_host
from sidefx_train.compile.gpu.simulation.device_operators import CPU_KERNELS
from sidefx_train.compile.gpu.simulation.interpreter import interpreting
from sidefx_train.compile.gpu.simulation.kernels import Cubin, SimulatedKernel
from sidefx_train.compile.gpu.simulation.placement import place
from sidefx_train.compile.graph.artifacts import Executable, TracedGraph
from sidefx_train.config import CompileConfig


@dataclass(frozen=True)
class LoweredGraph:
    """A graph lowered for a GPU.

    Attributes:
        placed: the graph, on fake tensors of the GPU.
        executable: runs it on CPU tensors, its kernels by interpreter; its sources are those for the GPU.
        kernels: its Triton kernels, in the order of the generated code.
        capability: compute capability for which it was lowered.
    """

    placed: TracedGraph
    executable: Executable
    kernels: tuple[SimulatedKernel, ...]
    capability: int

    def compile_kernels(self, *capabilities: int, every_config: bool = False) -> list[Cubin]:
        """Compiles every kernel to machine code, with the assembler that comes with Triton.

        Args:
            capabilities: compute capabilities; by default the one for which the graph was lowered.
            every_config: in blocks of all sizes that would be measured, else of the first.

        Raises:
            triton.compiler.errors.CompilationError: a kernel does not compile.
        """
        made = []
        for capability in capabilities or (self.capability,):
            with compat.simulated_cuda(capability):
                for kernel in self.kernels:
                    made += kernel.compile(capability, every_config)
        return made


def lower(traced: TracedGraph, config: CompileConfig | None = None, capability: int = 90) -> LoweredGraph:
    """Lowers a graph for a GPU.

    Args:
        traced: a graph captured on CPU tensors, or one that :func:`place` has moved already.
        config: options; by default those of :func:`sidefx_train.compile`.
        capability: compute capability of the GPU: 80 or 90.

    Raises:
        BackendError: the graph cannot be lowered; the cause is chained.
    """
    config = config or CompileConfig()
    if not records_on_host():
        config = replace(config, cuda_graphs="off")
    placed = traced if _is_placed(traced) else place(traced)
    kernels: list[SimulatedKernel] = []
    host: set[int] = set()

    def kernel(name: str, autotuner: Any) -> SimulatedKernel:
        kernels.append(SimulatedKernel(name, autotuner, host))
        return kernels[-1]

    def knowing_host(call: Callable[[list[Any]], Any], examples: list[Any]) -> Callable[[list[Any]], Any]:
        on_host = [i for i, each in enumerate(examples) if isinstance(each, torch.Tensor) and each.device.type == "cpu"]

        def run(args: list[Any]) -> Any:
            host.clear()
            host.update(compat.storage_address(args[i]) for i in on_host)
            return call(args)

        return run

    # The runner around the graph is made with real tensors, such as the buffer of its numbers.
    with compat.simulated_cuda(capability, kernel, knowing_host), compat.replaced(inductor, "generate", compat.on_cpu):
        executable = build(placed, config)
    run = _interpreted(executable.run, capability)
    return LoweredGraph(placed, replace(executable, run=run), tuple(kernels), capability)


def _is_placed(traced: TracedGraph) -> bool:
    examples = [given.example for given in traced.inputs]
    return any(isinstance(each, torch.Tensor) and each.device.type == "cuda" for each in examples)


def _interpreted(run: Callable[[list[Any]], Any], capability: int) -> Callable[[list[Any]], Any]:
    def interpreted(args: list[Any]) -> Any:
        with compat.simulated_cuda(capability), compat.cpu_kernels(CPU_KERNELS), interpreting():
            return compat.on_cpu(run)(args)

    return interpreted
