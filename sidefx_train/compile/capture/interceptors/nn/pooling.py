"""Pooling, and windows as columns, of symbolic sizes or with windows that change.

Torch composes some of it in C++ code that asks for plain sizes, and declares windows as plain integers.
"""

from __future__ import annotations

import inspect
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.ops import integer_operators
from sidefx_train.compile.ops.integer_operators import window_count

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

aten = torch.ops.aten
Numbers = list[Any]

_MAXIMUM = inspect.signature(
    lambda input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False: None
)
_MEAN = inspect.signature(
    lambda input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True: None
)
_DIVIDED_MEAN = inspect.signature(
    lambda input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True,
    divisor_override=None: None
)  # fmt: skip
_ADAPTIVE = inspect.signature(lambda input, output_size, return_indices=False: None)
_ADAPTIVE_MEAN = inspect.signature(lambda input, output_size: None)
_COLUMNS = inspect.signature(lambda input, kernel_size, dilation=1, padding=0, stride=1: None)
_IMAGE = inspect.signature(lambda input, output_size, kernel_size, dilation=1, padding=0, stride=1: None)


def _spread(value: Any, dims: int) -> Numbers | None:
    """Returns one integer for each dimension; ``None`` for what is no such list."""
    found = list(value) if safe_isinstance(value, (tuple, list)) else [value]
    found = found * dims if len(found) == 1 else found
    known = len(found) == dims and all(type(each) is int or compat.is_symbolic_integer(each) for each in found)
    return found if known else None


def _is_known(x: Any, dims: int) -> bool:
    """Returns True for images, of ``dims`` dimensions each, that the kernel leaves in their memory format."""
    known = safe_isinstance(x, compat.FakeTensor) and x.layout is torch.strided and x.is_contiguous()
    return known and x.dim() in (dims + 1, dims + 2) and not compat.inside_transform()


def _fit(
    world: TraceWorld, x: Any, kernel: Numbers, stride: Numbers, padding: Numbers, dilation: Numbers, rounds_up: bool
) -> bool:
    """Returns True if windows are valid, which is guarded; else torch says what is wrong."""
    for size, length, step, margin, gap in zip(x.shape[-len(kernel) :], kernel, stride, padding, dilation, strict=True):
        if not all(world.truth(each > 0) for each in (length, step, gap)) or not world.truth(margin >= 0):
            return False
        if not world.truth(window_count(size, length, step, margin, gap, rounds_up) > 0):
            return False
    return True


def _at_most_half(world: TraceWorld, kernel: Numbers, padding: Numbers, dilation: Numbers) -> bool:
    return all(
        world.truth(2 * margin <= (length - 1) * gap + 1)
        for length, margin, gap in zip(kernel, padding, dilation, strict=True)
    )


def _lines(values: Numbers, first: int) -> Numbers:
    """Returns the numbers of a line as those of an image of one row."""
    return [first, *values]


def _maximum(dims: int, with_indices: bool, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = registry.bound_arguments(_MAXIMUM, args, kwargs)
    if given is None:
        return ABSENT
    x, *windows, rounds_up, asked = given.values()
    if {type(rounds_up), type(asked)} != {bool}:
        return ABSENT
    windows[1] = windows[0] if windows[1] in (None, (), []) else windows[1]
    numbers: list[Any] = [_spread(each, dims) for each in windows]
    if None in numbers:
        return ABSENT
    made = _maximum_of_line(world, x, numbers, rounds_up) if dims == 1 else ABSENT
    if made is ABSENT:
        made = _maxima(dims, world, x, numbers, rounds_up)
    if made is ABSENT:
        return ABSENT
    return tuple(made) if with_indices or asked else made[0]


def _maximum_of_line(world: TraceWorld, x: Any, numbers: list[Any], rounds_up: bool) -> Any:
    """Pools lines of symbolic length by plain windows, or by one window as long as the line."""
    on_host = safe_isinstance(x, compat.FakeTensor) and x.device.type == "cpu"
    if not on_host or x.dim() not in (2, 3) or not any(map(compat.is_symbolic_integer, x.shape)):
        return ABSENT
    (kernel,), (stride,), (padding,), (dilation,) = numbers
    if not all(type(each) is int for each in (padding, dilation)):
        return ABSENT
    if type(kernel) is int and type(stride) is int:
        return world.guarded(_pooled_line, (x, kernel, stride, padding, dilation, rounds_up), {})
    if compat.is_symbolic_integer(kernel) and (padding, dilation) == (0, 1) and kernel == x.shape[-1]:
        return world.guarded(torch.max, (x, -1, True), {})
    return ABSENT


def _pooled_line(x: Any, kernel: int, stride: int, padding: int, dilation: int, rounds_up: bool) -> Any:
    pairs = (1, kernel), (1, stride), (0, padding), (1, dilation)
    made = aten.max_pool2d_with_indices.default(x.unsqueeze(-2), *pairs, rounds_up)
    return [each.squeeze(-2) for each in made]


def _maxima(dims: int, world: TraceWorld, x: Any, numbers: list[Any], rounds_up: bool) -> Any:
    """Pools by windows that change."""
    if not compat.are_changing_integers(*chain(*numbers)) or not _is_known(x, dims):
        return ABSENT
    kernel, stride, padding, dilation = numbers
    if not _at_most_half(world, kernel, padding, dilation):
        return ABSENT
    if not _fit(world, x, kernel, stride, padding, dilation, rounds_up):
        return ABSENT
    if dims == 1:
        x = world.guarded(torch.unsqueeze, (x, -2), {})
        numbers = [_lines(each, first) for each, first in zip(numbers, (1, 1, 0, 1), strict=True)]
    call = max(dims, 2), x, *numbers, rounds_up
    made = world.guarded(integer_operators.Maximum.apply, call, {})
    return [world.guarded(torch.squeeze, (each, -2), {}) for each in made] if dims == 1 else made


registry.intercept(F.max_pool1d, torch.max_pool1d)(partial(_maximum, 1, False))
registry.intercept(F.max_pool1d_with_indices, torch.max_pool1d_with_indices)(partial(_maximum, 1, True))
registry.intercept(F.max_pool2d, torch.max_pool2d)(partial(_maximum, 2, False))
registry.intercept(F.max_pool2d_with_indices)(partial(_maximum, 2, True))
registry.intercept(F.max_pool3d, torch.max_pool3d)(partial(_maximum, 3, False))
registry.intercept(F.max_pool3d_with_indices)(partial(_maximum, 3, True))


def _mean(dims: int, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pools by windows that change."""
    given = registry.bound_arguments(_MEAN if dims == 1 else _DIVIDED_MEAN, args, kwargs)
    if given is None:
        return ABSENT
    x, kernel, stride, padding, rounds_up, includes_padding, *divisor = given.values()
    stride = kernel if stride in (None, (), []) else stride
    numbers: list[Any] = [_spread(each, dims) for each in (kernel, stride, padding)]
    if None in numbers or {type(rounds_up), type(includes_padding)} != {bool} or not _is_known(x, dims):
        return ABSENT
    kernel, stride, padding = numbers
    dilation = [1] * dims
    if not compat.are_changing_integers(*chain(kernel, stride, padding), *divisor):
        return ABSENT
    if not all(each is None or (type(each) in (int, torch.SymInt) and world.truth(each != 0)) for each in divisor):
        return ABSENT
    if not _at_most_half(world, kernel, padding, dilation):
        return ABSENT
    if not _fit(world, x, kernel, stride, padding, dilation, rounds_up):
        return ABSENT
    if dims == 1:
        x, divisor = world.guarded(torch.unsqueeze, (x, -2), {}), [None]
        kernel, stride, padding = _lines(kernel, 1), _lines(stride, 1), _lines(padding, 0)
    options = kernel, stride, padding, rounds_up, includes_padding, *divisor
    call = max(dims, 2), x, *options
    made = world.guarded(integer_operators.Mean.apply, call, {})
    return world.guarded(torch.squeeze, (made, -2), {}) if dims == 1 else made


registry.intercept(F.avg_pool1d)(partial(_mean, 1))
registry.intercept(F.avg_pool2d)(partial(_mean, 2))
registry.intercept(F.avg_pool3d)(partial(_mean, 3))


def _adaptive(dims: int, with_indices: bool, world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pools to a size that changes."""
    given = registry.bound_arguments(_ADAPTIVE, args, kwargs)
    if given is None or type(given["return_indices"]) is not bool or not _is_known(given["input"], dims):
        return ABSENT
    x, size, asked = given.values()
    sizes = _spread(size, dims)
    if (
        sizes is None
        or not compat.are_changing_integers(*sizes)
        or not all(world.truth(each > 0) for each in (*sizes, *x.shape))
    ):
        return ABSENT
    if dims == 1:
        x, sizes = world.guarded(torch.unsqueeze, (x, -2), {}), _lines(sizes, 1)
    call = max(dims, 2), x, sizes
    made = world.guarded(integer_operators.AdaptiveMaximum.apply, call, {})
    if dims == 1:
        made = [world.guarded(torch.squeeze, (each, -2), {}) for each in made]
    return tuple(made) if with_indices or asked else made[0]


for _dims, _plain, _with_indices in (
    (1, F.adaptive_max_pool1d, F.adaptive_max_pool1d_with_indices),
    (2, F.adaptive_max_pool2d, F.adaptive_max_pool2d_with_indices),
    (3, F.adaptive_max_pool3d, F.adaptive_max_pool3d_with_indices),
):
    registry.intercept(_plain)(partial(_adaptive, _dims, False))
    registry.intercept(_with_indices)(partial(_adaptive, _dims, True))


@registry.intercept(F.adaptive_avg_pool1d)
def _adaptive_mean_of_line(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = registry.bound_arguments(_ADAPTIVE_MEAN, args, kwargs)
    if given is None or not _is_known(given["input"], 1):
        return ABSENT
    sizes = _spread(given["output_size"], 1)
    if sizes is None or not compat.are_changing_integers(*sizes):
        return ABSENT
    image = world.guarded(torch.unsqueeze, (given["input"], -2), {})
    return world.guarded(torch.squeeze, (world.guarded(F.adaptive_avg_pool2d, (image, _lines(sizes, 1)), {}), -2), {})


def _windows_of(given: dict[str, Any]) -> list[Any]:
    return [_spread(given[name], 2) for name in ("kernel_size", "dilation", "padding", "stride")]


@registry.intercept(F.unfold)
def _columns(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes columns of windows that change."""
    given = registry.bound_arguments(_COLUMNS, args, kwargs)
    if given is None or not _is_known(given["input"], 2):
        return ABSENT
    windows = _windows_of(given)
    if None in windows or not compat.are_changing_integers(*chain(*windows)):
        return ABSENT
    kernel, dilation, padding, stride = windows
    if not _fit(world, given["input"], kernel, stride, padding, dilation, False):
        return ABSENT
    call = given["input"], *windows
    return world.guarded(integer_operators.Columns.apply, call, {})


@registry.intercept(F.fold)
def _image(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes an image of windows that change."""
    given = registry.bound_arguments(_IMAGE, args, kwargs)
    if given is None or not _is_known(given["input"], 1):
        return ABSENT
    x, size, windows = given["input"], _spread(given["output_size"], 2), _windows_of(given)
    if size is None or None in windows or not compat.are_changing_integers(*size, *chain(*windows)):
        return ABSENT
    kernel, dilation, padding, stride = windows
    count: Any = 1
    for each in zip(size, kernel, stride, padding, dilation, strict=True):
        if not all(world.truth(number > 0) for number in (*each[:3], each[4])) or not world.truth(each[3] >= 0):
            return ABSENT
        count = count * window_count(*each)
    if not world.truth(x.shape[-1] == count) or not world.truth(x.shape[-2] % (kernel[0] * kernel[1]) == 0):
        return ABSENT
    call = x, size, *windows
    return world.guarded(integer_operators.Image.apply, call, {})
