"""Random numbers and arrays of the step that its prologue draws with Python's and NumPy's generators, seeds, clocks."""

from __future__ import annotations

import math
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.resume.resume_function import original
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import ListRecord
from sidefx_train.compile.capture.shadows.deferred_values import DeferredValue
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import ArrayRecord, array_shadow
from sidefx_train.compile.capture.shadows.records import Record
from sidefx_train.compile.capture.world.draw_arguments import Arguments, can_fetch, item_at, places_of
from sidefx_train.compile.capture.world.symbolic_numbers.array_functions import MAKERS
from sidefx_train.compile.capture.world.torch_draws import TorchDraws
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.draws.draw import Draw, Drawn, Fetched, Reseeding, Rewritten, TorchDraw, seed_default
from sidefx_train.compile.common.draws.generator_states import copy_of, is_generator, is_global, is_plain_generator
from sidefx_train.compile.common.draws.host_draws import HostDraws
from sidefx_train.compile.common.host_programs import OF_NUMPY, ArrayCall
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.fx_utils import one_generator

if TYPE_CHECKING:
    from sidefx_train.compile.capture.guards.source import Source
    from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI

_MOST_BYTES = 1 << 24
"""Size limit of a drawn array; larger ones are drawn where the program does."""

_MOST_LISTED = 64
"""Limit of numbers that one call draws; each is an input of the graph."""

_LARGEST = 2**62
"""Bound of integers that symbolic numbers represent."""


class RandomDraws:
    """The draws of one capture. It draws from copies: the program's generators do not advance.

    Attributes:
        values: the drawn numbers, in order; the entry draws its own into this list.
        reseeded: generators of torch that the step creates and seeds by numbers that change.
        of_torch: the numbers that torch draws on the CPU.
        wants_early: instructions that make arrays which a generator shuffles, by code and index.
    """

    def __init__(self, world: CaptureWorldAPI) -> None:
        self._world, self._heap = world, world.heap
        self._draws: list[Draw | TorchDraw] = []
        self._copies: dict[int, Any] = {}
        self._kept: list[Any] = []  # the table of shadows knows them by their ids
        self._ended = self._reads_arrays = False
        self.values: list[Any] = []
        self.reseeded: list[Reseeding] = []
        self.wants_early: set[tuple[types.CodeType, int]] = set()
        self._made: list[tuple[weakref.ref[Any], tuple[types.CodeType, int] | None]] = []
        arguments = lambda: Arguments(world, self.holds)  # noqa: E731
        self.of_torch = TorchDraws(world.heap, self.values, self._draws, self._number, arguments, self.seed_of)

    def end(self) -> None:
        """Draws nothing early from now on: a backward that is recorded next runs later, outside the step."""
        self._ended = self.of_torch.ended = True

    def finish(self) -> HostDraws:
        """Returns the draws for the entry."""
        foretells = self._heap.specialization.foretells_draws
        return HostDraws(tuple(self._draws), self.values, foretells)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], label: str = "") -> Any:
        """Calls a method of a generator early: ``function(*args, **kwargs)``.

        Args:
            function: the method, or a function that calls it.
            args: the generator and the method's arguments.
            kwargs: more of these.
            label: the method's name in messages, if ``function`` is not the method.

        Returns:
            What it draws, or ``None`` where it only changes the state; ``ABSENT`` if the entry cannot call it early: it
            does not find the generator, or an argument.

        Raises:
            Unsupported: the result is nothing that the graph could get.
        """
        if not self._is_early or not is_generator(args[0]):
            return ABSENT
        held, own = self._generator(args[0])
        if held is ABSENT:
            return ABSENT
        arguments = Arguments(self._world, self.holds)
        later, later_by_name = arguments.each(args[1:]), arguments.named(kwargs)
        if arguments.unknown:
            return ABSENT
        label = label or trace_rules.describe(function)
        try:
            with compat.real_world():
                value = function(own, *arguments.now(later), **arguments.now(later_by_name))
        except (TypeError, ValueError, KeyError, IndexError, OverflowError):
            self._heap.refuse("SFX103", f"calls {label} with arguments that it rejects")
        arguments.read(value)
        made = self._result(value, label, lambda place, kind: Draw(place, function, held, later, later_by_name, kind))
        if made is ABSENT:
            self._heap.refuse("SFX103", f"calls {label}, whose result is not a number that the graph can get")
        return made

    def reseed(self, generator: torch.Generator, seed: Any) -> bool:
        """Seeds a generator of torch, which the step has created, by a number that changes; returns False if the entry
        cannot compute it early."""
        arguments = Arguments(self._world, self.holds)
        later = arguments.each((seed,))
        if not self._is_early or arguments.unknown or self._world.branching:
            return False
        with compat.real_world():
            generator.manual_seed(arguments.now(later[0]))
        made = Reseeding(generator)
        self._draws.append(Draw(len(self.values), made, None, later, {}))
        self.values.append(None)
        self.reseeded.append(made)
        return True

    def seed_default(self, seed: Any) -> bool:
        """Seeds torch's default generator early; returns False if the step has used its state before, or the entry
        cannot compute the seed early."""
        arguments = Arguments(self._world, self.holds)
        later = arguments.each((seed,))
        used = self.of_torch.are_used or torch.accelerator.is_available()
        if not self._is_early or arguments.unknown or self._world.branching or used:
            return False
        with compat.real_world():
            try:
                self.of_torch.seed(arguments.now(later[0]))
            except (RuntimeError, ValueError, TypeError):
                return False
        self._draws.append(Draw(len(self.values), seed_default, None, later, {}))
        self.values.append(None)
        return True

    def of_generator(self, fn: Any, args: tuple[Any, ...]) -> Any:
        """Seeds a generator of torch, which the step has created, by a number that changes; refuses methods of one that
        the graph has drawn from, and ``seed``. Else :data:`ABSENT`."""
        heap, generator = self._heap, fn.__self__
        if fn.__name__ == "seed":
            heap.refuse("SFX110", "calls torch.Generator.seed")
        held = [each for each in vars(heap.tracer.tracer.root).values() if safe_isinstance(each, torch.Generator)]
        if any(one_generator(generator, each) for each in held):
            heap.refuse("SFX110", f"calls torch.Generator.{fn.__name__}, on a generator that the graph draws from")
        if heap.record_of(generator) is None and fn.__name__ == "manual_seed":
            self.reseeded = [each for each in self.reseeded if not one_generator(each.generator, generator)]
            if len(args) == 1 and type(args[0]) is torch.SymInt and self.reseed(generator, args[0]):
                return generator
        elif self.seed_of(generator) is not None:
            heap.refuse("SFX110", f"calls torch.Generator.{fn.__name__} after a seed that changes")
        return ABSENT

    def seed_of(self, generator: torch.Generator) -> Reseeding | None:
        """Returns the latest seed of a generator, if that is a number that changes."""
        return next((each for each in reversed(self.reseeded) if one_generator(each.generator, generator)), None)

    def create(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Creates a generator early, which the step may draw from and leave behind; ``ABSENT`` as of :meth:`call`."""
        arguments = Arguments(self._world, self.holds)
        later, later_by_name = arguments.each(args), arguments.named(kwargs)
        if not self._is_early or arguments.unknown:
            return ABSENT
        label = trace_rules.describe(function)
        try:
            with compat.real_world():
                made = function(*arguments.now(later), **arguments.now(later_by_name))
        except (TypeError, ValueError, OverflowError):
            return ABSENT  # called by the interpreter, it raises the program's error
        self._draws.append(Draw(len(self.values), function, None, later, later_by_name, type(made)))
        return self._keep(made, made, label)

    def read_clock(self, clock: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Reads a clock early; :data:`ABSENT` if that is not possible."""
        if not self._is_early or self._world.branching:
            return ABSENT
        with compat.real_world():
            now = clock(*args)
        return self._result(
            now, trace_rules.describe(clock), lambda place, kind: Draw(place, clock, None, args, {}, kind)
        )

    def ask(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Asks early for what others may change, such as a file; :data:`ABSENT` if that is not possible, or if calls
        that are deferred could change it."""
        arguments = Arguments(self._world, self.holds)
        later = arguments.each(args)
        if not self._is_early or arguments.unknown or self._world.branching or self._world.deferred:
            return ABSENT
        try:
            with compat.real_world():
                now = function(*arguments.now(later))
        except (OSError, ValueError):
            return ABSENT
        label = trace_rules.describe(function)
        return self._result(now, label, lambda place, kind: Draw(place, function, None, later, {}, kind))

    @property
    def _is_early(self) -> bool:
        return not self._ended and self._heap.specialization.host_draws

    def _generator(self, generator: Any) -> tuple[Any, Any]:
        """Returns what finds a generator at each call, and the one to draw from now; ``ABSENT`` if nothing does."""
        record = self._heap.record_of(generator)
        if record is not None and self.holds(record.source):
            return Drawn(record.source.key), generator
        if record is not None and record.base.kind != "const":
            fetched = record.real is not generator and can_fetch(record.source)
            return (Fetched(record.source, type(generator)), generator) if fetched else (ABSENT, None)
        if (record is None or record.real is not generator) and not is_global(generator):
            return ABSENT, None
        if not is_plain_generator(generator):
            return ABSENT, None
        if id(generator) not in self._copies:
            self._copies[id(generator)] = copy_of(generator)
        return generator, self._copies[id(generator)]

    def holds(self, source: Source) -> bool:
        """Returns True for the path of a value that was drawn, or of an object that was created."""
        return source.kind == "item" and source.parent is not None and source.parent.key is self.values

    def _keep(self, value: Any, shadow: Any, label: str) -> Any:
        """Adds an object that the step passes on, and does not look into."""
        record = Record(self._heap, value, shadow, self._append(value, label))
        record.unshadowed = True
        self._kept.append(value)
        return self._heap.register(record)

    def _result(self, value: Any, label: str, draw: Callable[[int, type | None], Draw]) -> Any:
        """Adds a draw and returns its result in the step; ``ABSENT`` for one that the step cannot use."""
        place, kind = len(self.values), type(value)
        if value is None:
            self._draws.append(draw(place, None))
            self.values.append(None)
            return None
        if _is_array(value):
            self._draws.append(draw(place, None))
            return self._array(value, label)
        if kind is list and len(value) <= _MOST_LISTED and len({*map(type, value)} | {int, float}) == 2:
            if not all(-_LARGEST < item < _LARGEST for item in value):
                return ABSENT
            self._draws.append(draw(place, kind))
            return self._list(value, label)
        if kind is tuple or kind is dict or kind is datetime:  # a state, or a date
            self._draws.append(draw(place, kind))
            return self._keep(value, DeferredValue(kind, ()), label)
        if kind in (bool, np.bool_):
            self._draws.append(draw(place, kind))
            return self._truth(value, label)
        if kind not in _NUMBER_TYPES or not math.isfinite(value) or abs(float(value)) >= _LARGEST:
            return ABSENT
        self._draws.append(draw(place, kind))
        if kind in OF_NUMPY:
            return self._heap.numbers.number_of_numpy(value, self._append(value, label))
        return self._number(value, label)

    def _truth(self, value: Any, label: str) -> Any:
        """Returns a truth, on which the step may decide: the guard is on a number, like any of drawn numbers."""
        place = len(self.values)
        self.values.append(value)
        self._draws.append(Draw(place + 1, int, None, (Drawn(place),), {}, int))
        return type(value)(bool(self._number(int(value), label) != 0))  # `~` of one of NumPy's is another

    def is_drawn(self, value: Any) -> bool:
        """Returns True for an array whose numbers differ at every call, and for a list or tuple with one."""
        if type(value) in (list, tuple):
            return any(map(self.is_drawn, value))
        record = self._heap.record_of(value) if type(value) is np.ndarray else None
        return safe_isinstance(record, ArrayRecord) and record.computed

    def derived(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes a function of NumPy early if it reads arrays whose numbers change, or makes an array of numbers that
        change; else :data:`ABSENT`."""
        given = (*args, *kwargs.values())
        if self._world.branching:
            return ABSENT
        early = self._heap.specialization.early_arrays
        if early and self._instruction() in early:
            return self.derive(fn, args, kwargs, trace_rules.describe(fn), always=True)
        if not any(map(self.is_drawn, given)) and not any(map(self.is_history, given)):
            for value in given:
                if type(value) in (list, deque):  # it may not have been read
                    self._world.touch(value)
            lists = any(type(value) in (list, tuple, deque) and _changes((value,)) for value in given)
            if not lists and not (_changes(given) and (fn in MAKERS or _has_array(given))):
                return ABSENT
        label = trace_rules.describe(fn)
        if any(type(value) is list and self.is_history(value) for value in given) and self._reads_changing_shape(label):
            return ABSENT  # one capture for each length
        return self.derive(fn, args, kwargs, label)

    def at_changing(self, array: Any, index: Any) -> Any:
        """Returns the part of an array at an index with numbers that change (``table[step]``, ``table[i : i + 8]``),
        looked up early; :data:`ABSENT` for any other index."""
        numbers: list[Any] = []
        places = places_of(index, numbers)
        if self._world.branching or not _changes(numbers):
            return ABSENT
        return self.derive(item_at, (array, places, *numbers), {}, "numpy.ndarray.__getitem__")

    def write(self, function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Writes to a drawn array early (``chances /= chances.sum()``): later calls read what it holds then.

        Args:
            function: an in-place operator, or ``operator.setitem``.
            args: its arguments, the array first.

        Returns:
            False if that is not possible: the memory may be that of an outside array, or something has read it that
            comes after all early calls, such as a tensor.
        """
        shared = self._writable(args[0])
        if shared is None:
            return False
        arguments = Arguments(self._world, self.holds)
        later = arguments.each(args)
        if arguments.unknown:
            return False
        call = ArrayCall(function)
        try:
            with compat.real_world():
                call(*arguments.now(later))
        except (TypeError, ValueError, ArithmeticError, LookupError):
            self._heap.refuse("SFX103", f"calls {trace_rules.describe(function)} with arguments that it rejects")
        self._draws.append(Draw(len(self.values), call, None, later, {}))
        self.values.append(None)
        for each in shared:
            each.refresh()
        return True

    def draw_into(self, function: Callable[..., Any], generator: Any, array: Any) -> bool:
        """Calls a method of a generator that writes to a drawn array (``shuffle``) early; returns False as
        :meth:`write` does."""
        shared = self._writable(array)
        if shared is None or self.call(function, (generator, array), {}) is ABSENT:
            return False
        for each in shared:
            each.refresh()
        return True

    def rewrite(self, function: Callable[..., Any], generator: Any, record: ArrayRecord) -> bool:
        """Calls a method of a generator that writes to an outside array early, for good; returns False if the entry
        does not find one of them, or an early call has read what the step sees afterwards."""
        held, own = self._generator(generator) if self._is_early and can_fetch(record.source) else (ABSENT, None)
        if held is ABSENT or self._reads_arrays:
            return False
        record.rewritten = record.drawn = record.read_early = True
        with compat.real_world():
            function(own, record.current)
        later = (Rewritten(record.source, np.ndarray),)
        self._draws.append(Draw(len(self.values), function, held, later, {}))
        self.values.append(None)
        return True

    def copied(self, array: Any) -> Any:
        """Returns a copy of a drawn array that the step may write to later, or the array itself."""
        if not self._heap.specialization.early_arrays or not self.is_drawn(array):
            return array
        copy = self.derive(np.copy, (array,), {}, "numpy.copy")
        return array if copy is ABSENT else copy

    def _writable(self, array: Any) -> list[ArrayRecord] | None:
        """Returns the arrays over the memory of one that an early call may write to; ``None`` if none may."""
        record = self._heap.record_of(array)
        if self._world.branching or not self._is_early or self._reads_arrays:
            return None
        arrays = [each for each in self._heap.by_real.values() if safe_isinstance(each, ArrayRecord)]
        shared = [each for each in arrays if record is not None and np.may_share_memory(each.real, record.real)]
        if any(not self.holds(each.source) or each.tensor is not None or each.shown for each in shared):
            return None
        return shared

    def note_made(self, array: Any) -> None:
        """Remembers which instruction has made an array of constants."""
        self._made.append((weakref.ref(array), self._instruction()))

    def want_early(self, array: Any) -> None:
        """Notes that the step draws into an array that it has made of constants, or into a view of one."""
        over = [one for one in (array, array.base) if type(one) is np.ndarray]
        made = [place for each, place in self._made if place is not None and any(each() is one for one in over)]
        self.wants_early.update({*made} - self._heap.specialization.early_arrays)

    def _instruction(self) -> tuple[types.CodeType, int] | None:
        frame = self._world.interp.current_frame
        return None if frame is None else original(frame.info.code, frame.pc - 1)

    def is_history(self, value: Any) -> bool:
        """Returns True for a list of numbers that changes; the step has read nothing of it but single items."""
        record = self._heap.record_of(value) if type(value) in (list, deque) else None
        return safe_isinstance(record, ListRecord) and record.holds_changing_numbers

    def of_history(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes a pure function of a list of numbers that changes (``sum(losses)``) early; else :data:`ABSENT`."""
        if self._world.branching or len(args) != 1 or kwargs or not self.is_history(args[0]):
            return ABSENT
        return self.derive(fn, args, kwargs, trace_rules.describe(fn))

    def derive(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        label: str,
        *,
        always: bool = False,
    ) -> Any:
        """Computes ``function(*args)`` of drawn arrays and numbers early, too, or of constants with ``always``;
        :data:`ABSENT` if the result is nothing that the step can use."""
        if not self._is_early:
            return ABSENT
        arguments = Arguments(self._world, self.holds)
        later, later_by_name = arguments.each(args), arguments.named(kwargs)
        if arguments.unknown or not (arguments.changes or always):
            return ABSENT
        try:
            with compat.real_world():
                made = ArrayCall(function)(*arguments.now(later), **arguments.now(later_by_name))
        except (TypeError, ValueError, ArithmeticError, LookupError):
            return ABSENT  # run natively, it raises the program's error
        if type(made) not in _DERIVED:
            return ABSENT
        arguments.read(made)
        self._reads_arrays |= any(not self.holds(record.source) for record in arguments.arrays)
        strict = ArrayCall(function)
        return self._result(made, label, lambda place, kind: Draw(place, strict, None, later, later_by_name, kind))

    def _array(self, value: Any, label: str) -> Any:
        source = self._append(value, label)
        if id(value) in self._heap.by_real:  # a function has returned its argument
            return self._heap.shadow(value, source)
        record = array_shadow(self._heap, value, source, drawn=True)
        record.drawn = True
        self._kept.append(value)
        return self._heap.register(record)

    def _list(self, value: list[int | float], label: str) -> list[Any]:
        source, sources = self._append(value, label), self._heap.sources
        self._heap.guard("length", source, len(value))
        return [self._heap.numbers.length(item, sources.item(source, index)) for index, item in enumerate(value)]

    def _number(self, value: int | float, label: str) -> Any:
        return self._heap.numbers.length(value, self._append(value, label))

    def _append(self, value: Any, label: str) -> Source:
        """Adds a value, and returns where the entry will find its own."""
        self.values.append(value)
        number, sources = len(self.values), self._heap.sources
        return sources.item(sources.const(self.values, "draws"), number - 1, _name(label, number))

    def _reads_changing_shape(self, label: str) -> bool:
        """Returns True if an earlier capture looked at the shape of the array that comes next, and it has changed."""
        return f"{_name(label, len(self.values) + 1)}.shape" in self._heap.specialization.symbolic_numbers


def _name(label: str, number: int) -> str:
    """Returns the name of a draw in messages."""
    return f"{label}()" if number == 1 else f"{label}() (draw {number})"


def _changes(values: Iterable[Any]) -> bool:
    """Returns True if there is a symbolic number among values, or in lists or tuples of these."""
    for value in values:
        if type(value) in (torch.SymInt, torch.SymFloat) or (type(value) in (list, tuple, deque) and _changes(value)):
            return True
    return False


def _has_array(values: tuple[Any, ...]) -> bool:
    return any(type(value) is np.ndarray for value in values)


_NUMBER_TYPES: frozenset[Any] = frozenset({int, float, *OF_NUMPY})
_DERIVED = frozenset({np.ndarray, *_NUMBER_TYPES, bool, np.bool_, list})


def _is_array(value: Any) -> bool:
    """Returns True for an array that can become a tensor over its memory, or a view of one in reverse order."""
    if type(value) is not np.ndarray or value.nbytes > _MOST_BYTES or value.dtype.byteorder not in "=|":
        return False
    known = value.dtype.kind in "bif" or value.dtype == np.uint8
    return known and value.dtype.itemsize <= 8
