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

_MOST_CAPTURES = 8


class SimulationError(RuntimeError):
    """A step cannot be simulated, or is captured again and again."""


class SimulatedStep:
    """A training step as a GPU would run it. Calls behave like the step: tensors and Python objects change.

    The first call captures and lowers it for its arguments, and so does a later one that no capture fits.

    Args:
        fn: the step, on CPU tensors.
        config: options; by default those of :func:`sidefx_train.compile`.
        capability: compute capability of the GPU: 80 or 90.

    Attributes:
        entries: the captures, bound to what runs them.
        graphs: their lowered graphs, with those of backwards where autograd continues outside.
    """

    def __init__(self, fn: Callable[..., Any], config: CompileConfig | None = None, capability: int = 90) -> None:
        self.graphs: list[LoweredGraph] = []
        self._fn = fn
        self._config = config or CompileConfig()
        self._capability = capability
        self.entries: list[Entry] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
            SimulationError: this would be one capture too many.
            CaptureFailed: the step cannot be captured.
            BackendError: it cannot be lowered.
        """
        for entry in self.entries:
            result = entry.replay(args, kwargs)
            if result is not MISS:
                return result
        result = self.prepare(*args, **kwargs).replay(args, kwargs)
        if result is MISS:
            raise SimulationError("the call invalidates its own capture")
        return result

    def prepare(self, *args: Any, **kwargs: Any) -> Entry:
        """Captures and lowers the step for a call, without running it; state of optimizers is created."""
        if len(self.entries) == _MOST_CAPTURES:
            raise SimulationError(
                f"captured {_MOST_CAPTURES} times; the last is missed by {self._missed_by(args, kwargs)}"
            )
        captured = capture(self._fn, args, kwargs, "step", Specialization(), in_parts=False)
        if captured.suspension is not None:
            raise SimulationError("a step with a part that runs natively cannot be simulated")
        captured = partitioned(captured, self._config)
        executable = compile_graphs(captured, self._config, self._lowered, _raise_difference)
        for commit, _ in captured.commits:
            commit()
        context = RunContext(_raise, _raise_difference, lambda: None, None, False)  # type: ignore[arg-type]
        self.entries.append(bind(captured, executable, guard_checks(captured, Call(args, kwargs)), context))
        return self.entries[-1]

    def _missed_by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        failed = self.entries[-1].why(args, kwargs)
        return "a check of tensors" if failed is None else str(failed[0])

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
