"""Guards on the length, keys and members of containers."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch

from sidefx_train.compile.capture.guards.guard import Guard, same_value, shown
from sidefx_train.compile.capture.guards.kinds.base import Arguments, Instruction, Kind, register, target
from sidefx_train.compile.capture.guards.kinds.objects import is_simple
from sidefx_train.compile.capture.guards.source import stored_keys, stored_length
from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.common.plain_values import is_plain


@register("length")
class Length(Kind):
    """The container has this many items."""

    native = True

    def describe(self, guard: Guard) -> str:
        return f"len({guard.source.label}) == {shown(guard.value)}"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        value = target(writer, guard)
        if guard.source.hooked:
            return f"{writer.constant(stored_length, 'stored_length')}({value}) != {guard.value}"
        return value if guard.value == 0 else f"len({value}) != {guard.value}"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return stored_length(value) != guard.value, stored_length(value)

    def instruction(self, guard: Guard) -> Instruction:
        return ("empty", None, 0) if guard.value == 0 else ("length", None, guard.value)


@register("keys")
class Keys(Kind):
    """The keys of a mapping, in order: by equality for plain keys, else by identity."""

    native = True

    def describe(self, guard: Guard) -> str:
        return f"keys of {guard.source.label} are {shown(guard.value)}"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        value = _stored_keys(writer, guard)
        keys = writer.constant(guard.value, "keys")
        if is_simple(guard.value):
            return f"tuple({value}) != {keys}"
        if is_plain(guard.value):
            return f"not {writer.constant(same_value)}(tuple({value}), {keys})"
        same = writer.constant(operator.is_, "is_same")
        return f"len({value}) != {len(guard.value)} or not all(map({same}, {value}, {keys}))"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        same = same_value if is_plain(guard.value) else operator.is_
        keys = stored_keys(value)
        return len(keys) != len(guard.value) or not all(map(same, keys, guard.value)), keys

    def instruction(self, guard: Guard) -> Instruction:
        return "keys", tuple(guard.value), int(is_plain(guard.value))


@register("no_item")
class NoItem(Kind):
    """The mapping has no such key."""

    native = True

    def describe(self, guard: Guard) -> str:
        return f"{guard.source.label} has no {shown(guard.value)}"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        stored = _stored_keys(writer, guard)
        if isinstance(guard.value, torch.Tensor):
            return f"{writer.constant(_has_object)}({stored}, {writer.constant(guard.value)})"
        return f"{writer.constant(guard.value)} in {stored}"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        if isinstance(guard.value, torch.Tensor):
            return _has_object(stored_keys(value), guard.value), shown(guard.value)
        return guard.value in stored_keys(value), f"{guard.value!r}"


@register("order")
class Order(Kind):
    """The members of a set, in the order in which it shows them."""

    native = True

    def describe(self, guard: Guard) -> str:
        return f"order of {guard.source.label} are {shown(guard.value)}"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        order = writer.constant(guard.value, "order")
        return f"not {writer.constant(same_order)}({writer.value(guard.source)}, {order})"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return not same_order(value, guard.value), value

    def instruction(self, guard: Guard) -> Instruction:
        return "keys", tuple(guard.value), int(is_plain(guard.value))


@register("members")
class Members(Kind):
    """The members of a set whose order the step did not read."""

    def describe(self, guard: Guard) -> str:
        return f"members of {guard.source.label} are {shown(guard.value)}"

    def python_test(self, writer: Writer, guard: Guard) -> str:
        wanted = writer.constant(_all_typed(guard.value), "members")
        return f"{writer.constant(typed)}({writer.value(guard.source)}) != {wanted}"

    def check(self, guard: Guard, value: Any, arguments: Arguments) -> tuple[bool, Any]:
        return typed(value) != _all_typed(guard.value), value


def _has_object(keys: Iterable[Any], key: Any) -> bool:
    """Returns True if a key is among others; tensors are compared by identity, since ``==`` compares contents."""
    return any(each is key for each in keys)


def typed(members: Any) -> frozenset[Any]:
    """Returns the members of a set, each with its class: 1 is not True."""
    return frozenset((type(item), item) for item in set.__iter__(members))


def _all_typed(order: tuple[Any, ...]) -> frozenset[Any]:
    return frozenset((type(item), item) for item in order)


def same_order(members: Any, order: tuple[Any, ...]) -> bool:
    """True if a set shows these members in this order."""
    same = same_value if is_plain(order) else operator.is_
    return set.__len__(members) == len(order) and all(map(same, set.__iter__(members), order))


def _stored_keys(writer: Writer, guard: Guard) -> str:
    value = writer.value(guard.source)
    return f"{writer.constant(stored_keys, 'stored_keys')}({value})" if guard.source.hooked else value
