"""The reference of a compiled graph, run op by op.

It is the captured graph, which is eager's own arithmetic. If the compiled graph draws its own random numbers
(``rng="fast"`` with Inductor), it is the functional graph that Inductor lowers, with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.runners.eager import build_eager
from sidefx_train.compile.backend.runners.reset_generators import with_generator_reset
from sidefx_train.compile.backend.runners.runner import generate
from sidefx_train.compile.backend.verification.exact import Exact
from sidefx_train.compile.backend.verification.inductor_random import drawing_functions
from sidefx_train.compile.backend.verification.replaced_operators import Calling
from sidefx_train.compile.backend.verification.rounding_noise import Noisy
from sidefx_train.compile.backend.verification.unwritten_memory import Filled, leaves_memory
from sidefx_train.compile.graph.artifacts import FunctionalGraph, TracedGraph
from sidefx_train.compile.graph.devices import generators_of
from sidefx_train.compile.graph.gradient_layouts import for_any_layout


@dataclass(frozen=True)
class Reference:
    """A graph run op by op.

    Attributes:
        run: ``run(args) -> outputs``, on copies of the inputs, interpreted without generated code.
        noisy: ``noisy(args, seed) -> outputs``: the same, with rounding-like noise on every operation.
        exact: ``exact(args) -> outputs``: the same in float64, from inputs in float64 (:func:`exact.widened`).
        filled: ``filled(args, number) -> outputs``: ``run`` with a number in all memory that operators leave as it was;
            ``None`` if no operator does.
        replacement: creates the ``run`` of an executable to use if the compiled graph is wrong.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    noisy: Callable[[list[Any], int], Sequence[Any]]
    exact: Callable[[list[Any]], Sequence[Any]]
    filled: Callable[[list[Any], float], Sequence[Any]] | None
    replacement: Callable[[], Callable[[list[Any]], Sequence[Any]]]


def captured_reference(traced: TracedGraph) -> Reference:
    """Returns the captured graph as a reference."""

    @cache
    def module() -> fx.GraphModule:
        return for_any_layout(traced.module) if traced.gradients else traced.module

    def run(interpreter: fx.Interpreter, args: list[Any]) -> Sequence[Any]:
        for generator, state in traced.created_generators:
            generator.set_state(state)
        with compat.autocast_off(), compat.training_kernels():
            return list(interpreter.run(*args, enable_io_processing=False))

    return Reference(
        lambda args: run(fx.Interpreter(module()), args),
        lambda args, seed: run(Noisy(module(), seed), args),
        lambda args: run(Exact(module()), args),
        (lambda args, number: run(Filled(module(), number), args)) if leaves_memory(traced.module.graph) else None,
        lambda: with_generator_reset(build_eager(traced), traced).run,
    )


def functional_reference(graph: FunctionalGraph, module: fx.GraphModule, traced: TracedGraph) -> Reference:
    """Returns a functional graph with the random numbers of Inductor's CPU code as a reference.

    Args:
        graph: the runner's plan.
        module: the graph that is lowered.
        traced: the captured graph from which it was made.
    """
    functions = drawing_functions(module.graph)
    drawn_from = generators_of(traced)

    def through(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Sequence[Any]]:
        return generate(graph, call, None, traced.uses_rng, counts=True, drawn_from=drawn_from)[0]

    def reset() -> None:
        for generator, state in traced.created_generators:
            generator.set_state(state)

    def plain(args: list[Any]) -> list[Any]:
        reset()
        return list(Calling(module, functions).run(*args))

    def noisy(args: list[Any], seed: int) -> Sequence[Any]:
        reset()
        return through(lambda given: list(Noisy(module, seed, functions).run(*given)))(args)

    def exact(args: list[Any]) -> Sequence[Any]:
        reset()
        return through(lambda given: list(Exact(module, functions).run(*given)))(args)

    def filled(args: list[Any], number: float) -> Sequence[Any]:
        reset()
        return through(lambda given: list(Filled(module, number, functions).run(*given)))(args)

    known = filled if leaves_memory(module.graph) else None
    return Reference(through(plain), noisy, exact, known, lambda: through(plain))
