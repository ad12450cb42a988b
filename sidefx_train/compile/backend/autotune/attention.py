"""Autotunes attention: torch's fused kernel, the native module, or matrix products and a softmax.

The fused CPU kernel processes a head in blocks, which saves memory for long sequences. For short ones its many small
products cost more than batched ones, and its softmax cannot be fused with neighboring operations. In bfloat16 each of
its small products has a library's setup cost: there float32 may be faster, fused or decomposed. The native module
(``native/attention_kernel.py``) also works in blocks, on tiles that stay in registers, and skips what a causal mask
hides. All candidates are timed once per shape and number of threads; times are cached on disk with those of matrix
products.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from sidefx_train.compile.backend.autotune.matmul import products_out_of
from sidefx_train.compile.backend.autotune.native_attention import attend, attend_backward, write_into
from sidefx_train.compile.backend.autotune.timing import LARGEST, MEASURES, Task, fastest, measured, timings
from sidefx_train.compile.graph.fx_utils import emit
from sidefx_train.compile.native import attention_module, products_module
from sidefx_train.report import ChoiceRecord

aten = torch.ops.aten
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_LARGEST = 4_000_000
"""Elements of all heads' attention weights above which the fused kernel is kept: it never stores them."""

_SMALL = 500_000
"""The same limit if the weights are larger than attention's arguments and result, which are stored in any case."""


_WEIGHTS = (aten.bmm.default, aten.baddbmm.default)
_SOFTMAX = (aten.exp.default, aten._softmax.default, aten._safe_softmax.default)


def has_attention(graph: fx.Graph) -> bool:
    """Returns True if a captured graph may contain attention for :func:`expand_attention`."""
    return any(node.target is _FORWARD for node in graph.nodes)


def is_written_out(module: fx.GraphModule) -> bool:
    """Returns True if attention may occur as products and a softmax, for which Inductor has patterns."""
    targets = Counter(node.target for node in module.graph.nodes if node.op == "call_function")
    return sum(targets[op] for op in _WEIGHTS) > 1 and any(op in targets for op in _SOFTMAX)


def expand_attention(module: fx.GraphModule, fake_mode: Any, threads: int) -> tuple[str, list[ChoiceRecord]]:
    """Rewrites attention for which another candidate is faster; returns a note for the report and the measurements.

    Args:
        module: a functional graph.
        fake_mode: fake mode of the values in its nodes.
        threads: number of threads that will run it.
    """
    found = [node for node in module.graph.nodes if node.op == "call_function" and node.target is _FORWARD]
    producers = _producers(module.graph)
    weights: dict[fx.Node, fx.Node] = {}
    wide: set[fx.Node] = set()
    native: dict[fx.Node, bool] = {}
    asked = {node: _key(node, threads) for node in found if _fits(node)}
    known = timings({key: _task(node, threads) for node, key in asked.items()})
    candidates = {key: fastest(known.get(key, {}), "fused") for key in asked.values()}
    for node, key in asked.items():
        way = candidates[key]
        if way in ("products", "tiles"):
            weights[node] = _Expansion(module.graph, node, fake_mode).forward()
        elif way == "wide":
            _Expansion(module.graph, node, fake_mode).widen()
            wide.add(node)
        elif way == "native":
            native[node] = bool(_causal(node, 4))
    for node, producer in producers.items():
        if producer in weights:
            _Expansion(module.graph, node, fake_mode).backward(weights[producer])
        elif producer in wide:
            _Expansion(module.graph, node, fake_mode).widen()
        elif producer in native:
            write_into(node, fake_mode, True, native[producer])
    for node, causal in native.items():
        write_into(node, fake_mode, False, causal)
    for node in reversed(found):
        if node in weights or node in wide:
            for user in list(node.users):
                if not user.users:
                    module.graph.erase_node(user)
            if not node.users:
                module.graph.erase_node(node)
    if weights or wide or native:
        module.graph.lint()
        module.recompile()
    notes = [f"{len(weights)} of {len(found)} attentions as matrix products"] if weights else []
    notes += [f"{len(native)} of {len(found)} attentions by the native module"] if native else []
    notes += [f"{len(wide)} of {len(found)} attentions in float32"] if wide else []
    counts = Counter(asked.values())
    return "; ".join(notes), [
        ChoiceRecord(key.partition(": ")[2], counts[key], threads, way, known.get(key, {}))
        for key, way in candidates.items()
    ]


def _producers(graph: fx.Graph) -> dict[fx.Node, Any]:
    """Returns the forward attention of each backward."""
    found = [node for node in graph.nodes if node.op == "call_function" and node.target is _BACKWARD]
    outputs = {node: node.args[5] for node in found}
    return {node: out.args[0] for node, out in outputs.items() if isinstance(out, fx.Node) and out.args}


def _task(node: fx.Node, threads: int) -> Task:
    q, k = (node.args[i].meta["val"] for i in range(2))  # type: ignore[union-attr]
    keys = k.shape[2] if k.shape[2] != q.shape[2] else None
    return "attention", [list(q.shape), bool(_causal(node, 4)), threads, str(q.dtype)[6:], keys]


def _fits(node: fx.Node) -> bool:
    """Returns True for attention of static shape, without dropout and mask tensor, with plain layouts."""
    q, k, v = (a.meta["val"] for a in node.args[:3])  # type: ignore[union-attr]
    dropout = node.args[3] if len(node.args) > 3 else node.kwargs.get("dropout_p", 0.0)
    if dropout != 0.0 or node.kwargs.get("attn_mask") is not None:
        return False
    for value in (q, k, v):
        if value.dtype not in (torch.float32, torch.bfloat16) or value.device.type != "cpu" or value.dim() != 4:
            return False
        if not all(isinstance(n, int) for n in (*value.shape, *value.stride())) or 0 in value.shape:
            return False
    if k.shape != v.shape or (*k.shape[:2], k.shape[3]) != (*q.shape[:2], q.shape[3]) or k.dtype != q.dtype:
        return False
    backward = [user for get in node.users for user in get.users if user.target is _BACKWARD]
    users = [*node.users, *(get for user in backward for get in user.users)]
    for get in users:
        value = get.meta["val"]
        if get.target is not operator.getitem:
            return False
        if value.dim() == 4 and not (value.is_contiguous() or value.transpose(1, 2).is_contiguous()):
            return False
    # Only the backward, in the same graph, uses the log-sum-exp.
    return all(user.target is _BACKWARD for get in node.users if get.args[1] == 1 for user in get.users)


def _most(shape: Any) -> int:
    """Returns the number of weights up to which attention of this shape may be decomposed."""
    return _LARGEST if shape[2] < 4 * shape[3] else min(_LARGEST, _SMALL)


def _key(node: fx.Node, threads: int) -> str:
    shape, causal, _, dtype, keys = _task(node, threads)[1]
    part = " (a part of it)" * (_part(shape, threads, keys) != (shape, keys))
    of = f" of {keys} keys" * (keys is not None)
    return f"{threads}: attention {tuple(shape)}{of} causal {causal}" + f" {dtype}" * (dtype != "float32") + part


def _causal(node: fx.Node, position: int) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get("is_causal", False)


def _measure(
    shape: list[int], causal: bool, threads: int, dtype: str = "float32", keys: int | None = None
) -> dict[str, float]:
    """Times forward and backward of each candidate in seconds, with torch's operators and the native kernels.

    Only some of many heads, and a part of long sequences, are timed.
    """
    rows, heads, length, width = shape
    may_be_padded = keys is None and rows * heads * length * length <= _most(shape)
    (rows, heads, length, width), keys = _part(shape, threads, keys)

    def candidates() -> dict[str, Callable[[], None]]:
        lengths = (length, keys or length, keys or length, length)
        given = [torch.rand(rows, n, heads, width).to(getattr(torch, dtype)).transpose(1, 2) for n in lengths]
        mask = torch.full((length, length), -math.inf).triu(1) if causal else torch.zeros(length, length)

        def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
            out, lse = _FORWARD(q, k, v, 0.0, causal)
            return [out, *_BACKWARD(g, q, k, v, out, lse, 0.0, causal)]

        def native() -> None:
            q, k, v, g = given
            out, sums = attend(q, k, v, causal)
            attend_backward(g, q, k, v, out, sums, causal)

        def wide() -> None:
            for result in fused(*[t.float() for t in given]):
                result.to(given[0].dtype)

        def decomposed(multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
            q, k, v, g = (t.float().reshape(rows * heads, length, width) for t in given)
            weights = torch.softmax(multiply(q, k.transpose(1, 2)).add_(mask), -1)
            results = [multiply(weights, v), multiply(weights.transpose(1, 2), g)]
            inner = multiply(g, v.transpose(1, 2))
            inner = aten._softmax_backward_data.default(inner, weights, -1, torch.float32)
            results += [multiply(inner, k), multiply(inner.transpose(1, 2), q)]
            for result in results:
                result.to(given[0].dtype)

        def tiles(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return products_out_of(a, b, out=torch.empty(a.shape[0], a.shape[1], b.shape[2]))

        candidates: dict[str, Callable[[], Any]] = {"fused": lambda: fused(*given)}
        if attention_module() is not None:
            candidates["native"] = native
        if dtype != "float32":
            candidates["wide"] = wide
        if may_be_padded:
            candidates["products"] = lambda: decomposed(torch.bmm)
            if products_module() is not None:
                candidates["tiles"] = lambda: decomposed(tiles)
        return candidates

    return measured(candidates, _operations([rows, heads, length, width], keys), threads)


def _part(shape: Any, threads: int, keys: int | None = None) -> tuple[list[int], int | None]:
    """Returns the part of an attention to time: enough heads for all threads, and a part of long sequences."""
    rows, heads, length, width = shape
    while _operations([rows, heads, length, width], keys) > LARGEST:
        if rows * heads >= 2 * threads:
            rows, heads = (rows // 2, heads) if rows > 1 else (rows, heads // 2)
        elif length > _LONG and (keys is None or length >= keys):
            length //= 2
        elif keys is not None and keys > _LONG:
            keys //= 2
        else:
            break
    return [rows, heads, length, width], keys


_LONG = 1024
"""Sequences up to this length are timed completely."""


def _operations(shape: Any, keys: int | None = None) -> float:
    """Returns the floating-point operations of forward and backward."""
    rows, heads, length, width = shape
    return 12.0 * rows * heads * length * (keys or length) * width


MEASURES["attention"] = _measure


class _Expansion:
    """Writes the nodes of one attention before the fused one."""

    def __init__(self, graph: fx.Graph, node: fx.Node, fake_mode: Any) -> None:
        self.graph = graph
        self.node = node
        self.fake_mode = fake_mode
        offset = 1 if node.target is _BACKWARD else 0
        self.q, self.k, self.v = (node.args[i + offset] for i in range(3))
        self.rows, self.heads, self.length, self.width = self.q.meta["val"].shape  # type: ignore[union-attr]
        self.causal = bool(_causal(node, 7 if offset else 4))
        scale = node.kwargs.get("scale")
        self.scale = float(scale) if scale is not None else 1.0 / math.sqrt(self.width)  # type: ignore[arg-type]

    def emit(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return emit(self.graph, self.fake_mode, op, *args, **kwargs)

    def flat(self, x: Any) -> fx.Node:
        """Reshapes [rows, heads, length, width] to a batch of matrices."""
        if not x.meta["val"].is_contiguous():
            x = self.emit(aten.clone.default, x, memory_format=torch.contiguous_format)
        return self.cast(self.emit(aten.view.default, x, [self.rows * self.heads, self.length, self.width]))

    def cast(self, x: Any, dtype: torch.dtype = torch.float32) -> fx.Node:
        """Returns ``x`` in another dtype, or ``x`` itself if it has that."""
        if x.meta["val"].dtype == dtype:
            return x  # type: ignore[no-any-return]
        return self.emit(torch.ops.prims.convert_element_type.default, x, dtype)

    def transposed(self, x: fx.Node) -> fx.Node:
        return self.emit(aten.permute.default, x, [0, 2, 1])

    def laid_out(self, x: fx.Node, like: torch.Tensor) -> fx.Node:
        """Reshapes a batch of matrices to [rows, heads, length, width], with the strides that users of the result
        expect."""
        x = self.cast(x, like.dtype)
        whole = self.emit(aten.view.default, x, [self.rows, self.heads, self.length, self.width])
        if like.is_contiguous():
            return whole
        whole = self.emit(aten.permute.default, whole, [0, 2, 1, 3])
        whole = self.emit(aten.clone.default, whole, memory_format=torch.contiguous_format)
        return self.emit(aten.permute.default, whole, [0, 2, 1, 3])

    def replace(self, results: dict[int, fx.Node]) -> None:
        for get in list(self.node.users):
            made = results.get(get.args[1])  # type: ignore[arg-type]
            if made is not None:
                get.replace_all_uses_with(made)
                self.graph.erase_node(get)

    def like(self, index: int) -> torch.Tensor:
        return self.node.meta["val"][index]  # type: ignore[no-any-return]

    def widen(self) -> None:
        """Rewrites to the same kernel in float32."""
        with self.graph.inserting_before(self.node):
            tensors = 6 if self.node.target is _BACKWARD else 3  # the other arguments are float32 sums, and numbers
            args = [self.cast(arg) for arg in self.node.args[:tensors]]
            made = self.emit(self.node.target, *args, *self.node.args[tensors:], **self.node.kwargs)
            taken = {get.args[1]: get.meta["val"].dtype for get in self.node.users}
            self.replace({i: self.cast(self.emit(operator.getitem, made, i), dtype) for i, dtype in taken.items()})
        if self.node.target is _BACKWARD:
            self.graph.erase_node(self.node)

    def forward(self) -> fx.Node:
        """Returns the attention weights."""
        with self.graph.inserting_before(self.node):
            scores = self.emit(aten.bmm.default, self.flat(self.q), self.transposed(self.flat(self.k)))
            scores = self.emit(aten.mul.Tensor, scores, self.scale)
            if self.causal:
                settings = {"start": 0, "step": 1, "dtype": torch.int64, "requires_grad": False}
                device = self.like(0).device
                place = self.emit(torch.ops.prims.iota.default, self.length, device=device, **settings)
                row = self.emit(aten.unsqueeze.default, place, 1)
                lowest = self.emit(aten.full.default, [], -math.inf, dtype=torch.float32, device=device)
                seen = self.emit(aten.le.Tensor, place, row)
                scores = self.emit(aten.where.self, seen, scores, lowest)
            top = self.emit(aten.amax.default, scores, [-1], True)
            powers = self.emit(aten.exp.default, self.emit(aten.sub.Tensor, scores, top))
            total = self.emit(aten.sum.dim_IntList, powers, [-1], True)
            weights = self.emit(aten.div.Tensor, powers, total)
            out = self.emit(aten.bmm.default, weights, self.flat(self.v))
            self.replace({0: self.laid_out(out, self.like(0))})
        return weights

    def backward(self, weights: fx.Node) -> None:
        with self.graph.inserting_before(self.node):
            grad = self.flat(self.node.args[0])
            dv = self.emit(aten.bmm.default, self.transposed(weights), grad)
            inner = self.emit(aten.bmm.default, grad, self.transposed(self.flat(self.v)))
            drawn = self.emit(aten.mul.Tensor, inner, weights)
            total = self.emit(aten.sum.dim_IntList, drawn, [-1], True)
            scores = self.emit(aten.sub.Tensor, drawn, self.emit(aten.mul.Tensor, weights, total))
            scores = self.emit(aten.mul.Tensor, scores, self.scale)
            dq = self.emit(aten.bmm.default, scores, self.flat(self.k))
            dk = self.emit(aten.bmm.default, self.transposed(scores), self.flat(self.q))
            made = {i: self.laid_out(x, self.like(i)) for i, x in enumerate((dq, dk, dv))}
            self.replace(made)
        self.graph.erase_node(self.node)
