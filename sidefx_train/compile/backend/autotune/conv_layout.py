"""Autotunes the memory format of a graph's convolutions.

Most of oneDNN's convolutions run fastest on channels-last images, those with many channels on contiguous ones. Formats
propagate through a graph (``functionalization/memory_format.py``), so one is chosen for the whole graph: each
convolution, and each gradient of one, is timed in both once per number of threads, and the sum decides. Times are
cached on disk with those of matrix products.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from sidefx_train.compile.backend.autotune.timing import MEASURES, Task, Times, fastest, measured, timings
from sidefx_train.compile.functionalization import memory_format
from sidefx_train.report import ChoiceRecord

aten = torch.ops.aten

LAST, AS_CAPTURED = "channels-last", "contiguous"

_LARGEST = 1e8
"""Floating-point operations above which only a part of the images is timed: a graph has many convolutions."""

_FEWEST = 512
"""Minimal positions in a part of the images: with fewer, work on the weights alone would dominate."""

_FLOATS_OF_A_VECTOR = 16
"""Of AVX-512; those of AVX2 have 8."""

_SHARE = 0.5
"""Fraction of the autotuning time; products and attention get the rest."""

_ROUNDS = 3
"""Rounds per format: the sum of many convolutions varies less than each."""


def choose_layout(graph: fx.Graph, threads: int) -> tuple[bool, list[ChoiceRecord]]:
    """Returns True if a captured graph's convolutions should be channels-last, and the measurements."""
    counts: Counter[str] = Counter()
    tasks: dict[str, Task] = {}
    for node in graph.nodes:
        if (task := _task(node, threads)) is not None:
            key = _key(*task[1])
            counts[key] += 1
            tasks[key] = task
    tasks = dict(sorted(tasks.items(), key=lambda item: -counts[item[0]] * _operations(*item[1][1][:4])))
    known = timings(tasks, _SHARE)
    total: Times = {}
    for key, times in known.items():
        image, *rest = tasks[key][1]
        parts = _operations(image, *rest[:3]) / _operations(_part(image, *rest[:4]), *rest[:3])
        for way, seconds in times.items():
            total[way] = total.get(way, 0.0) + counts[key] * parts * seconds
    last = fastest(total, LAST) == LAST
    way = LAST if last else AS_CAPTURED
    choices = [ChoiceRecord(_what(*tasks[key][1]), counts[key], threads, way, known.get(key, {})) for key in tasks]
    if total:
        choices.insert(0, ChoiceRecord("all convolutions of the graph", 1, threads, way, total))
    return last, choices


def supports_channels_last(graph: fx.Graph) -> bool:
    """Returns False if Inductor would convert images that the graph has as captured: results were wrong."""
    place = {aten.convolution.default: 0, aten.convolution_backward.default: 1}
    images = [node.args[place[node.target]] for node in graph.nodes if node.target in place]
    return all(memory_format.is_convertible(image.meta["val"]) for image in images)  # type: ignore[union-attr]


def damages_memory(graph: fx.Graph) -> bool:
    """Returns True if torch would write beyond its memory, were the graph's convolutions channels-last.

    The weight gradient of a strided convolution of kernel size 1 with fewer channels than a vector has floats does, in
    torch 2.13 to 2.15: seen with 3 to 7 channels on a CPU with AVX2, not with 8 or more.
    """
    return any(_is_narrow(*found) for node in graph.nodes if (found := _strided(node)) is not None)


def _strided(node: fx.Node) -> tuple[torch.Tensor, list[Any], int] | None:
    """Returns the weight, the strides and the groups of a convolution or of its gradients."""
    if node.target is aten.convolution.default:
        weight, stride, groups = node.args[1], node.args[3], node.args[8]
    elif node.target is aten.convolution_backward.default:
        weight, stride, groups = node.args[2], node.args[4], node.args[9]
    else:
        return None
    return weight.meta["val"], list(stride), groups  # type: ignore[union-attr, arg-type, return-value]


def _is_narrow(weight: torch.Tensor, stride: list[Any], groups: int) -> bool:
    return (
        all(size == 1 for size in weight.shape[2:])
        and any(step != 1 for step in stride)
        and (weight.shape[1] * groups < _FLOATS_OF_A_VECTOR)
    )


def _task(node: fx.Node, threads: int) -> Task | None:
    """Returns the measurement of a convolution of static shape that is not channels-last in the captured graph."""
    if node.target is aten.convolution.default:
        (image, weight), rest, wanted = node.args[:2], node.args[3:], []
    elif node.target is aten.convolution_backward.default:
        (image, weight), rest, wanted = node.args[1:3], node.args[4:10], list(node.args[10])  # type: ignore[arg-type]
    else:
        return None
    value, sizes = image.meta["val"], weight.meta["val"].shape  # type: ignore[union-attr]
    settings = [list(item) if isinstance(item, (list, tuple)) else item for item in rest]
    if not memory_format.is_convertible(value) or not _are_numbers(value.shape, value.stride(), sizes, settings):
        return None
    if 0 in value.shape or _is_channels_last(value):
        return None
    return "convolution", [list(value.shape), list(sizes), settings, wanted, threads, str(value.dtype)[6:]]


def _are_numbers(*given: Any) -> bool:
    return all(_are_numbers(*item) if isinstance(item, (list, tuple)) else isinstance(item, int) for item in given)


def _is_channels_last(value: torch.Tensor) -> bool:
    """Returns True if the value is channels-last in the captured graph."""
    flat = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
    return value.shape[1] > 1 and value.stride(1) == min(flat) and not value.is_contiguous()


def _key(image: list[int], weight: list[int], settings: list[Any], wanted: list[bool], threads: int, dtype: str) -> str:
    return f"{threads}: {_what(image, weight, settings, wanted, threads, dtype)}"


def _what(
    image: list[int], weight: list[int], settings: list[Any], wanted: list[bool], threads: int, dtype: str
) -> str:
    stride, padding, dilation, transposed, more, groups = settings
    of = [name for name, each in zip(("image", "weight", "bias"), wanted, strict=False) if each]
    what = "convolution" if not wanted else f"gradients ({', '.join(of)}) of a convolution"
    how = f"stride {stride} padding {padding} dilation {dilation}" + f" transposed {more}" * transposed
    how += f" groups {groups}" * (groups > 1) + f" {dtype}" * (dtype != "float32")
    part = " (a part of it)" * (_part(image, weight, settings, wanted, threads) != image)
    return f"{what} {tuple(image)} {tuple(weight)} {how}{part}"


def _operations(image: list[int], weight: list[int], settings: list[Any], wanted: list[bool]) -> float:
    """Returns the floating-point operations of a convolution, or of its gradients."""
    stride, padding, dilation, transposed, *_ = settings
    places = image[2:]
    if not transposed:
        sides = zip(image[2:], weight[2:], stride, padding, dilation, strict=True)
        places = [(size + 2 * p - d * (kernel - 1) - 1) // s + 1 for size, kernel, s, p, d in sides]
    return 2.0 * image[0] * math.prod(places) * math.prod(weight) * max(1, sum(wanted[:2]))


def _part(image: list[int], weight: list[int], settings: list[Any], wanted: list[bool], threads: int) -> list[int]:
    """Returns the image size to time: enough images for all threads, and a part of large ones."""
    part = list(image)
    while _operations(part, weight, settings, wanted) > _LARGEST:
        longest = 2 + part[2:].index(max(part[2:]))
        side = 0 if part[0] >= 2 * threads else longest
        if part[side] < 2 or part[0] * math.prod(part[2:]) < 2 * _FEWEST:
            break
        part[side] //= 2
    return part


def _measure(
    image: list[int], weight: list[int], settings: list[Any], wanted: list[bool], threads: int, dtype: str
) -> dict[str, float]:
    """Times a convolution, or its ``wanted`` gradients, in both formats, in seconds; uses some of many images."""
    part = _part(image, weight, settings, wanted, threads)

    def candidates() -> dict[str, Callable[[], Any]]:
        x, w = (torch.empty(size).uniform_(-1, 1).to(getattr(torch, dtype)) for size in (part, weight))

        def run(forward: Callable[..., Any], backward: Callable[..., Any], *given: torch.Tensor) -> Callable[[], Any]:
            made = forward(*given, None, *settings)
            if not wanted:
                return lambda: forward(*given, None, *settings)
            grad = torch.empty_like(made).uniform_(-1, 1)
            return lambda: backward(grad, *given, [made.shape[1]], *settings, wanted)

        return {
            AS_CAPTURED: run(aten.convolution.default, aten.convolution_backward.default, x, w),
            LAST: run(
                memory_format.convolution,
                memory_format.convolution_backward,
                _to_channels_last(x),
                _to_channels_last(w),
            ),
        }

    return measured(candidates, _operations(part, weight, settings, wanted), threads, _ROUNDS)


def _to_channels_last(x: torch.Tensor) -> torch.Tensor:
    return (
        memory_format.to_channels_last(x.unsqueeze(2)).squeeze(2) if x.dim() == 3 else memory_format.to_channels_last(x)
    )


MEASURES["convolution"] = _measure
