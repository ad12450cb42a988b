"""Steps that give a tensor another storage by ``.data =``.

A case is the state, the step, the arguments of call ``i``, and what is done with the result.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

CASES = {}


def case(make):
    CASES[make.__name__] = make
    return make


def linear():
    return nn.Linear(3, 3)


def rows(i):
    return (torch.ones(2, 3) * i,)


def numbers(i):
    return (torch.ones(3) * i,)


@case
def weight_decay():
    model = linear()

    def step(x):
        model.weight.data = model.weight.data * 0.9
        return model(x).sum()

    return model, step, rows


@case
def clamped_after_the_update():
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        optimizer.step()
        for p in model.parameters():
            p.data = p.data.clamp(-0.5, 0.5)
        return loss.detach()

    return (model, optimizer), step, rows


@case
def decayed_before_a_fused_update():
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)

    def step(x):
        for p in model.parameters():
            p.data = p.data * 0.9
        optimizer.zero_grad(set_to_none=False)
        model(x).pow(2).sum().backward()
        optimizer.step()
        return x + 1

    return model, step, rows


@case
def average_written_through_data():
    model, average = linear(), linear()

    def step(x):
        for p, q in zip(model.parameters(), average.parameters(), strict=True):
            q.data.copy_(q.data * 0.9 + p.data * 0.1)
        return average(x)

    return (model, average), step, rows


@case
def swapped_with_an_average():
    model, average = linear(), linear()

    def step(x):
        for p, q in zip(model.parameters(), average.parameters(), strict=True):
            p.data, q.data = q.data, p.data
        return model(x).detach()

    return (model, average), step, rows


@case
def swapped_and_swapped_back():
    model, average = linear(), linear()

    def step(x):
        saved = [p.data for p in model.parameters()]
        for p, q in zip(model.parameters(), average.parameters(), strict=True):
            p.data = q.data
        out = model(x).detach()
        for p, s in zip(model.parameters(), saved, strict=True):
            p.data = s
        return out, model.weight.view(-1)

    return (model, average), step, rows


@case
def tied_and_written():
    model, other = linear(), linear()

    def step(x):
        other.weight.data = model.weight.data
        with torch.no_grad():
            model.weight.mul_(0.5)
            other.weight.add_(1)
        return (other(x) + model(x)).detach()

    return (model, other), step, rows


@case
def a_growing_buffer():
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1, 3))

    def step(x):
        module.kept.data = torch.cat([module.kept, x])
        return module.kept.sum()

    return module, step, rows


@case
def an_argument():
    state = SimpleNamespace(t=torch.zeros(3))

    def step(t, x):
        t.data = x * 2
        v = t.view(3, 1)
        t.add_(1)
        return v, t

    return state, step, lambda i: (state.t, *numbers(i))


@case
def memory_of_an_argument():
    t = torch.zeros(3)

    def step(x):
        t.data = x
        t.add_(1)
        return t * 2

    return t, step, numbers


@case
def several_times():
    t = torch.ones(3)

    def step(x):
        t.data = x
        t.data = x * 2
        t.mul_(3)
        t.data = t * 2
        return t

    return t, step, numbers


@case
def three_exchanged():
    a, b, c = torch.ones(3), torch.zeros(3), torch.full((3,), 5.0)

    def step(x):
        a.data, b.data, c.data = b.data, c.data, a.data
        a.add_(x)
        return b * 2

    return (a, b, c), step, numbers


@case
def parts_of_one_tensor():
    model, flat = linear(), torch.arange(12.0)

    def step(x):
        begin = 0
        for p in model.parameters():
            p.data = flat[begin : begin + p.numel()].view_as(p)
            begin += p.numel()
        flat.mul_(0.5)
        return model(x).detach()

    return (model, flat), step, rows


@case
def parts_of_a_tensor_of_the_step():
    model = linear()

    def step(x):
        flat = torch.cat([p.data.view(-1) for p in model.parameters()])
        begin = 0
        for p in model.parameters():
            p.data = flat[begin : begin + p.numel()].view_as(p)
            begin += p.numel()
        model(x).sum().backward()
        return flat

    return model, step, rows


@case
def a_vector_of_parameters():
    model = linear()

    def step(x):
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 0.9, model.parameters())
        return model(x).sum().detach()

    return model, step, rows


@case
def another_type():
    model = linear()

    def step(x):
        model.double()
        out = model(x.double()).detach()
        model.float()
        return out

    return model, step, rows


@case
def another_layout():
    model = linear()

    def step(x):
        model.weight.data = model.weight.data.t()
        return model(x).sum().detach()

    return model, step, rows


@case
def what_it_was_leaves():
    model = linear()

    def step(x):
        old, seen = model.weight.data, model.weight.detach()
        model.weight.data = model.weight.data * 0.5
        old.add_(1)
        return old, seen, model.weight.detach(), model.weight.view(-1).detach()

    return model, step, rows


@case
def kept_in_a_list():
    t, seen = torch.ones(3), []

    def step(x):
        seen.append(t.clone())
        t.data = t * 2
        seen.append(t)
        return t.sum()

    return (t, seen), step, numbers


@case
def gradients_clamped():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        loss = model(x).sum()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad.data = p.grad.data.clamp(-1, 1)
        optimizer.step()
        return loss

    return model, step, rows


@case
def gradients_from_outside():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2, 3)).sum().backward()

    def step(x):
        for p in model.parameters():
            p.grad.data = p.grad.data * 0.5
        optimizer.step()
        return x * 2

    return model, step, rows


@case
def a_value_in_the_middle():
    model = linear()

    def step(x):
        h = model(x)
        h.data = h.data.clamp(-0.1, 0.1)
        h.pow(2).sum().backward()
        return h

    return model, step, rows


@case
def a_value_with_the_memory_of_another():
    def step(x):
        h, y = x * 2, x + 1
        h.data = y
        h.add_(1)
        return h, y

    return None, step, rows


@case
def hooks_of_a_parameter():
    model = linear()
    model.weight.register_hook(lambda grad: grad * 2)

    def step(x):
        model.weight.data = model.weight.data * 0.9
        model(x).sum().backward()
        return x * 2

    return model, step, rows
