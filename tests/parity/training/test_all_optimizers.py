"""Every optimizer of ``torch.optim``: captured in one graph, or refused for a reason that is named here."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, batches, classifier, mlp, parity

ALL = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
VARIANTS = {
    "default": {},
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "weight_decay": {"weight_decay": 0.01},
    "maximize": {"maximize": True},
    "tensor_lr": {"lr": torch.tensor(0.01)},
}
CAPTURES = {"RAdam": 2, "SparseAdam": 2}
"""RAdam's first steps, before its variance can be rectified, are a different computation; the first of SparseAdam
creates its state."""

REFUSED = {
    "LBFGS": ("SFX101", "branches on a tensor's value, which exists only when the graph runs"),  # its line search
}


def cases() -> list[tuple[str, str]]:
    found = []
    for name, cls in ALL.items():
        for variant, options in VARIANTS.items():
            known = inspect.signature(cls).parameters
            rate = "lr" in options and (options.get("foreach") or name in ("LBFGS", "SparseAdam"))
            if all(option in known for option in options) and not rate:
                found.append((name, variant))
    return found


REPEATED = ("single", "maximize")
"""Without a GPU, torch's default is the single-tensor update; ``maximize`` negates the gradients that it reads."""


def often(name: str, variant: str) -> bool:
    return variant not in REPEATED or name in ("AdamW", "SGD")


def train(name: str, variant: str) -> Program:
    options = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in VARIANTS[variant].items()}
    if name == "SparseAdam":
        model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Flatten(), nn.Linear(6, 3))
        optimizer = torch.optim.SparseAdam([*model[0].parameters()], **options)
        return classifier(model, optimizer, lambda i: (torch.tensor([[1], [i % 3]]), torch.tensor([0, 1])))
    model = mlp()
    if name == "Muon":  # matrices only
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
    if name == "LBFGS":
        return closure_step(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    return classifier(model, ALL[name](model.parameters(), **options), batches((5, 6), classes=3))


def closure_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Program:
    def step(x, y):
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return Program(step, batches((5, 6), classes=3), (model, optimizer))


def test_nothing_is_left_out():
    assert {name for name, _ in cases()} == set(ALL)


@pytest.mark.parametrize(
    ("name", "variant"), [pytest.param(*case, marks=() if often(*case) else pytest.mark.slow) for case in cases()]
)
@pytest.mark.every(2)
def test_optimizer(name, variant):
    reason = REFUSED.get(name)
    if reason is None:
        parity(lambda: train(name, variant), steps=7, captures=CAPTURES.get(name, 1))
        return
    report = parity(lambda: train(name, variant), steps=3, captures=None, whole=False)
    found = [(found.code, found.reason) for found in report.breaks]
    assert any(code == reason[0] and words.startswith(reason[1]) for code, words in found), found


def test_state_of_an_optimizer_that_counts():
    """RAdam resumed at another step: the count is read at every call, not a constant."""

    def make() -> Program:
        model = mlp()
        return classifier(model, torch.optim.RAdam(model.parameters(), lr=0.01), batches((5, 6), classes=3))

    def between(program, index):
        if index == 4:
            for state in program.watch[1].state.values():
                state["step"].fill_(1.0)
        if index == 6:
            for state in program.watch[1].state.values():
                state["step"] = torch.tensor(50.0)

    parity(make, steps=9, captures=None, between=between)


def numbers_as_tensors(module, inputs):
    """A user-defined backend gets changing numbers as tensors, as Inductor does."""
    return module.forward


@pytest.mark.parametrize("name", ["RAdam", "ASGD", "Adafactor"])
def test_counting_optimizer_with_numbers_as_tensors(name):
    parity(lambda: train(name, "default"), steps=7, captures=CAPTURES.get(name, 1), backend=numbers_as_tensors)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        # With Inductor the others write in the same places: ``make slow``.
        pytest.param(name, backend, marks=pytest.mark.slow if backend == "inductor" and name != "AdamW" else ())
        for name in ("SGD", "AdamW", "Adagrad")
        for backend in ("eager", "aot_eager", "inductor")
    ],
)
@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=lambda o: next(iter(o))
)
def test_version_counters(name, options, backend):
    """A graph kept from before the update must raise exactly where eager does."""
    seen = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = ALL[name](model.parameters(), lr=0.1, **options)

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        call = sidefx_train.compile(step, backend=backend, fullgraph=True, on_failure="raise") if compiled else step
        versions = []
        for _ in range(3):
            call(torch.ones(2, 3))
            state = [value for p in model.parameters() for value in optimizer.state[p].values()]
            held = [*model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
            versions.append([tensor._version for tensor in held])
        seen.append(versions)
    assert seen[0] == seen[1], f"eager: {seen[0]}, captured: {seen[1]}"
