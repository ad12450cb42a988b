"""Graphs with repeated regions are lowered by parts, with the same results as lowered whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import sidefx_train
from sidefx_train.compile.backend import inductor_call
from sidefx_train.compile.backend.cpp_codegen.region_wrapper import region_module
from sidefx_train.compile.backend.passes import repeated_regions
from sidefx_train.compile.backend.passes.repeated_regions import Division, find_regions
from tests.support.disk_cache import new_cache


class Block(nn.Module):
    def __init__(self, width: int, p: float, hidden: int) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(p)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # the gradient of the keys' bias is only rounding error
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        x = x + self.dropout(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Network(nn.Module):
    def __init__(self, layers: int = 4, p: float = 0.0, hidden: tuple[int, ...] = (32,)) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(Block(16, p, hidden[i % len(hidden)]) for i in range(layers))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.fixture
def divisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Division | None]]:
    """Records how each graph was divided."""
    new_cache(tmp_path, monkeypatch)
    found: list[Division | None] = []

    def noted(graph: fx.Graph) -> Division | None:
        found.append(find_regions(graph))
        return found[-1]

    monkeypatch.setattr(inductor_call, "find_regions", noted)
    yield found


def _train(
    make: Callable[[], nn.Module], wrap: Callable[..., Any], steps: int = 4, fused: bool = True, foreach: bool = False
) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused, foreach=foreach)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    ids = torch.randint(0, 8, (3, 7))

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 5)
        loss.backward()
        optimizer.step()
        if not fused:
            schedule.step()
        return loss.detach()

    step = wrap(step)
    results = [step(ids).clone() for _ in range(steps)]
    return [*results, *(p.detach() for p in model.parameters())], step


def _compile(step: Any) -> Any:
    return sidefx_train.compile(step, fullgraph=True, autotune="off")


def _same(expected: list[Any], actual: list[Any]) -> None:
    for a, b in zip(expected, actual, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_equal_layers_are_lowered_once(divisions: list[Division | None]) -> None:
    expected, _ = _train(Network, lambda step: step)
    actual, step = _train(Network, _compile)
    _same(expected, actual)
    (division,) = divisions
    assert division is not None
    counts = sorted(division.classes.count(kind) for kind in set(division.classes))
    assert counts[-2:] == [4, 4], "forward and backward of four layers"
    notes = [note for capture in step.report().captures for note in capture.notes]
    assert any("regions of" in note for note in notes) and not any("failed" in note for note in notes), notes


@pytest.mark.slow  # `test_equal_layers_are_lowered_once` compares them with eager
def test_parts_compute_what_the_whole_computes(
    divisions: list[Division | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    divided, _ = _train(Network, _compile)
    assert divisions[-1] is not None
    monkeypatch.setattr(inductor_call, "find_regions", lambda graph: None)
    new_cache(tmp_path / "another", monkeypatch)
    whole, _ = _train(Network, _compile)
    _same(whole, divided)


@pytest.mark.slow
def test_random_numbers_are_drawn_in_eagers_order(divisions: list[Division | None]) -> None:
    def make() -> nn.Module:
        return Network(p=0.2)

    expected, _ = _train(make, lambda step: step)
    actual, _ = _train(make, _compile)
    assert divisions[-1] is not None
    _same(expected, actual)


@pytest.mark.slow
def test_a_library_of_parts_is_kept(divisions: list[Division | None]) -> None:
    first, _ = _train(Network, _compile)
    second, step = _train(Network, _compile)
    assert len(divisions) == 1, "the second comes from the cache"
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert any("from the cache" in note for capture in step.report().captures for note in capture.notes)


@pytest.mark.slow
def test_layers_that_differ_are_not_repeated_regions(divisions: list[Division | None]) -> None:
    def make() -> nn.Module:
        return Network(hidden=(24, 32, 40, 48))

    expected, _ = _train(make, lambda step: step)
    actual, _ = _train(make, _compile)
    assert divisions == [None]
    _same(expected, actual)


@pytest.mark.slow
def test_alternating_layers(divisions: list[Division | None]) -> None:
    def make() -> nn.Module:
        return Network(layers=6, hidden=(24, 40))

    expected, _ = _train(make, lambda step: step)
    actual, _ = _train(make, _compile)
    division = divisions[-1]
    assert division is not None and max(map(division.classes.count, division.classes)) == 3, "pairs of layers"
    _same(expected, actual)


def test_what_leaves_a_graph_between_its_parts(divisions: list[Division | None]) -> None:
    """Results of every layer, views of them, an argument, a constant, and one value twice."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Block(16, 0.0, 32) for _ in range(6))

    @torch.no_grad()
    def step(x: torch.Tensor, other: torch.Tensor) -> Any:
        seen = []
        for layer in layers:
            x = layer(x)
            seen.append(x.transpose(0, 1))
        return x, x, seen, other, torch.ones(3), other.view(-1), x.sum()

    x, other = torch.randn(2, 5, 16), torch.randn(4)
    compiled = _compile(step)
    for _ in range(3):
        expected, actual = step(x, other), compiled(x, other)
        assert actual[0] is actual[1] and actual[3] is other and actual[5]._base is other
        _same([*expected[2], *expected], [*actual[2], *actual])
    assert divisions and divisions[-1] is not None


def test_a_part_that_raises_leaves_an_error_and_a_working_step(divisions: list[Division | None]) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Block(16, 0.0, 32) for _ in range(6))
    table = torch.randn(8, 16)

    @torch.no_grad()
    def step(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x + table[at]

    compiled = _compile(step)
    x = torch.randn(2, 5, 16)
    good, bad = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 2, 3, 4, 9])
    _same([step(x, good)], [compiled(x, good)])
    for _ in range(3):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            compiled(x, bad)
    _same([step(x, good)], [compiled(x, good)])
    assert divisions and divisions[-1] is not None


def _graph(function: Callable[..., Any], *args: torch.Tensor) -> fx.Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake")(*args).graph


def test_every_input_of_a_region_is_computed_before_it() -> None:
    torch.manual_seed(0)
    layers = [Block(16, 0.0, 32).requires_grad_(False) for _ in range(5)]

    def run(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        given = iter(parameters)
        for layer in layers:
            names = dict(layer.named_parameters())
            x = torch.func.functional_call(layer, {name: next(given) for name in names}, (x,))
        return x

    graph = _graph(run, torch.randn(2, 5, 16), *(p for layer in layers for p in layer.parameters()))
    division = find_regions(graph)
    assert division is not None
    there = {node for node in graph.nodes if node.op == "placeholder"}
    for region, number in zip(division.regions, division.classes, strict=True):
        assert set(region.takes) <= there, "taken before it is computed"
        there |= {region.items[i] for i in region.gives}
        first = division.regions[number]
        assert [node.target for node in region.items] == [node.target for node in first.items]
        assert len(region.takes) == len(first.takes) and region.gives == first.gives
    assert repeated_regions.find_regions(_graph(lambda x: x.sin() + x, torch.randn(3))) is None


def _products(y: torch.Tensor, count: int = 60) -> torch.Tensor:
    for _ in range(count):
        y = torch.mm(y, y).sin().cos().tanh()
    return y


def test_writes_before_the_end_are_lowered_as_a_whole() -> None:
    def writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return _products(y) + x

    assert find_regions(_graph(writes, torch.randn(4, 4), torch.randn(4, 4))) is None
    assert find_regions(_graph(lambda y: torch.zeros(4, 4).copy_(_products(y)), torch.randn(4, 4))) is None


def _run_by_regions(graph: fx.Graph, division: Division, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Runs the regions one after the other, as the C++ of their wrapper does."""
    values = dict(zip((node for node in graph.nodes if node.op == "placeholder"), inputs, strict=True))
    for region in division.regions:
        given = [values[node] for node in region.takes]
        if region.window is not None:
            first = region.window.first
            given.append(values[region.window.vector][first : first + region.window.count])
        made = region_module(region)(*given)
        values |= {region.items[i]: value for i, value in zip(region.gives, made, strict=True)}
    return [values[node] for node in next(iter(reversed(graph.nodes))).all_input_nodes]


def test_an_input_is_written_behind_its_last_reader() -> None:
    """What is computed of its old value is not computed again after the write."""

    def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        old = x.sin()
        turned = x.t()
        for _ in range(6):
            y = _products(y, 10) * old
        z.copy_(y)
        x.copy_(x * 2 + turned.exp())
        for _ in range(6):
            y = _products(y, 10) * old
        return y, old

    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(4, 4, generator=draw) for _ in range(3)]
    division = _same_by_regions(_with_writes_last(_graph(step, *inputs)), inputs)
    assert len(division.regions) > 3


def _with_writes_last(graph: fx.Graph) -> fx.Graph:
    """Moves writes of inputs to the end of a graph, as in functional graphs; other nodes read old values."""
    for write in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        write.replace_all_uses_with(write.args[0])
        graph.output_node().prepend(write)
    return graph


def _same_by_regions(graph: fx.Graph, inputs: list[torch.Tensor]) -> Division:
    """Compares a graph with its regions, results and inputs, and returns these."""
    division = find_regions(graph)
    assert division is not None
    mine, yours = [x.clone() for x in inputs], [x.clone() for x in inputs]
    want = fx.GraphModule({}, graph)(*mine)
    have = _run_by_regions(graph, division, yours)
    assert all(map(torch.equal, (*want, *mine), (*have, *yours)))
    return division


def test_an_input_is_written_behind_writes_that_read_its_old_value() -> None:
    """Regression: snapshots of weights before their update were of updated weights."""

    def step(y: torch.Tensor, *inputs: torch.Tensor) -> Any:
        weights, snapshots, older = inputs[:9], inputs[9:18], inputs[18:]
        for weight in weights:
            y = (_products(y, 4) @ weight).sigmoid()
        for weight, snapshot, oldest in zip(weights, snapshots, older, strict=True):
            oldest.copy_(torch.ops.aten._unsafe_view(snapshot, [4, 4]))
            snapshot.copy_(weight.t())
            weight.copy_((weight.t() * 0.9).t())
        return (y,)

    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(4, 4, generator=draw) for _ in range(28)]
    division = _same_by_regions(_with_writes_last(_graph(step, *inputs)), inputs)
    for region in division.regions:
        writes = [node.target is torch.ops.aten.copy_.default for node in region.nodes]
        assert writes == sorted(writes), "Inductor expects writes at the end"


@pytest.mark.parametrize("kind", ["rows", "strided", "written"])
def test_rows_parts_of_others_and_written_numbers_are_no_window(kind: str) -> None:
    """Regression: rows were read as single numbers, elements with a stride as consecutive ones."""

    def step(y: torch.Tensor, *inputs: torch.Tensor) -> Any:
        for i in range(12):
            y = _products(y, 4) * (inputs[i][0] if kind == "rows" else inputs[0][i])
        if kind == "written":
            inputs[0].copy_(inputs[0] * 0.5 + y.mean())
        return (y,)

    draw = torch.Generator().manual_seed(0)
    numbers = [torch.randn(12, 4, generator=draw) for _ in range(12)]
    given = {"rows": numbers, "strided": [numbers[0][:, 1]], "written": [numbers[0][:, 1].clone()]}[kind]
    inputs = [torch.randn(4, 4, generator=draw), *given]
    graph = _with_writes_last(_graph(step, *inputs))
    if kind == "rows":
        _same_by_regions(graph, inputs)
    division = find_regions(graph)
    assert division is None or all(region.window is None for region in division.regions)


def test_numbers_that_one_region_reads_are_a_window_of_its_own() -> None:
    def step(numbers: torch.Tensor, *parameters: torch.Tensor) -> None:
        for i, parameter in enumerate(parameters):
            first, second = numbers[2 * i + 1], numbers[2 * i + 2]
            moved = parameter * first.float() + numbers[0].float()
            for _ in range(12):
                moved = (moved.sin() * second.float()).exp()
            parameter.copy_(moved)

    numbers = torch.linspace(0.1, 0.9, 17, dtype=torch.float64)
    parameters = [torch.full((3,), float(i)) for i in range(8)]
    graph = _graph(step, numbers, *parameters)
    division = find_regions(graph)
    assert division is not None and len(set(division.classes)) < len(division.classes)
    windows = [region.window for region in division.regions if region.window is not None]
    assert len(windows) > 2 and all(window.count == windows[0].count for window in windows[:-1])
    mine, yours = [x.clone() for x in parameters], [x.clone() for x in parameters]
    step(numbers, *mine)
    _run_by_regions(graph, division, [numbers, *yours])
    assert all(map(torch.equal, mine, yours))


@pytest.mark.parametrize("foreach", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_updates_of_equal_layers_are_lowered_once(divisions: list[Division | None], foreach: bool) -> None:
    """The update of an optimizer that is not fused is part of the graph; only the host reads a scheduler's counters."""
    expected, _ = _train(Network, lambda step: step, fused=False, foreach=foreach)
    actual, step = _train(Network, _compile, fused=False, foreach=foreach)
    _same(expected, actual)
    (division,) = divisions
    assert division is not None and (foreach or any(region.window is not None for region in division.regions))
    notes = [note for capture in step.report().captures for note in capture.notes]
    assert any("regions of" in note for note in notes) and not any("failed" in note for note in notes), notes
    again, step = _train(Network, _compile, fused=False, foreach=foreach)
    assert len(divisions) == 1 and all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))
    assert any("from the cache" in note for capture in step.report().captures for note in capture.notes)


@pytest.mark.slow
def test_a_fork_lowers_some_kinds_to_what_they_are_lowered_to_here(
    divisions: list[Division | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not inductor_call.may_fork():
        pytest.skip("no second processor, or no fork")
    shared, step = _train(Network, _compile)
    (capture,) = step.report().captures
    assert any("by a fork of the process" in note for note in capture.notes), capture.notes
    monkeypatch.setattr(inductor_call, "may_fork", lambda: False)
    new_cache(tmp_path / "another", monkeypatch)
    alone, other = _train(Network, _compile)
    assert all(torch.equal(a, b) for a, b in zip(shared, alone, strict=True))
    assert step.report().sources()["inductor"] == other.report().sources()["inductor"]
