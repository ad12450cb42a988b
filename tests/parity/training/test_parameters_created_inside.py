"""Parameters, buffers and modules that a step creates, and attributes it sets on tensors, equal eager's."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch import nn

import sidefx_train
from sidefx_train.errors import SideFXWarning


class Box:
    pass


def ones(module):
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    return module


def leaves(x, box):
    box.kept = nn.Parameter(x * 2)
    return x


def leaves_with_a_gradient(x, box):
    box.kept = nn.Parameter(torch.ones(2))
    (box.kept * x).sum().backward()
    return x


def without_gradients(x, box):
    box.kept = nn.Parameter(torch.ones(2), requires_grad=False)
    return x


def of_an_input(x, box):
    box.kept, box.same = nn.Parameter(x), x
    return x


def of_what_leaves_too(x, box):
    box.same = x * 3
    box.kept = nn.Parameter(box.same)
    return box.same


def module_inside(x, box):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.full((2,), 2.0))
            self.register_buffer("b", torch.ones(2))
            self.parts = nn.ModuleList([ones(nn.Linear(2, 1)) for _ in range(2)])

        def forward(self, x):
            return (self.w * x + self.b).sum() + sum(part(x).sum() for part in self.parts)

    net = Net()
    loss = net(x)
    loss.backward()
    box.kept, box.names = net.w.grad, [name for name, _ in net.named_parameters()]
    return loss.detach()


def module_that_leaves(x, box):
    box.module = ones(nn.Linear(2, 1))
    box.kept = box.module.weight
    return x


def trained_inside(x, box):
    model = ones(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    box.kept = model.weight
    return x


def buffer(x, box):
    box.kept = nn.Buffer(x * 2, persistent=False)
    box.seen = isinstance(box.kept, nn.Buffer), box.kept.persistent
    return x


def parameter_dict(x, box):
    made = nn.ParameterDict({"a": torch.ones(2)})
    box.kept, box.names = made["a"], list(made)
    return x


def attributes(x, box):
    made = x * 2
    made.a, made.b = 1, [made, 2]
    made.a += 1
    del made.b
    made.c = {"key": made}
    setattr(made, "d", "text")
    object.__setattr__(made, "e", 5)
    box.kept = made
    return x


def attributes_of_views(x, box):
    box.same = made = x * 2
    made.a = len(vars(box))
    box.kept = made[0:1]
    box.kept.note = "v"
    box.seen = made.a, box.kept.note, hasattr(box.kept, "a")
    return made


def attributes_of_a_parameter(x, box):
    box.kept = nn.Parameter(x * 1)
    box.kept.rate = 0.3
    return x


def attributes_over_a_break(x, box):
    made = x * 2
    made.a = 1
    os.times()
    made.b = made.a + 1
    box.kept = made
    os.times()
    box.seen = made.b
    return made


def attributes_seen_as_a_dict(x, box):
    box.kept = made = x * 2
    made.a = 1
    vars(made)["b"] = 2
    made.__dict__.update(c=3)
    box.seen = dict(vars(made))
    return made


STEPS = (
    leaves, leaves_with_a_gradient, without_gradients, of_an_input, of_what_leaves_too, module_inside,
    module_that_leaves, trained_inside, buffer, parameter_dict, attributes, attributes_of_views,
    attributes_of_a_parameter, attributes_over_a_break, attributes_seen_as_a_dict,
)  # fmt: skip
BREAKING = {"attributes_over_a_break", "attributes_seen_as_a_dict"}


def _facts(tensor):
    own = {name: "itself" if value is tensor else value for name, value in vars(tensor).items()}
    if "c" in own and isinstance(own["c"], dict):
        own["c"] = own["c"]["key"] is tensor
    grad = None if tensor.grad is None else tensor.grad.tolist()
    kind = type(tensor), isinstance(tensor, nn.Parameter), isinstance(tensor, nn.Buffer)
    flags = tensor.requires_grad, tensor.is_leaf, tensor._version, tensor._is_view(), tensor.storage_offset()
    return kind, flags, tensor.tolist(), grad, own


def _history(run):
    history = []
    for call in range(3):
        box = Box()
        history.append(_facts(run(torch.full((2,), call + 1.0), box)))
        history.append(_facts(box.kept))
        history.append([getattr(box, name, None) for name in ("seen", "names")])
        with torch.no_grad():
            box.kept.add_(1)  # visible in all tensors that share its memory
        same = getattr(box, "same", None)
        history.append((box.kept._version, None if same is None else _facts(same)))
        if hasattr(box, "module"):
            box.module(torch.ones(2)).sum().backward()
            assert box.kept is box.module.weight
            history.append((box.kept.grad.tolist(), [p is box.kept for p in box.module.parameters()]))
    return history


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_what_the_step_made_is_of_its_kind(step):
    compiled = sidefx_train.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        assert _history(compiled) == _history(step)
    report = compiled.report()
    assert report.replays == 3 and (step.__name__ in BREAKING or not report.breaks), str(report)


class Overrides(nn.Module):
    """Has a ``register_buffer`` of its own, which torch calls for a buffer that is assigned."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.register_buffer("mean", torch.zeros(2))

    def register_buffer(self, name, tensor, persistent=True):
        self.names.append((name, persistent))
        super().register_buffer(name, tensor, persistent)

    def forward(self, x):
        self.mean = self.mean + x.mean(0)
        self.kept = nn.Buffer(self.mean * 2)
        self.other = nn.Buffer(self.mean * 3, persistent=False)
        return x * self.mean


def test_buffers_that_are_assigned():
    """Regression: a ``Buffer`` was stored as a plain attribute, and the override was not called."""
    found = []
    for compiled in (False, True):
        model = Overrides()
        run = sidefx_train.compile(lambda x, model=model: model(x), backend="eager") if compiled else model
        results = [run(torch.full((2, 2), float(i))) for i in range(3)]
        found.append(str([results, model.names, list(model.state_dict().items()), list(model.named_buffers())]))
    assert found[0] == found[1]
