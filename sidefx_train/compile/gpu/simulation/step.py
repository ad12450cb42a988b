"""A whole training step, captured on CPU tensors, lowered for a GPU, and run by interpreter on those tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.compile_graph import build
from sidefx_train.compile.gpu.simulation.kernels import Cubin, SimulatedKernel
from sidefx_train.compile.gpu.simulation.lowering import LoweredGraph, lower
from sidefx_train.compile.graph.artifacts import Executable, TracedGraph
from sidefx_train.compile.pipeline import compile_capture
from sidefx_train.compile.runtime.compiled_step import CompiledStep
from sidefx_train.config import CompileConfig
from sidefx_train.report import StepReport


class SimulatedStep:
    """A compiled step whose graphs are those of a GPU. Calls behave like the step: tensors and Python objects change.

    Everything but the place of the tensors is as in ``sidefx_train.compile``: captures, guards, symbolic sizes, what
    runs outside the graphs. Times are not compared.

    Args:
        fn: the step, on CPU tensors.
        config: options; nothing is compiled in the background. By default those of :func:`sidefx_train.compile`, but
            what cannot be captured or lowered raises.
        capability: compute capability of the GPU: 80 or 90.

    Attributes:
        graphs: the lowered graphs, in the order in which they were compiled.
    """

    def __init__(self, fn: Callable[..., Any], config: CompileConfig | None = None, capability: int = 90) -> None:
        self.graphs: list[LoweredGraph] = []
        self._capability = capability
        self._failures: list[Exception] = []
        config = config or CompileConfig(on_failure="raise")
        self._step = CompiledStep(fn, replace(config, warmup="now", keep_slower=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
            BackendError: a graph cannot be lowered, and the options ask for the error.
            GraphBreakError: the step cannot be captured, and they ask for that one.
            Exception: a lowered graph failed. The step has then run eagerly.
        """
        self._failures.clear()
        try:
            with compat.replaced(compile_capture, "build", lambda before: self._lowered):
                result = self._step(*args, **kwargs)
        except Exception as error:
            if self._failures:
                raise self._failures[0] from error
            raise
        if self._failures:
            raise self._failures[0]
        return result

    def report(self) -> StepReport:
        """Returns what was captured, as ``CompiledStep.report`` does."""
        return self._step.report()

    @property
    def kernels(self) -> list[SimulatedKernel]:
        """The Triton kernels of all graphs."""
        return [kernel for graph in self.graphs for kernel in graph.kernels]

    def compile_kernels(self, *capabilities: int, every_config: bool = False) -> list[Cubin]:
        """Compiles every kernel of the step to machine code; see :meth:`LoweredGraph.compile_kernels`."""
        return [
            made for graph in self.graphs for made in graph.compile_kernels(*capabilities, every_config=every_config)
        ]

    def _lowered(self, traced: TracedGraph, config: CompileConfig) -> Executable:
        if config.backend != "inductor":  # a step that runs once, op by op
            return build(traced, config)
        self.graphs.append(lower(traced, config, self._capability))
        executable = self.graphs[-1].executable
        return replace(executable, run=self._noting_failures(executable.run), functional=[])

    def _noting_failures(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def noting(inputs: list[Any]) -> Any:
            try:
                return run(inputs)
            except Exception as error:
                self._failures.append(error)
                raise

        return noting
