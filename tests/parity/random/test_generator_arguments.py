"""Random generators owned by the program: the same numbers and the same state as in eager, on every backend."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import sidefx_train

DRAWS = {
    "rand": lambda x, g: x + torch.rand(3, 4, generator=g),
    "mask": lambda x, g: x * (torch.rand(x.shape, generator=g) > 0.5),
    "bernoulli": lambda x, g: torch.bernoulli(x.sigmoid(), generator=g),
    "permutation": lambda x, g: x[torch.randperm(3, generator=g)],
    "in place": lambda x, g: x.clone().normal_(generator=g),
    "with torch's own": lambda x, g: torch.rand(2, generator=g) + torch.rand(2) + torch.rand(2, generator=g),
}


def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("rng", ["eager", "fast"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.covering(1)
def test_drawn_from_an_argument(name, backend, rng):
    """Draws from a generator argument equal eager's also where the backend draws for torch's default generator."""
    if (backend, rng, name) == ("inductor", "fast", "with torch's own"):
        pytest.skip("torch's own numbers are the backend's then")
    if backend == "inductor" and name not in ("rand", "with torch's own"):
        pytest.skip("two of them are enough under Inductor")
    if backend == "inductor" and torch.__version__ < "2.13":
        pytest.skip("Inductor of torch 2.12 knows no generator among a graph's constants: such a step runs eagerly")
    draw = DRAWS[name]
    call = sidefx_train.compile(draw, backend=backend, rng=rng, fullgraph=True, on_failure="raise")
    for seed in (1, 2, 1):  # separate generators: one must not be used for another
        mine, other = generator(seed), generator(seed)
        for i in range(2):
            x = torch.randn(3, 4, generator=generator(i))
            torch.manual_seed(i)
            want, state = draw(x, mine), torch.get_rng_state()
            torch.manual_seed(i)
            assert torch.equal(call(x, other), want), f"generator {seed}, call {i}: other numbers"
            assert torch.equal(mine.get_state(), other.get_state()), f"generator {seed}, call {i}: another state"
            assert torch.equal(torch.get_rng_state(), state), f"generator {seed}, call {i}: torch's own state"


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.noise = nn.Linear(4, 4), generator(3)

    def forward(self, x):
        return self.layer(x) + 0.1 * torch.randn(x.shape, generator=self.noise)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_drawn_from_an_attribute(backend):
    seen = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Noisy()
        call = sidefx_train.compile(model, backend=backend, fullgraph=True) if compiled else model
        for _ in range(3):
            call(torch.ones(2, 4)).square().sum().backward()
        seen.append([model.layer.weight.grad, model.noise.get_state()])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True)), seen


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_that_raises_has_drawn_once(backend):
    """The draws of a graph that fails are rolled back; eager draws them again and raises."""

    def step(x, index, g):
        noise = torch.rand(3, generator=g) + torch.rand(3)
        return x[index + noise.long()] + noise

    call = sidefx_train.compile(step, backend=backend)
    mine, other = generator(5), generator(5)
    x = torch.arange(4.0)
    states = []
    for run, g in ((step, mine), (call, other)):
        torch.manual_seed(0)
        run(x, torch.tensor([0, 1, 2]), g)
        with pytest.raises(IndexError):
            run(x, torch.tensor([0, 1, 9]), g)
        states.append((g.get_state(), torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True)), "another random state"


def test_a_recapture_says_what_the_draws_use():
    """Regression: it blamed the dispatch keys of tensors."""
    why = "what the step draws random numbers with"
    one, other = random.Random(1), random.Random(2)
    step = sidefx_train.compile(lambda x, a, b: x * a.random() + b.random(), backend="eager")
    for a, b in ((one, other), (one, one)):
        step(torch.ones(2), a, b)
    assert [change.source for change in step.report().recaptures] == [why]
    with torch.inference_mode():
        untracked = torch.ones(2)
    plain = sidefx_train.compile(lambda x: x * 2, backend="eager")
    for x in (torch.ones(2), untracked):
        plain(x)
    assert [change.new for change in plain.report().recaptures] == ["tensors with other dispatch keys"]
