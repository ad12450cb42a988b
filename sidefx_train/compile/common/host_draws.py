"""Random numbers that the prologue of a step reads: it draws them before its guards are tested and its graph runs.

A step may decide on such a number, or pass it to the graph. Numbers of Python's and NumPy's generators are drawn for
good; if a guard fails, the generators get back the states they had. So are changes of their states (``seed``,
``setstate``), and generators that the step creates are created then. A number that torch draws on the CPU is foretold:
the draws of the graph up to that number are made once more and forgotten, and the graph makes them as in eager. If the
backend has random numbers of its own, the number is drawn for good as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from sidefx_train.compile.common.host_programs import OF_NUMPY

_Replay = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_LARGEST = 2**62
"""Bound of numbers that are inputs of a graph."""


class Drawn(NamedTuple):
    """An earlier result, as an argument of a draw.

    Attributes:
        position: its place among the values.
    """

    position: int


class Fetched(NamedTuple):
    """An outside object, as an argument of a draw, or the generator itself.

    Attributes:
        source: where it is found at each call.
        kind: its exact type.
    """

    source: Any
    kind: type


class Rewritten(NamedTuple):
    """An outside array that a draw writes to, as its argument.

    Attributes:
        source: where it is found at each call.
        kind: its exact type.
    """

    source: Any
    kind: type


class Joined(NamedTuple):
    """The numbers of an outside list or deque with those that the step has appended, as an argument of an early call.

    Attributes:
        held: the list.
        appended: plain numbers, and what stands for others.
        removed: places of items that the step has removed before it appended these, in order.
    """

    held: Fetched
    appended: tuple[Any, ...]
    removed: tuple[int, ...] = ()


class Computed(NamedTuple):
    """A number that depends on outside values, as an argument of a draw.

    Attributes:
        program: computes it from values found at each call.
        kind: its exact type.
    """

    program: Any
    kind: type


class Draw(NamedTuple):
    """One draw of a generator of Python's or NumPy's, a change of its state, or the creation of one.

    Attributes:
        position: place of the result among the values.
        function: the unbound method, or the function.
        generator: the object it is called on: itself, :class:`Fetched` or :class:`Drawn`; ``None`` for a function.
        args: plain values, and what stands for others; tuples and lists of these.
        kwargs: the same, by name.
        kind: exact type of the result, if the step relies on it.
    """

    position: int
    function: Callable[..., Any]
    generator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kind: type | None = None


class Reseeding:
    """The seed of a torch generator that the step creates: a draw that sets the state to which every run resets it.

    Attributes:
        generator: the generator of the graph.
        state: that state, once it is known that the graph draws from it.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.state: torch.Tensor | None = None

    def __call__(self, seed: int) -> None:
        if self.state is not None:
            self.state.copy_(torch.Generator(self.generator.device).manual_seed(seed).get_state())


def seed_default(seed: int) -> None:
    """Seeds torch's default generator: a draw that is made before the graph draws."""
    torch.manual_seed(seed)


class _Changed(Exception):
    """A value that a draw uses is of another type than at the capture."""


class EmptyTensor(NamedTuple):
    """A tensor that a draw fills, or whose layout it takes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class TorchDraw(NamedTuple):
    """One draw of torch's default generator on the CPU.

    Attributes:
        position: place of the first number among the values; ``None`` for a draw that is not read.
        operator: the random operator.
        args: its arguments.
        kwargs: its keyword arguments.
    """

    position: int | None
    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        args = [torch.empty_strided(*a[:2], dtype=a.dtype) if type(a) is EmptyTensor else a for a in self.args]
        return self.operator(*args, **self.kwargs)


class _State(NamedTuple):
    """How the state of a class of generators is read, set, and given to a new generator."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    copy: Callable[[Any], Any]


def _copy_python(generator: random.Random) -> random.Random:
    copy = random.Random(0)
    copy.setstate(generator.getstate())
    return copy


def _copy_legacy(generator: np.random.RandomState) -> np.random.RandomState:
    copy = np.random.RandomState(type(generator._bit_generator)(0))  # type: ignore[attr-defined]
    copy.set_state(generator.get_state(legacy=False))
    return copy


def _copy_numpy(generator: np.random.Generator) -> np.random.Generator:
    bits = type(generator.bit_generator)(0)
    bits.state = generator.bit_generator.state
    return np.random.Generator(bits)


def _write_numpy(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_STATES: dict[type, _State] = {
    random.Random: _State(random.Random.getstate, random.Random.setstate, _copy_python),
    np.random.RandomState: _State(
        lambda generator: generator.get_state(legacy=False), np.random.RandomState.set_state, _copy_legacy
    ),
    np.random.Generator: _State(lambda generator: generator.bit_generator.state, _write_numpy, _copy_numpy),
}
"""The exact classes of generators whose state can be read and set; a subclass may draw otherwise."""


_GLOBAL = (random.random.__self__, np.random.rand.__self__)  # type: ignore[attr-defined]


def is_generator(value: Any) -> bool:
    """Returns True for a generator whose draws can be made early and taken back."""
    return type(value) in _STATES


def is_plain_generator(value: Any) -> bool:
    """Returns True for a generator without attributes of the program, which could be other methods."""
    return is_generator(value) and (type(value) is not random.Random or vars(value).keys() == {"gauss_next"})


def is_state(value: tuple[Any, ...]) -> bool:
    """Returns True for what ``random.getstate`` returns, which only ``random.setstate`` reads."""
    return len(value) == 3 and type(value[1]) is tuple and len(value[1]) == _WORDS and type(value[0]) is int


_WORDS = 625
"""Length of the state of Python's generators."""


def is_global(generator: Any) -> bool:
    """Returns True for the generators behind the functions of the modules ``random`` and ``numpy.random``."""
    return any(generator is each for each in _GLOBAL)


def copy_of(generator: Any) -> Any:
    """Returns another generator in the same state."""
    return _STATES[type(generator)].copy(generator)


_LITERALS = frozenset({int, float, bool, str, bytes, type(None)})


def joined(held: Any, appended: list[Any], removed: tuple[int, ...] = ()) -> list[Any]:
    """Returns the items of a list or deque of numbers after some were removed and others appended."""
    items = list(held)
    for place in removed:
        del items[place]
    items += appended
    if not {*map(type, items)} <= {int, float}:
        raise _Changed
    bound = None if type(held) is list else held.maxlen
    return items if bound is None else items[max(0, len(items) - bound) :]


def _is_input(value: Any) -> bool:
    """Returns False for a number that no graph takes, and for a list with one."""
    if isinstance(value, list):
        return all(map(_is_input, value))
    return not isinstance(value, (int, float, *OF_NUMPY)) or -_LARGEST < float(value) < _LARGEST


def _same(a: Any, b: Any) -> bool:
    """Returns True for equal states, in which NumPy has arrays."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)


class _Run:
    """One run of the draws of an entry.

    Args:
        values: gets the results.
        copies: generators to draw from in place of those outside, by id; ``None`` to draw from these.
        call: positional and keyword arguments of the step.
        found: outside values in the order in which the draws use them; the run on copies takes them from there.

    Attributes:
        touched: outside generators with their states before their first draw.
        rewritten: outside arrays with their contents before the first draw that writes to them.
    """

    def __init__(self, values: list[Any], copies: dict[int, Any] | None, call: Any, found: list[Any]) -> None:
        self.values, self.copies, self.call, self.found = values, copies, call, found
        self.touched: dict[int, tuple[Any, _State, Any]] = {}
        self.rewritten: dict[int, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
        self._taken = 0

    def make(self, draw: Draw) -> None:
        """Makes one draw."""
        args = self._each(draw.args)
        kwargs = {name: self._value(value) for name, value in draw.kwargs.items()}
        if draw.generator is not None:
            args = [self._generator(draw.generator), *args]
        result = draw.function(*args, **kwargs)
        if draw.kind is not None and (type(result) is not draw.kind or not _is_input(result)):
            raise _Changed
        self.values[draw.position] = result

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
                raise _Changed
            self.rewritten[id(array)] = array, array.copy()
        return array

    def restore_arrays(self) -> None:
        """Gives outside arrays the contents that they had before."""
        for array, contents in self.rewritten.values():
            np.copyto(array, contents)

    def _outside(self, wanted: Fetched | Rewritten | Computed) -> Any:
        if self.copies is not None:
            self._taken += 1
            found = self.found[self._taken - 1]
            return self.copies.get(id(found), found)
        if not isinstance(wanted, Computed):
            value = wanted.source.fetch(*self.call)
        else:
            operands = [source.fetch(*self.call) for source in wanted.program.operands]
            value = next(iter(wanted.program(*operands)), None)
        if type(value) is not wanted.kind:
            raise _Changed
        self.found.append(value)
        return value

    def _generator(self, wanted: Any) -> Any:
        if type(wanted) is Drawn:
            return self.values[wanted.position]
        generator = self._outside(wanted) if type(wanted) is Fetched else wanted
        if self.copies is not None:
            return self.copies.get(id(generator), generator)
        if id(generator) not in self.touched:
            if not is_plain_generator(generator):
                raise _Changed
            state = _STATES[type(generator)]
            self.touched[id(generator)] = generator, state, state.read(generator)
        return generator


class HostDraws:
    """The draws of one entry.

    Args:
        draws: those of Python's and NumPy's generators, in program order.
        values: the list that guards and prologue read the drawn numbers from.
        of_torch: those of torch's generator, in program order.
        foretells: the graph makes the draws of torch itself.
    """

    def __init__(
        self, draws: tuple[Draw, ...], values: list[Any], of_torch: tuple[TorchDraw, ...] = (), foretells: bool = True
    ) -> None:
        self.values = values
        self._draws, self._of_torch, self._foretells = draws, of_torch, foretells
        paths = {each.generator.source: each.generator for each in draws if type(each.generator) is Fetched}
        self._fetched = tuple(paths.values())
        self._seeds = any(each.function is seed_default for each in draws)
        self._held = {id(each.generator) for each in draws if type(each.generator) not in (Fetched, Drawn)}
        self._run: _Run | None = None
        self._copies: dict[int, Any] = {}
        self._torch_before: torch.Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self._draws or self._of_torch)

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
            self._torch_before = torch.default_generator.get_state()
        try:
            if self._fetched:
                self._tell_apart(run)
            for draw in self._draws:
                run.make(draw)
        except Exception:  # a path that leads nowhere, or a number that the method rejects: captured again, it raises
            for generator, state, before in run.touched.values():
                state.write(generator, before)
            run.restore_arrays()
            if self._torch_before is not None:
                torch.default_generator.set_state(self._torch_before)
            self.forget()
            return False
        if self._of_torch:
            seeded = torch.default_generator.get_state()
            self._torch_before = seeded if self._torch_before is None else self._torch_before
            for each in self._of_torch:
                drawn = each()
                if each.position is not None:
                    numbers = drawn.flatten().tolist()
                    self.values[each.position : each.position + len(numbers)] = numbers
            if self._foretells:
                torch.default_generator.set_state(seeded)
        return True

    def _tell_apart(self, run: _Run) -> None:
        """Raises if generators that differed at the capture are one object."""
        found = [id(each.source.fetch(*run.call)) for each in self._fetched]
        if len({*found}) < len(found) or not self._held.isdisjoint(found):
            raise _Changed

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
                if _same(state.read(copies[ident]), state.read(generator)):
                    state.write(generator, before)
            if run.touched.keys() <= self._held:  # by id: the draws hold these generators
                self._copies = copies
        if run is not None:
            run.restore_arrays()
        if self._torch_before is not None:
            torch.default_generator.set_state(self._torch_before)

    def fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns True if the values that the draws use are as the capture saw them; nothing is drawn."""
        fits = self.draw(args, kwargs)
        if fits:
            self.take_back()
            self.forget()
        return fits

    def forget(self) -> None:
        """Lets go of what the latest draws used."""
        self._run = self._torch_before = None

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
