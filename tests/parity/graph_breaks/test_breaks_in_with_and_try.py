"""Breaks inside ``with``, ``try``, ``except`` and ``finally``: the handlers run once, in their order."""

from __future__ import annotations

import os
import sys

import pytest
import torch

import sidefx_train
from tests.support.graph_breaks import failing, in_parts, outside, trained
from tests.support.parity import parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


class Noted:
    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("enter")
        return self

    def __exit__(self, kind, value, trace):
        self.log.append(("leave", None if kind is None else kind.__name__))
        return kind is ValueError


def test_break_inside_with():
    def after(loss, log, state):
        with Noted(log) as manager:
            manager.seen = outside(loss)
            loss = loss * 2
        return loss, manager.seen

    in_parts(trained(after))


def test_break_inside_with_that_swallows_what_the_instruction_raises():
    def after(loss, log, state):
        with Noted(log):
            failing(loss)
            log.append("not reached")
        log.append("after")
        return loss * 2

    report = parity(trained(after), whole=False, captures=None)
    assert report.breaks and not report.fallbacks


def test_break_inside_no_grad():
    def after(loss, log, state):
        with torch.no_grad():
            value = outside(loss)
            doubled = loss * value
            log.append(torch.is_grad_enabled())
        log.append(torch.is_grad_enabled())
        return doubled

    in_parts(trained(after))


@pytest.mark.parametrize("call", [outside, failing])
def test_break_inside_try(call):
    def after(loss, log, state):
        try:
            log.append("try")
            value = call(loss)
            log.append("no error")
        except ValueError as error:
            log.append(str(error))
            value = -1.0
        else:
            log.append("else")
        finally:
            log.append("finally")
        return loss * value

    report = parity(trained(after), whole=False, captures=None)
    assert report.breaks and not report.fallbacks


def test_an_error_passes_through_the_callers_handlers():
    def inner(loss, log):
        try:
            return failing(loss)
        finally:
            log.append("inner finally")

    def after(loss, log, state):
        try:
            inner(loss, log)
        except ValueError as error:
            log.append(repr(error))
        return loss + 1

    report = parity(trained(after), whole=False, captures=None)
    assert report.breaks and not report.fallbacks


def test_an_error_that_nobody_handles():
    def after(loss, log, state):
        log.append("before")
        failing(loss)
        log.append("not reached")

    parity(trained(after), whole=False, captures=None)


def test_an_unset_variable_of_the_enclosing_function():
    def step(x, seen):
        def walk():
            os.times()
            yield 1
            try:
                yield late
            except NameError as error:
                yield type(error).__name__, str(error)

        seen.append(list(walk()))
        late = x * 2
        return late

    compiled = sidefx_train.compile(step, backend="eager")
    wanted, found = [], []
    for _ in range(3):
        step(torch.ones(1), wanted)
        compiled(torch.ones(1), found)
    assert found == wanted and wanted[0][1][0] == "NameError"


def test_break_inside_except():
    def after(loss, log, state):
        try:
            raise KeyError("k")
        except KeyError as error:
            log.append(outside(loss))
            log.append((str(error), repr(sys.exc_info()[1]), error.__traceback__ is not None))
            loss = loss * 2
        log.append(sys.exc_info()[1])
        return loss

    in_parts(trained(after))


def test_break_inside_finally():
    def after(loss, log, state):
        try:
            try:
                {}["k"]
            finally:
                log.append((outside(loss), repr(sys.exc_info()[1])))
        except KeyError as error:
            loss = loss * 3
            log.append(repr(error))
        return loss

    in_parts(trained(after))


def test_a_callee_breaks_while_its_caller_handles():
    def inner(loss, log):
        log.append(repr(sys.exc_info()[1]))
        try:
            raise ValueError(outside(loss))
        except ValueError as error:
            log.append(repr(error.__context__))
        value = outside(loss * 2)
        log.append(repr(sys.exc_info()[1]))
        return value

    def after(loss, log, state):
        for i in range(2):
            try:
                [][i]
            except IndexError as error:
                log.append(inner(loss, log))
                log.append((error.args, repr(sys.exc_info()[1])))
        return loss

    in_parts(trained(after))


def test_what_is_handled_is_raised_again_behind_a_break():
    def after(loss, log, state):
        try:
            try:
                raise KeyError("k")
            except KeyError:
                log.append(outside(loss))
                if state["calls"] % 2:
                    raise
                raise ValueError("v")
        except (KeyError, ValueError) as error:
            log.append((repr(error), repr(error.__context__)))
        return loss

    in_parts(trained(after))


def test_an_error_out_of_a_handler_behind_a_break():
    def after(loss, log, state):
        try:
            raise KeyError("k")
        except KeyError:
            log.append(outside(loss))
            raise

    parity(trained(after), whole=False, captures=None)


@pytest.mark.parametrize("decorator", [torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad()])
def test_a_function_that_the_step_decorates(decorator):
    """Regression: the decorated function reached code after the capture, with a callback of the capture in it."""
    weight = torch.randn(4, 4)

    def step(x):
        @decorator
        def inner(x):
            made = x @ weight
            os.times()
            return made @ weight

        return inner(x).float()

    compiled = sidefx_train.compile(step, backend="eager")
    for _ in range(3):
        x = torch.randn(2, 4)
        assert torch.equal(compiled(x), step(x))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "context",
    [
        torch.autograd.graph.allow_mutation_on_saved_tensors,
        lambda: torch.backends.mkldnn.flags(enabled=False),
        lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone),
    ],
    ids=["allow_mutation_on_saved_tensors", "mkldnn flags", "saved_tensors_hooks"],
)
def test_a_break_inside_a_context_of_torch_that_runs_natively(context):
    """Regression: a capture that stopped inside left a mode, and a flag of torch that made the eager step raise."""

    def states():
        modes = torch._C._len_torch_dispatch_stack(), torch.autograd.graph._allow_mutation_on_saved_tensors_enabled
        return *modes, torch._C._get_mkldnn_enabled()

    before = states()

    def after(loss, log, state):
        scale = torch.ones(1, requires_grad=True)
        with context():
            scaled = (loss * scale).exp()
            log.append(outside(loss))
            scaled.backward()
        log.append(states())
        return scale.grad

    parity(trained(after), whole=False, captures=None)
    assert states() == before
