"""Describes how the effects of two runs of a step differ."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.deferred_values import (
    DeferredCall,
    DeferredValue,
    TensorSnapshot,
    TraceKey,
)
from sidefx_train.compile.capture.side_effects.checkpoint import Checkpoint, fixed_parts
from sidefx_train.compile.common.plain_values import PLAIN_TYPES
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import attribute_of, safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.side_effects.effect import Effect, SideEffects


def difference(
    first: SideEffects,
    second: SideEffects,
    same_tensor: Callable[[Any, Any], bool] | None = None,
    writes: bool = True,
) -> str:
    """Returns one line for each difference of ``second``; empty if the two leave equal objects.

    Objects that both created are compared by contents and references, not by identity.

    Args:
        first: effects of a capture, from ``observe``.
        second: effects of the same capture, for example after another branch.
        same_tensor: returns True if two fake tensors (or symbolic numbers) have the same value; identity if ``None``.
        writes: in-place writes to tensors are differences.

    Raises:
        ValueError: one of the two is not a result of ``observe``.
    """
    return "\n".join(Comparison(first, second, same_tensor, writes).lines())


class Comparison:
    """Compares the effects of two runs of one capture.

    Objects created by both are matched in pairs: an object on one side always corresponds to the same object on the
    other.

    Args:
        first: effects of one run.
        second: effects of the other.
        same_tensor: returns True if two fake tensors have the same value.
        writes: in-place writes to tensors are differences.
    """

    def __init__(
        self,
        first: SideEffects,
        second: SideEffects,
        same_tensor: Callable[[Any, Any], bool] | None = None,
        writes: bool = True,
    ) -> None:
        self.first = first
        self.second = second
        self.left: Checkpoint = first.point()
        self.right: Checkpoint = second.point()
        self.same_tensor = same_tensor or _is_same
        self.writes = writes
        self._matched: dict[int, int] = {}
        self._back: dict[int, int] = {}

    def lines(self) -> Iterator[str]:
        """Yields one line for each difference."""
        yield from self._changes()
        yield from self._calls()
        for key, saved in list(self.left.contents.items()):
            ours = self.left.is_shadow(saved.value) or key in self.left.running
            if key in self.right.contents and not ours:
                yield from self._values(saved.value, saved.value, _kind(saved.value))

    def _changes(self) -> Iterator[str]:
        mine, yours = self._by_target(self.first.changes), self._by_target(self.second.changes)
        for key, change in mine.items():
            if key not in yours:
                yield f"only the first {change.describe()}"
        for key, change in yours.items():
            if key not in mine:
                yield f"only the second {change.describe()}"
                continue
            other = mine[key]
            if safe_isinstance(change.key, TraceKey) and safe_isinstance(other.key, TraceKey):
                yield from self._values(other.key.value, change.key.value, f"the key that it {change.describe()} under")
            what = change.describe().partition(" ")[2]
            if change.kind in ("extend", "replace", "add", "remove"):
                yield from self._values(tuple(other.value), tuple(change.value), what)
            else:
                yield from self._values(other.value, change.value, what)

    def _by_target(self, changes: list[Effect]) -> dict[Any, Effect]:
        found: dict[Any, Effect] = {}
        for position, change in enumerate(changes):
            if change.kind == "count_writes" and not self.writes:
                continue
            key = change.key
            if safe_isinstance(key, TraceKey):
                key = ("made in the trace", position)
            elif key is not None:
                key = (type(key), key)
            found[change.kind, id(change.target), key] = change
        return found

    def _calls(self) -> Iterator[str]:
        mine, yours = self.first.calls, self.second.calls
        if len(mine) != len(yours):
            yield f"the first makes {len(mine)} deferred calls, the second {len(yours)}"
        for index, (a, b) in enumerate(zip(mine, yours, strict=False)):
            if a is not b:
                yield from self._call(a, b, f"deferred call {index}")

    def _call(self, a: DeferredCall | DeferredValue, b: DeferredCall | DeferredValue, where: str) -> Iterator[str]:
        if a.fn != b.fn:
            yield f"{where}: {_kind(a.fn)}, then {_kind(b.fn)}"
        else:
            yield from self._values((a.args, a.kwargs, a.dtype), (b.args, b.kwargs, b.dtype), f"arguments of {where}")

    def _values(self, a: Any, b: Any, where: str) -> Iterator[str]:
        """Yields the differences of two values, each at its own checkpoint."""
        todo = [(a, b, where)]
        while todo:
            a, b, where = todo.pop()
            if safe_isinstance(a, (torch.Tensor, *compat.SYMBOLS)) and safe_isinstance(
                b, (torch.Tensor, *compat.SYMBOLS)
            ):
                if not self.same_tensor(a, b):
                    yield f"{where}: another {_kind(a)}"
                if not safe_isinstance(a, torch.Tensor) or not safe_isinstance(b, torch.Tensor):
                    continue
            elif type(a) is not type(b):
                yield f"{where}: {_show(a)}, then {_show(b)}"
                continue
            if type(a) in PLAIN_TYPES:
                if a != b and not (a != a and b != b):
                    yield f"{where}: {_show(a)}, then {_show(b)}"
                continue
            seen, known = self._matched.get(id(a)), self._back.get(id(b))
            if seen is not None or known is not None:
                if seen != id(b) or known != id(a):
                    yield f"{where}: refers to another {_kind(a)}"
                continue
            if self.left.is_shadow(a) or self.right.is_shadow(b):
                if a is not b:
                    yield f"{where}: {_show(a)}, then another"
                continue
            mine, yours = self.left.contents.get(id(a)), self.right.contents.get(id(b))
            if mine is None and yours is None:
                if safe_isinstance(a, DeferredValue):
                    yield from self._call(a, b, where)
                elif safe_isinstance(a, TensorSnapshot):
                    todo.append((a.fake, b.fake, where))
                elif fixed_parts(a) or fixed_parts(b):
                    todo += _pairs(tuple(fixed_parts(a)), tuple(fixed_parts(b)), where)
                elif a is not b and a != b:
                    yield f"{where}: {_show(a)}, then {_show(b)}"
                continue
            if mine is None or yours is None:
                yield f"{where}: {_show(a)} was not made by both"
                continue
            self._matched[id(a)], self._back[id(b)] = id(b), id(a)
            if safe_isinstance(a, types.FunctionType) and a.__code__ is not b.__code__:
                yield f"{where}: another function {a.__qualname__}"
                continue
            pairs, problem = _contents(mine, yours, where, self.writes)
            if problem:
                yield problem
            todo += pairs
            todo += _pairs(tuple(fixed_parts(a)), tuple(fixed_parts(b)), where)


def _contents(mine: Any, yours: Any, where: str, writes: bool) -> tuple[list[tuple[Any, Any, str]], str]:
    """Returns pairs to compare further, and the first difference."""
    pairs: list[tuple[Any, Any, str]] = []
    if mine.items is not None:
        if len(mine.items) != len(yours.items):
            return [], f"{where}: {len(mine.items)} items, then {len(yours.items)}"
        if safe_isinstance(mine.value, set):
            return [], "" if set(mine.items) == set(yours.items) else f"{where}: other members"
        pairs += _pairs(mine.items, yours.items, where)
    if mine.entries is not None:
        keys, others = [key for key, _ in mine.entries], [key for key, _ in yours.entries]
        if len(keys) != len(others):
            return [], f"{where}: keys {keys}, then {others}"
        pairs += [(a, b, f"a key of {where}") for a, b in zip(keys, others, strict=True)]
        for (key, a), (_, b) in zip(mine.entries, yours.entries, strict=True):
            pairs.append((a, b, f"{where}[{_show(key)}]"))
    for names, others in ((mine.attributes, yours.attributes), (mine.slots, yours.slots)):
        if list(names) != list(others):
            return [], f"{where}: attributes {sorted(names)}, then {sorted(others)}"
        pairs += [(names[name], others[name], f"{where}.{name}") for name in names]
    if mine.place != yours.place:
        return [], f"{where}: an iterator has given other items"
    if mine.cell is not None or yours.cell is not None:
        pairs.append((mine.cell, yours.cell, f"a variable of {where}"))
    if mine.tensor is not None:
        version, requires_grad, grad, hooks = mine.tensor
        same = requires_grad == yours.tensor[1] and (not writes or version == yours.tensor[0])
        if not same or list(hooks.values()) != list(yours.tensor[3].values()):
            return [], f"{where}: a tensor changed in place, its requires_grad or its hooks"
        pairs.append((grad, yours.tensor[2], f"{where}.grad"))
    return pairs[::-1], ""


def _pairs(a: tuple[Any, ...], b: tuple[Any, ...], where: str) -> list[tuple[Any, Any, str]]:
    if len(a) != len(b):
        return [(len(a), len(b), f"length of {where}")]
    return [(x, y, f"{where}[{index}]") for index, (x, y) in enumerate(zip(a, b, strict=True))][::-1]


def _is_same(a: Any, b: Any) -> bool:
    return a is b


def _kind(value: Any) -> str:
    if safe_isinstance(value, torch.Tensor):
        return f"tensor of shape {tuple(value.shape)}"
    return attribute_of(value, "__qualname__") or type(value).__qualname__


def _show(value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    if type(value) in PLAIN_TYPES:
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "..."
    return f"this {_kind(value)}"
