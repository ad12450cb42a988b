"""A whole training step, captured on CPU tensors, lowered for a GPU, and run by interpreter on those tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sidefx_train.compile.capture.guards.specialization import Specialization
from sidefx_train.compile.gpu.simulation.kernels import Cubin, SimulatedKernel
from sidefx_train.compile.gpu.simulation.lowering import LoweredGraph, lower
from sidefx_train.compile.graph.artifacts import Executable, TracedGraph
from sidefx_train.compile.pipeline.compile_capture import bind, capture, compile_graphs, guard_checks, partitioned
from sidefx_train.compile.pipeline.entry import Entry
from sidefx_train.compile.pipeline.run_context import Call, RunContext
from sidefx_train.compile.residual.generate import MISS
from sidefx_train.config import CompileConfig


class SimulationError(RuntimeError):
    """A step cannot be simulated, or a call of it needs another capture."""


class SimulatedStep:
    """A training step as a GPU would run it. Calls behave like the step: tensors and Python objects change.

    The first call captures and lowers it for its arguments; further calls must fit that capture.

    Args:
        fn: the step, on CPU tensors.
        config: options; by default those of :func:`sidefx_train.compile`.
        capability: compute capability of the GPU: 80 or 90.

    Attributes:
        graphs: the lowered graphs: the step's, and its backward where autograd continues outside.
    """

    def __init__(self, fn: Callable[..., Any], config: CompileConfig | None = None, capability: int = 90) -> None:
        self.graphs: list[LoweredGraph] = []
        self._fn = fn
        self._config = config or CompileConfig()
        self._capability = capability
        self._entry: Entry | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
            SimulationError: the call needs another capture.
            CaptureFailed: the step cannot be captured.
            BackendError: it cannot be lowered.
        """
        entry = self._entry or self.prepare(*args, **kwargs)
        result = entry.replay(args, kwargs)
        if result is MISS:
            failed = entry.why(args, kwargs)
            raise SimulationError(f"the call needs another capture: {'a guard fails' if failed is None else failed[0]}")
        return result

    def prepare(self, *args: Any, **kwargs: Any) -> Entry:
        """Captures and lowers the step for a call, without running it; state of optimizers is created."""
        call = Call(args, kwargs)
        in_parts = False
        captured = capture(self._fn, args, kwargs, "step", Specialization(), in_parts)
        if captured.suspension is not None:
            raise SimulationError("a step with a part that runs natively cannot be simulated")
        captured = partitioned(captured, self._config)
        executable = compile_graphs(captured, self._config, self._lowered, _raise_difference)
        for commit, _ in captured.commits:
            commit()
        context = RunContext(_raise, _raise_difference, lambda: None, None, False)  # type: ignore[arg-type]
        self._entry = bind(captured, executable, guard_checks(captured, call), context)
        return self._entry

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
        graph = lower(traced, config, self._capability)
        self.graphs.append(graph)
        return replace(graph.executable, functional=[])


def _raise(error: BaseException, args: Any, kwargs: Any) -> Any:
    raise error


def _raise_difference(text: str) -> None:
    raise SimulationError(f"the lowered graph differs from the captured one: {text}")
