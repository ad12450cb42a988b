"""A compiled step that outlives a model keeps neither the model nor its optimizer alive; what lives stays captured."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch
from torch import nn

import sidefx_train
from sidefx_train.compile.native import guards_module
from sidefx_train.compile.runtime import entry_holder

BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def native_module():
    if guards_module() is None:
        pytest.skip("no C++ compiler")


def make(optimizer=torch.optim.Adam):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    return model, optimizer(model.parameters(), lr=0.1)


def batch():
    return torch.randn(3, 4)


def train_step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def watched(*objects):
    """Weak references to models and optimizers, and to all that they hold which can be referred to weakly."""
    found = []
    for each in objects:
        found.append(weakref.ref(each))
        if isinstance(each, nn.Module):
            held = [*each.modules(), *each.parameters(), *each.buffers()]
        else:
            held = [state for entry in each.state.values() for state in entry.values() if torch.is_tensor(state)]
        found += [weakref.ref(part) for part in held if part is not each]
    return found


def alive(refs):
    gc.collect()
    return [ref() for ref in refs if ref() is not None]


def captured_only(step, calls):
    report = step.report()
    assert report.replays == calls and not report.breaks, str(report)


@pytest.mark.parametrize("backend", BACKENDS)
def test_models_as_arguments(backend):
    step = sidefx_train.compile(train_step, backend=backend)
    for round in range(2):
        model, optimizer = make()
        for _ in range(3):
            step(model, optimizer, batch())
        captured_only(step, 3 * (round + 1))
        refs = watched(model, optimizer)
        assert len(alive(refs)) == len(refs)
        del model, optimizer
        assert alive(refs) == []
    assert not step._replays and step._cache.newest is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_closure_variable_that_gets_another_value(backend):
    model, optimizer = make()

    @sidefx_train.compile(backend=backend)
    def step(x):
        return train_step(model, optimizer, x)

    for _ in range(3):
        step(batch())
    refs = watched(model, optimizer)
    model, optimizer = make(torch.optim.SGD)
    assert alive(refs) == []
    for _ in range(3):
        step(batch())
    captured_only(step, 6)
    assert len(alive(watched(model, optimizer))) == len(watched(model, optimizer))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_and_a_step_over_its_model(backend):
    model, _ = make()
    compiled = sidefx_train.compile(model, backend=backend)
    for _ in range(3):
        compiled(batch()).sum().backward()
    refs = [*watched(model), weakref.ref(compiled)]
    del model, compiled
    assert alive(refs) == []
    held = make()
    step = sidefx_train.compile(lambda x: train_step(*held, x), backend=backend)
    for _ in range(3):
        step(batch())
    refs = [*watched(*held), weakref.ref(step)]
    step = held = None
    assert alive(refs) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, lambda p, lr: torch.optim.SGD(p, lr, 0.9)])
def test_an_optimizer_of_a_model_that_lives_on(kind, backend):
    step = sidefx_train.compile(train_step, backend=backend)
    model, optimizer = make(kind)
    for _ in range(3):
        step(model, optimizer, batch())
    refs, others = watched(optimizer), watched(model)
    assert len(refs) > 4
    del optimizer
    assert alive(refs) == [] and len(alive(others)) == len(others)
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer, batch())
    captured_only(step, 6)


def test_a_submodule_that_is_replaced():
    model, optimizer = make()
    step = sidefx_train.compile(train_step, backend="eager")
    for _ in range(3):
        step(model, optimizer, batch())
    refs = watched(model[3])
    model[3] = nn.Linear(8, 2)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    optimizer.state.clear()
    assert alive(refs) == []


class Trainer:
    def __init__(self):
        self.model, self.optimizer = make()
        self.model.trainer = [self]
        self.history = []

    def training_step(self, x):
        self.history.append(train_step(self.model, self.optimizer, x))
        return self.history[-1]


def _hook(model):
    model[0].register_forward_hook(lambda *_: model.trainer and None)


def test_cycles_of_the_program():
    """A trainer that its model refers to, and a hook over the model: only the collector finds them."""

    def run(trainer, x):
        return trainer.training_step(x)

    step = sidefx_train.compile(run, backend="eager")
    trainer = Trainer()
    model = trainer.model
    _hook(model)
    for _ in range(5):
        step(trainer, batch())
    assert step.report().replays == 5
    refs = [*watched(model, trainer.optimizer), weakref.ref(trainer)]
    del trainer, model
    assert alive(refs) == []
    trainer = Trainer()
    step = sidefx_train.compile(trainer.training_step, backend="eager")
    for _ in range(5):
        step(batch())
    refs = [*watched(trainer.model, trainer.optimizer), weakref.ref(trainer)]
    del trainer
    assert len(alive(refs)) == len(refs), "the step holds its method's object, as any function does"
    del step
    assert alive(refs) == []


@pytest.mark.parametrize("container", [lambda a, b: [a, b], lambda a, b: {"model": a, "optimizer": b}])
def test_models_in_containers(container):
    def run(held, x):
        model, optimizer = held.values() if isinstance(held, dict) else held
        return train_step(model, optimizer, x)

    step = sidefx_train.compile(run, backend="eager")
    held = container(*make())
    for _ in range(3):
        step(held, batch())
    captured_only(step, 3)
    refs = watched(*(held.values() if isinstance(held, dict) else held))
    held.clear()
    assert alive(refs) == []


def test_over_a_graph_break():
    def run(model, optimizer, x):
        loss = model(x).square().mean()
        os.times()
        loss.backward()
        os.getloadavg()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = sidefx_train.compile(run, backend="eager")
    model, optimizer = make()
    with pytest.warns(sidefx_train.errors.SideFXWarning):
        for _ in range(4):
            step(model, optimizer, batch())
    assert step.report().replays >= 3
    refs = watched(model, optimizer)
    assert len(alive(refs)) == len(refs)
    del model, optimizer
    assert alive(refs) == []


def test_a_step_that_cannot_be_captured():
    def run(model, x):
        with torch.random.fork_rng(devices=[]):
            noise = torch.randn(())
        return model(x) + noise

    step = sidefx_train.compile(run, backend="eager")
    model, _ = make()
    with pytest.warns(sidefx_train.errors.SideFXWarning):
        for _ in range(3):
            step(model, batch())
    assert step._limits.stops and step._limits.stops[0].holds is not None, "the test is for the guard of a stop"
    refs = watched(model)
    del model
    assert alive(refs) == []


HELD = make()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@torch.library.custom_op("sidefx_tests_entry_holder::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: grad * 2, setup_context=lambda ctx, inputs, output: None)


MODELS = {
    "custom operator": lambda net, x: doubled(net(x)),
    "plain": lambda net, x: net(x),
    "views": lambda net, x: (net(x).t(), net(x).t()[0] * 2),
    "a view that changes": lambda net, x: (h := net(x), h.view(-1).mul_(2), h.sum())[2],
    "custom function": lambda net, x: Doubled.apply(net(x)),
}


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(2)
def test_hooks_of_accumulation_nodes_over_a_backward_outside(name):
    """Regression: an entry kept outputs of the trace, whose autograd graph has the hooks and what they refer to."""

    def train():
        net, seen = nn.Linear(4, 2), []
        node = torch.autograd.graph.get_gradient_edge(net.weight).node
        handles = [(node, node.register_prehook(lambda grads: seen.append((net.weight.shape, len(handles)))))]
        compiled = sidefx_train.compile(lambda x: MODELS[name](net, x), backend="eager", warmup="now")
        for _ in range(3):
            made = compiled(batch())
            sum(each.sum() for each in (made if type(made) is tuple else (made,))).backward()
        assert len(seen) == 3 and compiled.report().replays
        return weakref.ref(net)

    dropped = train()
    while gc.collect():  # cycles through nodes of autograd take several
        pass
    assert dropped() is None


def test_an_operator_whose_derivative_is_python():
    """Regression: its autograd node kept the world of the capture."""

    def train():
        net = nn.Linear(4, 2)

        def step(x):
            loss = doubled(net(x)).sum()
            loss.backward()
            net.zero_grad()
            return loss.detach()

        compiled = sidefx_train.compile(step, backend="eager", warmup="now")
        for _ in range(2):
            compiled(batch())
        assert compiled.report().replays
        return weakref.ref(net)

    dropped = train()
    gc.collect()
    assert dropped() is None


def test_what_lives_stays_captured():
    """Collections during a run cost no capture, and clear no weak reference."""
    model, optimizer = make()

    def run(x):
        return train_step(model, optimizer, x), train_step(*HELD, x)

    step = sidefx_train.compile(run, backend="eager")
    refs = []
    for i in range(6):
        step(batch())
        refs = refs or watched(model, optimizer, *HELD)
        for generation in range(3):
            gc.collect(generation)
        assert len(step._replays) == 1 and all(ref() is not None for ref in refs), i
    captured_only(step, 6)


def test_new_models_in_the_memory_of_old_ones():
    """Addresses come again: each model must be trained, never the one before."""
    step = sidefx_train.compile(train_step, backend="eager", recapture_limit=100)
    addresses = set()
    for round in range(8):
        results = []
        for run in (train_step, step):
            torch.manual_seed(round)
            model = nn.Linear(4, 1 + round % 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            addresses.add(id(model))
            results.append([run(model, optimizer, torch.ones(2, 4) * i) for i in range(3)])
            results[-1] += [parameter.detach().clone() for parameter in model.parameters()]
            del model, optimizer
            if round % 3:
                gc.collect()
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    assert len(addresses) < 16, "the test is for addresses that come again"


def test_captures_that_do_not_pay_count():
    step = sidefx_train.compile(train_step, backend="eager", recapture_limit=3)
    with pytest.warns(sidefx_train.errors.SideFXWarning, match="which the program drops after a few calls"):
        for _ in range(5):
            step(*make(), batch())
            gc.collect()
    report = step.report()
    assert len(report.captures) == 3 and report.calls == 5


def test_captures_that_pay_do_not_count(monkeypatch):
    monkeypatch.setattr("sidefx_train.compile.runtime.entry_cache._AMORTIZED_AFTER", 3)
    step = sidefx_train.compile(train_step, backend="eager", recapture_limit=3)
    for _ in range(6):
        model, optimizer = make()
        for _ in range(4):
            step(model, optimizer, batch())
        del model, optimizer
        gc.collect()
    captured_only(step, 24)


def test_a_model_dropped_while_its_entry_runs():
    held = list(make())

    def run(held, x):
        loss = held[0](x).sum()
        loss.backward()
        os.times()
        refs = watched(held[0])
        held.clear()
        return len(alive(refs)), loss.detach()

    step = sidefx_train.compile(run, backend="eager")
    for _ in range(3):
        held = list(make())
        kept = held[0]
        count, _ = step(held, batch())
        assert count == len(watched(kept))
        refs = watched(kept)
        del kept
        assert alive(refs) == []


def test_until_the_native_module_is_built(monkeypatch):
    there = False
    monkeypatch.setattr(entry_holder, "guards_ready", lambda: there)
    step = sidefx_train.compile(train_step, backend="eager")
    model, optimizer = make()
    for _ in range(3):
        step(model, optimizer, batch())
    assert type(step._replays[0]) is entry_holder.PlainHolder
    there = True
    step(model, optimizer, batch())
    assert type(step._replays[0]) is not entry_holder.PlainHolder and step._cache.newest_holder is step._replays[0]
    captured_only(step, 4)
    refs = watched(model, optimizer)
    del model, optimizer
    assert alive(refs) == []


def test_a_holder_alone():
    native = guards_module()
    replay = lambda args, kwargs: args  # noqa: E731
    holder = native.entry_holder(replay, [replay], (), "missed")
    assert holder((1,), {}) == (1,) and holder.entry == [replay]
    holder.drop()
    assert holder((1,), {}) == "missed" and holder.entry is None
    plain = entry_holder.PlainHolder(replay, [replay], "missed", None)
    assert plain((1,), {}) == (1,)
    plain.drop()
    assert plain((1,), {}) == "missed" and plain.entry is None
    with pytest.raises(TypeError):
        native.entry_holder(replay)


def test_background_compilation():
    step = sidefx_train.compile(train_step, backend="eager", warmup="background")
    model, optimizer = make()
    for _ in range(6):
        step(model, optimizer, batch())
        assert step.wait(120)
    assert step.report().replays
    refs = watched(model, optimizer)
    del model, optimizer
    assert alive(refs) == []
