"""Numbers that a step draws with Python's or NumPy's generators: drawn before the graph, and decisions are guards."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sidefx_train
from tests.support.parity import Program, parity
from tests.support.training_steps import ROWS, WIDTH, stacked

OWN, NUMPY = random.Random(), np.random.default_rng()


def states():
    bits = NUMPY.bit_generator.state["state"]["state"]
    return random.getstate()[1], OWN.getstate(), np.random.get_state()[1:], bits


def seed():
    random.seed(3)
    np.random.seed(3)
    OWN.seed(3)
    NUMPY.bit_generator.state = np.random.PCG64(3).state


def between(program, index):
    """Seeds all generators before the first call; keeps their states after every call."""
    if not index:
        seed()
    program.watch[-1].append(repr(states()))


def coin(draw):
    def body(model, x):
        y = model(x)
        return (y * 2 if draw() < 0.5 else y.tanh()).square().mean()

    return body


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        OWN.random,
        np.random.rand,
        NUMPY.random,
        lambda: random.uniform(0, 1),
        lambda: np.random.uniform(low=0.0, high=1.0),
        lambda: random.gauss(0.5, 0.2),
        lambda: NUMPY.normal(0.5, 0.2),
    ],
    ids=["python", "own", "numpy", "generator", "uniform", "keywords", "gauss", "normal"],
)
@pytest.mark.every(2)
def test_each_side_of_a_random_decision_is_captured_once(draw):
    report = parity(stacked(coin(draw)), steps=12, captures=2, between=between)
    assert len(report.captures) == 2
    assert "draw" not in report.recaptures[0].source
    assert report.recaptures[0].source.endswith("()")


@pytest.mark.parametrize(
    "mixed",
    [
        lambda: random.betavariate(0.5, 0.5),
        lambda: np.random.beta(0.5, 0.5),
        lambda: NUMPY.beta(0.5, 0.5),
        lambda: max(0.1, random.random()),
    ],
    ids=["python", "numpy", "generator", "max"],
)
def test_a_drawn_factor_is_an_input_of_the_graph(mixed):
    def body(model, x):
        share = mixed()
        return model(share * x + (1 - share) * x.flip(0)).square().mean()

    parity(stacked(body), steps=8, between=between)


def test_drawn_integers_and_choices_are_captured_once_each():
    def body(model, x):
        start = random.randint(0, 1)
        size = np.random.randint(2)
        layer = random.choice(list(model))
        return layer(x.roll(start, 0))[size:].square().mean()

    parity(stacked(body), steps=12, captures=8, between=between)


def test_rare_combinations_of_decisions_are_captured_in_parts():
    """Sixteen combinations: the first ones have graphs of their own, the others share parts."""

    def body(model, x):
        x = model[0](x)
        for layer in model[1:]:
            if random.random() < 0.5:
                x = F.dropout(layer(x), 0.1)
        return x.square().mean()

    report = parity(stacked(body, layers=5), steps=40, captures=None, whole=False, between=between)
    assert len(report.captures) == 9 and not report.fallbacks
    assert {found.code for found in report.breaks} == {"SFX103"}
    assert report.replays == 40


def test_a_decision_that_needs_the_very_float_is_left_to_python():
    def body(model, x):
        names = {}
        names[random.random()] = 1.0  # hashes it
        return model(x).square().mean() * sum(names.values())

    report = parity(stacked(body), steps=8, captures=None, whole=False, between=between)
    assert len(report.captures) <= 2 and not report.fallbacks


def test_an_entry_that_does_not_fit_takes_its_draws_back():
    def body(model, x):
        y = model(x)
        return (y * random.random() + NUMPY.random() if np.random.rand() < 0.5 else y).square().mean()

    def batch(index):
        return (torch.randn(3 + index % 3, WIDTH),)

    parity(stacked(body, batch), steps=12, captures=6, between=between)


def test_a_failing_graph_takes_its_draws_back():
    def body(model, x, label):
        y = model(x) if random.random() < 0.5 else model(x * 2)
        return F.cross_entropy(y, label) * random.random()

    def batch(index):
        return torch.randn(ROWS, WIDTH), torch.full((ROWS,), WIDTH if index % 3 == 2 else 1)

    report = parity(stacked(body, batch), steps=9, captures=2, whole=False, between=between)
    assert {found.code for found in report.fallbacks} == {"SFX202"}


def test_a_failed_assumption_takes_the_draws_back():
    def body(model, x):
        loss = model(x).square().mean() * random.random()
        if torch.isnan(loss):
            return model(torch.nan_to_num(x)).mean() * random.random()
        return loss

    def batch(index):
        return (torch.full((ROWS, WIDTH), float("nan") if index == 4 else 1.0),)

    report = parity(stacked(body, batch), steps=7, captures=1, whole=False, between=between)
    assert [found.code for found in report.fallbacks] == ["SFX208"]


def test_another_generator_in_its_place():
    class Holder:
        generator = random.Random(1)

    def make():
        holder = Holder()
        holder.generator = random.Random(1)
        program = stacked(lambda model, x: model(x).sum() * holder.generator.random())()
        program.watch.insert(0, holder)
        return Program(program.step, program.batch, [*program.watch[1:], []]), holder

    def run(wrap):
        torch.manual_seed(0)
        program, holder = make()
        step, found = wrap(program.step), []
        for index in range(6):
            if index == 3:
                holder.generator = random.Random(2)
            found += [step(*program.batch(index)).item(), holder.generator.getstate()]
        return found

    assert run(lambda step: sidefx_train.compile(step, backend="eager")) == run(lambda step: step)


@pytest.mark.parametrize("make_generator", [lambda: random.Random(7), lambda: np.random.default_rng(7)])
def test_generators_in_arguments_and_created_in_the_step(make_generator):
    def body(model, x, generator):
        inside = random.Random(5)
        return model(x).square().mean() * generator.random() + inside.random()

    def batch(index):
        return torch.randn(ROWS, WIDTH), make_generator()

    def run(wrap):
        torch.manual_seed(0)
        program = stacked(body, batch)()
        step, found = wrap(program.step), []
        for index in range(4):
            x, generator = batch(index)
            found += [step(x, generator).item(), generator.random()]
        return found

    assert run(lambda step: sidefx_train.compile(step, backend="eager")) == run(lambda step: step)


def test_decisions_after_the_last_tensor_operation_are_not_guards():
    log = []

    def make():
        program = stacked(lambda model, x: model(x).square().mean() * random.random())()

        def step(x):
            loss = program.step(x)
            if random.random() < 0.3:
                log.append(random.random())
            return loss

        log.clear()
        return Program(step, program.batch, [*program.watch[:2], log, []])

    parity(make, steps=10, captures=1, between=between)


@pytest.mark.parametrize("read", [random.getstate, lambda: random.shuffle([1, 2, 3]), lambda: random.seed(4)])
def test_other_uses_of_the_generator_keep_their_order(read):
    def body(model, x):
        y = model(x) * random.random()
        found = read()
        return y.sum() * random.random() if found is None else y.sum() * (found[1][-1] + random.random())

    parity(stacked(body), steps=5, captures=None, whole=False, between=between)


def test_a_draw_in_a_backward_outside_happens_there():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * random.random()

        @staticmethod
        def backward(ctx, grad):
            return grad * random.random()

    def run(wrap):
        seed()
        forward, found = wrap(lambda x: Scaled.apply(x) * 2), []
        for _ in range(4):
            x = torch.ones(3, requires_grad=True)
            out = forward(x).sum()
            found += [random.random(), out.item()]
            out.backward()
            found += [x.grad.tolist(), random.random()]
        return found

    assert run(lambda step: sidefx_train.compile(step, backend="eager")) == run(lambda step: step)


def test_a_recomputed_region_draws_again():
    def body(model, x):
        def region(x):
            return model(x) * random.random()

        return torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False).square().mean()

    parity(stacked(body), steps=4, captures=None, whole=False, between=between)


def test_in_the_background():
    """While a worker compiles, testing whether a call fits leaves the generators as they are."""

    def run(wrap):
        torch.manual_seed(0)
        seed()
        program = stacked(coin(random.random))()
        step, found = wrap(program.step), []
        for index in range(10):
            found += [step(*program.batch(index)).item(), repr(states())]
            if isinstance(step, sidefx_train.compile(len).__class__):
                step.wait()
        return found, step

    wanted, _ = run(lambda step: step)
    found, step = run(lambda step: sidefx_train.compile(step, backend="eager", warmup="background"))
    assert found == wanted and step.report().replays > 3


def test_under_inductor_with_its_comparisons():
    parity(stacked(coin(random.random)), steps=6, captures=2, backend="inductor", between=between, keep_slower=False)


def _normalized(x):
    noise = np.random.randn(4)
    view, total = noise[1:], noise.sum()
    noise -= noise.mean()
    view *= 2
    noise[noise < 0] = 0.5
    noise[np.random.randint(4)] += 1
    return x + torch.from_numpy(noise) * total, noise


def _written_after_a_tensor(x):
    noise = np.random.randn(4)
    before = torch.from_numpy(noise) * 1
    noise *= 2
    return x + before + torch.from_numpy(noise)


ARRAYS = {
    "noise": lambda x: x + torch.from_numpy(np.random.randn(3, 4).astype("float32")) * 0.1,
    "scaled": lambda x: x + torch.from_numpy(np.random.uniform(size=(3, 4)) * 2 - 1).float(),
    "copied": lambda x: x + torch.tensor(NUMPY.normal(0, 1, (3, 4)), dtype=torch.float32),
    "reshaped": lambda x: x * torch.as_tensor(np.random.beta(0.5, 0.5, 12).reshape(3, 4)).float(),
    "permutation": lambda x: x[np.random.permutation(3)],
    "rows": lambda x: x[NUMPY.choice(3, 2, replace=False)] * 2,
    "columns": lambda x: x[:, np.random.randint(0, 4, (3,))],
    "sample": lambda x: x[random.sample(range(3), 2)],
    "sample_of_columns": lambda x: x[:, OWN.sample(range(4), 2)] + random.sample(range(5), 3)[0],
    "summed": lambda x: x + float(np.random.randn(3).sum()),
    "multiplied": lambda x: x + torch.from_numpy(np.multiply(np.random.randn(4), 2, dtype=np.float32)),
    "mask": lambda x: x * torch.from_numpy(np.random.rand(4) < 0.5),
    "chosen": lambda x: x + torch.from_numpy(np.where(NUMPY.random(4) > 0.5, np.random.rand(4), 0.0)),
    "clipped": lambda x: x * torch.from_numpy(np.clip(np.random.randn(4), -0.5, 0.5).astype(np.float32)),
    "listed": lambda x: x + torch.tensor([noise := np.random.rand(4), noise * 2, 1 - noise]),
    "items": lambda x: x * sum(float(value) for value in np.random.rand(3)) + np.random.rand(3)[1],
    "weighted": lambda x: x[:, np.random.choice(4, 2, p=np.array([0.1, 0.2, 0.3, 0.4]))],
    "in_place": lambda x: x + torch.from_numpy(np.random.rand(12).reshape(3, 4)).mul_(2),
    "index_select": lambda x: x.index_select(0, torch.tensor(random.sample(range(3), 2))),
    "written": lambda x: _normalized(x)[0],
    "written and returned": lambda x: x + torch.from_numpy(_normalized(x)[1]),
}
READ = {
    "written after a tensor": _written_after_a_tensor,
    "tables": lambda x: x[np.random.randint(0, 3, (2, 2))],
    "filled": lambda x: x + torch.from_numpy(np.put(noise := np.random.randn(4), [0], 1.0) or noise).float(),
}


@pytest.mark.parametrize("name", [*ARRAYS, *READ])
def test_arrays_and_lists_of_random_numbers(name):
    """They are inputs of the graph; where NumPy code reads them, that line runs natively."""

    def run(wrap):
        seed()
        step = wrap({**ARRAYS, **READ}[name])
        out = [step(torch.arange(12.0).view(3, 4) + i).tolist() for i in range(5)]
        return out, repr(states()), step

    expected, captured = (
        run(lambda step: step),
        run(lambda step: sidefx_train.compile(step, backend="eager", rng="eager")),
    )
    assert captured[:2] == expected[:2]
    report = captured[2].report()
    assert len(report.captures) == 1 and bool(report.breaks) == (name in READ)


def test_a_drawn_array_that_leaves_the_step():
    def step(x, kept):
        noise = np.random.randn(2)
        kept.append(noise)
        return x + torch.from_numpy(noise), noise.reshape(1, 2)

    def run(fn):
        seed()
        kept = []
        out = [fn(torch.ones(2), kept) for _ in range(3)]
        assert all(view[0, 0] == array[0] for (_, view), array in zip(out, kept, strict=True))
        return [(made.tolist(), view.tolist()) for made, view in out], [array.tolist() for array in kept]

    assert run(sidefx_train.compile(step, backend="eager", rng="eager")) == run(step)
