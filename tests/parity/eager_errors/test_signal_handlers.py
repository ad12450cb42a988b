"""Exceptions of the program's signal handlers reach it, wherever the signal arrives."""

from __future__ import annotations

import copy
import functools
import signal
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import sidefx_train


class Late(Exception):
    pass


class Interrupts:
    """Raises the signal where it is armed to; its handler raises :class:`Late`."""

    def __init__(self) -> None:
        self.where, self.count = "", 0

    def at(self, place: str) -> None:
        if place == self.where:
            self.where = ""
            signal.raise_signal(signal.SIGUSR1)

    def handle(self, *_: object) -> None:
        self.count += 1
        raise Late("the time is over")


INTERRUPTS = Interrupts()


@torch.library.custom_op("tests_signal_handlers::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    INTERRUPTS.at("run")
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    INTERRUPTS.at("capture")
    return torch.empty_like(x)


double.register_autograd(lambda ctx, grad: grad * 2)


@pytest.fixture(params=["method", "partial"])
def handler(request) -> Iterator[Callable[..., None]]:
    found = INTERRUPTS.handle if request.param == "method" else functools.partial(INTERRUPTS.handle)
    before = signal.signal(signal.SIGUSR1, found)
    INTERRUPTS.count = 0
    yield found
    INTERRUPTS.where = ""
    signal.signal(signal.SIGUSR1, before)


def program(net: nn.Module, log: list[float]) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            loss = double(net(x)).square().mean()
            loss.backward()
        except Exception:
            log.append(-1.0)
            raise
        optimizer.step()
        optimizer.zero_grad()
        if torch.backends.mha.get_fastpath_enabled():
            log.append(1.0)
        return loss

    return step


def pair() -> tuple[nn.Module, list[float], nn.Module, list[float]]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    return net, [], copy.deepcopy(net), []


def equal(net: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))


def test_a_handler_that_raises_during_the_capture(handler):
    net, log, other, expected = pair()
    compiled = sidefx_train.compile(program(net, log), backend="eager")
    eager = program(other, expected)
    x = torch.randn(4, 3)
    INTERRUPTS.where = "capture"
    with pytest.raises(Late) as caught:
        compiled(x)
    assert caught.value.__context__ is None
    assert INTERRUPTS.count == 1 and log == [] and equal(net, other)
    assert signal.getsignal(signal.SIGUSR1) == handler
    for _ in range(3):
        assert torch.equal(compiled(x), eager(x))
    assert equal(net, other) and log == expected
    assert compiled.report().replays == 3 and not compiled.report().fallbacks


def test_a_handler_that_replaces_itself_stays_replaced(handler):
    def once(*_: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise Late

    net, log, _, _ = pair()
    compiled = sidefx_train.compile(program(net, log), backend="eager")
    signal.signal(signal.SIGUSR1, once)
    INTERRUPTS.where = "capture"
    with pytest.raises(Late):
        compiled(torch.randn(4, 3))
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_handler_that_raises_while_the_graph_runs(handler, backend):
    net, log, other, expected = pair()
    compiled = sidefx_train.compile(program(net, log), backend=backend)
    eager = program(other, expected)
    x = torch.randn(4, 3)
    for _ in range(2):
        compiled(x), eager(x)
    INTERRUPTS.where = "run"
    with pytest.raises(Late):
        compiled(x)
    assert INTERRUPTS.count == 1
    assert not compiled.report().fallbacks
    for _ in range(2):
        compiled(x), eager(x)
    assert equal(net, other)
    assert compiled.report().calls == 5


def test_a_handler_that_raises_while_guards_are_checked(handler):
    net, log, other, expected = pair()
    compiled = sidefx_train.compile(program(net, log), backend="eager")
    eager = program(other, expected)
    x = torch.randn(4, 3)
    for _ in range(3):
        compiled(x), eager(x)
    asked = torch.backends.mha.get_fastpath_enabled.__code__

    def profile(frame, event, arg):
        if event == "call" and frame.f_code is asked:
            INTERRUPTS.at("guard")

    INTERRUPTS.where = "guard"
    sys.setprofile(profile)
    try:
        with pytest.raises(Late):
            compiled(x)
    finally:
        sys.setprofile(None)
    assert INTERRUPTS.count == 1 and equal(net, other) and log == expected
    compiled(x), eager(x)
    assert equal(net, other) and log == expected
    assert len(compiled.report().captures) == 1


def test_an_interrupt_runs_no_handler_of_the_step():
    net, log, other, _ = pair()
    step = program(net, log)

    def guarded(x: torch.Tensor) -> torch.Tensor:
        try:
            return step(x)
        finally:
            log.append(2.0)

    def interrupt() -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, lambda *_: interrupt())
    compiled = sidefx_train.compile(guarded, backend="eager")
    INTERRUPTS.where = "capture"
    try:
        with pytest.raises(KeyboardInterrupt):
            compiled(torch.randn(4, 3))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert log == [] and equal(net, other)
