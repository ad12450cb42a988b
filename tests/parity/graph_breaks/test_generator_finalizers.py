"""Generators that clean up when they are freed: eager runs their ``finally`` when the last reference is dropped.

Most steps here break while such a generator is suspended; it continues as a native one, and is freed natively.
"""

from __future__ import annotations

import gc
import itertools
import os
import warnings
from contextlib import nullcontext

import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning

WEIGHT = torch.ones(2, requires_grad=True)


class Seen:
    """State that a step recorded."""

    def __init__(self):
        self.closed = 0


def numbers(seen):
    try:
        yield from range(4)
    finally:
        seen.closed += 1


def breaking_numbers(seen):
    try:
        yield from range(4)
    finally:
        os.times()
        seen.closed += 1


def passing_on(seen):
    for number in numbers(seen):  # noqa: UP028 - the loop's iterator is the object that is freed
        yield number


def delegating(seen):
    yield from numbers(seen)


class Entered:
    def __init__(self, seen):
        self.seen = seen

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.seen.left = kind


def inside_with(seen):
    with Entered(seen):
        yield 1
        yield 2


def loop_that_raises(seen):
    def broken():
        os.times()
        raise RuntimeError("in the loop")

    for _ in numbers(seen):
        broken()


def loop_that_raises_and_is_caught(seen):
    try:
        for _ in numbers(seen):
            for inner in passing_on(seen):
                os.times()
                if inner:
                    raise RuntimeError(inner)
    except RuntimeError:
        seen.inside = seen.closed
    seen.behind = seen.closed


def loop_that_is_left(seen):
    for number in numbers(seen):
        os.times()
        if number == 1:
            break
    seen.behind = seen.closed


def loop_that_returns(seen):
    def inner():
        for number in delegating(seen):
            os.times()
            if number:
                return seen.closed
        return None

    seen.inside = inner()
    seen.behind = seen.closed


def enumerated(seen):
    for i, _ in enumerate(numbers(seen)):
        os.times()
        if i:
            break
    seen.behind = seen.closed


def zipped(seen):
    for i, _ in zip(range(9), passing_on(seen), strict=False):
        os.times()
        if i:
            break
    seen.behind = seen.closed


def mapped(seen):
    for number in map(lambda value: value + 1, numbers(seen)):
        os.times()
        if number == 2:
            break
    seen.behind = seen.closed


def deleted(seen):
    one = numbers(seen)
    next(one)
    os.times()
    del one
    seen.behind = seen.closed


def assigned_over(seen):
    one = other = numbers(seen)
    next(one)
    os.times()
    one = None
    seen.between = seen.closed
    other = one
    seen.behind = seen.closed
    return other


def variable_of_a_function(seen):
    def inner():
        one = numbers(seen)
        next(one)
        os.times()
        return seen.closed

    seen.inside = inner()
    seen.behind = seen.closed


def variable_nobody_needs(seen):
    one = numbers(seen)
    next(one)
    os.times()
    seen.between = seen.closed
    os.times()
    seen.later = seen.closed


def kept_by_a_traceback(seen):
    def inner():
        one = numbers(seen)
        next(one)
        raise RuntimeError("keeps its frame")

    try:
        inner()
    except RuntimeError:
        seen.inside = seen.closed
    seen.behind = seen.closed


def kept_by_a_traceback_behind_a_break(seen):
    def inner():
        one = numbers(seen)
        next(one)
        os.times()
        raise RuntimeError("keeps its frame")

    try:
        inner()
    except RuntimeError:
        seen.inside = seen.closed
    seen.behind = seen.closed


def with_statement(seen):
    one = inside_with(seen)
    next(one)
    os.times()
    one = None
    seen.behind = seen.left
    return one


def closed_by_name(seen):
    one = inside_with(seen)
    next(one)
    os.times()
    one.close()
    seen.behind = seen.left


def cleaning_up_breaks(seen):
    for _ in breaking_numbers(seen):
        break
    seen.behind = seen.closed


def cleaning_up_raises(seen):
    def failing():
        try:
            yield 1
        finally:
            seen.closed += 1
            raise RuntimeError("nobody hears")

    for _ in failing():
        break
    seen.behind = seen.closed


def thrown_into(seen):
    def catching():
        for i in range(3):
            try:
                yield i
            except ValueError as error:
                seen.caught = str(error)
                yield 77

    one = catching()
    next(one)
    os.times()
    seen.first = one.throw(ValueError("thrown"))
    os.times()
    seen.second = next(one)


def sent_into(seen):
    def summing():
        total = 0
        try:
            while True:
                value = yield total
                if value is None:
                    break
                total += value
        finally:
            seen.closed += 1
        return total

    def outer():
        seen.total = yield from summing()
        yield seen.total

    one = outer()
    next(one)
    one.send(3)
    os.times()
    one.send(4)
    seen.last = one.send(None)
    seen.behind = seen.closed


def stored_elsewhere(seen):
    one = numbers(seen)
    next(one)
    os.times()
    seen.between = seen.closed
    return one


def gradients(seen):
    WEIGHT.grad = None
    total = 0
    for number in numbers(seen):
        total = total + (WEIGHT * number).sum()
        os.times()
        if number == 2:
            break
    total.backward()
    seen.grad = WEIGHT.grad.tolist()
    seen.behind = seen.closed


CALLS = [0]


def an_iterator_has_ended_in_the_capture(seen):
    """Its ``StopIteration`` is kept during the capture of the part, with every frame around the part."""
    for _ in numbers(seen):

        def inner(k, *rest, **named):
            os.times()
            for _ in itertools.islice(CALLS, 0):
                pass
            return k + len(rest) + len(named)

        CALLS[0] += 1
        inner(1, CALLS[0])
        break
    seen.behind = seen.closed


STEPS = (
    an_iterator_has_ended_in_the_capture,
    loop_that_raises,
    loop_that_raises_and_is_caught,
    loop_that_is_left,
    loop_that_returns,
    enumerated,
    zipped,
    mapped,
    deleted,
    assigned_over,
    variable_of_a_function,
    variable_nobody_needs,
    kept_by_a_traceback,
    kept_by_a_traceback_behind_a_break,
    with_statement,
    closed_by_name,
    cleaning_up_breaks,
    cleaning_up_raises,
    thrown_into,
    sent_into,
    stored_elsewhere,
    gradients,
)


def _run(step, unheard):
    """Returns the state after a call, with its result alive and afterwards; the cycle collector is disabled."""
    seen, before = Seen(), len(unheard)
    gc.disable()
    try:
        try:
            result = step(seen)
        except RuntimeError as error:
            result = str(error)
        kind, during = type(result).__name__, dict(vars(seen))
        del result
        return kind, during, dict(vars(seen)), len(unheard) - before
    finally:
        gc.enable()


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.every(4)
def test_a_generator_cleans_up_where_eager_drops_it(step, monkeypatch):
    unheard = []
    monkeypatch.setattr("sys.unraisablehook", lambda info: unheard.append(type(info.exc_value)))
    compiled = sidefx_train.compile(step, backend="eager")
    expected = _run(step, unheard)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        for _ in range(3):
            assert _run(compiled, unheard) == expected
    assert compiled.report().replays, "something was captured"


def test_the_place_of_a_generator_decides_whether_it_cleans_up():
    """The part after the break is shared by generators suspended inside and outside of the ``try``."""

    def half(seen):
        yield 1
        try:
            yield 2
        finally:
            seen.closed += 1

    def step(seen, ahead):
        one = half(seen)
        for _ in range(ahead):
            next(one)
        os.times()
        one = None
        seen.behind = seen.closed
        return one

    compiled = sidefx_train.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        for ahead in (1, 2, 1, 2, 2, 1):
            expected, seen = Seen(), Seen()
            step(expected, ahead)
            compiled(seen, ahead)
            assert vars(seen) == vars(expected)


def test_a_first_call_keeps_nothing_alive():
    """Objects that a capture keeps must not hold arguments or results until the cycle collector runs."""

    died = []

    class Watched:
        def __init__(self, value):
            self.value = value

        def __del__(self):
            died.append(self.value)

    def step(given, batch):
        os.times()
        return batch * 2

    compiled = sidefx_train.compile(step, backend="eager")
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SideFXWarning)
            compiled(Watched(5), torch.ones(2))
        assert died == [5]
    finally:
        gc.enable()


def test_a_graph_that_raises_keeps_nothing_alive():
    """The step itself runs instead, and frees objects and keeps its traceback as in eager."""

    def step(seen, batch, other):
        one = numbers(seen)
        next(one)
        os.times()
        return batch @ other

    compiled = sidefx_train.compile(step, backend="eager")
    batch = torch.ones(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        for other in (torch.ones(2, 2), torch.ones(2, 2).double(), torch.ones(2, 2).double(), torch.ones(3, 2)):
            counts = []
            for run in (step, compiled):
                seen = Seen()
                gc.disable()
                try:
                    with pytest.raises(RuntimeError) if other.dtype != batch.dtype or len(other) > 2 else nullcontext():
                        run(seen, batch, other)
                    counts.append(seen.closed)
                finally:
                    gc.enable()
            assert counts[1] == counts[0]
