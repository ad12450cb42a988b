"""Functions that a step runs are replaced between two calls: library functions, methods, the code of a function."""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from sidefx_train.errors import SideFXWarning

SEEN: list[Any] = []


TABLE = {"more": 0.0}


def scaled(x, factor=2.0, *, shift=1.0, table=TABLE):
    return x * factor + shift + table["more"]


def other_scaled(x, factor=2.0, *, shift=1.0, table=TABLE):
    return x * factor - shift


class Base:
    def weigh(self, x):
        return x * 3


class Model(nn.Module, Base):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.0)
        self.norm = nn.LayerNorm(3)
        self.attention = nn.MultiheadAttention(3, 1)

    def forward(self, x):
        x = self.drop(F.relu(self.first(x)))
        return self.norm(self.weigh(x)) + self.attention(x, x, x)[0] + torch.sigmoid(x)


class World:
    """A training step and all objects that it uses."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, x):
        out = 2 * scaled(self.model(x)) * math.sqrt(4.0)
        loss = (out * out).mean() + F.mse_loss(out, out.detach() * 0.5) + x.mul(2).sum() * 0
        loss = loss + abs(-0.1) + isinstance(out, torch.Tensor)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self) -> list[torch.Tensor]:
        return [value.detach().clone() for value in self.model.state_dict().values()]


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function`` with twice its value and a side effect."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        SEEN.append(function.__name__)
        return function(*args, **kwargs) * 2

    return wrapper


def patched(owner: Any, name: str, make: Callable[[Any], Any] = noted) -> Callable[[], Any]:
    """Returns a context manager that replaces ``owner.name``."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


@contextlib.contextmanager
def field(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets a field that every object of its type has, and that cannot be deleted."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def forward_twice(self, x):
    SEEN.append("forward")
    return F.linear(x, self.weight, self.bias) * 2


class Twice(Base):
    def weigh(self, x):
        return x * 6


def with_setattr(self, name, value):
    SEEN.append(name)
    object.__setattr__(self, name, value)


OTHER_F = types.SimpleNamespace(dropout=noted(F.dropout))

REPLACED = {
    "code": lambda: field(scaled, "__code__", other_scaled.__code__),
    "code_of_a_library": lambda: field(F.relu, "__code__", (lambda input, inplace=False: input * 3).__code__),
    "code_of_a_method": lambda: field(nn.Linear.forward, "__code__", (lambda self, input: input * 3).__code__),
    "defaults": lambda: field(scaled, "__defaults__", (5.0,)),
    "keyword_defaults": lambda: field(scaled, "__kwdefaults__", {"shift": 9.0, "table": TABLE}),
    "a_keyword_default": lambda: mock.patch.dict(scaled.__kwdefaults__, shift=9.0),
    "contents_of_a_default": lambda: mock.patch.dict(TABLE, more=3.0),
    "function_of_torch": patched(F, "relu"),
    "function_called_inside_torch": patched(F, "linear"),
    "function_in_c": patched(torch, "sigmoid"),
    "function_in_c_called_inside_torch": patched(torch._C._nn, "mse_loss"),
    "function_of_python": patched(math, "sqrt"),
    "builtin": lambda: mock.patch.object(builtins, "abs", lambda value: 7.0),
    "method_of_a_module": lambda: mock.patch.object(nn.Linear, "forward", forward_twice),
    "new_method": lambda: mock.patch.object(Model, "weigh", lambda self, x: x * 4, create=True),
    "new_method_of_a_library": lambda: mock.patch.object(
        nn.MultiheadAttention, "__call__", lambda self, *args: (args[0] * 2, None), create=True
    ),
    "method_of_a_base": lambda: mock.patch.object(Base, "weigh", lambda self, x: x * 4),
    "bases": lambda: field(Model, "__bases__", (nn.Module, Twice)),
    "method_of_tensors": patched(torch.Tensor, "mul"),
    "operator_of_tensors": lambda: mock.patch.object(torch.Tensor, "__mul__", lambda a, b: torch.mul(a, b) + 1),
    "reflected_operator": lambda: mock.patch.object(torch.Tensor, "__rmul__", lambda a, b: torch.mul(a, b) + 1),
    "backward": lambda: mock.patch.object(torch.Tensor, "backward", lambda self: None),
    "clipping": lambda: mock.patch.object(torch.nn.utils, "clip_grad_norm_", lambda parameters, most: None),
    "optimizer_step": lambda: mock.patch.object(torch.optim.SGD, "step", lambda self, closure=None: None),
    "optimizer_update": lambda: mock.patch.object(sys.modules["torch.optim.sgd"], "sgd", lambda *args, **kwargs: None),
    "zero_grad": lambda: mock.patch.object(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: None),
    "setattr_of_modules": lambda: mock.patch.object(nn.Dropout, "__setattr__", with_setattr, create=True),
    "name_of_a_library": lambda: mock.patch.object(torch.nn.modules.dropout, "F", OTHER_F),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


def run(replace: Callable[[], Any], backend: str | None) -> list[Any]:
    """Returns the outcomes of six calls of the step; the third and the fourth with the replacement."""
    world = World()
    SEEN.clear()
    step: Any = world.step
    if backend is not None:
        step = sidefx_train.compile(step, backend=backend)
    moments: list[Any] = []
    for index in range(6):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(index))
        if index in (2, 3):
            with replace():
                value = step(x)
        else:
            value = step(x)
        moments.append((value, world.state(), list(SEEN)))
    return moments


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.every(8)
def test_replaced_between_calls(name):
    eager = run(REPLACED[name], None)
    captured = run(REPLACED[name], "eager")
    for index, (want, have) in enumerate(zip(eager, captured, strict=True)):
        assert torch.equal(want[0], have[0]), f"call {index}: {have[0]}, eager gives {want[0]}"
        for a, b in zip(want[1], have[1], strict=True):
            assert torch.equal(a, b), f"call {index}: parameters differ"
        assert want[2] == have[2], f"call {index}: effects {have[2]}, eager {want[2]}"
    plain = run(lambda: mock.patch.object(math, "pi", math.pi), None)
    assert (
        any(not torch.equal(a[0], b[0]) for a, b in zip(eager, plain, strict=True)) or eager[-1][2] or name in _SILENT
    )


_SILENT = {"setattr_of_modules"}
"""Replacements that the step never runs."""


def test_unrelated_changes_cause_no_recapture():
    world = World()
    step = sidefx_train.compile(world.step, backend="eager")
    x = torch.ones(4, 3)
    step(x)
    with mock.patch.object(F, "gelu", None), mock.patch.object(torch.Tensor, "some_helper", 1, create=True):
        step(x)
    nn.Linear.some_helper = lambda self: None  # type: ignore[attr-defined]
    try:
        step(x)
    finally:
        del nn.Linear.some_helper  # type: ignore[attr-defined]
    step(x)
    report = sidefx_train.explain(step)
    assert report.replays == 4 and not report.recaptures, f"{report}"


def test_going_back_reuses_the_capture():
    world = World()
    step = sidefx_train.compile(world.step, backend="eager")
    x = torch.ones(4, 3)
    step(x)
    for _ in range(3):
        with mock.patch.object(F, "relu", F.gelu):
            step(x)
        step(x)
    (recapture,) = sidefx_train.explain(step).recaptures
    assert recapture.source == "torch.nn.functional.relu", f"{recapture}"


def test_replaced_special_method_of_tensors_is_refused():
    def step(x):
        return [row * 2 for row in x]

    with mock.patch.object(torch.Tensor, "__iter__", lambda self: iter([self[0]])):
        compiled = sidefx_train.compile(step, backend="eager")
        with pytest.warns(SideFXWarning, match="was replaced by user code"):
            assert len(compiled(torch.ones(3, 2))) == 1
    assert len(compiled(torch.ones(3, 2))) == 3


def test_a_builtin_that_torch_computes_with():
    """Conditions on numbers came out wrong: a momentum that is not zero was taken for zero."""
    world, eager = World(), World()
    step = sidefx_train.compile(world.step, backend="eager")
    for index in range(6):
        patch = mock.patch.object(builtins, "abs", lambda value: 7.0)
        replaces = patch if index in (2, 3) else contextlib.nullcontext()
        x = torch.randn(4, 3)
        with replaces, warnings.catch_warnings():
            warnings.simplefilter("ignore", SideFXWarning)
            assert torch.equal(step(x), eager.step(x))
    assert all(torch.equal(a, b) for a, b in zip(world.state(), eager.state(), strict=True))
    report = step.report()
    assert len(report.captures) == 1 and report.replays == 4, str(report)
    assert "builtins.abs is replaced" in str(report)
