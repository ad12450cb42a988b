"""Functions, partials and weak references that a step creates before a break: new objects at every call."""

from __future__ import annotations

import datetime
import functools
import gc
import hashlib
import operator
import os
import re
import struct
import warnings
import weakref

import numpy as np
import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning

WEIGHT = torch.ones(2, requires_grad=True)
ESCAPED: list = []


class Value:
    alive: weakref.WeakSet = weakref.WeakSet()

    def __init__(self, v=0):
        self.v = v
        Value.alive.add(self)


def closure(x, seen):
    held = Value(3)

    def scaled(y):
        return y * held.v

    os.times()
    seen.append(scaled(2))
    held.v = 5
    return scaled(x)


def default(x, seen):
    held = Value(3)
    scaled = lambda y, held=held: y * held.v  # noqa: E731
    os.times()
    seen.append(scaled(2))
    held.v = 4
    return scaled(x)


def keyword_default(x, seen):
    held = Value(3)

    def scaled(y, *, held=held, k=2):
        return y * held.v * k

    os.times()
    seen.append(scaled(2))
    scaled.__kwdefaults__["k"] = 3
    return scaled(x)


def replaced_default(x, seen):
    def scaled(y, k=2):
        return y * k

    os.times()
    seen.append(scaled(2))
    scaled.__defaults__ = (len(seen),)
    return scaled(x)


def several(x, seen):
    each = [lambda y, i=i: y + i for i in range(3)]
    os.times()
    seen.append([fn(1) for fn in each])
    return sum(fn(x) for fn in each)


def attribute(x, seen):
    def counting():
        counting.n += 1
        return counting.n

    counting.n = len(seen)
    os.times()
    seen.append(counting())
    os.times()
    seen.append(counting.n)
    return x


def variable(x, seen):
    n = 0

    def counting():
        nonlocal n
        n += 1
        return n

    counting()
    os.times()
    counting()
    seen.append(n)
    os.times()
    seen.append((counting(), n))
    return x * n


def compared(x, seen):
    def one():
        pass

    def other():
        pass

    again = one
    os.times()
    seen.append(
        (one is other, one is again, one == other, {one: 1, other: 2}[again], one in [other], one in (other, one))
    )
    seen.append(len({one, again, other}))
    return x


def escaping(x, seen):
    held = Value(4)

    def scaled(y):
        return y * held.v

    os.times()
    ESCAPED.append(scaled)
    seen.append(len(ESCAPED))
    held.v += len(seen)
    return x


def partial(x, seen):
    held = Value(2)
    made = functools.partial(lambda a, b, k: a * b.v * k, 3, k=2)
    os.times()
    seen.append(made(held))
    return x * made(held)


def weak(x, seen):
    held = Value(2)
    reference = weakref.ref(held)
    os.times()
    seen.append(reference().v)
    reference().v = 7
    os.times()
    seen.append(held.v)
    return x * held.v


def weak_and_dead(x, seen):
    held = Value(2)
    reference = weakref.ref(held)
    os.times()
    del held
    os.times()
    seen.append(reference() is None)
    return x


def hook(x, seen):
    WEIGHT.grad, n = None, [0]

    def doubled(grad):
        n[0] += 1
        return grad * 2

    os.times()
    handle = WEIGHT.register_hook(doubled)
    (WEIGHT * x).sum().backward()
    handle.remove()
    seen.append(n[0])
    return WEIGHT.grad.clone()


def key(x, seen):
    order = {1: 3, 2: 1}
    by = lambda k: order[k]  # noqa: E731
    os.times()
    seen.append(sorted(order, key=by))
    order[3] = 0
    os.times()
    seen.append(sorted(order, key=by))
    return x


def mutual(x, seen):
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    os.times()
    seen.append((even(4), odd(4)))
    return x


def decorated(x, seen):
    def counted(fn):
        @functools.wraps(fn)
        def inner(*args):
            seen.append("in")
            return fn(*args)

        return inner

    @counted
    def doubled(y):
        return y * 2

    os.times()
    seen.append(doubled.__name__)
    return doubled(x)


def differentiated(x, seen):
    h = WEIGHT * x

    def loss(k):
        return (h * k).sum()

    os.times()
    found = loss(2)
    WEIGHT.grad = None
    found.backward()
    seen.append("backward")
    return WEIGHT.grad.clone()


def optimizer_closure(x, seen):
    model, optimizer = _trained()

    def evaluate():
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    os.times()
    loss = optimizer.step(evaluate)
    seen.append(len(optimizer.state))
    return loss.detach()


@functools.cache
def _trained():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def method(x, seen):
    held = Value(5)
    made = held.__init__
    os.times()
    made(8)
    seen.append(held.v)
    return x * held.v


def generator(x, seen):
    held = Value(2)

    def scaled(value):
        return value * held.v

    each = (scaled(i) for i in range(4))
    next(each)
    os.times()
    seen.append(list(each))
    return x


STEPS = (
    closure, default, keyword_default, several, attribute, variable, compared, escaping, partial, weak, weak_and_dead,
    hook, key, mutual, decorated, differentiated, optimizer_closure, method, generator,
)  # fmt: skip


def _history(step, run):
    ESCAPED.clear()
    _trained.cache_clear()
    seen, results = [], []
    for call in range(8):
        results.append(run(torch.full((2,), float(call + 1)), seen).tolist())
    results.append([fn(1) for fn in ESCAPED])
    ESCAPED.clear()
    return results, seen


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.every(2)
def test_a_later_call_is_answered_by_the_same_part(step):
    _trained()  # a cached function's result is read at the first call as at later ones
    compiled = sidefx_train.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        assert _history(step, compiled) == _history(step, step)
    report = compiled.report()
    assert report.breaks and not report.fallbacks, str(report)
    assert all(len(part.captures) <= 1 for part in report.parts), str(report)
    gc.collect()
    assert not Value.alive, "an entry keeps what the step made"


def test_a_replaced_default_is_another_step():
    compiled = sidefx_train.compile(replaced_default, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        assert _history(replaced_default, compiled) == _history(replaced_default, replaced_default)


def test_another_function_behind_the_break_is_another_entry():
    def step(x, seen):
        fn = (lambda y: y + 1) if len(seen) % 2 else (lambda y: y - 1)
        os.times()
        seen.append(fn(1))
        return fn(x)

    compiled = sidefx_train.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        assert _history(step, compiled) == _history(step, step)
    (part,) = [part for part in compiled.report().parts if "step" in part.name]
    assert len(part.captures) == 2 and len(part.recaptures) == 1, str(compiled.report())


def test_functions_that_become_identical_are_guarded():
    """Two functions with one code object were distinguished."""

    def step(x, same):
        one, other = [(lambda y, k=k: y * 2) for k in range(2)]
        if same:
            other = one
        os.times()
        return x * (2 if one is other else 3), {one: 1, other: 2}

    compiled = sidefx_train.compile(step, backend="eager")
    for same in (False, False, True, False, True):
        got, table = compiled(torch.ones(1), same)
        assert got.item() == (2 if same else 3) and len(table) == (1 if same else 2)


def test_a_new_function_as_argument_takes_one_recapture():
    """A ``lambda`` in the call of the step is a new one every time."""

    def step(x, fn):
        return fn(x) * 2

    compiled = sidefx_train.compile(step, backend="eager")
    for call in range(6):
        held = Value(call)
        got = compiled(torch.ones(2), lambda y, held=held: y * held.v)
        assert got.tolist() == [2.0 * call] * 2
    report = compiled.report()
    assert len(report.captures) <= 3 and not report.fallbacks, str(report)
    assert any("lambda" in change.old for change in report.recaptures), str(report)


def test_a_new_partial_as_argument_takes_one_recapture():
    def step(x, fn):
        return fn(x) * 2

    def scaled(y, k, by):
        return y * k * by

    compiled = sidefx_train.compile(step, backend="eager")
    for call in range(6):
        got = compiled(torch.ones(2), functools.partial(scaled, k=2.5, by=torch.full((2,), float(call))))
        assert got.tolist() == [5.0 * call] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        assert compiled(torch.ones(2), functools.partial(scaled, by=3, k=2.5)).tolist() == [15.0, 15.0]
        assert compiled(torch.ones(2), functools.partial(lambda y, k: y - k, k=1.0)).tolist() == [0.0, 0.0]
        assert compiled(torch.ones(2), functools.partial(scaled, k=1.5, by=2)).tolist() == [6.0, 6.0]
    assert len(compiled.report().captures) <= 7, str(compiled.report())


def test_a_step_that_cannot_go_on_behind_a_break_says_why():
    def step(x):
        @functools.lru_cache
        def kept(n):
            return n * 2

        kept(1)
        os.times()
        return x * kept(2)

    compiled = sidefx_train.compile(step, backend="eager")
    with pytest.warns(SideFXWarning, match="cannot rebuild a _lru_cache_wrapper created in the step"):
        compiled(torch.ones(2))
    (fallback,) = compiled.report().fallbacks
    assert fallback.code == "SFX103" and "posix.times" in fallback.reason and "cannot rebuild" in fallback.reason


def _values_of_c():
    zone = datetime.timezone
    hours = [datetime.timedelta(hours=h) for h in (1, 2, 3)]
    return {
        "durations": (hours, lambda v: (str(v), v.seconds, v.total_seconds(), f"{v}", v + v, v > hours[1])),
        "times": ([datetime.datetime(2020, 1, d) for d in (1, 2, 3)], lambda v: (str(v), v.isoformat(), f"{v:%d}")),
        "times of zones": ([datetime.datetime(2020, 1, 1, h, tzinfo=zone(hours[h])) for h in (0, 1, 2)], str),
        "folded times": ([datetime.datetime(2020, 1, 1, fold=f) for f in (0, 1, 0)], lambda v: v.fold),
        "days": ([datetime.date(2020, 1, d) for d in (1, 2, 3)], lambda v: (str(v), v.weekday())),
        "zones": ([zone(h) for h in hours], str),
        "patterns": ([re.compile(c) for c in "abc"], lambda v: v.sub("x", "abc")),
        "matches": ([re.match(".", c) for c in "abc"], lambda v: (v.group(), v.string)),
        "getters": ([operator.itemgetter(c) for c in "abc"], lambda v: v({"a": 1, "b": 2, "c": 3})),
        "orders": (
            [functools.cmp_to_key(lambda a, b, sign=s: (a - b) * sign) for s in (1, -1, 1)],
            lambda v: sorted([3, 1, 2], key=v),
        ),
        "floats of a class": ([type("Price", (float,), {})(n) for n in (1, 2, 3)], lambda v: (str(v), v + 1)),
        "layouts": ([struct.Struct(c) for c in "bhi"], lambda v: v.pack(1)),
        "types of NumPy": ([np.dtype(c) for c in ("f4", "f8", "i4")], str),
        "unions": ([int | str, int | float, str | bytes], str),
        "in a tuple": ([(h,) for h in hours], lambda v: str(v[0])),
    }


@pytest.mark.parametrize("kind", _values_of_c())
def test_values_of_c_types_are_guarded_by_value(kind):
    """They are constants, and C code reads them without guards: another object is another value."""
    values, read = _values_of_c()[kind]
    compiled = sidefx_train.compile(lambda x, v: (read(v), x + 1), backend="eager")
    for value in (*values, *reversed(values)):
        assert compiled(torch.ones(1), value)[0] == read(value)


def test_values_of_c_behind_a_break():
    def step(x):
        return str(datetime.timedelta(seconds=x.sum().item()))

    compiled = sidefx_train.compile(step, backend="eager")
    for seconds in (1.0, 2.0, 3.0, 1.0):
        assert compiled(torch.tensor([seconds])) == step(torch.tensor([seconds]))


def test_a_hash_behind_a_break():
    """Parts pass hashes on to C code; what a part reads of one is guarded."""

    def step(x, name, n):
        found = hashlib.new(name, str(n).encode())
        os.times()
        size = found.digest_size
        found.update(b"more")
        text = found.hexdigest()
        return x * size, text, found.name

    compiled = sidefx_train.compile(step, backend="eager", keep_slower=True)
    for call in range(12):
        args = torch.ones(2), ("sha256", "md5", "blake2b")[call // 4], call
        want, have = step(*args), compiled(*args)
        assert torch.equal(want[0], have[0]) and want[1:] == have[1:]
    report = compiled.report()
    assert report.fallback_count <= 1 and all(len(part.captures) <= 5 for part in report.parts), str(report)


def test_a_method_of_a_list_that_is_replaced_between_the_calls():
    """As ``warnings`` does for each block that records them: the method is that of another list."""
    state = {"add": [].append}

    def step(x):
        state["add"](x.sum())
        return x * 2

    compiled = sidefx_train.compile(step, backend="eager", keep_slower=True)
    for call in range(8):
        found: list = []
        state["add"] = found.append if call != 5 else found.remove
        if call == 5:
            found.append(torch.tensor(10.0))
        compiled(torch.full((2,), float(call)))
        assert [value.item() for value in found] == ([2.0 * call] if call != 5 else [])
    assert len(compiled.report().captures) <= 4, str(compiled.report())


def test_warnings_that_each_call_records():
    def step(x):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("of the step", stacklevel=1)
        return x * 2

    compiled = sidefx_train.compile(step, backend="eager", keep_slower=True)
    for _ in range(6):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled(torch.ones(2))
        assert [str(each.message) for each in caught] == ["of the step"]
    assert len(compiled.report().captures) <= 2, str(compiled.report())
