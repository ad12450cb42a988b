"""Rematerialization in the backward of a whole step, the memory of a step, and its in-place updates."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import sidefx_train
from sidefx_train.bench.peak_memory import held_mb
from sidefx_train.bench.workloads import gpt
from sidefx_train.compile.backend.autotune import attention
from sidefx_train.compile.backend.passes import rematerialize
from tests.support.disk_cache import new_cache
from tests.support.parity import mlp


def training_step(model, optimizer):
    def step(batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def small_gpt():
    torch.manual_seed(0)
    work = gpt(vocabulary=32, width=64, heads=2, layers=4, length=32, rows=4)
    return work.model, work.batches


@pytest.fixture
def any_size(monkeypatch, tmp_path):
    monkeypatch.setattr(rematerialize, "_LEAST", 0)
    monkeypatch.setattr(attention, "_LARGEST", 0)  # short attention is faster decomposed, and then saves its weights
    new_cache(tmp_path, monkeypatch)  # a cached graph would not be lowered


def both(optimizer):
    """Returns (losses and parameters, MiB held by a step), eagerly and captured, and the captured step."""
    model, batches = small_gpt()
    found = []
    for captured in (False, True):
        mine = copy.deepcopy(model)
        step = training_step(mine, optimizer(mine.parameters()))
        if captured:
            step = sidefx_train.compile(step, fullgraph=True, on_failure="raise")
        values = [step(batch) for batch in batches] + [p.detach().clone() for p in mine.parameters()]
        found.append((values, held_mb(step, batches[0])))
    assert any("recomputed in the backward" in note for capture in step.report().captures for note in capture.notes), (
        step.report()
    )
    return found


def test_a_transformer_holds_less(any_size):
    (_, eager), (_, captured) = both(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
    assert captured <= 0.85 * eager, f"a step holds {captured} MiB, eager {eager}"


@pytest.mark.slow
def test_a_transformer_learns_the_same(any_size):
    (wanted, _), (found, _) = both(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    for want, have in zip(wanted, found, strict=True):
        assert (want - have).norm() <= 1e-5 * max(1.0, want.norm()), f"off by {(want - have).norm()}"


@pytest.mark.slow
def test_small_steps_are_left_alone():
    model, batches = small_gpt()
    step = sidefx_train.compile(training_step(model, torch.optim.SGD(model.parameters(), lr=0.1)), fullgraph=True)
    step(batches[0])
    assert not any("recomputed in the backward" in note for capture in step.report().captures for note in capture.notes)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD, one by one": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


OF_EACH_KIND = ("SGD, one by one", "AdamW", "fused AdamW", "fused SGD")
"""Always run: with Inductor the others differ only in their formula (``make slow``)."""


def on_both_backends(names):
    return [
        pytest.param(name, backend, marks=[] if backend == "aot_eager" or name in OF_EACH_KIND else pytest.mark.slow)
        for name in names
        for backend in ("aot_eager", "inductor")
    ]


@pytest.mark.parametrize(("name", "backend"), on_both_backends(OPTIMIZERS))
@pytest.mark.every(3)
def test_parameters_and_state_stay_where_they_are(name, backend):
    torch.manual_seed(0)
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    step = sidefx_train.compile(training_step(model, optimizer), backend=backend, fullgraph=True, on_failure="raise")
    batch = torch.randn(5, 6), torch.randint(0, 3, (5,))
    step(batch)

    def places():
        state = [t for p in model.parameters() for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
        return [t.data_ptr() for t in (*model.parameters(), *model.buffers(), *state)]

    before = places()
    for _ in range(3):
        step(batch)
    assert places() == before
    assert all(p.grad is None for p in model.parameters()), "gradients that the step forgets are there"
    sources = step.report().sources()
    if backend == "inductor":
        assert "copy_" not in sources["inductor"], "an update of an input is a copy"
    returned = re.search(r"^ *(\(?.*?\)?) = graph\(given\)", sources["runner"], re.MULTILINE)
    results = re.findall(r"r\d+", returned[1]) if returned else []
    gradients = len(list(model.parameters())) if name == "fused AdamW" else 0  # read by the update after the graph
    assert len(results) == 1 + gradients, f"the graph returns {results}: the loss and {gradients} gradients are needed"


FUSED = {
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.1, fused=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
}


@pytest.mark.parametrize(("name", "backend"), on_both_backends([*OPTIMIZERS, *FUSED]))
@pytest.mark.every(3)
def test_buffers_and_averages_stay_where_they_are(name, backend):
    """Batch norm's buffers and an average of the parameters are written after the update, so it is not a tail."""
    found = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        average = copy.deepcopy(model).requires_grad_(False)
        optimizer = (OPTIMIZERS | FUSED)[name](model.parameters())
        update = training_step(model, optimizer)

        def step(batch, model=model, average=average, update=update):
            loss = update(batch)
            with torch.no_grad():
                for kept, now in zip(average.parameters(), model.parameters(), strict=True):
                    kept.lerp_(now, 0.1)
            return loss

        def held(model=model, average=average, optimizer=optimizer):
            state = [t for p in model.parameters() for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
            return [*model.parameters(), *model.buffers(), *average.parameters(), *state]

        if captured:
            step = sidefx_train.compile(step, backend=backend, fullgraph=True, on_failure="raise")
        batches = [(torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in range(4)]
        losses = [step(batches[0])]
        places = [t.data_ptr() for t in held()]
        losses += [step(batch) for batch in batches[1:]]
        assert [t.data_ptr() for t in held()] == places, "something has moved"
        assert all(p.grad is None for p in model.parameters()), "gradients that the step forgets are there"
        found.append([*losses, *(t.detach() for t in held())])
    for wanted, have in zip(*found, strict=True):
        if backend == "inductor":
            torch.testing.assert_close(have, wanted, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(have, wanted), "not to the last bit"
    sources = step.report().sources()
    assert "copy_" not in sources.get("inductor", ""), "an update of an input is a copy"
    (returned,) = re.findall(r"^ *(\(?.*?\)?) = graph\(given\)", sources["runner"], re.MULTILINE)
    assert len(re.findall(r"r\d+", returned)) == 1, f"gradients leave the graph: {returned}"


def test_gradients_are_freed_before_the_next_step(any_size):
    """Values that a step drops are freed at its end."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    step = training_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    compiled = sidefx_train.compile(step, fullgraph=True, on_failure="raise")
    batch = torch.randn(4, 64), torch.randint(0, 64, (4,))
    for _ in range(2):
        step(batch)
    eager = held_mb(step, batch)
    for _ in range(2):
        compiled(batch)
    assert held_mb(compiled, batch) <= eager, "a captured step holds more than eager"
