"""A step that invalidates its own guards: its capture serves one call, and is not compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import sidefx_train
from sidefx_train.compile.pipeline import compile_capture
from sidefx_train.compile.pipeline.entry import Entry
from sidefx_train.compile.residual.generate import MISS
from tests.support.parity import Program, parity

ONCE = "runs once, operation by operation"


def once(report: Any) -> list[bool]:
    return [any(note.startswith(ONCE) for note in capture.caveats) for capture in report.captures]


def batch(i: int) -> tuple[torch.Tensor]:
    return (torch.randn(4, 3, generator=torch.Generator().manual_seed(i)),)


def trained(
    extra: Callable[[dict[str, Any]], Any], optimizer_class: Any = torch.optim.SGD, **state: Any
) -> Callable[[], Program]:
    def make() -> Program:
        model = nn.Linear(3, 2)
        optimizer = optimizer_class(model.parameters(), lr=0.1)
        box = dict(state)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean() * extra(box)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, batch, (model, optimizer, box))

    return make


def first_call(box: dict[str, Any]) -> float:
    if box["count"] == 0:
        box["begun"] = True
    box["count"] += 1
    return 1.0


def by_flag(box: dict[str, Any]) -> float:
    factor = 0.5 if box["first"] else 1.0
    box["first"] = False
    return factor


def by_cache(box: dict[str, Any]) -> Any:
    if box["mask"] is None:
        box["mask"] = torch.full((), 0.5)
    return box["mask"]


def toggled(box: dict[str, Any]) -> float:
    box["odd"] = not box["odd"]
    return 2.0 if box["odd"] else 1.0


def every_third(box: dict[str, Any]) -> float:
    box["count"] += 1
    return 2.0 if box["count"] % 3 == 0 else 1.0


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], list[bool]]] = {
    "a count at its beginning": (first_call, {"count": 0, "begun": False}, [True, False]),
    "a flag that is cleared": (by_flag, {"first": True}, [True, False]),
    "a cache that is filled": (by_cache, {"mask": None}, [True, False]),
    "a flag to and fro: compiled when it comes again": (toggled, {"odd": False}, [True, True, False, False]),
    "every third call": (every_third, {"count": 0}, [False, True, False]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(2)
def test_is_compiled_where_it_holds_for_more_than_one_call(name):
    extra, state, want = CASES[name]
    report = parity(trained(extra, **state), steps=9, backend="inductor", captures=len(want))
    assert once(report) == want, str(report)
    assert report.replays == 9, str(report)
    lowered = ["runner" in capture.seconds for capture in report.captures]
    assert lowered == [not single for single in want], str(report)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_without_a_compiler_there_is_nothing_to_save(backend):
    extra, state, _ = CASES["a flag that is cleared"]
    report = parity(trained(extra, **state), steps=4, backend=backend, captures=2)
    assert once(report) == [False, False], str(report)


class Cosine(torch.optim.lr_scheduler.CosineAnnealingLR):
    """A scheduler of the program, which is interpreted; the prologue computes the steps of torch's own."""


@pytest.mark.parametrize("scheduler_class", [Cosine, torch.optim.lr_scheduler.CosineAnnealingLR])
def test_a_scheduler_asks_whether_it_is_at_its_first_step(scheduler_class):
    def make() -> Program:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = scheduler_class(optimizer, 10)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            loss.mul_(2)  # the scheduler does not run behind the graph
            optimizer.zero_grad()

        return Program(step, batch, (model, optimizer, scheduler))

    report = parity(make, steps=5, backend="inductor", captures=2)
    assert once(report) == ([True, False] if scheduler_class is Cosine else [False]), str(report)


def test_an_error_in_that_one_call_is_eagers():
    def make() -> Program:
        box = {"first": True, "seen": 0}
        weight = torch.ones(3, requires_grad=True)

        def step(x):
            box["seen"] += 1
            if box["first"]:
                box["first"] = False
                (weight * x).sum().backward()
                raise ValueError("the first")
            (weight * x).sum().backward()

        return Program(step, batch, (box, weight))

    parity(make, steps=4, backend="inductor", captures=None, whole=False)


def test_a_guard_that_does_not_hold_at_once_leaves_the_call_to_eager(monkeypatch):
    """Regression: an entry for one call was removed twice, which raised."""
    compiled = compile_capture.compile_captured

    def missing(*args: Any) -> Entry:
        return replace(compiled(*args), replay=lambda args, kwargs: MISS)

    monkeypatch.setattr(compile_capture, "compile_captured", missing)
    box = {"first": True}

    def step(x):
        factor = 3.0 if box["first"] else 1.0
        box["first"] = False
        return x * factor

    with pytest.warns(sidefx_train.errors.SideFXWarning, match="SFX204"):
        fn = sidefx_train.compile(step)
        assert fn(torch.ones(2)).tolist() == [3.0, 3.0]
    assert box == {"first": False}


def test_background_compilation_compiles_nothing_for_one_call():
    box = {"count": 0}

    def step(x):
        box["count"] += 1
        return x * 2 if box["count"] == 2 else x + 1  # the second call makes a capture

    fn = sidefx_train.compile(step, warmup="background")
    found = []
    for i in range(8):
        found.append(fn(torch.full((2,), float(i))).tolist())
        assert fn.wait(timeout=120)
    assert found == [[i * 2.0] * 2 if i == 1 else [i + 1.0] * 2 for i in range(8)]
    assert box["count"] == 8
    report = fn.report()
    assert len(report.captures) == 1, str(report)
    assert report.captures[0].trigger == "first call"
    assert report.replays >= 4, str(report)


class KeepsNew(torch.optim.Optimizer):
    """Replaces all tensors of its state at each step, as optimizers with a quantized or factored state do."""

    NAMES = ("mean", "square", "row", "column", "scale")

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update({name: torch.zeros_like(p) for name in self.NAMES})
                for i, name in enumerate(self.NAMES):
                    state[name] = state[name] * 0.5 + p.grad * i
                p -= group["lr"] * sum(state[name] for name in self.NAMES)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_all_tensors_that_a_step_replaces_are_learned_in_one_capture(backend):
    make = trained(lambda box: 1.0, KeepsNew)
    report = parity(make, steps=6, backend=backend, captures=2)  # without a state, and with one
    assert not report.fallbacks, str(report)


def test_a_tensor_that_passes_from_one_name_to_another():
    def make() -> Program:
        box = {"new": torch.ones(2), "old": torch.zeros(2), "oldest": torch.zeros(2)}

        def step(x):
            box["oldest"], box["old"], box["new"] = box["old"], box["new"], box["old"] + x.mean()
            return box["oldest"] is box["old"]

        return Program(step, batch, box)

    assert len(parity(make, steps=6, backend="eager", captures=None).captures) <= 2
