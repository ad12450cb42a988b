"""``verify``: a wrong backend is found, its results are not used, and the report says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sidefx_train
from sidefx_train.errors import SideFXWarning, VerificationError


def make(**options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, sidefx_train.compile(step, **options) if options else step


def wrong(gm, example_inputs):
    def run(*args):
        return [out * 1.5 if isinstance(out, torch.Tensor) and out.dim() == 0 else out for out in gm(*args)]

    return run


BATCHES = [(torch.randn(5, 4), torch.randint(0, 3, (5,))) for _ in range(4)]


def test_right_backend_passes():
    plain, eager = make()
    model, step = make(backend="aot_eager", verify=2)
    for batch in BATCHES:
        assert torch.equal(eager(*batch), step(*batch)), "losses differ"
    assert torch.equal(plain.weight, model.weight), "parameters differ"
    assert not step.report().breaks, str(step.report())


def test_wrong_backend_is_found_and_not_used():
    plain, eager = make()
    model, step = make(backend=wrong, verify=1)
    with pytest.warns(SideFXWarning, match="SFX205"):
        losses = [step(*batch) for batch in BATCHES]
    assert all(torch.equal(a, eager(*b)) for a, b in zip(losses, BATCHES, strict=True)), "a wrong loss was returned"
    assert torch.equal(plain.weight, model.weight), "parameters differ"
    assert [b.code for b in step.report().breaks] == ["SFX205"], str(step.report())


def test_wrong_backend_raises_on_request():
    _, step = make(backend=wrong, verify=1, on_failure="raise")
    with pytest.raises(VerificationError, match="off by"):
        step(*BATCHES[0])


def test_options_of_later_versions_are_refused():
    with pytest.raises(NotImplementedError, match="cuda_graphs"):
        make(cuda_graphs="on")
