"""Writes the effects of a step as lines of its epilogue."""

from __future__ import annotations

import itertools

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.capture.shadows.containers.iterators import advance
from sidefx_train.compile.capture.shadows.deferred_values import TraceKey
from sidefx_train.compile.capture.side_effects.effect import Effect
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.native import set_gradients
from sidefx_train.compile.residual.reconstruct.rebuilder import Rebuilder
from sidefx_train.compile.residual.reconstruct.tensors import sparse_tensor

_ATTRIBUTE_KINDS = frozenset({"set_attr", "del_attr", "set_slot", "del_slot", "set_class_attr"})


class GradientLine(str):
    """A line that sets the gradient of a tensor.

    Attributes:
        owner: code for the tensor.
        position: position of the output that becomes its gradient; ``None`` for another value.
    """

    owner: str
    position: int | None

    def __new__(cls, owner: str, result: str, position: int | None) -> GradientLine:
        made = super().__new__(cls, f"{owner}.grad = {result}")
        made.owner, made.position = owner, position
        return made


def effect_lines(writer: Writer, rebuilder: Rebuilder, effect: Effect) -> list[str]:
    """Returns the lines that write one change back: an attribute, a dict entry, list items, a cell, a gradient.

    There are none for the kinds that come before all others.
    """
    if effect.kind in ("set_data", "grow") or effect.switches:
        return []
    if effect.kind in _ATTRIBUTE_KINDS:
        return [_attribute_line(writer, rebuilder, effect)]
    return _content_lines(writer, rebuilder, effect, writer.value(effect.target))


def switch_line(writer: Writer, effect: Effect) -> str:
    """Returns the line of an effect that switches ``requires_grad`` of a tensor."""
    owner = writer.value(effect.target)
    return f"{owner}.detach_()" if effect.kind == "detach" else f"{owner}.requires_grad_({effect.value})"


def _attribute_line(writer: Writer, rebuilder: Rebuilder, effect: Effect) -> str:
    """Returns the line that stores or deletes an attribute, bypassing ``__setattr__`` of the object's class."""
    if effect.kind == "set_attr":
        return f"{writer.space(effect.target)}[{writer.constant(effect.key)}] = {rebuilder.expression(effect.value)}"
    if effect.kind == "del_attr":
        return f"del {writer.space(effect.target)}[{writer.constant(effect.key)}]"
    owner, key = writer.value(effect.target), writer.constant(effect.key)
    if effect.kind == "del_slot":
        return f"object.__delattr__({owner}, {key})"
    base = "object" if effect.kind == "set_slot" else "type"
    return f"{base}.__setattr__({owner}, {key}, {rebuilder.expression(effect.value)})"


def _content_lines(writer: Writer, rebuilder: Rebuilder, effect: Effect, owner: str) -> list[str]:
    """Returns the lines that change what an object contains.

    A container of a user's class is changed by methods of Python's own class (:attr:`Effect.through`), which bypasses
    overrides.
    """
    kind, value = effect.kind, effect.value
    cls = None if effect.through is None else writer.constant(effect.through, effect.through.__name__)

    def call(method: str, *args: str) -> str:
        return f"{owner}.{method}({', '.join(args)})" if cls is None else f"{cls}.{method}({', '.join((owner, *args))})"

    if kind in ("set_item", "del_item"):
        key = rebuilder.expression(effect.key) if safe_isinstance(effect.key, TraceKey) else writer.constant(effect.key)
        if kind == "set_item":
            item = rebuilder.expression(value)
            return [f"{owner}[{key}] = {item}" if cls is None else call("__setitem__", key, item)]
        return [f"del {owner}[{key}]" if cls is None else call("__delitem__", key)]
    if kind == "clear":
        return [call("clear")]
    if kind == "advance":
        return [f"{writer.constant(advance)}({owner}, {value})"]
    if kind == "count_writes":
        return [f"{writer.constant(compat.count_writes)}({owner}, {value})"]
    if kind == "set_rows":
        return [f"{owner}.data = {sparse_tensor(rebuilder, value)}"]
    if kind == "set_cell":
        return [f"{owner}.cell_contents = {rebuilder.expression(value)}"]
    if kind == "del_cell":
        return [f"del {owner}.cell_contents"]
    if kind == "set_grad":
        result = rebuilder.expression(value)
        return [GradientLine(owner, result, rebuilder.position(result))]
    items = [rebuilder.expression(item) for item in value]
    if kind == "remove":  # difference_update may rebuild the table
        return [call("discard", item) for item in items]
    if kind == "extend" and len(items) == 1:
        return [call("append", items[0])]
    sequence = f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if kind == "add":
        return [call("update", sequence)]
    if kind == "extend":
        return [call("extend", sequence)]
    return [f"{owner}[:] = {sequence}"] if cls is None else [call("clear"), call("extend", sequence)]


def gradients_at_once(writer: Writer, lines: list[str]) -> list[str]:
    """Returns lines in which consecutive gradients of tensors that the entry holds are set by one call.

    What it sets follows as comments.
    """
    made: list[str] = []
    for together, run in itertools.groupby(lines, key=lambda line: _is_held_gradient(writer, line)):
        group = list(run)
        if together and len(group) > 1:
            gradients = [line for line in group if isinstance(line, GradientLine)]
            holders = writer.constant(tuple(writer.names[line.owner] for line in gradients), "holders")
            positions = writer.constant(tuple(line.position for line in gradients), "positions")
            made.append(f"{writer.constant(set_gradients)}({holders}, o, {positions})")
            made += [f"# {line}" for line in gradients]
        else:
            made += group
    return made


def _is_held_gradient(writer: Writer, line: str) -> bool:
    if not isinstance(line, GradientLine) or line.position is None:
        return False
    return compat.is_plain_strided(writer.names.get(line.owner))
