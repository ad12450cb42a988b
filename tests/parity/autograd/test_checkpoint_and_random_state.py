"""Activation checkpointing and random states set inside a step."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import sidefx_train
from tests.support.parity import Program, mlp, parity
from tests.support.training_steps import refused, trained


@pytest.mark.parametrize("preserve", [True, False], ids=["preserved", "redrawn"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
@pytest.mark.every(2)
def test_checkpoint(reentrant, preserve):
    """Dropout inside draws the same numbers again; the segment's Python runs twice, as in eager."""

    def make() -> Program:
        model, runs = mlp(dropout=0.5), [0]

        def segment(x):
            runs[0] += 1
            return model(x)

        def loss(model, x, y):
            x = x.clone().requires_grad_()
            out = checkpoint(segment, x, use_reentrant=reentrant, preserve_rng_state=preserve)
            return F.cross_entropy(F.dropout(out, 0.2), y)

        return trained(loss, model, runs)

    parity(make, steps=4, captures=2)


def test_nested_checkpoints():
    def make() -> Program:
        inner, model = mlp(6, 8, 6, dropout=0.3), mlp(dropout=0.3)

        def outer(x):
            return F.dropout(model(checkpoint(inner, x, use_reentrant=False)), 0.2)

        def loss(model, x, y):
            return F.cross_entropy(F.dropout(checkpoint(outer, x, use_reentrant=False), 0.1), y)

        return trained(loss, model)

    parity(make, steps=4, captures=2)


def test_checkpoint_sequential():
    def make() -> Program:
        return trained(lambda model, x, y: F.cross_entropy(checkpoint_sequential(model, 2, x, use_reentrant=False), y))

    parity(make, steps=4)


def test_checkpoint_inductor():
    def make() -> Program:
        model = mlp(dropout=0.5)
        return trained(lambda model, x, y: F.cross_entropy(checkpoint(model, x, use_reentrant=False), y), model)

    parity(make, steps=4, backend="inductor", rng="eager")


def test_random_state_set_again():
    """A state saved in the step gives the same numbers again, and the generator ends in eager's state."""

    def make() -> Program:
        after = []

        def loss(model, x, y):
            state = torch.get_rng_state()
            a = torch.empty(5, 6).uniform_(-1, 1).mul_(3)
            torch.set_rng_state(state)
            b = torch.empty(5, 6).uniform_(-1, 1)
            with torch.random.fork_rng(devices=[]):
                c = torch.rand(3)
            return F.cross_entropy(model(x + a - b), y) + (torch.rand(3) - c).sum() + c.sum()

        program = trained(loss, None, after)
        step = program.step
        program.step = lambda x, y: step(x, y)
        return program

    def between(program, index):
        if index:
            program.watch[2].append(torch.get_rng_state().sum())

    parity(make, steps=4, between=between)


def test_random_state_left_set_back():
    def loss(model, x, y):
        with torch.random.fork_rng(devices=[]):
            noise = torch.randn(5, 6)
        return F.cross_entropy(model(x + noise), y)

    refused(loss, "SFX110", "leaves the random state set back to an earlier one")


def test_other_draw_after_random_state():
    def loss(model, x, y):
        with torch.random.fork_rng(devices=[]):
            noise = torch.randn(5, 6)
        return F.cross_entropy(model(F.dropout(x + noise)), y)

    refused(loss, "SFX110", "draws with bernoulli_ after a random state was set, but drew otherwise before")


def test_seed_inside():
    def loss(model, x, y):
        noise = torch.rand(5, 6)
        torch.manual_seed(3)
        return F.cross_entropy(model(x + noise + torch.rand(5, 6)), y)

    refused(loss, "SFX110", "seeds the random generator inside the step")


POLICIES: list[tuple[str, bool]] = []
"""Operators that :func:`saves_products` was asked about, and whether in a repetition."""


def saves_products(context, operator, *args, **kwargs):
    POLICIES.append((str(operator), context.is_recompute))
    saved = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(6, 24), nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x):
        query, key, value = self.inputs(x).view(1, len(x), 3, 8).unbind(2)
        return self.outputs(F.scaled_dot_product_attention(query[None], key[None], value[None])[0, 0])


def selected(policy):
    def loss(model, x, y):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return F.cross_entropy(checkpoint(model, x, use_reentrant=False, context_fn=contexts), y)

    return loss


def test_selective_checkpoint():
    def make():
        POLICIES.clear()
        program = trained(selected(saves_products), Attention())
        return Program(program.step, program.batch, (program.watch, POLICIES))

    parity(make, steps=3)
    assert ("aten.addmm.default", False) in POLICIES


def test_selective_checkpoint_of_listed_operators():
    parity(lambda: trained(selected([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])), steps=3)


def test_selective_checkpoint_whose_backward_runs_outside():
    def gradients(wrap):
        torch.manual_seed(0)
        model = Attention()
        loss = wrap(lambda x, y: selected(saves_products)(model, x, y))
        found = []
        for seed in range(2):
            torch.manual_seed(seed)
            loss(torch.randn(5, 6), torch.randint(0, 3, (5,))).backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
        return found

    step = functools.partial(sidefx_train.compile, backend="eager", fullgraph=True)
    for want, have in zip(gradients(lambda fn: fn), gradients(step), strict=True):
        assert torch.equal(want, have)


def test_a_break_in_a_selective_checkpoint_is_refused():
    def loss(model, x, y):
        def run(value):
            open(os.devnull).close()
            return model(value)

        return selected([torch.ops.aten.addmm.default])(run, x, y)

    report = parity(lambda: trained(loss), steps=3, captures=None, whole=False)
    assert "SFX103" in {found.code for found in report.breaks}


def test_modes_that_the_program_sees():
    """Regression: the capture's own modes were seen."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack

    seen: list[str] = []

    def inner(x):
        seen.append(type(_get_current_dispatch_mode()).__name__)
        return x.cos().exp().sin()

    def step(x):
        seen.append(f"{_get_current_dispatch_mode()} {len(_get_current_dispatch_mode_stack())}")
        contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.exp.default])
        checkpoint(inner, x, use_reentrant=False, context_fn=contexts).sum().backward()

    x = torch.ones(3, requires_grad=True)
    step(x)
    expected = [*seen]
    sidefx_train.compile(step, backend="eager", fullgraph=True)(x)
    assert seen == 2 * expected
