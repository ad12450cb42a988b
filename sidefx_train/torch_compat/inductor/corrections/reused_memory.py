"""Writes and results that share memory with another value: copies that Inductor removes, operands it overwrites."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from sidefx_train.torch_compat.inductor.patching import hidden, replaced
from sidefx_train.torch_compat.op_overloads import holder_of


@contextmanager
def nothing_written_while_read() -> Iterator[None]:
    """Keeps an operator from writing into an operand that is read at the same time.

    Upstream: an operator with an in-place form writes into its operand if that has no later use.

    - Another operand may be a view of it: ``v.index_put(indices, v[:3], accumulate=True)`` reads what it has just
      written. Seen with ``torch.compile`` in torch 2.11 to 2.13.
    - The operand may lie in the memory of a concatenation: ``c = cat([v, y]); w = v.clone(); w[i] = 1`` writes to
      ``c``. Seen with ``torch.compile`` in torch 2.13.
    - The operand may be a view of a copy that a pass has removed: ``w = v.clone().squeeze(); w.index_put(i, x)``, or a
      reduction of ``w`` between processes, writes to ``v``. Seen with ``torch.compile`` in torch 2.13.
    """
    from torch._inductor.fx_passes import reinplace
    from torch._inductor.fx_utils import get_node_storage

    def is_read(node: fx.Node, positions: Sequence[int]) -> bool:
        def storages(arguments: Any) -> set[Any]:
            found: set[Any] = set()
            fx.map_arg(arguments, lambda operand: found.add(get_node_storage(operand)))
            return found - {None}

        written = [node.args[i] for i in positions]
        if storages(written) != storages([_viewed(each) for each in written]):
            return True
        others = [argument for i, argument in enumerate(node.args) if i not in positions]
        if not storages(written).isdisjoint(storages((others, node.kwargs))):
            return True
        concatenations = node.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
        return any(not storages(written).isdisjoint(storages(whole.args[0])) for whole in concatenations)

    def unless_read(before: dict[Any, Any]) -> dict[Any, Any]:
        def checked(how: Any) -> Any:
            at = (how.mutated_arg,) if isinstance(how.mutated_arg, int) else tuple(how.mutated_arg)
            allowed = how.extra_check
            return dataclasses.replace(how, extra_check=lambda node: not is_read(node, at) and allowed(node))

        return {target: checked(how) for target, how in before.items()}

    with replaced(reinplace, "inplaceable_ops", unless_read):
        yield


@contextmanager
def results_own_storage() -> Iterator[None]:
    """Keeps arithmetic without effect from making a result share storage with an input or another result.

    Upstream: ``x + 0``, ``x - 0``, ``x * 1`` and ``x / 1`` are replaced by ``x``, also where they are a result: whoever
    changes the result changes ``x``. Seen with ``torch.compile`` in torch 2.13 for tensors of zeros and ones that the
    graph creates, and in 2.14 and 2.15 for numbers too. A copy of a part of an input that the graph has written
    (``x[0].add_(1); return x[0].clone()``) is removed as well, and the result lies in the input's memory. Seen with
    ``torch.compile`` in torch 2.11 to 2.15.
    """
    from torch._inductor.fx_passes import joint_graph, post_grad

    def with_copies(before: Callable[..., Any]) -> Callable[..., Any]:
        def remove_no_ops(module: fx.GraphModule, *args: Any) -> None:
            copies = _copied_results(module.graph)
            values = {node: node.meta["val"] for node in module.graph.nodes if "val" in node.meta}
            before(module, *args)
            for node in module.graph.nodes:  # an operand gets the metadata of the sum that it replaces
                if node in values:
                    node.meta["val"] = values[node]
            for original, copied in copies.items():
                if copied.args[0] is original:  # it is still computed
                    copied.replace_all_uses_with(original)
                    module.graph.erase_node(copied)

        return remove_no_ops

    with (
        replaced(joint_graph, "remove_no_ops", with_copies),
        replaced(
            post_grad, "remove_noop_ops", _hiding(lambda graph: _copies_of_written(graph, post_grad.noop_registry))
        ),
    ):
        yield


@contextmanager
def copies_for_writes() -> Iterator[None]:
    """Keeps the copy of an input that the graph writes where another input gets it.

    Upstream: the copy is removed, and the input written first: ``t = x.clone(); x.copy_(y); y.copy_(t)`` leaves ``y``
    as it is. Seen with ``torch.compile`` in torch 2.13. ``order_writes`` in ``compile/backend/passes`` puts the writes
    in an order in which few copies are needed.
    """
    from torch._inductor.fx_passes import post_grad

    with replaced(post_grad, "remove_noop_ops", _hiding(_copies_for_writes)):
        yield


def _hiding(find: Callable[[fx.Graph], list[fx.Node]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns what hides some nodes from a pass that removes copies."""

    def without_them(before: Callable[..., Any]) -> Callable[..., Any]:
        def remove_noop_ops(graph: fx.Graph) -> None:
            with hidden(find(graph)):
                before(graph)

        return remove_noop_ops

    return without_them


def _viewed(node: Any) -> Any:
    """Returns the node whose memory a node views."""
    while isinstance(node, fx.Node) and getattr(node.target, "is_view", False) and node.args:
        node = node.args[0]
    return node


def _copies_of_written(graph: fx.Graph, removable: Any) -> list[fx.Node]:
    """Returns results, or what results are views of, that are copies of values with which the graph updates inputs."""
    copy = torch.ops.aten.copy_.default
    written = {_viewed(node.args[1]) for node in graph.find_nodes(op="call_function", target=copy)}
    found: list[fx.Node] = []
    for result in graph.output_node().all_input_nodes:
        node = chain = _viewed(result)
        while chain not in written and chain.target in removable and chain.all_input_nodes:
            source = chain.all_input_nodes[1 if chain.target is torch.ops.aten.copy.default else 0]
            chain = _viewed(source)
        if chain in written and node is not chain:
            found.append(node)
    return found


def _copies_for_writes(graph: fx.Graph) -> list[fx.Node]:
    """Returns copies of inputs that the graph writes, where these are the values of other inputs."""
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = {write.args[0] for write in writes}
    found = []
    for write in writes:
        node: Any = write.args[1]
        if node.target is torch.ops.aten.clone.default:
            source = holder_of(node.args[0])
            if source in written and source is not write.args[0]:
                found.append(node)
    return found


_ARITHMETIC = frozenset(getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div"))


def _copied_results(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Inserts copies of sums and products that are results, or whose views are; returns the copies by the original."""
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.output_node()
    for result in output.all_input_nodes:
        user, node = output, result
        while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view and node not in copies.values():
            user, node = node, node.all_input_nodes[0]
        if node.target in _ARITHMETIC:
            if node not in copies:
                with graph.inserting_after(node):
                    copies[node] = graph.call_function(torch.ops.aten.clone.default, (node,))
                value = node.meta["val"]
                with value.fake_mode:  # with storage of its own: later passes compare it
                    copies[node].meta = {**node.meta, "val": value.clone()}
            user.replace_input_with(node, copies[node])
    return copies
