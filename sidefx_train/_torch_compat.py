"""Every private torch name this library uses, in one place.

Checked against torch 2.11 and 2.13. Nothing else in the package imports from a torch name that starts with an
underscore or from an experimental module, so a torch release is supported by reading this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import Source
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    disable_proxy_modes_tracing,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

# --- recording ---------------------------------------------------------------------------------------------------


def new_shape_env() -> ShapeEnv:
    """Symbol table of one capture; a tensor's ``item()`` may become a symbol."""
    return ShapeEnv(allow_scalar_outputs=True)


def new_fake_mode(shape_env: ShapeEnv) -> FakeTensorMode:
    return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=False)


def new_proxy_tracer() -> PythonKeyTracer:
    """A tracer with an empty graph, ready to be driven by a proxy mode."""
    tracer = PythonKeyTracer()
    tracer.root = torch.nn.Module()
    tracer.tensor_attrs = {}
    tracer.graph = fx.Graph(tracer_cls=PythonKeyTracer)
    return tracer


@contextmanager
def no_recording() -> Iterator[None]:
    """Tensor operations inside are not recorded."""
    with disable_proxy_modes_tracing():
        yield


def fake_snapshot(fake: torch.Tensor) -> torch.Tensor:
    """A detached twin over the same fake storage that keeps today's sizes and strides."""
    with disable_proxy_modes_tracing(), torch.no_grad():
        return fake.detach()


def track(value: Any, proxy: fx.Proxy, tracer: PythonKeyTracer) -> None:
    """Says that ``proxy`` computes ``value`` (a fake tensor or a symbolic number)."""
    track_tensor_tree(value, proxy, constant=None, tracer=tracer)


@dataclass(frozen=True)
class _NamedSource(Source):
    """Where a symbol comes from, by a name of ours."""

    label: str

    @property
    def _name_template(self) -> str:
        return self.label


def new_symbolic_number(shape_env: ShapeEnv, value: int | float, name: str) -> Any:
    """A symbolic int or float whose value during the capture is ``value``; 0 and 1 are not special."""
    source: Any = _NamedSource(f"{name}#{len(shape_env.var_to_range)}")
    if isinstance(value, float):
        symbol = shape_env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        return shape_env.create_symfloatnode(symbol, hint=value, source=source)
    return shape_env.create_unspecified_symint_and_symbol(value, source, DimDynamic.DYNAMIC)


def symbol_of(number: Any) -> Any:
    """The sympy expression of a symbolic number."""
    return number.node.expr


def is_unbacked(number: Any) -> bool:
    """True if the number is known only when the graph runs (it comes from a tensor's contents)."""
    return not number.node.has_hint()


def recorded_conditions(shape_env: ShapeEnv) -> list[Any]:
    """Sympy conditions on input symbols that the capture relied on."""
    return [guard.expr for guard in shape_env.guards]


def is_random(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """Raised when the program asks for a value that only exists when the graph runs."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, UserError

    del UserError
    return (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def unsupported_fake_errors() -> tuple[type[BaseException], ...]:
    """Raised when an operation has no fake implementation."""
    from torch._subclasses.fake_tensor import UnsupportedOperatorException

    return (UnsupportedOperatorException,)


# --- guards ------------------------------------------------------------------------------------------------------


def tensor_guards(tensors: list[torch.Tensor]) -> Any:
    """One C++ check of type, dtype, device, sizes, strides, requires_grad and dispatch keys of all tensors."""
    sizes = [list(t.shape) for t in tensors]
    strides = [list(t.stride()) for t in tensors]
    return torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def global_state_guard() -> Any:
    """One C++ check of grad mode, autocast, determinism, default dtype and threads."""
    return torch._C._dynamo.guards.GlobalStateGuard()
