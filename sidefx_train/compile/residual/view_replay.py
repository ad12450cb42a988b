"""What makes a view again outside: generated code, and the captured part's autograd nodes, call this."""

from __future__ import annotations

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
        args: its arguments; :data:`BASE` stands for the tensor that is viewed, a :class:`Number` for a number that
            the graph computes.
        kwargs: likewise.
        item: which of several views is meant.
        turns: it changes the view itself (``t_``), and makes none.
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
    """A number among those given to :func:`replay`, by position."""

    position: int


BASE: Any = type("Base", (), {"__repr__": lambda self: "base"})()


@dataclass(frozen=True)
class Path:
    """How a value is made from its base.

    Attributes:
        base: fake tensor, or the graph node of one that nothing but its views refers to.
        ops: what to do with it.
        numbers: graph nodes of numbers that the operations take.
        grad: whether autograd has recorded the views.
        version: its version, where that does not follow from the base's.
        apart: eager does not take the value for a view, though it is in the base's memory.
        creation: how autograd is to take the view to have come to be, where the operations do not say it.
        unsafe: an operation is among them of which autograd does not know that it makes views (``unsafe_split``).
        anew: its memory was written after it was made: autograd makes its history anew, from the base of its base, once
            it is asked for it; ``"asked"`` if the step has done so.
    """

    base: torch.Tensor | fx.Node
    ops: tuple[ViewOp, ...]
    numbers: tuple[fx.Node, ...]
    grad: bool
    version: int | None = None
    unrelated: bool = False
    creation: Any = None
    unsafe: bool = False
    regenerates_grad_fn: Literal["", "unasked", "asked"] = ""


@dataclass(frozen=True)
class IntermediateView:
    """A view from which another value that leaves was computed: the backward passes through it.

    Attributes:
        value: its fake tensor.
        base: what it is made from: an input, a result of the graph, or an earlier such view.
        path: how; nothing is to be done for one from outside, of which autograd makes the history anew.
        numbers: positions of the numbers of ``path`` among the results.
        position: of one from outside, among the inputs.
    """

    value: torch.Tensor
    base: tuple[Literal["input", "result", "view"], int]
    path: Path | None
    numbers: tuple[int, ...] = ()
    position: int | None = None


@dataclass(frozen=True)
class CustomView:
    """A view of a tensor from outside that a custom autograd function made, and that leaves.

    Attributes:
        name: of its node in the autograd graph.
        base: what it is a view of.
        path: how it is made of that.
        numbers: positions of the numbers of ``path`` among the results.
    """

    name: str
    base: tuple[Literal["input", "result", "view"], int]
    path: Path
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class KnownOutputs:
    """What one pass over all that leaves a step teaches the next.

    Attributes:
        shared: storages that several values leave in.
        passed: views, by their nodes, from which other values that leave were computed.
        replayed: views that autograd knows, each with when the step made it.
        counters: ``.data`` of tensors, by their nodes: they have version counters of their own.
        staged: a backward leaves too: such views are made between its stages.
    """

    shared: frozenset[int] = frozenset()
    passed: Mapping[fx.Node, torch.Tensor] = field(default_factory=dict)
    replayed: tuple[tuple[tuple[int, int], torch.Tensor], ...] = ()
    counters: Mapping[fx.Node, torch.Tensor] = field(default_factory=dict)
    staged: bool = False

    def known(self) -> tuple[object, ...]:
        """What to compare: each pass knows at least what the one before it knew."""
        views = frozenset((begun, id(view)) for begun, view in self.replayed)
        return self.shared, frozenset(self.passed), views, frozenset(self.counters), self.staged


_NEVER = 1 << 31
"""More writes than a tensor will see: by them, the version of a view that is out of date is told from any to come."""


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
    """The view of ``base`` that a sequence of operations makes; called by generated code."""
    before = torch.is_grad_enabled()
    mutated = bool(regenerates_grad_fn) or (not grad and any(each.mutates_metadata for each in ops))
    counted = base._version if mutated else 0
    try:
        value: Any = base
        if regenerates_grad_fn:  # the view is of another version, and autograd is not asked for the history of ``base``
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
    if mutated:  # that has been counted; autograd would notice where it is taken back
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
    """A history that is out of date, for a view that has none: it is no leaf."""
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
    """A view of a tensor's memory that begins ``distance`` elements behind the tensor."""
    return tensor.as_strided(size, stride, tensor.storage_offset() + distance)
