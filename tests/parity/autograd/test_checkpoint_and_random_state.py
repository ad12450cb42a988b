"""Activation checkpointing and random states set inside a step."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from tests.support.parity import Program, mlp, parity
from tests.support.training_steps import refused, trained


@pytest.mark.parametrize("preserve", [True, False], ids=["preserved", "redrawn"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
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
        torch.manual_seed(3)
        return F.cross_entropy(model(x + torch.rand(5, 6)), y)

    refused(loss, "SFX110", "seeds the random generator inside the step")


def test_selective_checkpoint_is_refused():
    def loss(model, x, y):
        contexts = lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default])
        return F.cross_entropy(checkpoint(model, x, use_reentrant=False, context_fn=contexts), y)

    refused(loss, "SFX111", "enters _CachingTorchDispatchMode, a TorchDispatchMode")
