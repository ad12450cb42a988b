"""Random numbers that the prologue of a step reads: it draws them before its guards are tested and its graph runs.

A step may decide on such a number, or pass it to the graph. Numbers of Python's and NumPy's generators are drawn for
good; if a guard fails, the generators get back the states they had. So are changes of their states (``seed``,
``setstate``), and generators that the step creates are created then. A number that torch draws on the CPU is foretold:
the draws of the graph up to that number are made once more and forgotten, and the graph makes them as in eager. If the
backend has random numbers of its own, the number is drawn for good as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sidefx_train.compile.common.draws.draw import (
    ASKED_ONCE,
    Changed,
    Computed,
    Draw,
    Drawn,
    Fetched,
    Joined,
    OwnGenerator,
    Rewritten,
    TorchDraw,
    joined,
    seed_default,
)
from sidefx_train.compile.common.draws.generator_states import STATES, GeneratorState, is_plain_generator, same_state
from sidefx_train.compile.common.host_programs import OF_NUMPY

_Replay = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_LARGEST = 2**62
"""Bound of numbers that are inputs of a graph."""

_LITERALS = frozenset({int, float, bool, str, bytes, type(None)})


def _is_input(value: Any) -> bool:
    """Returns False for a number that no graph takes, and for a list with one."""
    if isinstance(value, list):
        return all(map(_is_input, value))
    return not isinstance(value, (int, float, *OF_NUMPY)) or -_LARGEST < float(value) < _LARGEST


class _Run:
    """One run of the draws of an entry.

    Args:
        values: gets the results.
        copies: generators to draw from in place of those outside, by id; ``None`` to draw from these.
        call: positional and keyword arguments of the step.
        found: outside values in the order in which the draws use them; the run on copies takes them from there.

    Attributes:
        torch_before: state of torch's default generator before its first seed or draw.
        torch_drawn: the same before its first draw.
        touched: outside generators with their states before their first draw.
        rewritten: outside arrays with their contents before the first draw that writes to them.
    """

    def __init__(self, values: list[Any], copies: dict[int, Any] | None, call: Any, found: list[Any]) -> None:
        self.values, self.copies, self.call, self.found = values, copies, call, found
        self.torch_before: torch.Tensor | None = None
        self.torch_drawn: torch.Tensor | None = None
        self.touched: dict[int, tuple[Any, GeneratorState, Any]] = {}
        self.rewritten: dict[int, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
        self.own: dict[int, torch.Generator] = {}
        self.computed: dict[Any, list[Any]] = {}
        self._taken = 0

    def make(self, draw: Draw | TorchDraw) -> None:
        """Makes one draw; of torch's, none on copies."""
        if isinstance(draw, TorchDraw):
            if self.copies is None:
                self._make_of_torch(draw)
            return
        if self.copies is not None and draw.function in ASKED_ONCE:
            return  # the value stays
        args = self._each(draw.args)
        kwargs = {name: self._value(value) for name, value in draw.kwargs.items()}
        if draw.generator is not None:
            args = [self._generator(draw.generator), *args]
        result = draw.function(*args, **kwargs)
        if draw.kind is not None and (type(result) is not draw.kind or not _is_input(result)):
            raise Changed
        self.values[draw.position] = result

    def _make_of_torch(self, draw: TorchDraw) -> None:
        if draw.generator is None and self.torch_drawn is None:
            self.torch_drawn = torch.default_generator.get_state()
            self.torch_before = self.torch_drawn if self.torch_before is None else self.torch_before
        drawn = draw(self._now, None if draw.generator is None else self._copy_of(draw.generator))
        if draw.position is not None:
            numbers = drawn.flatten().tolist()
            self.values[draw.position : draw.position + len(numbers)] = numbers

    def _copy_of(self, own: OwnGenerator) -> torch.Generator:
        """Returns a generator that draws what the graph will draw from one of the step's."""
        made = self.own.get(id(own.held))
        if made is None:
            made = self.own[id(own.held)] = torch.Generator()
            if own.seed is not None:
                made.manual_seed(self._now(own.seed) if type(own.seed) is Computed else own.seed)
            else:
                made.set_state(own.held.get_state() if own.state is None else own.state)
        return made

    def _each(self, values: tuple[Any, ...]) -> list[Any]:
        return [value if type(value) in _LITERALS else self._value(value) for value in values]

    def _value(self, value: Any) -> Any:
        kind = type(value)
        if kind is Drawn:
            return self.values[value.position]
        if kind is Fetched or kind is Computed:
            return self._outside(value)
        if kind is Rewritten:
            return self._array(value)
        if kind is Joined:
            return joined(self._outside(value.held), self._each(value.appended), value.removed)
        return kind(map(self._value, value)) if kind is tuple or kind is list else value

    def _array(self, wanted: Rewritten) -> Any:
        array = self._outside(wanted)
        if self.copies is None and id(array) not in self.rewritten:
            if not array.flags.writeable:
                raise Changed
            self.rewritten[id(array)] = array, array.copy()
        return array

    def restore(self) -> None:
        """Gives outside arrays the contents that they had before, and torch's generator its state."""
        for array, contents in self.rewritten.values():
            np.copyto(array, contents)
        if self.torch_before is not None:
            torch.default_generator.set_state(self.torch_before)

    def _outside(self, wanted: Fetched | Rewritten | Computed) -> Any:
        if self.copies is not None:
            self._taken += 1
            found = self.found[self._taken - 1]
            return self.copies.get(id(found), found)
        value = self._now(wanted)
        self.found.append(value)
        return value

    def _now(self, wanted: Fetched | Rewritten | Computed) -> Any:
        if not isinstance(wanted, Computed):
            value = wanted.source.fetch(*self.call)
        else:
            value = next(iter(wanted.program(*map(self._fetch, wanted.program.operands))), None)
        if type(value) is not wanted.kind:
            raise Changed
        return value

    def _fetch(self, source: Any) -> Any:
        """Follows a path; what is computed on the way is computed once in a run."""
        kind, parent = source.kind, source.parent
        if kind == "computed":
            if source not in self.computed:
                self.computed[source] = source.key(*map(self._fetch, source.key.operands))
            return self.computed[source]
        if kind == "item" and parent.key is self.values:
            return self.values[source.key]
        of_computed = kind == "item" and parent.kind == "computed"
        return self._fetch(parent)[source.key] if of_computed else source.fetch(*self.call)

    def _generator(self, wanted: Any) -> Any:
        if type(wanted) is Drawn:
            return self.values[wanted.position]
        generator = self._outside(wanted) if type(wanted) is Fetched else wanted
        if self.copies is not None:
            return self.copies.get(id(generator), generator)
        if id(generator) not in self.touched:
            if not is_plain_generator(generator):
                raise Changed
            state = STATES[type(generator)]
            self.touched[id(generator)] = generator, state, state.read(generator)
        return generator


class HostDraws:
    """The draws of one entry.

    Args:
        draws: all draws, in program order: arguments may depend on earlier ones, of any generator.
        values: the list that guards and prologue read the drawn numbers from.
        foretells: the graph makes the draws of torch itself.
    """

    def __init__(self, draws: tuple[Draw | TorchDraw, ...], values: list[Any], foretells: bool = True) -> None:
        self.values = values
        self._draws, self._foretells = draws, foretells
        own = [each for each in draws if type(each) is Draw]
        self._fetched = tuple({g.source: g for g in (each.generator for each in own) if type(g) is Fetched}.values())
        self._seeds = any(each.function is seed_default for each in own)
        self._held = {id(each.generator) for each in own if type(each.generator) not in (Fetched, Drawn)}
        self._run: _Run | None = None
        self._copies: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._draws)

    def has(self, source: Any) -> bool:
        """Returns True if ``source`` leads to the drawn numbers, or to one of a drawn list."""
        return source is not None and (source.key is self.values or self.has(source.parent))

    def draw(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> bool:
        """Draws the numbers.

        Args:
            args: positional arguments of the step.
            kwargs: its keyword arguments.

        Returns:
            False if a value that the draws use is not as the capture saw it: nothing is drawn.
        """
        run = self._run = _Run(self.values, None, (args, kwargs or {}), [])
        if self._seeds:
            run.torch_before = torch.default_generator.get_state()
        try:
            if self._fetched:
                self._tell_apart(run)
            for draw in self._draws:
                run.make(draw)
        except Exception:  # a path that leads nowhere, or a number that the method rejects: captured again, it raises
            for generator, state, before in run.touched.values():
                state.write(generator, before)
            run.restore()
            self.forget()
            return False
        if self._foretells and run.torch_drawn is not None:  # the graph draws again
            torch.default_generator.set_state(run.torch_drawn)
        return True

    def _tell_apart(self, run: _Run) -> None:
        """Raises if generators that differed at the capture are one object."""
        found = [id(each.source.fetch(*run.call)) for each in self._fetched]
        if len({*found}) < len(found) or not self._held.isdisjoint(found):
            raise Changed

    def take_back(self) -> None:
        """Sets the generators to the states before the latest :meth:`draw`, and arrays to what they held; the values
        stay, for messages.

        A generator from which another thread has drawn since is left: its numbers must not be drawn twice.
        """
        run, self._run = self._run, None
        if run is not None and run.touched:
            copies, self._copies = self._copies, {}  # of the latest time: making one takes longer than a draw
            if copies.keys() != run.touched.keys():
                copies = {ident: state.copy(generator) for ident, (generator, state, _) in run.touched.items()}
            arrays = {ident: contents.copy() for ident, (_, contents) in run.rewritten.items()}
            again = _Run(list(self.values), {**copies, **arrays}, run.call, run.found)
            for ident, (_, state, before) in run.touched.items():
                state.write(copies[ident], before)
            for draw in self._draws:
                again.make(draw)
            for ident, (generator, state, before) in run.touched.items():
                if same_state(state.read(copies[ident]), state.read(generator)):
                    state.write(generator, before)
            if run.touched.keys() <= self._held:  # by id: the draws hold these generators
                self._copies = copies
        if run is not None:
            run.restore()

    def fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns True if the values that the draws use are as the capture saw them; nothing is drawn."""
        fits = self.draw(args, kwargs)
        if fits:
            self.take_back()
            self.forget()
        return fits

    def forget(self) -> None:
        """Lets go of what the latest draws used."""
        self._run = None

    def before(self, replay: _Replay, miss: Any, keep: bool = True) -> _Replay:
        """Returns ``replay`` behind the draws, which are taken back if it returns ``miss``, or always without
        ``keep``."""
        if not self:
            return replay

        def drawing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.draw(args, kwargs):
                return miss
            try:
                result = replay(args, kwargs)
                if result is miss or not keep:
                    self.take_back()
                return result
            finally:
                self.forget()

        return drawing

    def taken_back_before(self, failed: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``failed``, which runs the step eagerly, behind :meth:`take_back`."""
        if not self:
            return failed

        def after(*args: Any) -> Any:
            self.take_back()
            return failed(*args)

        return after
