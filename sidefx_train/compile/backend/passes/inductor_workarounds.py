"""Workarounds for arguments that Inductor ignores or gets wrong: they are replaced by explicit operators.

Upstream, ``torch.compile`` included (seen in torch 2.13; each has a program in
``tests/unit/torch_compat/test_upstream_bugs.py`` that fails once upstream is right):

- Patterns ignore keyword arguments that they do not mention: ``add(x, mm(a, b), alpha=2)`` becomes ``addmm(x, a, b)``,
  and a cumulative sum of ones has the dtype of the ones, not the requested ``dtype``.
- C functions called by its C++ take every number as a double: ``2 ** integers`` is computed in floating point, and the
  result is read as integers of half the size.
- The gradient of average pooling divides by the size of the window even if ``ceil_mode`` makes a window reach past the
  padding. Eager divides by the part that lies inside.
- The gradient of nearest-neighbor interpolation of images ignores the scale factors. It divides sizes exactly, where
  eager rounds: 14 pixels that become 46 are one such case.
- The C++ makes tensors of float64, int64 or complex128 of numbers, which promote what has no dimensions: the product of
  a complex64 number and 0.5 is complex128, and what reads it as complex64 reads other numbers.
- A loop (``while_loop``, ``scan``, ``map``) keeps what it carries in memory with the strides of the first value: where
  that is expanded, all elements of later values are one.
- An operation that returns a tensor with some elements replaced works in place where nothing else reads the tensor,
  even if that is expanded: the gradient of ``index_put`` is zero everywhere if that of its result is one number.
- The pattern of ``x[torch.randperm(n)[:m]]`` also matches a permutation that is not cut, and then fails because ``m``
  is missing: ``x[torch.randperm(n)]`` of mixup does not compile.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from types import NoneType
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.fx_utils import emit
from sidefx_train.compile.graph.strided_layout import is_dense, may_overlap

aten = torch.ops.aten
_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_LOOPS = tuple(getattr(torch.ops.higher_order, name) for name in ("while_loop", "scan", "map_impl"))
_REPLACING = (
    *(aten.index_put.default, aten._unsafe_index_put.default, aten.index_copy.default, aten.index_add.default),
    *(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.put.default, aten.slice_scatter.default),
    *(aten.select_scatter.default, aten.diagonal_scatter.default, aten.as_strided_scatter.default),
)
_SAME_PLACES = (aten.alias.default, aten.detach.default, aten.clone.default, aten.slice.Tensor, aten.view.default)
_POOLINGS = (aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)


def apply_inductor_workarounds(module: fx.GraphModule, fake_mode: Any) -> None:
    """Rewrites sums with an ``alpha``, cumulative sums with a ``dtype``, integer powers of a number, gradients of
    average pooling with ``ceil_mode`` and of interpolation, loops over tensors that are not contiguous, operations that
    replace elements of expanded tensors, and complex operations with numbers; also in graphs of branches."""
    for inner in module.children():
        if isinstance(inner, fx.GraphModule):
            apply_inductor_workarounds(inner, fake_mode)
    graph, found = module.graph, False
    for node in list(graph.nodes):
        if node.target in _SUMS and "alpha" in node.kwargs and _is_of_the_sums_type(node):
            _write_out_multiple(graph, node, fake_mode)
        elif node.target is aten.cumsum.default and "dtype" in node.kwargs and _is_full(node.args[0]):
            _hide_from_pattern(graph, node, fake_mode)
        elif node.target is aten.pow.Scalar and not node.meta["val"].dtype.is_floating_point:
            _write_out_base(graph, node, fake_mode)
        elif node.target in _POOLINGS and _cuts_windows(node):
            _write_out_divisor(graph, node, fake_mode)
        elif node.target is aten.upsample_nearest2d_backward.default and not _divides_sizes(node):
            _interpolate_volume(graph, node, fake_mode)
        elif node.target in _LOOPS and any(map(_has_gaps, node.all_input_nodes)):
            _lay_out(graph, node, fake_mode, filter(_has_gaps, node.all_input_nodes))
        elif node.target in _REPLACING and may_overlap(node.args[0].meta["val"]):
            _lay_out(graph, node, fake_mode, [node.args[0]])
        else:
            continue
        found = True
    for node in filter(_takes_bare_numbers, list(graph.nodes)):
        _give_numbers_a_type(graph, node, fake_mode)
        found = True
    if found:
        graph.lint()
        module.recompile()


def index_by_permutations(module: fx.GraphModule) -> None:
    """Has rows that a random permutation puts in order looked up without a check, before Inductor's patterns run; also
    in graphs of branches."""
    for inner in module.children():
        if isinstance(inner, fx.GraphModule):
            index_by_permutations(inner)
    found = [node for node in module.graph.nodes if node.target is aten.index.Tensor and _permutes(node)]
    for node in found:
        node.target = aten._unsafe_index.Tensor
    if found:
        module.recompile()


def _is_of_the_sums_type(node: fx.Node) -> bool:
    """Returns True if the multiple has the sum's dtype; no pattern matches the others, which are promoted first."""
    added, alpha = (n.meta["val"] if isinstance(n, fx.Node) else n for n in (node.args[1], node.kwargs["alpha"]))
    if not isinstance(added, torch.Tensor):
        return True
    return bool(added.dtype == node.meta["val"].dtype == torch.result_type(added, alpha))


def _takes_bare_numbers(node: fx.Node) -> bool:
    """Returns True if a number stands for a tensor of an operation on complex numbers, which Inductor's C++ calls."""
    if not isinstance(node.target, compat.OpOverload) or not any(_numbers_for_tensors(node)):
        return False
    return any(_is_complex(each.meta.get("val")) for each in (node, *node.all_input_nodes))


def _numbers_for_tensors(node: fx.Node) -> list[bool]:
    """Returns for each positional argument whether it is a number where the schema has a tensor."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return [
        isinstance(given, (int, float, complex)) and str(argument.type) == "Tensor"
        for argument, given in zip(schema, node.args, strict=False)
    ]


def _is_complex(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


def _give_numbers_a_type(graph: fx.Graph, node: fx.Node, fake_mode: Any) -> None:
    """Replaces numbers by tensors of the dtype that torch promotes the others to."""
    value = node.meta["val"]
    tensors = [each.meta["val"] for each in node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]
    for i, bare in enumerate(_numbers_for_tensors(node)):
        if bare:
            number: Any = node.args[i]
            dtype = torch.result_type(tensors[0], number) if tensors else value.dtype
            with graph.inserting_before(node):
                typed = emit(graph, fake_mode, aten.full.default, [], number, dtype=dtype, device=value.device)
            node.update_arg(i, typed)


def _write_out_multiple(graph: fx.Graph, node: fx.Node, fake_mode: Any) -> None:
    added, alpha = node.args[1], node.kwargs["alpha"]
    with graph.inserting_before(node):
        product = emit(graph, fake_mode, aten.mul.Tensor, added, alpha) if isinstance(added, fx.Node) else added * alpha
    node.args, node.kwargs = (node.args[0], product), {}


def _is_full(given: Any) -> bool:
    return isinstance(given, fx.Node) and given.target is aten.full.default


def _hide_from_pattern(graph: fx.Graph, node: fx.Node, fake_mode: Any) -> None:
    """Drops ``pin_memory=False`` from the summed tensor, which the pattern requires."""
    given = node.args[0]
    options = {name: value for name, value in given.kwargs.items() if name != "pin_memory"}  # type: ignore[union-attr]
    with graph.inserting_before(node):
        unsaid = emit(graph, fake_mode, aten.full.default, *given.args, **options)  # type: ignore[union-attr]
    node.args = (unsaid, *node.args[1:])


def _write_out_base(graph: fx.Graph, node: fx.Node, fake_mode: Any) -> None:
    base, power = node.args
    value = node.meta["val"]
    with graph.inserting_before(node):
        number = emit(graph, fake_mode, aten.full.default, [], base, dtype=value.dtype, device=value.device)
    node.target, node.args = aten.pow.Tensor_Tensor, (number, power)


def _cuts_windows(node: fx.Node) -> bool:
    """Returns True for the gradient of average pooling if windows may reach past the padded input."""
    _, _, _, _, _, ceil_mode, counts_padding, divisor = node.args
    return bool(ceil_mode and counts_padding and divisor is None)


def _write_out_divisor(graph: fx.Graph, node: fx.Node, fake_mode: Any) -> None:
    """Divides the gradient of each window by the window's part inside, and uses the gradient of the sum."""
    grad, x, kernel, stride, padding, *flags, _ = node.args
    value, dims = x.meta["val"], len(kernel)  # type: ignore[union-attr,arg-type]
    kernel, stride, padding = (_each(given, dims) for given in (kernel, stride or kernel, padding))
    with graph.inserting_before(node):
        for i in range(dims):
            windows = grad.meta["val"].shape[i - dims]  # type: ignore[union-attr]
            count, size = _number(graph, fake_mode, grad, i - dims, windows), value.shape[i - dims]
            first = emit(graph, fake_mode, aten.arange.default, count, dtype=torch.int64, device=value.device)
            first = emit(graph, fake_mode, aten.mul.Tensor, first, stride[i])
            end = _number(graph, fake_mode, x, i - dims, size, 2 * padding[i])  # relative to the padding's begin
            last = emit(graph, fake_mode, aten.clamp_max.default, _plus(graph, fake_mode, first, kernel[i]), end)
            width = emit(graph, fake_mode, aten.sub.Tensor, last, first)
            width = emit(graph, fake_mode, aten.view.default, width, [-1, *[1] * (dims - 1 - i)])
            grad = emit(graph, fake_mode, aten.div.Tensor, grad, width)
    node.args = (grad, x, kernel, stride, padding, *flags, 1)


def _divides_sizes(node: fx.Node) -> bool:
    """Returns True if eager's interpolation takes the pixel that the exact quotient of the sizes gives."""
    _, out, size, *scales = node.args
    scales = [*scales, *[None] * (2 - len(scales))]
    return all(map(_takes_quotient, size[-2:], out, scales))  # type: ignore[index,arg-type]


def _takes_quotient(size: Any, out: Any, scale: Any) -> bool:
    if type(size) is not int or type(out) is not int or type(scale) not in (float, NoneType):
        return False
    pixels = torch.arange(size, dtype=torch.float32)
    taken = aten.upsample_nearest2d.default(pixels[None, None, :, None], [out, 1], scale, None)
    return torch.equal(taken.flatten(), pixels[torch.arange(out) * size // out])


def _interpolate_volume(graph: fx.Graph, node: fx.Node, fake_mode: Any) -> None:
    """Computes a gradient as that of a volume of one slice, for which Inductor calls eager's kernel.

    The gradient of a volume is contiguous; that of an image has the memory format of what it is computed from.
    """
    grad, out, size, *scales = node.args
    with graph.inserting_before(node):
        grad = emit(graph, fake_mode, aten.unsqueeze.default, grad, 2)
        of_volume = [*size[:2], 1, *size[2:]]  # type: ignore[index,misc]
        volume = aten.upsample_nearest3d_backward.default
        made = emit(graph, fake_mode, volume, grad, [1, *out], of_volume, None, *scales)  # type: ignore[misc]
        image = emit(graph, fake_mode, aten.squeeze.dim, made, 2)
    node.target, node.args = aten.alias.default, (image,)
    if str(image.meta["val"].stride()) != str(node.meta["val"].stride()):
        node.target, node.kwargs = aten.clone.default, {"memory_format": torch.channels_last}


def _has_gaps(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not is_dense(value)


def _lay_out(graph: fx.Graph, node: fx.Node, fake_mode: Any, inputs: Iterable[Any]) -> None:
    """Has an operation work on contiguous copies of some inputs."""
    for given in inputs:
        with graph.inserting_before(node):
            copy = emit(graph, fake_mode, aten.clone.default, given, memory_format=torch.contiguous_format)
        node.replace_input_with(given, copy)


def _permutes(node: fx.Node) -> bool:
    """Returns True for a tensor that is indexed by a random permutation which is known to be in range."""
    given, (order, *more) = node.args  # type: ignore[misc]
    while not more and isinstance(order, fx.Node) and order.target in _SAME_PLACES:
        order = order.args[0]
    if more or not isinstance(order, fx.Node) or order.target is not aten.randperm.default:  # type: ignore[union-attr]
        return False
    size, count = given.meta["val"].shape[0], order.args[0]  # type: ignore[union-attr]
    if isinstance(size, int) and isinstance(count, int):
        return count <= size
    return isinstance(count, fx.Node) and str(count.meta["val"]) == str(size)


def _each(given: Any, dims: int) -> list[int]:
    return list(given) * dims if len(given) == 1 else list(given)


def _plus(graph: fx.Graph, fake_mode: Any, value: fx.Node, number: int) -> fx.Node:
    return emit(graph, fake_mode, aten.add.Tensor, value, number)


def _number(graph: fx.Graph, fake_mode: Any, tensor: Any, dim: int, size: Any, more: int = 0) -> Any:
    """Returns a size plus a number, as a node if it is symbolic."""
    if isinstance(size, int):
        return size + more
    node = emit(graph, fake_mode, torch.ops.aten.sym_size.int, tensor, dim)
    return emit(graph, fake_mode, operator.add, node, more) if more else node
