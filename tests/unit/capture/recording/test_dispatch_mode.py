"""Operations that our recorder leaves out do not appear in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from sidefx_train import torch_compat as compat

aten = torch.ops.aten


def _layers(x: torch.Tensor, w: torch.Tensor) -> Any:
    for _ in range(3):
        x = F.gelu(F.layer_norm(x @ w, (4,))) + x.t().t()
        x = F.dropout(x, 0.5, True)
    return x, *x.max(1), *x.topk(2), x.split(2)


def _equal_but_for_types(x: torch.Tensor, w: torch.Tensor) -> Any:
    ones = [torch.full((2,), value) for value in (1, 1.0, True, 1, 1.0, True)]
    return ones, x.sum(0), x.sum(0, True), x.sum(0, dtype=torch.float64), x.t() + 1, x + 1, x.t() + 1


def _in_place(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x.clone()
    for _ in range(2):
        y.add_(1).mul_(w.sum())
        y = y.contiguous()
        y[0].copy_(y[1])
    return y, y.detach(), aten.detach_(x.clone())


def _constants(x: torch.Tensor, w: torch.Tensor) -> Any:
    one = torch.tensor(3)
    return x[: int(one)], one + 1, one + 1, x.nonzero(), x[x > 0], x.sum().item()


def _default_dtype(x: torch.Tensor, w: torch.Tensor) -> Any:
    first = torch.arange(3) / 2
    torch.set_default_dtype(torch.float64)
    try:
        return first, torch.arange(3) / 2
    finally:
        torch.set_default_dtype(torch.float32)


def _bits(x: torch.Tensor, w: torch.Tensor) -> Any:
    z = torch.complex(x, x)
    return z * 2, z.conj() * 2, z.conj().imag + 1, z.imag + 1, z * 2


def _other_memory(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x.expand(2, *x.shape)
    return aten._to_copy(y), aten.contiguous(x), aten._to_copy(y), aten.contiguous(x), x.to(x.dtype), y.reshape(-1, 4)


def _symbolic_place(x: torch.Tensor, w: torch.Tensor) -> Any:
    place = x.shape[0] - 2
    row = w.select(0, place)
    return row + 1, row + 1, torch.stack((row, row)).sum()


PROGRAMS = [_layers, _equal_but_for_types, _in_place, _constants, _default_dtype, _bits, _other_memory, _symbolic_place]


def _described(value: Any, memories: dict[int, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_described(each, memories) for each in value]
    if not isinstance(value, torch.Tensor):
        return str(value)
    memory = value.untyped_storage()
    place = memories.setdefault(memory._cdata, len(memories))
    layout = (tuple(map(str, value.shape)), tuple(map(str, value.stride())), str(value.storage_offset()))
    return *layout, value.dtype, value.device, value.is_conj(), value.is_neg(), str(memory.nbytes()), place


def _recorded(make: Callable[[Any], Any], program: Any, dynamic: bool) -> list[Any]:
    env = compat.new_shape_env()
    mode, tracer = compat.new_fake_mode(env), compat.new_proxy_tracer()
    recorder = make(tracer)
    given = []
    for name, real in (("x", torch.randn(4, 4)), ("w", torch.randn(4, 4))):
        fake = compat.fake_of(mode, real, frozenset((0,)) if dynamic else frozenset(), name)
        compat.track(fake, tracer.create_proxy("placeholder", name, (), {}), tracer)
        given.append(fake)
    with mode, recorder, torch.no_grad():
        returned = program(*given)
    memories: dict[int, int] = {}
    nodes = [
        (
            node.format_node(),
            sorted(node.meta),
            _described(node.meta.get("val"), memories),
            node.meta.get("tensor_meta"),
        )
        for node in tracer.graph.nodes
    ]
    return [*map(str, nodes), str(_described(returned, memories))]


def _of_torch(tracer: Any) -> Any:
    return compat.ProxyTorchDispatchMode(tracer, "symbolic")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.strip("_"))
@pytest.mark.parametrize("dynamic", [False, True], ids=["exact", "symbolic"])
def test_the_graph_is_what_torch_records(program: Any, dynamic: bool) -> None:
    if dynamic and program in (_layers, _constants, _bits, _other_memory):
        program = _equal_but_for_types  # recording does not affect a condition on the size
    assert _recorded(compat.RecordingMode, program, dynamic) == _recorded(_of_torch, program, dynamic)


def test_what_is_known_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    dispatch = compat.FakeTensorMode.dispatch

    def noting(mode: Any, func: Any, *rest: Any) -> Any:
        asked.append(func)
        return dispatch(mode, func, *rest)

    monkeypatch.setattr(compat.FakeTensorMode, "dispatch", noting)
    nodes = _recorded(compat.RecordingMode, lambda x, w: [x @ w for _ in range(5)], False)
    assert sum("aten.mm.default" in node for node in nodes) == 5
    assert asked.count(aten.mm.default) == 1
