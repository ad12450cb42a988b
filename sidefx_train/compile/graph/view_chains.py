"""View chains: how values were made, along graph nodes up to the creator of their storage, and along autograd nodes."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.artifacts import CALLED, COUNTER, DATA
from sidefx_train.compile.graph.fx_utils import schema_args, written_args

STRIDED = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_.default)
"""Views of arbitrary size and strides, whose derivative depends on the tensor they are made from."""


def gradient_edge(value: torch.Tensor) -> tuple[Any, int]:
    """Returns the gradient edge of a tensor: its autograd node and the index of that node's output."""
    return value.grad_fn, value.output_nr


def first_operation(value: torch.Tensor, base: torch.Tensor | fx.Node) -> int:
    """Returns the sequence number of the first operation on ``base`` on the way to a view."""
    stops = {each.grad_fn for each in (base, value._base) if safe_isinstance(each, torch.Tensor)}
    node, first = value.grad_fn, -1
    while node is not None and node not in stops and not hasattr(node, "variable"):
        first = node._sequence_nr()  # type: ignore[attr-defined]
        node = node.next_functions[0][0] if node.next_functions else None
    return first


def gradient_edges_behind(*values: torch.Tensor) -> set[tuple[Any, int]]:
    """Returns the edges of all tensors that some tensors were computed from."""
    found: set[tuple[Any, int]] = set()
    seen: set[Any] = set()
    waiting = [value.grad_fn for value in values]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.update(node.next_functions)
            waiting += [before for before, _ in node.next_functions]
    return found


def way_up(node: fx.Node) -> list[fx.Node]:
    """Returns the node, its base, and so on up to the node that created the storage."""
    way = [node]
    while (parent := parent_of(way[-1])) is not None:
        way.append(parent)
    return way


def memory_of(node: fx.Node) -> int:
    """Returns the identity of the storage of a node's value."""
    value = node.meta.get("val")
    return compat.storage_id(value) if safe_isinstance(value, torch.Tensor) else id(node)


def parent_of(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source = node.args[0]
        known = safe_isinstance(source, fx.Node) and safe_isinstance(source.target, compat.OpOverload)
        return source if known and parent_of(source) is not None else None  # type: ignore[arg-type, return-value]
    if not safe_isinstance(node.target, compat.OpOverload) or not any(
        r.alias_info for r in node.target._schema.returns
    ):
        return None
    shared = [value for argument, value in schema_args(node) if argument.alias_info is not None]
    return shared[0] if len(shared) == 1 and safe_isinstance(shared[0], fx.Node) else None


def first_of(node: fx.Node) -> fx.Node:
    """Returns the node that created the tensor which later in-place operations returned."""
    while is_in_place(node):
        node = written_args(node)[0]
    return node


def is_in_place(node: fx.Node) -> bool:
    """Returns True for an operation that returns the tensor it writes to."""
    return bool(written_args(node)) and parent_of(node) is not None


def leaves_autograd(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.detach.default or DATA in node.meta


def counts_alone(node: fx.Node) -> bool:
    """Returns True for a node whose value aliases another with its own version counter."""
    made_by = node.args[0] if node.target is operator.getitem else node
    return DATA in node.meta or (safe_isinstance(made_by, fx.Node) and made_by is not node and CALLED in made_by.meta)


def own_counter(node: fx.Node) -> fx.Node | None:
    """Returns the node from which on a value has another version counter than its storage's first tensor."""
    return next((each for each in way_up(node) if counts_alone(each)), None)


def changes_layout(node: fx.Node) -> bool:
    return safe_isinstance(node.target, compat.OpOverload) and torch.Tag.inplace_view in node.target.tags


def written_since(node: fx.Node, include_metadata: bool = False, besides: frozenset[fx.Node] = frozenset()) -> bool:
    """Returns True if a node after ``node`` writes to its value's storage, or mutates metadata of tensors in it.

    Args:
        node: node of the value.
        include_metadata: count metadata mutations.
        besides: nodes to ignore.
    """
    return any(include_metadata or not changes_layout(each) for each in _writes_to(node) if each not in besides)


def counted_since(node: fx.Node, besides: frozenset[fx.Node] = frozenset()) -> bool:
    """Returns True if the version of a node's value is incremented after it."""
    counter = _counter(node)
    return any(each not in besides and _counter(written_args(each)[0]) is counter for each in _writes_to(node))


def last_counted(node: fx.Node) -> fx.Node:
    """Returns the last node, from ``node`` on, that increments the version of its value."""
    counter = _counter(node)
    counted = [each for each in _writes_to(node) if _counter(written_args(each)[0]) is counter]
    return counted[-1] if counted else node


def _counter(node: fx.Node) -> fx.Node | None:
    """Returns the identity of the version counter of a value."""
    own = own_counter(node)
    return way_up(node)[-1].meta.get(COUNTER) if own is None else own


def _writes_to(node: fx.Node) -> Iterator[fx.Node]:
    """Yields nodes after ``node`` that write to its value's storage, or mutate metadata of tensors in it."""
    memory, following_node = memory_of(node), node.next
    while following_node.op not in ("root", "output"):
        if any(memory_of(written) == memory for written in written_args(following_node)):
            yield following_node
        following_node = following_node.next


def is_replayed(node: fx.Node) -> bool:
    """Returns True for operations that make views or mutate their metadata; the graph itself performs writes."""
    return not is_in_place(node) or changes_layout(node)


def below_base(up: list[fx.Node], first: fx.Node, base: torch.Tensor) -> list[fx.Node]:
    """Returns the nodes of the chain after ``base``, whose first node is ``first``; none if they do not fit."""
    place = _index_of_base(up, first)
    if place is None or not same_layout(up[place].meta.get("val"), base):
        return []  # the base's metadata was mutated after the view was made
    return up[:place]


def base_metadata_mutated(up: list[fx.Node], first: fx.Node, base: torch.Tensor) -> bool:
    """Returns True if ``base``, whose first node is ``first``, had another layout when the view was made from it."""
    place = _index_of_base(up, first)
    return place is not None and not same_layout(up[place].meta.get("val"), base)


def _index_of_base(up: list[fx.Node], first: fx.Node) -> int | None:
    """Returns the chain index of the base at the time when a view was made from it."""
    if first not in up:
        return None
    place = up.index(first)
    while place > 0 and is_in_place(up[place - 1]):
        place -= 1
    return place


def before_metadata_mutations(up: list[fx.Node], first: fx.Node) -> tuple[Any, list[fx.Node]]:
    """Returns a base that only its views refer to, before its metadata mutations, and the nodes after it."""
    place = up.index(first)
    while place > 0 and is_in_place(up[place - 1]) and not changes_layout(up[place - 1]):
        place -= 1
    return up[place], up[:place]


def same_layout(a: Any, b: torch.Tensor) -> bool:
    return safe_isinstance(a, torch.Tensor) and layout_of(a) == layout_of(b)


def layout_of(t: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(t.shape), tuple(t.stride()), t.storage_offset())
