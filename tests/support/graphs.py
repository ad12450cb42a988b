"""Builds captured training steps for tests of the later stages, without the interpreter.

``trace_step`` runs a plain Python step on fake copies of a model, its optimizer and a batch while proxy tracing
records the aten ops, backward and optimizer included, and returns the :class:`TracedGraph` with the real values of its
inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    disable_autocast_cache,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree

from sidefx_train.compile.graph.artifacts import GraphInput, TracedGraph


@dataclass
class Recorder:
    """Collects placeholders while a graph is traced."""

    fake_mode: FakeTensorMode
    tracer: PythonKeyTracer
    inputs: list[GraphInput] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def tensor(self, real: torch.Tensor, kind: str, source: str) -> torch.Tensor:
        """Returns a fake tensor of ``real`` as a new placeholder."""
        fake = self.fake_mode.from_tensor(real, static_shapes=True)
        with self.fake_mode, torch.no_grad():
            example = fake.detach()
        self._placeholder(fake, example, real, kind, source)
        return fake

    def scalar(self, value: float | int, source: str) -> Any:
        """Returns a symbolic number for ``value`` as a new placeholder."""
        env = self.fake_mode.shape_env
        assert env is not None, "scalars need a ShapeEnv"
        src = ConstantSource(source.replace(".", "_"))
        symbol = env.create_unspecified_symbol(value, source=src, dynamic_dim=DimDynamic.DYNAMIC)
        make = env.create_symfloatnode if isinstance(value, float) else env.create_symintnode
        sym = make(symbol, hint=value, source=src)
        self._placeholder(sym, sym, value, "scalar", source)
        return sym

    def _placeholder(self, fake: Any, example: Any, real: Any, kind: str, source: str) -> None:
        proxy = self.tracer.create_proxy("placeholder", f"arg{len(self.inputs)}", (), {})
        track_tensor_tree(fake, proxy, constant=None, tracer=self.tracer)
        self.inputs.append(GraphInput(proxy.node.name, kind, example, source, None if kind != "scalar" else real))
        self.values.append(real)


def _node(value: Any, tracer: PythonKeyTracer) -> Any:
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat)):
        return tracer.unwrap_proxy(value).node
    if isinstance(value, (list, tuple)):
        return [_node(v, tracer) for v in value]
    return value


@contextmanager
def whole_fused_updates(tracer: PythonKeyTracer) -> Iterator[None]:
    """Records fused optimizer calls with their numbers as nodes (the operator itself takes plain floats only)."""
    with ExitStack() as stack:
        for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_"):
            packet = getattr(torch.ops.aten, name)

            def record_call(*args: Any, packet: Any = packet, **kwargs: Any) -> None:
                lr = kwargs.get("lr")
                op = packet.tensor_lr if isinstance(lr, torch.Tensor) else packet.default
                named = {k: _node(v, tracer) for k, v in kwargs.items()}
                tracer.create_node("call_function", op, tuple(_node(a, tracer) for a in args), named)

            stack.enter_context(mock.patch.object(torch, name, record_call))
        yield


def new_recorder() -> Recorder:
    """Returns a recorder with a fresh fake mode and tracer."""
    tracer = PythonKeyTracer()
    tracer.root = nn.Module()
    tracer.graph = fx.Graph(tracer_cls=PythonKeyTracer)
    tracer.tensor_attrs = {}
    return Recorder(FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), tracer)


def record(recorder: Recorder, body: Callable[[], Any], uses_rng: bool = False) -> TracedGraph:
    """Runs ``body`` on fake tensors and finishes the graph; ``body`` returns any tree of tensors and numbers."""
    tracer = recorder.tracer
    mode = ProxyTorchDispatchMode(tracer, "symbolic")
    with (
        torch.autograd.set_multithreading_enabled(False),
        recorder.fake_mode,
        mode,
        disable_autocast_cache(),
        whole_fused_updates(tracer),
    ):
        outputs = pytree.tree_leaves(body())
        nodes = []
        for out in outputs:
            if isinstance(out, torch.Tensor):
                nodes.append(tracer.unwrap_proxy(out).node)
            elif isinstance(out, (torch.SymInt, torch.SymFloat)):
                nodes.append(tracer.unwrap_proxy(out).node)
            else:
                nodes.append(out)
        tracer.create_node("output", "output", (tuple(nodes),), {})
    for node in list(tracer.graph.nodes):
        if "profiler" in str(node.target):
            node.replace_all_uses_with(None) if not node.users else None
    for node in reversed(list(tracer.graph.nodes)):
        if "profiler" in str(node.target):
            tracer.graph.erase_node(node)
    module = fx.GraphModule(tracer.root, tracer.graph)
    return TracedGraph(module, tuple(recorder.inputs), recorder.fake_mode, uses_rng)


def trace_fn(fn: Callable[..., Any], args: list[Any], kinds: list[str] | None = None, rng: bool = False) -> TracedGraph:
    """Traces ``fn(*args)`` with one placeholder per argument (tensors and numbers)."""
    rec = new_recorder()
    fakes = []
    for i, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            fakes.append(rec.tensor(arg, kinds[i] if kinds else "tensor", f"a{i}"))
        else:
            fakes.append(rec.scalar(arg, f"a{i}"))
    return record(rec, lambda: fn(*fakes), rng)


@dataclass
class Step:
    """A traced training step and the real objects behind it.

    ``args(batch)`` gives the list that ``Executable.run`` takes; static values are those of ``model`` and ``opt``.
    """

    traced: TracedGraph
    model: nn.Module
    opt: torch.optim.Optimizer
    static: list[torch.Tensor]
    scalars: list[tuple[dict[str, Any], str, int | None]]

    def args(self, batch: tuple[torch.Tensor, ...]) -> list[Any]:
        numbers = [g[k] if i is None else g[k][i] for g, k, i in self.scalars]
        return [*self.static, *batch, *numbers]


def init_state(opt: torch.optim.Optimizer) -> None:
    """Creates the optimizer's state without changing any parameter."""
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    saved = [p.detach().clone() for g in opt.param_groups for p in g["params"]]
    kept = [{k: g[k] for k in ("lr", "weight_decay") if k in g} for g in opt.param_groups]
    opt.step()
    for group, old in zip(opt.param_groups, kept):
        group.update(old)
    for p, old in zip((p for g in opt.param_groups for p in g["params"]), saved):
        with torch.no_grad():
            p.copy_(old)
    for state in opt.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    opt.zero_grad()


def trace_step(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, tuple[torch.Tensor, ...]], torch.Tensor],
    batch: tuple[torch.Tensor, ...],
    clip: float | None = None,
    symbolic: tuple[str, ...] = ("lr",),
    body: Callable[..., Any] | None = None,
    rng: bool = False,
) -> Step:
    """Traces ``loss = loss_of(model, batch); backward; [clip]; opt.step()`` and returns the loss.

    Args:
        symbolic: names of ``param_groups`` entries that become scalar inputs.
        body: replaces the whole step; called with (fake model, fake optimizer, fake batch).
    """
    if not opt.state:
        init_state(opt)
    rec = new_recorder()
    fake_model = copy.deepcopy(model)
    static: list[torch.Tensor] = []
    fake_of: dict[int, torch.Tensor] = {}

    def fake(real: torch.Tensor, source: str) -> torch.Tensor:
        if id(real) not in fake_of:
            fake_of[id(real)] = rec.tensor(real, "static", source)
            static.append(real)
        return fake_of[id(real)]

    for (name, mod), (_, fmod) in zip(
        model.named_modules(remove_duplicate=False), fake_model.named_modules(remove_duplicate=False)
    ):
        for key, p in mod._parameters.items():
            if p is not None:
                fmod._parameters[key] = fake(p, f"{name}.{key}")  # type: ignore[assignment]
        for key, b in mod._buffers.items():
            if b is not None:
                fmod._buffers[key] = fake(b, f"{name}.{key}")
        if hasattr(fmod, "_flat_weights_names"):
            fmod._flat_weights = [getattr(fmod, n) for n in fmod._flat_weights_names]  # type: ignore[assignment,union-attr]
    groups = [{**g, "params": [fake(p, "param") for p in g["params"]]} for g in opt.param_groups]
    fake_opt = copy.copy(opt)
    fake_opt.__dict__ = dict(opt.__dict__)
    fake_opt.state = type(opt.state)(dict)  # type: ignore[arg-type]
    for p, state in opt.state.items():
        fake_opt.state[fake_of[id(p)]] = {
            k: fake(v, f"state.{k}") if isinstance(v, torch.Tensor) else v for k, v in state.items()
        }
    fake_opt.param_groups = groups
    fakes = tuple(rec.tensor(b, "tensor", f"batch[{i}]") for i, b in enumerate(batch))
    scalars: list[tuple[dict[str, Any], str, int | None]] = []
    for g, (real, group) in enumerate(zip(opt.param_groups, groups)):
        for key in symbolic:
            value = real.get(key)
            if isinstance(value, (float, int)) and not isinstance(value, bool):
                group[key] = rec.scalar(value, f"g{g}_{key}")
                scalars.append((real, key, None))
            elif isinstance(value, tuple):
                group[key] = tuple(rec.scalar(v, f"g{g}_{key}{i}") for i, v in enumerate(value))
                scalars.extend((real, key, i) for i in range(len(value)))

    def default_body() -> Any:
        loss = loss_of(fake_model, fakes)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(fake_model.parameters(), clip)
        fake_opt.step()
        fake_opt.zero_grad()
        return loss.detach()

    run = default_body if body is None else lambda: body(fake_model, fake_opt, fakes)
    return Step(record(rec, run, rng), model, opt, static, scalars)


def eager_step(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, tuple[torch.Tensor, ...]], torch.Tensor],
    batch: tuple[torch.Tensor, ...],
    clip: float | None = None,
) -> torch.Tensor:
    """Runs the step that :func:`trace_step` traces, eagerly."""
    loss = loss_of(model, batch)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    opt.step()
    opt.zero_grad()
    return loss.detach()
