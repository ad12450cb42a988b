"""Operators whose kernels are Python of the program: a comparison calls them no more often than eager does.

Such a kernel may count, print, or draw numbers. The first run of a comparison calls it; the others, and the run that
counts, get what it computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from sidefx_train import torch_compat as compat


def python_operators(module: fx.GraphModule) -> frozenset[Any]:
    """Returns the operators of a graph, and of its subgraphs, whose kernels are Python of the program.

    Those that return an argument are left out.
    """
    graphs = (each.graph for each in module.modules() if isinstance(each, fx.GraphModule))
    targets = {node.target for graph in graphs for node in graph.nodes if node.op == "call_function"}
    found = filter(compat.runs_python, targets)
    return frozenset(op for op in found if not any(result.alias_info for result in op._schema.returns))


@dataclass
class _Call:
    """A call.

    Attributes:
        operator: what was called.
        given: copies of the arguments, before the call.
        written: copies of those that it wrote, after it.
        made: copy of its results.
        run: the last run that got the results.
    """

    operator: Any
    given: list[Any]
    written: list[Any]
    made: Any
    run: int = 1


class CalledOnce(compat.TorchDispatchMode):
    """Dispatch mode: the first run calls operators, the runs after it get copies of their results.

    A later run's call gets the results of the call, one for each, whose arguments are nearest. It raises a
    ``RuntimeError`` if there is none of the same dtypes, sizes and numbers. An operator that the first run does not
    call at all is called in later ones.
    """

    def __init__(self, operators: frozenset[Any]) -> None:
        super().__init__()
        self._operators, self._calls, self._run = operators, list[_Call](), 0

    def begin_run(self) -> None:
        """Has to be called before each run."""
        self._run += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._operators:
            return func(*args, **kwargs)
        values, written = tree_leaves((args, kwargs)), _written(func, args, kwargs)
        if self._run == 1:
            given = _copied(values)
            made = func(*args, **kwargs)
            self._calls.append(_Call(func, given, _copied(written), _copied(made)))
            return made
        calls = [call for call in self._calls if call.operator is func]
        if not calls:  # the backend compiles it
            return func(*args, **kwargs)
        left = (call for call in calls if call.run < self._run)
        distances = [(distance, call) for call in left if (distance := _distance(call.given, values)) is not None]
        if not distances:
            raise RuntimeError(f"the first run has no such call of {func}")
        _, call = min(distances, key=lambda found: found[0])
        call.run = self._run
        for value, after in zip(written, call.written, strict=True):
            value.copy_(after)
        return _copied(call.made)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    pairs = [(argument, value) for argument, value in zip(func._schema.arguments, args, strict=False)]
    pairs += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    values = [value for argument, value in pairs if argument.alias_info is not None and argument.alias_info.is_write]
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _copied(values: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), values)


def _distance(given: list[Any], values: list[Any]) -> float | None:
    """Returns how far arguments are apart; ``None`` for other ones."""
    total = 0.0
    for a, b in zip(given, values, strict=True):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
                return None
            wide = torch.complex128 if a.is_complex() else torch.float64
            total += float((a.to(wide) - b.to(wide)).abs().nan_to_num(0.0, 0.0, 0.0).sum())
        elif type(a) is not type(b) or a != b:
            return None
    return total
