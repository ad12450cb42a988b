"""Clipping, both forms of zero_grad, no_grad blocks and hand-written accumulation inside the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.parity import Program, batches, mlp, parity


def clipped(max_norm: float = 0.5, kind: str = "norm", foreach: bool | None = None) -> Program:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if kind == "norm":
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=foreach)
        else:
            norm = nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return Program(step, batches((5, 6), classes=3), (model, optimizer))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_clip_grad_norm(backend):
    parity(clipped, backend=backend)


def test_clip_grad_norm_foreach_off():
    parity(lambda: clipped(foreach=False))


def test_clip_grad_norm_inf_norm():
    parity(lambda: clipped(float("inf")))


def test_clip_grad_value():
    parity(lambda: clipped(kind="value"))


@pytest.mark.parametrize(("set_to_none", "captures"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("first", [True, False])
def test_zero_grad(set_to_none, captures, first):
    """With ``set_to_none=False`` grads exist from the second call on, and are read: a second, last capture."""

    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x, y):
            if first:
                optimizer.zero_grad(set_to_none=set_to_none)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if not first:
                optimizer.zero_grad(set_to_none=set_to_none)
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model, optimizer))

    parity(make, captures=captures)


def test_model_zero_grad():
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            model.zero_grad()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model, optimizer))

    parity(make)


@pytest.mark.parametrize("form", ["with", "decorator", "inference", "enable_inside", "set_grad"])
def test_no_grad_blocks(form):
    def make() -> Program:
        model, teacher = mlp(), mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @torch.no_grad()
        def targets(x):
            return teacher(x).softmax(-1)

        def step(x, y):
            if form == "with":
                with torch.no_grad():
                    target = teacher(x).softmax(-1)
            elif form == "decorator":
                target = targets(x)
            elif form == "inference":
                with torch.no_grad():
                    target = teacher(x).softmax(-1).detach()
            elif form == "set_grad":
                with torch.set_grad_enabled(False):
                    target = teacher(x).softmax(-1)
            else:
                with torch.no_grad():
                    with torch.enable_grad():
                        extra = model(x).mean()
                    target = teacher(x).softmax(-1)
            loss = F.cross_entropy(model(x), target)
            if form == "enable_inside":
                loss = loss + extra
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mine, theirs in zip(model.parameters(), teacher.parameters()):
                    theirs.lerp_(mine, 0.1)
            return loss.detach(), torch.is_grad_enabled()

        return Program(step, batches((5, 6), classes=3), (model, teacher, optimizer))

    parity(make)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_accumulation_inside_one_step(backend):
    """Several micro-batches, one update, all in the step."""

    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x, y):
            total = 0.0
            for part, labels in zip(x.chunk(3), y.chunk(3)):
                loss = F.cross_entropy(model(part), labels) / 3
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total

        return Program(step, batches((6, 6), classes=3), (model, optimizer))

    parity(make, backend=backend)


def test_accumulation_across_calls():
    """The usual ``if (i + 1) % n == 0`` with a counter that the caller passes."""

    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = batches((5, 6), classes=3)

        def step(x, y, index):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            if (index + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return Program(step, lambda i: (*data(i), i), (model, optimizer))

    # Two branches, and one more capture to detect that the index is a changing number.
    parity(make, steps=12, captures=3)


def test_accumulation_with_own_counter():
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        class Trainer:
            seen = 0

            def step(self, x, y):
                loss = F.cross_entropy(model(x), y) / 2
                loss.backward()
                self.seen += 1
                if self.seen % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                return loss.detach()

        trainer = Trainer()
        return Program(trainer.step, batches((5, 6), classes=3), (model, optimizer, trainer))

    # Two branches, and one more capture to detect that the remaining grads are other tensors each time.
    parity(make, steps=12, captures=3)


def test_autograd_grad():
    """``torch.autograd.grad`` and an update written by hand."""

    def make() -> Program:
        model = mlp()
        parameters = list(model.parameters())

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            grads = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for p, g in zip(parameters, grads):
                    p -= 0.1 * g
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model,))

    parity(make)


def test_grads_left_in_place():
    """Without zero_grad the grads accumulate, step after step."""

    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model, optimizer))

    parity(make, captures=2)


def test_forward_only_under_no_grad():
    def make() -> Program:
        model = mlp()

        @torch.no_grad()
        def step(x, y):
            return F.cross_entropy(model(x), y), (model(x).argmax(-1) == y).float().mean()

        return Program(step, batches((5, 6), classes=3), (model,))

    parity(make)


def test_autocast_bfloat16():
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x, y):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model, optimizer))

    parity(make)


def test_module_as_the_step():
    """``compile`` of an nn.Module: here one whose forward trains itself."""

    class SelfTraining(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.__dict__["optimizer"] = torch.optim.SGD(self.net.parameters(), lr=0.1)

        def forward(self, x, y):
            loss = F.cross_entropy(self.net(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

    def make() -> Program:
        model = SelfTraining()
        return Program(model, batches((5, 6), classes=3), (model,))

    parity(make)


def test_zero_grad_first_is_one_capture():
    """Gradients that zero_grad drops unread do not make the first step differ from the second."""

    def make() -> Program:
        model = mlp()
        model.register_parameter("unused", nn.Parameter(torch.ones(3)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model, optimizer))

    def between(made: Program, index: int) -> None:
        if index in (3, 6):  # gradients appear and disappear between the calls
            made.watch[0].zero_grad() if index == 3 else setattr(made.watch[0].unused, "grad", torch.ones(3))

    parity(make, captures=1, between=between)


def test_gradient_read_before_zero_grad():
    """A step that reads the last step's gradient before it drops it sees eager's."""

    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        norms: list[object] = []

        def step(x, y):
            grad = model[0].weight.grad
            norms.append(None if grad is None else grad.norm())
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model, optimizer, norms))

    parity(make, captures=3)


def test_leftover_gradient_of_a_frozen_parameter():
    """torch updates a frozen parameter as long as it has a gradient; so does the captured step."""

    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[0].weight.grad = torch.ones_like(model[0].weight)
        model[0].weight.requires_grad_(False)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            model[3].zero_grad()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model, optimizer))

    parity(make, captures=2)


@pytest.mark.parametrize(
    ("kind", "operators"), [("norm", ["_foreach_norm", "_foreach_mul_"]), ("value", ["_foreach_clamp"])]
)
def test_operators_of_lists_are_called_where_eager_calls_them(kind, operators):
    """On a GPU their kernels sum in another order than those of single tensors."""
    graph = parity(lambda: clipped(kind=kind)).sources()["graph"]
    assert all(operator in graph for operator in operators), graph
