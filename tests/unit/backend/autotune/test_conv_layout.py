"""The layout of a graph's convolutions: chosen by timings, correct in both, unchanged where it is channels-last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import sidefx_train
from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.autotune import conv_layout, timing
from sidefx_train.compile.backend.autotune.conv_layout import AS_CAPTURED, LAST
from tests.support.disk_cache import new_cache


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    new_cache(tmp_path, monkeypatch)  # cached graphs that were lowered with other timings are not used
    with compat.inductor_options({"cpp_cache_precompile_headers": False}):
        yield


def choose(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    given = {LAST: 1.0, AS_CAPTURED: 1.0, way: 0.1}
    monkeypatch.setattr(conv_layout, "timings", lambda tasks, share: dict.fromkeys(tasks, given))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "images": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, 2, 1)), (2, 3, 8, 8)),
    "groups, and up": (
        lambda: nn.Sequential(
            nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3, groups=16), nn.ConvTranspose2d(16, 3, 3, 2, 1, 1)
        ),
        (2, 8, 8, 8),
    ),
    "sequences": (
        lambda: nn.Sequential(nn.Conv1d(4, 16, 3, padding=2, dilation=2), nn.ConvTranspose1d(16, 8, 3, 2, 1, 1)),
        (2, 4, 12),
    ),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(2, 16, 3), nn.MaxPool3d(2), nn.Conv3d(16, 4, 1)), (2, 2, 6, 6, 6)),
}


def trained(net: str, compiled: bool, narrow: bool = False, **options: Any) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    make, shape = NETS[net]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            out = model(x)
        loss = out.float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), out.detach()

    run = sidefx_train.compile(step, fullgraph=True, **options) if compiled else step
    made = [t for i in range(3) for t in run(torch.randn(shape, generator=torch.Generator().manual_seed(i)))]
    return [*made, *(p.detach().clone() for p in model.parameters())], run


@pytest.mark.parametrize("way", [LAST, AS_CAPTURED])
@pytest.mark.parametrize(
    ("net", "narrow"),
    [
        *((net, False) for net in NETS),
        ("images", True),
        pytest.param("sequences", True, marks=pytest.mark.slow),  # in full precision above; images prove autocast
    ],
)
@pytest.mark.every(10)
def test_right_in_both_layouts(monkeypatch: pytest.MonkeyPatch, way: str, net: str, narrow: bool) -> None:
    choose(monkeypatch, way)
    wanted, _ = trained(net, False, narrow)
    found, run = trained(net, True, narrow)
    for a, b in zip(wanted, found, strict=True):
        assert a.stride() == b.stride() and a.dtype == b.dtype
        assert (a - b).float().norm() <= (2e-2 if narrow else 1e-5) * a.float().norm()
    report = run.report()
    assert ("convolutions are contiguous" in report.captures[0].notes) == (way == AS_CAPTURED)
    assert ("channels_last" in report.sources()["graph"]) == (way == LAST)
    total, *each = report.captures[0].choices
    assert total.what == "all convolutions of the graph" and total.seconds[way] == min(total.seconds.values())
    assert all(choice.chosen == way and "convolution (" in choice.what for choice in each)


@pytest.mark.parametrize("way", [LAST, AS_CAPTURED])
@pytest.mark.every(2)
def test_inductor_converts_nothing_in_a_contiguous_graph(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Otherwise Inductor would convert each image if oneDNN is available."""
    choose(monkeypatch, way)
    lower, seen = compat.inductor_compile, []

    def compile(*args: Any) -> Any:
        seen.append(torch._inductor.config.layout_optimization)
        return lower(*args)

    monkeypatch.setattr(compat, "inductor_compile", compile)
    trained("images", True)
    assert seen == [way == LAST]


def test_nothing_is_measured_with_autotune_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_layout, "timings", lambda *_: pytest.fail("measured"))
    _, run = trained("images", True, autotune="off")
    assert "channels_last" in run.report().sources()["graph"]
    assert not run.report().captures[0].choices


def graph_of(*images: torch.Tensor, weight: torch.Tensor, backward: bool = False) -> torch.fx.Graph:
    def run(weight: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
        made = [torch.ops.aten.convolution(x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1) for x in given]
        if not backward:
            return made
        rest = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
        return [torch.ops.aten.convolution_backward(y, x, weight, *rest)[1] for x, y in zip(given, made, strict=True)]

    return make_fx(run, tracing_mode="fake")(weight, *images).graph  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_inductor_converts_no_image_to_channels_last_by_itself(dtype: torch.dtype) -> None:
    graph = graph_of(torch.randn(2, 4, 6, 6, dtype=dtype), weight=torch.randn(4, 4, 3, 3, dtype=dtype))
    assert conv_layout.supports_channels_last(graph) == (dtype == torch.float32)


@pytest.mark.parametrize(("channels", "kernel", "stride"), [(5, 1, 2), (64, 1, 2), (5, 1, 1), (5, 3, 2)])
def test_a_convolution_that_damages_memory_stays_contiguous(channels: int, kernel: int, stride: int) -> None:
    """Regression: the process ended in ``free()``; torch's own kernel writes beyond its memory in channels-last."""
    torch.manual_seed(0)
    net = nn.Conv2d(channels, 16, kernel, stride, bias=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        net.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss.detach()

    run = sidefx_train.compile(step, autotune="off")
    run(torch.randn(2, channels, 6, 6))
    narrow = channels < 16 and kernel == 1 and stride > 1
    assert ("channels_last" in run.report().sources()["graph"]) == (not narrow)


def test_the_sum_decides_each_convolution_as_often_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = torch.randn(2, 4, 6, 6), torch.randn(2, 4, 9, 9)
    times = {6: {LAST: 1.0, AS_CAPTURED: 2.0}, 9: {LAST: 3.0, AS_CAPTURED: 1.5}}
    asked: list[str] = []

    def timings(tasks: dict[str, timing.Task], share: float) -> dict[str, timing.Times]:
        asked.extend(tasks)
        return {key: times[task[1][0][-1]] for key, task in tasks.items()}

    monkeypatch.setattr(conv_layout, "timings", timings)
    weight = torch.randn(4, 4, 3, 3)
    last, (total, *each) = conv_layout.choose_layout(graph_of(small, large, weight=weight), 2)
    assert not last and total.seconds == {AS_CAPTURED: 3.5, LAST: 4.0}
    assert {(choice.count, choice.threads, choice.chosen) for choice in (total, *each)} == {(1, 2, AS_CAPTURED)}
    assert ["(2, 4, 9, 9)" in key for key in asked] == [True, False], "what has most to do first"
    last, (total, *each) = conv_layout.choose_layout(graph_of(small, small, small, large, weight=weight), 2)
    assert last and total.chosen == LAST
    assert [(choice.count, "(2, 4, 6, 6)" in choice.what) for choice in each] == [(3, True), (1, False)]


def test_times_of_a_part_count_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {LAST: 1.0, AS_CAPTURED: 2.0}
    monkeypatch.setattr(conv_layout, "timings", lambda tasks, share: dict.fromkeys(tasks, times))
    graph = graph_of(torch.randn(64, 16, 32, 32), weight=torch.randn(16, 16, 3, 3))
    _, (total, each) = conv_layout.choose_layout(graph, 2)
    assert "(a part of it)" in each.what and each.seconds[LAST] == 1.0 and total.seconds[LAST] == 4.0


@pytest.mark.parametrize("backward", [False, True])
def test_what_is_channels_last_as_captured_is_not_asked_for(monkeypatch: pytest.MonkeyPatch, backward: bool) -> None:
    asked: list[str] = []
    monkeypatch.setattr(conv_layout, "timings", lambda tasks, share: asked.extend(tasks) or {})
    image, weight = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3)
    channels_last = image.to(memory_format=torch.channels_last)
    assert conv_layout.choose_layout(graph_of(channels_last, weight=weight, backward=backward), 1)[0] and not asked
    assert conv_layout.choose_layout(graph_of(image, weight=weight, backward=backward), 1)[0]
    assert len(asked) == 1 + backward
    assert conv_layout.choose_layout(graph_of(image.double(), weight=weight.double()), 1)[1] == []


TASKS: list[list[Any]] = [
    [[2, 3, 8, 8], [4, 3, 3, 3], [[1, 1], [1, 1], [1, 1], False, [0, 0], 1], [], 1, "float32"],
    [[2, 4, 8, 8], [4, 1, 3, 3], [[2, 2], [1, 1], [1, 1], False, [0, 0], 4], [True, True, True], 1, "float32"],
    [[2, 4, 16], [4, 4, 3], [[1], [2], [2], False, [0], 1], [False, True, False], 1, "bfloat16"],
    [
        [2, 4, 5, 5, 5],
        [4, 2, 2, 2, 2],
        [[2] * 3, [0] * 3, [1] * 3, True, [0] * 3, 1],
        [True, False, True],
        1,
        "float32",
    ],
]


@pytest.mark.parametrize("args", TASKS)
def test_both_layouts_are_measured(args: list[Any]) -> None:
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    times = conv_layout._measure(*args)
    assert set(times) == {LAST, AS_CAPTURED} and all(0 < seconds < 1 for seconds in times.values())
    assert torch.equal(torch.rand(3), want)


def test_of_many_and_large_images_a_part_is_measured() -> None:
    same = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    part = lambda image, weight, threads=2: conv_layout._part(image, weight, same, [], threads)  # noqa: E731
    assert part([2, 3, 8, 8], [4, 3, 3, 3]) == [2, 3, 8, 8]
    assert part([64, 16, 32, 32], [16, 16, 3, 3]) == [16, 16, 32, 32]
    assert part([1, 16, 512, 256], [16, 16, 3, 3]) == [1, 16, 128, 128]
    assert part([64, 512, 8, 8], [512, 512, 3, 3]) == [8, 512, 8, 8], "of fewer places the weights would be the most"


def test_measurements_of_one_compilation_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_memory", {})
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setitem(timing.MEASURES, "slow", lambda: clock.__setitem__(0, clock[0] + 4.0) or {"way": 1.0})
    timing.begin(10.0)
    tasks: dict[str, timing.Task] = {name: ("slow", []) for name in "abcd"}
    assert list(timing.timings(tasks, share=0.5)) == ["a", "b"], "half of the time was up"
    assert list(timing.timings({name: ("slow", []) for name in "efg"})) == ["e"]
    timing.begin(10.0)
    assert list(timing.timings(tasks)) == ["a", "b", "c", "d"]
