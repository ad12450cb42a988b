"""Strings, bytes, decimals and time spans that the step makes of numbers that change: the prologue makes them.

``len(str(n))``, ``n.to_bytes(4, "little")[0]`` and ``timedelta(seconds=n).total_seconds()`` are functions of a number
by way of such objects. The step passes these on, or has C code compute with them; what that returns is a number of the
step, a truth that is guarded, or another such object.
"""

from __future__ import annotations

import operator
import string
import struct
import types
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.deferred_values import DeferredValue, join_text, percent
from sidefx_train.compile.capture.shadows.records import Record
from sidefx_train.compile.capture.world.symbolic_numbers.program_writer import ProgramWriter
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.host_programs import OBJECTS, OF_NUMPY, HostProgram, ObjectCall, Slot, Step
from sidefx_train.compile.common.plain_values import instance_dict_of_plain
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.guards.source import Source
    from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI

_Made = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_MAKERS: frozenset[Any] = frozenset({Decimal, timedelta, complex, int.to_bytes, struct.pack})
"""C functions that make such an object of numbers."""

_FUNCTIONS: frozenset[Any] = _MAKERS | frozenset(
    (
        len,
        str,
        repr,
        format,
        ascii,
        bin,
        hex,
        oct,
        ord,
        chr,
        float,
        int,
        abs,
        round,
        divmod,
        getattr,
        join_text,
        percent,
    )
    + (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow)
    + (operator.neg, operator.pos, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
    + (operator.getitem, operator.contains, int.from_bytes, struct.unpack)
)
"""Pure functions of such objects and numbers."""

_LITERALS = (bool, int, float, type(None), slice, *OBJECTS, *OF_NUMPY)
_MOST_STEPS = 16
_MOST_MODULES = 8
"""Limit of modules, or attributes, among which a number that changes chooses: each is captured."""
_NO_DIGITS = str.maketrans("", "", string.digits)


class ComputedObjects:
    """The objects that the prologue of one capture makes of numbers."""

    def __init__(self, world: CaptureWorldAPI) -> None:
        self._world = world
        self._made: dict[int, _Made] = {}
        self._kept: list[Any] = []

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of C code that is called with such an object, or makes one; :data:`ABSENT` if the prologue
        cannot call it."""
        given = (*args, *kwargs.values())
        if not any(type(value) is DeferredValue for value in given) and not (
            any(type(value) in (torch.SymInt, torch.SymFloat) for value in given) and _is_in(fn, _MAKERS)
        ):
            return ABSENT
        value, program = self._value((fn, args, kwargs))
        if value is ABSENT:
            return ABSENT
        label = trace_rules.describe(fn)
        sources = self._world.heap.sources
        source = sources.item(sources.computed(program, f"{label}(...)"), 0, f"{label}(...)")
        if type(value) not in OBJECTS:
            return self._world.computed_numbers.number(value, source)
        return self._object(value, source, (fn, args, kwargs))

    def attribute(self, value: DeferredValue, name: str) -> Any:
        """Returns an attribute of such an object, or of a string that the prologue could make; else :data:`ABSENT`."""
        made = self._how(value)
        now = ABSENT if made is None else self._value(made)[0]
        if now is ABSENT:
            return ABSENT
        attribute = getattr(type(now), name, ABSENT)
        if type(attribute) is types.MethodDescriptorType:
            return types.MethodType(attribute, value)
        return ABSENT if attribute is ABSENT or callable(attribute) else self.call(getattr, (value, name), {})

    def name_of_module(self, modules: dict[Any, Any], name: DeferredValue) -> Any:
        """Returns the text under which a dict of a few modules has one, which is guarded: the module decides what is
        captured; :data:`ABSENT` for another dict or key."""
        record = self._world.heap.record_of(modules)
        held = modules if record is None else record.real

        def is_chosen(text: str) -> bool:
            return safe_isinstance(dict.get(held, text), (torch.nn.Module, torch.nn.Parameter))

        return self._text(name, is_chosen) if len(held) <= _MOST_MODULES else ABSENT

    def name_of_attribute(self, owner: Any, name: DeferredValue) -> Any:
        """Returns the name of an attribute that an object has, which is guarded in the same way; :data:`ABSENT` if it
        has none of that name, or many that differ in digits only."""
        record = self._world.heap.record_of(owner)
        names = _attribute_names(owner if record is None else record.real)

        def is_chosen(text: str) -> bool:
            alike = [each for each in names if _without_digits(each) == _without_digits(text)]
            return text in names and len(alike) <= _MOST_MODULES

        return self._text(name, is_chosen)

    def _text(self, name: DeferredValue, is_chosen: Callable[[str], bool]) -> Any:
        """Returns the text that the prologue makes at each call, and guards it; :data:`ABSENT` if it makes none, or
        one that is not among those to choose from."""
        made = self._how(name)
        if made is None:
            return ABSENT
        text, program = self._value(made)
        if type(text) is not str or not is_chosen(text):
            return ABSENT
        heap, label = self._world.heap, f"{trace_rules.describe(made[0])}(...)"
        heap.guard("equal", heap.sources.item(heap.sources.computed(program, label), 0, label), text)
        return text

    def _object(self, value: Any, source: Source, made: _Made) -> DeferredValue:
        heap = self._world.heap
        heap.guard("type", source, type(value))
        found = DeferredValue(type(value), ())
        heap.by_shadow[id(found)] = Record(heap, value, found, source)
        self._made[id(found)] = made
        self._kept.append(found)
        return found

    def _how(self, value: DeferredValue) -> _Made | None:
        """Returns the call that makes an object; ``None`` for another value that is known only after the step."""
        known = self._made.get(id(value))
        if known is not None or self._world.heap.record_of(value) is not None:
            return known
        return value.fn, value.args, value.kwargs

    def _value(self, made: _Made) -> tuple[Any, Any]:
        """Returns the value now of a call, and the program that makes it at each call; :data:`ABSENT` for none."""
        symbols: list[Any] = []
        if not self._world.host_reads.allowed or not self._take(made, symbols):
            return ABSENT, None
        tracer = self._world.tracer
        if not symbols or not all(tracer.has_node(each) and not compat.is_unbacked(each) for each in symbols):
            return ABSENT, None
        nodes = {id(each): tracer.node_of(each) for each in symbols}
        written = ProgramWriter(self._world).of(nodes.values())
        if written is None:
            return ABSENT, None
        steps = list(written.steps)
        places = {ident: written.slots[node] for ident, node in nodes.items()}
        self._write(made, places, len(written.operands), steps)
        if len(steps) > len(written.steps) + _MOST_STEPS:
            return ABSENT, None
        program = HostProgram(written.sources, tuple(steps))
        with compat.real_world():
            values = program(*written.operands)
        return (values[0], program) if values else (ABSENT, None)

    def _take(self, value: Any, symbols: list[Any]) -> bool:
        """Notes the numbers that a call or an argument depends on; returns False for one that a program cannot hold."""
        if type(value) is DeferredValue:
            made = self._how(value)
            return made is not None and self._take(made, symbols)
        if type(value) is tuple and len(value) == 3 and callable(value[0]) and type(value[2]) is dict:
            fn, args, kwargs = value
            return _is_known(fn) and all(self._take(each, symbols) for each in (*args, *kwargs.values()))
        if type(value) in (tuple, list):
            return self._world.heap.record_of(value) is None and all(self._take(each, symbols) for each in value)
        if type(value) in (torch.SymInt, torch.SymFloat):
            symbols.append(value)
            return True
        return type(value) in _LITERALS

    def _write(self, made: _Made, places: dict[int, Slot], first: int, steps: list[Step]) -> Slot:
        """Appends the steps of a call, behind those of its arguments; returns where its result is."""

        def add(step: Step) -> Slot:
            steps.append(step)
            return Slot(first + len(steps) - 1)

        def written(value: Any) -> Any:
            kind = type(value)
            if kind is DeferredValue:
                how = self._how(value)
                assert how is not None, "it was taken"
                return self._write(how, places, first, steps)
            if kind is tuple:  # a program makes lists of tuples
                return add(Step(tuple, ([written(item) for item in value],), {}))
            if kind is list:
                return [written(item) for item in value]
            return places.get(id(value), value) if kind in (torch.SymInt, torch.SymFloat) else value

        fn, args, kwargs = made
        given = tuple(map(written, args)), {name: written(value) for name, value in kwargs.items()}
        return add(Step(ObjectCall(fn), *given))


def _attribute_names(owner: Any) -> frozenset[str]:
    """Returns the names of an object's attributes, of its classes', and of what a module holds by name."""
    own = instance_dict_of_plain(owner)
    spaces = [own, *(vars(cls) for cls in type(owner).__mro__)]
    if safe_isinstance(owner, torch.nn.Module):
        spaces += [own.get(held, {}) for held in ("_modules", "_parameters", "_buffers")]
    return frozenset(name for space in spaces for name in space if type(name) is str)


def _without_digits(text: str) -> str:
    return text.translate(_NO_DIGITS)


def _is_known(fn: Any) -> bool:
    if type(fn) is types.MethodDescriptorType:
        return fn.__objclass__ in OBJECTS or _is_in(fn, _MAKERS)
    return _is_in(fn, _FUNCTIONS)


def _is_in(fn: Any, functions: frozenset[Any]) -> bool:
    kinds = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
    return type(fn) in kinds and fn in functions
