"""Finds values that could make a step raise after a mutation.

If a class label is out of range, the loss raises, and batch norm has already updated its statistics: eager leaves them
updated, so must the eager re-run of a failed step, and so the compiled step must not have changed anything. Indices
that come directly from an input are checked before the graph runs. Indices that the step computes are checked by the
graph itself, which clamps them and reports (generated code must not raise inside a parallel region: the process would
end). Every update then writes the old value where the report says so; on an accelerator, and outside of generated code,
it waits for the report. For all other operations that may raise, independent updates are deferred until the graph has
finished.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.alias_analysis import Aliases
from sidefx_train.compile.graph.artifacts import IndexCheck
from sidefx_train.compile.graph.devices import is_on_accelerator
from sidefx_train.compile.graph.fx_utils import schema_args

aten = torch.ops.aten

_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "t",
        "transpose",
        "permute",
        "slice",
        "select",
        "squeeze",
        "unsqueeze",
        "expand",
        "detach",
        "alias",
        "clone",
        "contiguous",
        "as_strided",
        "split",
        "split_with_sizes",
        "unbind",
        "repeat",
    )
)
"""Operations whose result contains only values of their first argument."""


FACTORIZED = aten._linalg_check_errors.default
"""Raises if its first argument says that a matrix could not be factorized. The graph reports that, too."""


@dataclass(frozen=True)
class IndexUse:
    """An index tensor computed by the step: its values must be in ``[low, high)`` or equal ``ignore``."""

    index: fx.Node
    low: int
    high: int
    ignore: int | fx.Node | None


@dataclass(frozen=True)
class RaisingOps:
    """Operations that can raise.

    Attributes:
        checks: conditions the runner checks first.
        unchecked: nodes that may still raise.
        uses: for an unchecked node that raises only because of indices, those indices.
    """

    checks: tuple[IndexCheck, ...]
    unchecked: tuple[fx.Node, ...]
    uses: dict[fx.Node, tuple[IndexUse, ...]]


Size: TypeAlias = int | torch.SymInt


def _size(value: object, dim: int) -> Size | None:
    if not isinstance(value, fx.Node):
        return None
    shape = value.meta["val"].shape
    return shape[dim] if shape else 1  # a 0-dim tensor is indexed like one of size 1


def _targets(node: fx.Node) -> tuple[fx.Node, Size | None, int | fx.Node | None] | None:
    """Returns (class indices, number of classes, ignored label) of a loss node."""
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    if name in ("nll_loss_forward", "nll_loss2d_forward"):
        scores = node.args[0]
        dim = -1 if scores.meta["val"].dim() <= 2 else 1  # type: ignore[union-attr]
        return node.args[1], _size(scores, dim), node.args[4]  # type: ignore[return-value]
    if name in ("nll_loss_backward", "nll_loss2d_backward"):
        scores = node.args[1]
        dim = -1 if scores.meta["val"].dim() <= 2 else 1  # type: ignore[union-attr]
        return node.args[2], _size(scores, dim), node.args[5]  # type: ignore[return-value]
    return None


def _indices(node: fx.Node) -> list[tuple[fx.Node, Size | None, int | fx.Node | None, bool]] | None:
    """Returns (index tensor, indexed size, ignored value, may be negative) of a node that raises on a bad index."""
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    loss = _targets(node)
    if loss is not None:
        return [(*loss, False)]
    args = node.args
    if name in ("embedding", "_embedding_bag", "_embedding_bag_forward_only"):
        return [(args[1], _size(args[0], 0), None, False)]  # type: ignore[list-item]
    if name == "embedding_dense_backward":
        return [(args[1], args[2] if isinstance(args[2], int) else None, None, False)]  # type: ignore[list-item]
    if name in _ALONG_DIM:
        return [(args[2], _size(args[0], args[1]), None, name == "index_fill")]  # type: ignore[list-item, arg-type]
    if name in ("put", "take"):
        return [(args[1], args[0].meta["val"].numel(), None, True)]  # type: ignore[list-item, union-attr]
    if name in ("max_unpool2d", "max_unpool3d"):
        known = all(isinstance(length, int) for length in args[2])  # type: ignore[union-attr]
        return [(args[1], math.prod(args[2]) if known else None, None, False)]  # type: ignore[arg-type, list-item]
    if name in ("index", "index_put", "_unsafe_index", "_unsafe_index_put", "_index_put_impl"):
        if name.startswith("_unsafe"):
            return []
        used = [(i, ix) for i, ix in enumerate(args[1]) if ix is not None]  # type: ignore[arg-type]
        if any(ix.meta["val"].dtype in (torch.bool, torch.uint8) for _, ix in used):  # type: ignore[union-attr]
            return [] if len(used) == 1 else None
        return [(ix, _size(args[0], i), None, True) for i, ix in used]  # type: ignore[misc]
    return None


_ALONG_DIM = frozenset(
    {
        *("gather", "scatter", "scatter_add", "scatter_reduce"),
        *("index_select", "index_add", "index_copy", "index_fill", "index_reduce"),
    }
)
"""Operations whose arguments begin with a tensor, a dimension and indices along it."""

_RAISES = (
    *("_assert", "_ctc_loss", "pack_padded_sequence", "segment_reduce", "repeat_interleave", "masked_scatter"),
    *("_linalg_svd", "_linalg_eigh", "linalg_eig", "linalg_pinv", "linalg_lstsq", "cholesky_inverse"),
    *("multinomial", "poisson", "binomial", "histc", "histogram", "_histogramdd", "bincount", "kthvalue"),
)
"""What the names of operations begin with that may raise because of values. Kernels named ``_ex`` return a status."""

_RAISE = frozenset(
    {"index", "index_put", "index_put_", "binary_cross_entropy", "multi_margin_loss", "multilabel_margin_loss_forward"}
)
"""Whole names of such operations."""


def find_raising_ops(graph: fx.Graph, aliases: Aliases) -> RaisingOps:
    """Finds operations in a captured graph that raise on bad values."""
    placeholders = {n: i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    storages = frozenset().union(*(aliases.writes(n) for n in graph.nodes if n.op == "call_function"))
    written = frozenset(n for n in graph.nodes if not storages.isdisjoint(aliases.roots.get(n, ())))
    checks: dict[IndexCheck, None] = {}
    unchecked: dict[fx.Node, None] = {}
    uses: dict[fx.Node, list[IndexUse]] = {}
    unknown: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, compat.OpOverload):
            continue
        name = node.target._schema.name.split("::")[1]
        found = _indices_in_place(node, name)
        if _asserts_on_device(node, name):
            continue
        if found is None:
            if _may_raise(node, name):
                unchecked[node] = None
                unknown.add(node)
            continue
        for index, length, ignore, negative in found:
            if _safe_by_construction(index, length, written):
                continue
            size = length if isinstance(length, int) else None
            traced = _source_of(index, size, ignore, written)
            source, way = traced if traced is not None else (None, [])
            low = -size if negative and size is not None else 0
            if size is None or source is None or source not in placeholders or isinstance(ignore, fx.Node):
                unchecked[node] = None
                if size is None or size == 0 or index.meta["val"].device.type != "cpu":
                    unknown.add(node)
                else:
                    uses.setdefault(node, []).append(IndexUse(index, low, size, ignore))
            elif source.meta["val"].device.type == "cpu":
                checks[IndexCheck(placeholders[source], low, size, ignore, _selected(way))] = None
    known = {node: tuple(found) for node, found in uses.items() if node not in unknown}
    return RaisingOps(tuple(checks), tuple(unchecked), known)


def raises_on_index(node: fx.Node) -> bool:
    """Returns True for an operation on the host that raises if an index is out of range, also if nothing uses it.

    A backward raises where its forward has raised.
    """
    if node.op != "call_function" or not isinstance(node.target, compat.OpOverload):
        return False
    name = node.target._schema.name.split("::")[1]
    if name.endswith("_backward") or _asserts_on_device(node, name):
        return False
    return any(not _safe_by_construction(index, size) for index, size, _, _ in _indices_in_place(node, name) or ())


def _may_raise(node: fx.Node, name: str) -> bool:
    """Returns True for an operation that may raise because of values, other than indices that are known."""
    if name in _RAISE or name.startswith(_RAISES) or _divides_integers(node, name.rstrip("_")):
        return True
    return _takes_indices(node.target) and not (name.startswith("_unsafe") or name.endswith("_backward"))


def _divides_integers(node: fx.Node, name: str) -> bool:
    """Returns True for a division of integers by a tensor, or by zero: kernels of the host raise at a zero."""
    if name not in ("div", "floor_divide", "remainder", "fmod") or len(node.args) < 2:
        return False
    value, divisor = node.meta.get("val"), node.args[1]
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
        return False
    return isinstance(divisor, fx.Node) or divisor == 0


@functools.lru_cache(maxsize=1024)
def _takes_indices(op: Any) -> bool:
    """Returns True for an operation with a tensor of indices: code generated for it does not check these."""
    if op.namespace != "aten":
        return False
    given = (each for each in op._schema.arguments if each.name in ("index", "indices") and not each.is_out)
    return any("Tensor" in str(each.type) for each in given)


_READ_BY_HOST = ("linalg_", "_ctc_loss")
"""Operations whose kernels on an accelerator read a status on the host, and raise."""


def _asserts_on_device(node: fx.Node, name: str) -> bool:
    """Returns True for an operation on an accelerator: bad values make its kernels assert there, as eager's do."""
    value = node.meta.get("val")
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    return is_on_accelerator(value) and not name.startswith(_READ_BY_HOST)


def factorizes(graph: fx.Graph) -> bool:
    """Returns True if the graph checks whether a matrix could be factorized."""
    return any(node.target is FACTORIZED for node in graph.nodes)


def _indices_in_place(node: fx.Node, name: str) -> list[tuple[fx.Node, Size | None, int | fx.Node | None, bool]] | None:
    return _indices(node) if not name.endswith("_") else _indices(_WithoutUnderscore(node, name))  # type: ignore[arg-type]


class _WithoutUnderscore:
    """An in-place node with the name of its functional form."""

    def __init__(self, node: fx.Node, name: str) -> None:
        self.args = node.args
        schema = type("Schema", (), {"name": f"aten::{name.rstrip('_')}"})
        self.target = type("Target", (), {"_schema": schema})


def _source_of(
    index: fx.Node, size: int | None, ignore: int | None, written: Set[fx.Node]
) -> tuple[fx.Node, list[fx.Node]] | None:
    """Traces an index tensor back through operations that only copy values.

    Returns:
        The node that contains all its values, and the operations after it, in order; ``None`` if one of them creates a
        storage that the step writes to.
    """
    node, way = index, list[fx.Node]()
    while node.op == "call_function":
        if node.target is aten.constant_pad_nd.default:
            fill = node.args[2] if len(node.args) > 2 else 0
            if fill != ignore and not (size is not None and isinstance(fill, int) and 0 <= fill < size):
                return None
        elif not _moves(node):
            return None
        way.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return None if node in written or not written.isdisjoint(way) else (node, way[::-1])


_REORDERS = {aten.t.default: "t", aten.transpose.int: "transpose", aten.unsqueeze.default: "unsqueeze"}


def _selected(way: list[fx.Node]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Returns the operations that select the used values of an input, as far as their arguments are constants."""
    found: list[tuple[str, tuple[Any, ...]]] = []
    for i, node in enumerate(way):
        made = _selection(node, way[i + 1] if i + 1 < len(way) else None)
        if made is None:
            break
        found += made
    while found and found[-1][0] in _REORDERS.values():
        found.pop()
    return tuple(found)


def _selection(node: fx.Node, following: fx.Node | None) -> list[tuple[str, tuple[Any, ...]]] | None:
    """Returns the form of one operation in :attr:`IndexCheck.selected`; ``None`` if it has none."""
    rest = node.args[1:]
    if node.target is operator.getitem:
        return []  # a part of the operation before it
    if not all(value is None or isinstance(value, int) for value in rest) or node.kwargs:
        return None
    if node.target in (aten.clone.default, aten.detach.default, aten.alias.default):
        return []
    if node.target in _REORDERS:
        return [(_REORDERS[node.target], rest)]
    if node.target is aten.select.int:
        return [("select", rest)]
    if node.target is aten.slice.Tensor:
        return [("slice", (*rest, *(0, None, None, 1)[len(rest) :]))]
    if node.target is aten.unbind.int and following is not None:
        return [("select", (rest[0] if rest else 0, following.args[1]))]
    return None


def _moves(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    if node.target is aten._to_copy.default:
        return not node.args[0].meta["val"].dtype.is_floating_point  # type: ignore[union-attr]
    if node.target is aten.view.dtype:
        return False
    return isinstance(node.target, compat.OpOverload) and node.target._schema.name in _MOVES


def _safe_by_construction(index: fx.Node, size: Size | None, written: Set[fx.Node] = frozenset()) -> bool:
    """Returns True for ``arange(n)`` or draws below ``n`` with ``n <= size``, and for places of maxima or sorted values
    among as many."""
    most = _number_of_places(index, written)
    if most is None or size is None:
        return False
    if isinstance(most, int) and isinstance(size, int):
        return most <= size
    both = isinstance(most, torch.SymInt) and isinstance(size, torch.SymInt)
    return both and bool(compat.symbol_of(most) == compat.symbol_of(size))


_PLACES_AND_VALUES = frozenset({"sort", "topk", "max", "min", "cummax", "cummin", "kthvalue", "median"})
"""Operations whose second result has the places of the first one's values along a dimension."""


def _number_of_places(index: fx.Node, written: Set[fx.Node]) -> Size | None:
    """Returns the number that all indices computed by some operations are below; ``None`` if it is not known."""
    node, item, changed = index, None, index in written
    while node.op == "call_function" and _moves(node):
        item = node.args[1] if node.target is operator.getitem else item
        node = node.args[0]  # type: ignore[assignment]
        changed = changed or node in written
    if changed or not isinstance(node.target, compat.OpOverload):
        return None
    name = node.target._schema.name.split("::")[1]
    given = {argument.name: value for argument, value in schema_args(node)}
    if name in ("arange", "randint", "randperm"):
        return _end_of_range(given)
    source = node.args[0].meta["val"] if node.args and isinstance(node.args[0], fx.Node) else None
    if not isinstance(source, torch.Tensor) or not source.dim():
        return None
    if name in ("argmax", "argmin"):
        dim = given.get("dim")
        return source.numel() if dim is None else source.shape[dim]
    if name == "nonzero":
        known = [size for size in source.shape if isinstance(size, int)]
        return source.shape[0] if source.dim() == 1 else max(known) if len(known) == source.dim() else None
    several = isinstance(node.meta["val"], (tuple, list))  # without a dimension, ``max`` returns a value
    if name not in _PLACES_AND_VALUES or not several or item != 1:
        return None
    return source.shape[given.get("dim", -1)]


def _end_of_range(given: dict[str, Any]) -> Size | None:
    """Returns the end of the numbers that a range has, or that are drawn from it; ``None`` if some are negative."""
    start, step = given.get("start", given.get("low", 0)), given.get("step", 1)
    end = given.get("end", given.get("high", given.get("n")))
    if isinstance(end, fx.Node) and isinstance(start, int) and start >= 0 and step == 1:
        value = end.meta["val"]
        return value if isinstance(value, torch.SymInt) else None
    if not all(isinstance(value, int) for value in (start, end, step)):
        return None
    if min(start, end) < 0:
        return None
    return start + 1 if step < 0 else end


def wait_for_losses(graph: fx.Graph) -> None:
    """Makes the gradient of a loss that checks probabilities read the loss, so that updates wait for the check.

    They would be deferred otherwise: each new value would be copied once more.
    """
    losses = {node.args[:2]: node for node in graph.nodes if node.target is aten.binary_cross_entropy.default}
    for node in [n for n in graph.nodes if n.target is aten.binary_cross_entropy_backward.default]:
        loss, given = losses.get(node.args[1:3]), node.args[1]
        if loss is None or is_on_accelerator(loss.meta["val"]):  # its kernel asserts there, as eager's does
            continue
        with graph.inserting_before(node):
            always = graph.call_function(aten.eq.Tensor, (loss, loss))
            same = graph.call_function(aten.where.self, (always, given, given))
        value = loss.meta["val"]
        always.meta["val"] = value.new_empty(value.shape, dtype=torch.bool)
        same.meta["val"] = given.meta["val"]
        node.args = (node.args[0], same, *node.args[2:])


_FACTORIES = tuple(f"aten::{name}" for name in ("ones_like", "zeros_like", "full_like", "empty_like", "new_"))


def _reads_no_values(node: fx.Node) -> bool:
    """Returns True for a factory that takes only the shape and dtype of its argument: the backend drops that argument.

    The gradient of a loss begins with one: it does not wait for the loss.
    """
    return isinstance(node.target, compat.OpOverload) and node.target._schema.name.startswith(_FACTORIES)


def deferred_mutations(graph: fx.Graph, aliases: Aliases, unchecked: tuple[fx.Node, ...]) -> set[fx.Node]:
    """Returns placeholders whose update could precede one of the ``unchecked`` operations."""
    if not unchecked:
        return set()
    before: dict[fx.Node, set[fx.Node]] = {}
    state: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        seen: set[fx.Node] = {node} if node in unchecked else set()
        for arg in () if _reads_no_values(node) else node.all_input_nodes:
            seen |= before[arg]
        for root in aliases.reads(node):
            seen |= state.get(root, set())
        before[node] = seen
        for root in aliases.writes(node):
            state[root] = state.get(root, set()) | seen
    everything = set(unchecked)
    return {root for root, seen in state.items() if root.op == "placeholder" and seen != everything}
