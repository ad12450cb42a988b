"""Guards as generated code: each a test that is true when the guard fails."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import Guard, NumberCondition, TensorFacts, same_value
from sidefx_train.compile.capture.guards.source import Source, stored_keys, stored_length
from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.capture.guards.storage_guards import storage_of
from sidefx_train.compile.capture.guards.symbol_guards import CONDITION_NAMES
from sidefx_train.compile.capture.interpreter.generator_finalizers import has_pending_finally
from sidefx_train.compile.common.plain_values import DERIVED_FROM, exact_value, is_plain, is_set
from sidefx_train.compile.common.type_checks import descriptor_of

FETCH_ERRORS = (KeyError, IndexError, AttributeError, ValueError, TypeError)
"""What going down a path, or testing what is there now, raises where the world has changed."""


def write_guards(writer: Writer, guards: list[Guard], miss: str = "return MISS") -> list[str]:
    """Lines that leave with ``miss`` where a guard fails; fetches go to ``writer.fetched`` in between.

    Fetch lines and tests are interleaved, so that nothing is fetched below a value whose type is wrong.
    """
    lines: list[str] = []
    tensors: list[Guard] = []
    conditions: list[Guard] = []
    empty = {id(g.source) for g in guards if g.kind == "length" and g.value == 0}
    for guard in guards:
        if guard.kind == "tensor":
            tensors.append(guard)
        elif guard.kind in ("number", "distinct", "placed", "no_overlap", "counted", "separate", "disjoint"):
            conditions.append(guard)
        elif guard.kind == "type" and id(guard.source) in empty and not guard.source.from_arguments:
            continue  # an empty container is only ever tested for emptiness
        else:
            test = _TESTS[guard.kind](writer, guard)
            lines += _drain(writer)
            lines.append(f"if {test}: {miss}")
    if tensors:
        fetched = ", ".join(writer.value(guard.source) for guard in tensors if guard.source.kind != "const")
        held = tuple(guard.source.key for guard in tensors if guard.source.kind == "const")
        values = ", ".join([fetched] * bool(fetched) + [f"*{writer.constant(held, 'tensors')}"] * bool(held))
        lines += _drain(writer)
        lines.append(f"if not check_tensors({values}): {miss}")
    for guard in conditions:
        test = _CONDITIONS[guard.kind](writer, guard)
        lines += _drain(writer)
        lines.append(f"if {test}: {miss}")
    return lines


def tensor_check(guards: list[Guard], fetch: Callable[[Source], Any]) -> Callable[..., bool]:
    """The batched check of all tensor guards, in the order :func:`write_guards` passes the tensors."""
    wanted = [guard for guard in guards if guard.kind == "tensor"]
    wanted.sort(key=lambda guard: guard.source.kind == "const")  # stable: fetched ones first
    if not wanted:
        return _always
    facts: list[TensorFacts] = [guard.value for guard in wanted]
    sizes, strides = [list(fact.shape) for fact in facts], [list(fact.stride) for fact in facts]
    return compat.tensor_guards([fetch(guard.source) for guard in wanted], sizes, strides).check  # type: ignore[no-any-return]


def _always() -> bool:
    return True


def _drain(writer: Writer) -> list[str]:
    lines, writer.fetched[:] = list(writer.fetched), []
    return lines


def _target(writer: Writer, guard: Guard) -> str:
    """The tested value; a value tested once and never used again needs no variable."""
    return writer.value(guard.source) if writer.is_fetched(guard.source) else writer.access(guard.source)


def _is(writer: Writer, guard: Guard) -> str:
    return f"{_target(writer, guard)} is not {writer.constant(guard.value, guard.source.label)}"


def _equal(writer: Writer, guard: Guard) -> str:
    value = writer.value(guard.source)
    expected = writer.constant(guard.value, guard.source.label)
    if type(guard.value) in (tuple, frozenset, float, complex) and not _is_simple(guard.value):
        return f"not {writer.constant(same_value)}({value}, {expected})"
    # The class first: what is there now may be a tensor, or compare itself in Python.
    return f"type({value}) is not {writer.constant(type(guard.value))} or {value} != {expected}"


def _value(writer: Writer, guard: Guard) -> str:
    exact = f"{writer.constant(exact_value)}({writer.value(guard.source)})"
    return f"not {writer.constant(same_value)}({exact}, {writer.constant(guard.value, guard.source.label)})"


def _is_simple(value: Any) -> bool:
    """True for a number that equals nothing but itself among numbers of its type, and for tuples of text."""
    if type(value) is tuple:
        return all(type(item) is str for item in value)
    return type(value) is float and value != 0 and value == value


def _type(writer: Writer, guard: Guard) -> str:
    return f"type({writer.value(guard.source)}) is not {writer.constant(guard.value)}"


def _length(writer: Writer, guard: Guard) -> str:
    target = _target(writer, guard)
    if guard.source.hooked:
        return f"{writer.constant(stored_length, 'stored_length')}({target}) != {guard.value}"
    return target if guard.value == 0 else f"len({target}) != {guard.value}"


def _keys(writer: Writer, guard: Guard) -> str:
    value = writer.value(guard.source)
    if guard.source.hooked:
        value = f"{writer.constant(stored_keys, 'stored_keys')}({value})"
    keys = writer.constant(guard.value, "keys")
    if _is_simple(guard.value):
        return f"tuple({value}) != {keys}"
    if is_plain(guard.value):
        return f"not {writer.constant(same_value)}(tuple({value}), {keys})"
    same = writer.constant(operator.is_, "is_same")
    return f"len({value}) != {len(guard.value)} or not all(map({same}, {value}, {keys}))"


def _members(writer: Writer, guard: Guard) -> str:
    wanted = writer.constant(_all_typed(guard.value), "members")
    return f"{writer.constant(typed)}({writer.value(guard.source)}) != {wanted}"


def _order(writer: Writer, guard: Guard) -> str:
    return f"not {writer.constant(same_order)}({writer.value(guard.source)}, {writer.constant(guard.value, 'order')})"


def typed(members: Any) -> frozenset[Any]:
    """The members of a set, each with its class: 1 is not True."""
    return frozenset((type(item), item) for item in set.__iter__(members))


def _all_typed(order: tuple[Any, ...]) -> frozenset[Any]:
    return frozenset((type(item), item) for item in order)


def same_order(members: Any, order: tuple[Any, ...]) -> bool:
    """True if a set shows these members in this order."""
    same = same_value if is_plain(order) else operator.is_
    return len(members) == len(order) and all(map(same, set.__iter__(members), order))


def _absent(writer: Writer, guard: Guard) -> str:
    return f"{writer.constant(guard.value)} in {writer.space(guard.source)}"


def _no_item(writer: Writer, guard: Guard) -> str:
    value = writer.value(guard.source)
    if guard.source.hooked:
        value = f"{writer.constant(stored_keys, 'stored_keys')}({value})"
    return f"{writer.constant(guard.value)} in {value}"


def _same(writer: Writer, guard: Guard) -> str:
    return f"{_target(writer, guard)} is not {writer.value(guard.value)}"


def _empty_cell(writer: Writer, guard: Guard) -> str:
    return f"{writer.constant(cell_is_set)}({writer.value(guard.source)})"


def _unset_slot(writer: Writer, guard: Guard) -> str:
    return f"{writer.constant(is_set)}({writer.value(guard.source)}, {writer.constant(guard.value)})"


def _distinct(writer: Writer, guard: Guard) -> str:
    storage = writer.constant(storage_of, "storage_of")
    return f"{storage}({writer.value(guard.source)}) == {storage}({writer.value(guard.value)})"


def _memory(writer: Writer, guard: Guard) -> str:
    return f"not {writer.constant(guard.value.refresh, 'share_memory_as_before')}()"


def _placed(writer: Writer, guard: Guard) -> str:
    other, distance = guard.value
    return f"{writer.value(other)}.data_ptr() - {writer.value(guard.source)}.data_ptr() != {distance}"


def _counted(writer: Writer, guard: Guard) -> str:
    other, shared = guard.value
    shared = writer.constant(compat.share_version_counter, "share_version_counter")
    asked = f"{shared}({writer.value(guard.source)}, {writer.value(other)})"
    return f"not {asked}" if shared else asked


def _no_overlap(writer: Writer, guard: Guard) -> str:
    storage = writer.constant(storage_of, "storage_of")
    return f"{storage}({writer.value(guard.source)}) in {writer.constant(guard.value, 'held_memory')}"


def _number(writer: Writer, guard: Guard) -> str:
    condition: NumberCondition = guard.value
    writer.names.update(CONDITION_NAMES)
    code = condition.code
    for name, source in condition.names:
        code = re.sub(rf"\b{name}\b", writer.value(source), code)
    return f"not ({code})"


def cell_is_set(cell: Any) -> bool:
    """True if a closure cell has contents."""
    try:
        cell.cell_contents  # noqa: B018 - the access is the test
    except ValueError:
        return False
    return True


def _holds(writer: Writer, guard: Guard) -> str:
    return f"not {writer.constant(guard.value.holds, guard.kind)}({writer.value(guard.source)})"


def _method(writer: Writer, guard: Guard) -> str:
    descriptor = writer.constant(guard.value, "descriptor")
    return f"{writer.constant(descriptor_of)}({writer.value(guard.source)}) is not {descriptor}"


def _has_pending_finally(writer: Writer, guard: Guard) -> str:
    return f"{writer.constant(has_pending_finally)}({writer.value(guard.source)}) is not {guard.value}"


_TESTS: dict[str, Callable[[Writer, Guard], str]] = {
    "is": _is,
    "equal": _equal,
    "value": _value,
    "type": _type,
    "length": _length,
    "keys": _keys,
    "members": _members,
    "order": _order,
    "absent": _absent,
    "no_item": _no_item,
    "same": _same,
    "empty_cell": _empty_cell,
    "unset_slot": _unset_slot,
    "method": _method,
    "has_pending_finally": _has_pending_finally,
    "taken": _holds,
    "body": _holds,
    "memory": _memory,
}


def _separate(writer: Writer, guard: Guard) -> str:
    values = ", ".join(f"id({writer.value(source)})" for source in guard.value)
    return f"len({{{values}}}) != {len(guard.value)}"


def _disjoint(writer: Writer, guard: Guard) -> str:
    ones, others = (", ".join(f"id({writer.value(source)})" for source in sources) for sources in guard.value)
    return f"not {{{ones}}}.isdisjoint(({others},))"


_CONDITIONS: dict[str, Callable[[Writer, Guard], str]] = {
    "number": _number,
    "distinct": _distinct,
    "placed": _placed,
    "no_overlap": _no_overlap,
    "counted": _counted,
    "separate": _separate,
    "disjoint": _disjoint,
}

# --- the slow way ------------------------------------------------------------------------------------------------


def failing(guard: Guard, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Evaluates one guard without generated code: (failed, the value found)."""
    try:
        if guard.kind == "absent":
            owner = object.__getattribute__(guard.source.fetch(args, kwargs), "__dict__")
            return guard.value in owner, owner.get(guard.value)
        value = guard.source.fetch(args, kwargs)
    except FETCH_ERRORS as error:
        return guard.kind != "empty_cell", f"nothing ({type(error).__name__})"
    try:
        return _fails(guard, value, args, kwargs)
    except FETCH_ERRORS as error:  # what it is compared with is elsewhere, or nowhere
        return True, f"nothing to compare with ({type(error).__name__})"


def _fails(guard: Guard, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    if guard.kind == "is":
        return value is not guard.value, value
    if guard.kind == "equal":
        return not same_value(value, guard.value), value
    if guard.kind == "value":
        return not isinstance(value, DERIVED_FROM) or not same_value(exact_value(value), guard.value), value
    if guard.kind == "type":
        return type(value) is not guard.value, type(value)
    if guard.kind == "length":
        return stored_length(value) != guard.value, stored_length(value)
    if guard.kind == "keys":
        same = same_value if is_plain(guard.value) else operator.is_
        keys = stored_keys(value)
        return len(keys) != len(guard.value) or not all(map(same, keys, guard.value)), keys
    if guard.kind == "members":
        return typed(value) != _all_typed(guard.value), value
    if guard.kind == "order":
        return not same_order(value, guard.value), value
    if guard.kind == "no_item":
        return guard.value in stored_keys(value), f"{guard.value!r}"
    if guard.kind == "same":
        return value is not guard.value.fetch(args, kwargs), value
    if guard.kind == "tensor":
        if not isinstance(value, torch.Tensor):
            return True, type(value)
        facts = TensorFacts.of(value)
        return not guard.value.fits(facts), facts
    if guard.kind in ("taken", "body"):
        changed = guard.value.changed(value)
        return bool(changed), changed
    if guard.kind == "method":
        return descriptor_of(value) is not guard.value, value
    if guard.kind == "has_pending_finally":
        return has_pending_finally(value) is not guard.value, "suspended elsewhere"
    if guard.kind == "memory":
        return not guard.value.holds(), "shared otherwise"
    if guard.kind == "empty_cell":
        return cell_is_set(value), value
    if guard.kind == "unset_slot":
        return is_set(value, guard.value), value
    if guard.kind == "separate":
        return len({id(source.fetch(args, kwargs)) for source in guard.value}) != len(guard.value), "one object twice"
    if guard.kind == "disjoint":
        ones, others = ({id(source.fetch(args, kwargs)) for source in sources} for sources in guard.value)
        return not ones.isdisjoint(others), "one object in both"
    if guard.kind == "no_overlap":
        return storage_of(value) in guard.value, "memory of a tensor that the step holds"
    if guard.kind == "placed":
        other, distance = guard.value
        found = other.fetch(args, kwargs).data_ptr() - value.data_ptr()
        return found != distance, f"{found} bytes"
    if guard.kind == "counted":
        other, shared = guard.value
        return compat.share_version_counter(
            value, other.fetch(args, kwargs)
        ) != shared, "shared" if not shared else "not shared"
    if guard.kind == "distinct":
        return storage_of(value) == storage_of(guard.value.fetch(args, kwargs)), value
    condition: NumberCondition = guard.value
    names = {name: source.fetch(args, kwargs) for name, source in condition.names}
    held = bool(eval(condition.code, dict(CONDITION_NAMES), names))
    return not held, ", ".join(f"{source.label} = {names[name]!r}" for name, source in condition.names)
