"""Replays chains of view operations on real base tensors; called by generated code and by autograd functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from sidefx_train import torch_compat as compat


@dataclass(frozen=True)
class ViewOp:
    """One view operation.

    Attributes:
        op: the operator.
        args: its arguments; :data:`BASE` is replaced by the viewed tensor, a :class:`Number` by a number that the graph
            computes.
        kwargs: its keyword arguments, in the same form.
        item: index of the view if there are several.
        mutates_metadata: it mutates the metadata of the view itself (``t_``) and makes no other.
        grad: autograd was on.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None = None
    mutates_metadata: bool = False
    grad: bool = True

    def __repr__(self) -> str:
        return f"{self.op}{self.args[1:]}" + ("" if self.item is None else f"[{self.item}]")


@dataclass(frozen=True)
class Number:
    """A number among those passed to :func:`replay`, by position."""

    position: int


BASE: Any = type("Base", (), {"__repr__": lambda self: "base"})()


@dataclass(frozen=True)
class ViewChain:
    """How an output is made from its base.

    Attributes:
        base: fake tensor, or the graph node of one that only its views refer to; ``None`` after the capture.
        ops: the view operations.
        numbers: graph nodes of numbers that the operations use.
        grad: whether autograd has recorded the views.
        version: its version, if it does not follow from the base's.
        unrelated: eager does not treat it as a view, though it is in the base's storage.
        creation: autograd's creation metadata of the view, if the operations do not determine it.
        unsafe: it contains an operation that autograd does not treat as a view (``unsafe_split``).
        regenerates_grad_fn: its storage was written after it was made: autograd regenerates its history, from the
            base of its base, at the next read; ``"asked"`` if the step has read it.
    """

    base: Any
    ops: tuple[ViewOp, ...]
    numbers: tuple[fx.Node, ...]
    grad: bool
    version: int | None = None
    unrelated: bool = False
    creation: Any = None
    unsafe: bool = False
    regenerates_grad_fn: Literal["", "unasked", "asked"] = ""

    def without_trace(self) -> ViewChain:
        """Returns what a replay needs: the base of the trace keeps its autograd graph."""
        return dataclasses.replace(self, base=None)


@dataclass(frozen=True)
class IntermediateView:
    """A view between stages: another output was computed from it, so the backward passes through it.

    Attributes:
        value: its fake tensor; ``None`` after the capture.
        base: what it is made from: an input, a result of the graph, or an earlier such view.
        chain: its view chain; ``None`` for an outside view whose history autograd regenerates.
        numbers: positions of the numbers of ``chain`` among the results.
        position: for an outside view, its position among the inputs.
    """

    value: Any
    base: tuple[Literal["input", "result", "view"], int]
    chain: ViewChain | None
    numbers: tuple[int, ...] = ()
    position: int | None = None

    def without_trace(self) -> IntermediateView:
        """Returns what a call needs: the tensors of the trace keep their autograd graph."""
        return dataclasses.replace(self, value=None, chain=None if self.chain is None else self.chain.without_trace())


@dataclass(frozen=True)
class CustomView:
    """A view of an outside tensor that a custom autograd function made, and that leaves the step.

    Attributes:
        name: name of its autograd node.
        base: location of its base.
        chain: its view chain.
        numbers: positions of the numbers of ``chain`` among the results.
    """

    name: str
    base: tuple[Literal["input", "result", "view"], int]
    chain: ViewChain
    numbers: tuple[int, ...]

    def without_trace(self) -> CustomView:
        """Returns what a call needs, without the base of the trace."""
        return dataclasses.replace(self, chain=self.chain.without_trace())


@dataclass(frozen=True)
class KnownOutputs:
    """Known outputs: what one pass over the outputs finds for the next.

    Attributes:
        shared: storages of several outputs.
        passed: views, by node, from which other outputs were computed.
        replayed: views with history, with the position at which the step made each.
        counters: ``.data`` of tensors, by node: they have version counters of their own.
        staged: a backward leaves too: such views are made between its stages.
    """

    shared: frozenset[int] = frozenset()
    passed: Mapping[fx.Node, torch.Tensor] = field(default_factory=dict)
    replayed: tuple[tuple[tuple[int, int], torch.Tensor], ...] = ()
    counters: Mapping[fx.Node, torch.Tensor] = field(default_factory=dict)
    staged: bool = False

    def known(self) -> tuple[object, ...]:
        """Returns what to compare: each pass knows at least as much as the one before it."""
        views = frozenset((begun, id(view)) for begun, view in self.replayed)
        return self.shared, frozenset(self.passed), views, frozenset(self.counters), self.staged


_NEVER = 1 << 31
"""More writes than a tensor will ever see: marks the version of an outdated view."""


def replay(
    base: torch.Tensor,
    ops: tuple[ViewOp, ...],
    grad: bool,
    numbers: tuple[int, ...] = (),
    version: int | None = None,
    unrelated: bool = False,
    creation: Any = None,
    regenerates_grad_fn: Literal["", "unasked", "asked"] = "",
) -> torch.Tensor:
    """Applies a chain of view operations to ``base``; called by generated code."""
    before = torch.is_grad_enabled()
    mutated = bool(regenerates_grad_fn) or (not grad and any(each.mutates_metadata for each in ops))
    counted = base._version if mutated else 0
    try:
        value: Any = base
        if regenerates_grad_fn:  # the view's version differs, and the history of ``base`` must not be read
            compat.set_version(base, counted + _NEVER + 1)
        for each in ops:
            compat.set_grad_enabled(each.grad and not regenerates_grad_fn)
            args = [value if a is BASE else _given(a, numbers) for a in each.args]
            kwargs = {name: _given(a, numbers) for name, a in each.kwargs.items()}
            value = each.op(*args, **kwargs)
            if each.item is not None:
                value = value[each.item]
    finally:
        compat.set_grad_enabled(before)
    if regenerates_grad_fn:
        _give_history(value, base, counted, creation)
    elif creation is not None and not unrelated:
        compat.set_creation(value, creation)
    if mutated:  # already counted; autograd would detect a later reset
        compat.set_version(base, counted)
    if unrelated:
        value = compat.alias_hidden_from_autograd(value)
        if creation is not None:
            compat.set_creation(value, creation)
    if version is not None:
        compat.set_version(value, version)
    if regenerates_grad_fn == "asked":
        value.grad_fn  # noqa: B018
    return value  # type: ignore[no-any-return]


def _give_history(value: torch.Tensor, base: torch.Tensor, counted: int, creation: Any) -> None:
    """Gives an outdated history to a view that has none, so that it is not a leaf."""
    wanted = creation or compat.creation_of(base) or compat.PLAIN_VIEW
    compat.set_creation(value, compat.PLAIN_VIEW)
    compat.set_version(base, counted + _NEVER)
    value.grad_fn  # noqa: B018
    compat.set_creation(value, wanted)


def _given(value: Any, numbers: tuple[int, ...]) -> Any:
    if isinstance(value, Number):
        return numbers[value.position]
    if type(value) in (list, tuple):
        return type(value)(_given(item, numbers) for item in value)
    return value


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data


def seen_as(tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], distance: int) -> torch.Tensor:
    """Returns a view of a tensor's storage that begins ``distance`` elements after the tensor."""
    return tensor.as_strided(size, stride, tensor.storage_offset() + distance)
