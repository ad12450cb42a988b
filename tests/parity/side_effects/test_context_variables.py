"""Context variables that a step sets: values read, values left set, and the tokens that it keeps."""

from __future__ import annotations

import contextvars
import os
import warnings

import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning

FILLED = contextvars.ContextVar("FILLED", default=0)
EMPTY = contextvars.ContextVar("EMPTY")


class Holder:
    token = None


class Entered:
    """Sets a variable to itself, and keeps the token."""

    def __enter__(self):
        self.token = FILLED.set(self)
        return self

    def __exit__(self, *error):
        FILLED.reset(self.token)


OUTSIDE = Entered()


def left_set(log, x):
    FILLED.set(3)
    return x * 2


def left_set_to_a_tensor(log, x):
    FILLED.set(x * 2)
    return x


def left_set_to_an_object(log, x):
    FILLED.set(Holder())
    return x


def counted(log, x):
    log.append(FILLED.get())
    FILLED.set(FILLED.get() + 1)
    return x


def token_returned(log, x):
    token = FILLED.set(3)
    log.append((token.var is FILLED, type(token) is contextvars.Token, token.old_value is token.MISSING))
    return x * 2, token


def used_token_returned(log, x):
    token = FILLED.set(1)
    FILLED.reset(token)
    return x, token


def token_stored(log, x):
    holder = Holder()
    holder.token = FILLED.set([holder])
    return holder


def set_over_a_break(log, x):
    token = FILLED.set([1])
    os.times()
    FILLED.get().append(2)
    log.append(list(FILLED.get()))
    FILLED.reset(token)
    log.append(FILLED.get())
    return x * 2


def set_again_over_breaks(log, x):
    first = EMPTY.set({"x": x})
    os.times()
    log.append(sorted(EMPTY.get()))
    second = EMPTY.set(5)
    os.times()
    log.append(EMPTY.get())
    EMPTY.reset(second)
    log.append(list(EMPTY.get()))
    EMPTY.reset(first)
    log.append(EMPTY.get("none"))
    return x * 2


def emptied_over_breaks(log, x):
    for value in (1, 2):
        token = EMPTY.set(value)
        os.times()
        EMPTY.reset(token)
        log.append(EMPTY.get("none"))
    try:
        EMPTY.get()
    except LookupError:
        log.append("lookup")
    return x


def nested_over_breaks(log, x):
    token = FILLED.set("outer")
    for number in range(3):
        inner = FILLED.set(number)
        log.append(FILLED.get())
        FILLED.reset(inner)
    os.times()
    log.append(FILLED.get())
    FILLED.reset(token)
    return x


def manager(log, x):
    with Entered() as entered:
        log.append(FILLED.get() is entered)
        y = x * 2
    log.append(FILLED.get())
    return y


def manager_from_outside(log, x):
    with OUTSIDE:
        return x * 2


def manager_over_a_break(log, x):
    with Entered() as entered:
        os.times()
        log.append(FILLED.get() is entered)
    log.append(FILLED.get())
    return x


def wrong_tokens(log, x):
    token = FILLED.set(1)
    FILLED.reset(token)
    for variable, wrong in ((FILLED, token), (EMPTY, FILLED.set(2))):
        try:
            variable.reset(wrong)
        except (RuntimeError, ValueError) as error:
            log.append(type(error).__name__)
    return x


def token_used_twice_over_breaks(log, x):
    token = FILLED.set(1)
    os.times()
    FILLED.reset(token)
    for _ in range(2):
        try:
            FILLED.reset(token)
        except RuntimeError as error:
            log.append("has already been used once" in str(error) and "<Token used" in str(error))
        os.times()
    return x


def reset_out_of_order(log, x):
    first, second = FILLED.set([1]), FILLED.set([2])
    FILLED.reset(first)
    log.append(FILLED.get())
    return second, second.old_value


def in_a_generator(log, x):
    def walk():
        token = FILLED.set("walking")
        yield FILLED.get()
        FILLED.reset(token)
        yield FILLED.get()

    log.append(list(walk()))
    walked = walk()
    log.append(next(walked))
    os.times()
    log.append(next(walked))
    return x


def across_a_backward(log, x):
    weight = torch.ones(2, requires_grad=True)
    token = FILLED.set(x * weight)
    (FILLED.get() + 1).sum().backward()
    FILLED.reset(token)
    return weight.grad


STEPS = (
    left_set, left_set_to_a_tensor, left_set_to_an_object, counted, token_returned, used_token_returned, token_stored,
    set_over_a_break, set_again_over_breaks, emptied_over_breaks, nested_over_breaks, manager, manager_from_outside,
    manager_over_a_break, wrong_tokens, token_used_twice_over_breaks, reset_out_of_order, in_a_generator,
    across_a_backward,
)  # fmt: skip


def _shown(value):
    if isinstance(value, contextvars.Token):
        old = value.old_value
        return "token", repr(value).startswith("<Token used"), old if old is value.MISSING else _shown(old)
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Holder):
        return "holder", None if value.token is None else repr(value.token).startswith("<Token used")
    return [_shown(item) for item in value] if isinstance(value, (tuple, list)) else value


def _history(run):
    history, log = [], []

    def go():
        for number in range(4):
            result = run(log, torch.ones(2) * number)
            history.append((_shown(result), _shown(FILLED.get()), _shown(EMPTY.get("none"))))

    contextvars.Context().run(go)
    return history, log


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_context_variables_are_left_as_in_eager(step):
    compiled = sidefx_train.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        assert _history(compiled) == _history(step)
    report = compiled.report()
    assert report.replays == 4 and not report.fallbacks, str(report)


def test_a_variable_set_otherwise_by_the_caller_is_seen():
    compiled = sidefx_train.compile(counted, backend="eager")
    log = []

    def go():
        for value in (1, 5, 1):
            FILLED.set(value)
            compiled(log, torch.ones(1))
            assert FILLED.get() == value + 1

    contextvars.Context().run(go)
    assert log == [1, 5, 1]


def test_what_only_the_step_set_and_reset_is_not_done_again():
    compiled = sidefx_train.compile(manager, backend="eager")
    compiled([], torch.ones(1))
    replay = compiled.report().sources()["residual"]
    assert "FILLED" not in replay and "v1.extend((True, 0))" in replay
