"""Steps that change a storage by ``set_``, ``resize_`` and ``out=``, are differentiated outside, or left to eager."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from tests.parity.views.storage_data_cases import case, linear, numbers, rows


@case
def set_to_a_tensor():
    t, other = torch.zeros(3), torch.ones(3)

    def step(x):
        t.set_(other)
        t.add_(x)
        return other.sum()

    return (t, other), step, numbers


@case
def set_of_a_parameter():
    model = linear()

    def step(x):
        with torch.no_grad():
            model.weight.set_(model.weight * 0.9)
        return model(x).sum()

    return model, step, rows


@case
def set_to_a_part():
    t = torch.zeros(3)

    def step(x):
        t.set_(x, 1, (2,), (1,))
        t.add_(1)
        return x * 2

    return t, step, numbers


@case
def set_to_nothing():
    t = torch.zeros(3)

    def step(x):
        t.set_()
        return x * 2

    return t, step, numbers


@case
def a_growing_queue():
    state = SimpleNamespace(queue=torch.zeros(0))

    def step(x):
        n = state.queue.numel()
        state.queue.resize_(n + 3)
        state.queue[n:] = x
        return state.queue.sum()

    return state, step, numbers


@case
def enlarged_under_a_view_that_the_step_does_not_see():
    t = torch.ones(3)
    view = t[1:]

    def step(x):
        if t.numel() < 6:
            t.resize_(6)
            t[3:] = 4
        t.add_(1)
        return t * 2

    return (t, view), step, numbers


@case
def an_empty_output_argument():
    def step(x, out):
        result = torch.exp(x, out=out)
        result.add_(1)
        return result, out.view(-1)

    return None, step, lambda i: (*rows(i), torch.empty(0))


@case
def one_empty_output_argument_of_two():
    def step(x, values, indices):
        torch.topk(x, 2, out=(values, indices))
        return values + 1

    return None, step, lambda i: (*rows(i), torch.zeros(2, 2), torch.empty(0, dtype=torch.long))


def differentiated(result, _):
    result.backward()


@case
def differentiated_outside():
    model, head = linear(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)

    def step(x):
        for p in model.parameters():
            p.data = p.data.clamp(-0.3, 0.3)
        return head(model(x).relu()).sum()

    def after(result, _):
        result.backward()
        optimizer.step()
        optimizer.zero_grad()

    return (model, head), step, rows, after


def clipped():
    model = linear()

    def step(x):
        model.weight.data = model.weight.data.clamp(-0.3, 0.3)
        return (model(x) * model.weight).sum()

    return model, step, lambda i: (torch.ones(3, 3) * i,)


@case
def written_before_the_backward():
    model, *rest = clipped()

    def after(result, _):
        with torch.no_grad():
            model.weight.mul_(2)
        result.backward()

    return model, *rest, after


@case
def storage_replaced_before_the_backward():
    model, *rest = clipped()

    def after(result, _):
        model.weight.data = model.weight.data * 2
        result.backward()

    return model, *rest, after


@case
def used_before_and_after():
    model = linear()

    def step(x):
        before = model(x).sum()
        model.weight.data = model.weight.data * 2
        return before * (model.weight * model.weight).sum()

    return model, step, rows, differentiated


@case
def the_value_it_had_is_needed():
    model = linear()

    def step(x):
        model.weight.data = model.weight.data * 2
        y = (model.weight.t() * 3).exp() * model.weight.t()
        model.weight.data = model.weight.data + 1
        return y.sum() + model.weight.exp().sum()

    return model, step, rows, differentiated


@case
def an_error_that_is_caught():
    model = linear()

    def step(x):
        try:
            model.weight.data = None
        except TypeError as error:
            return x * 2, str(error)

    return model, step, rows


LEFT = {}


def left(code):
    def note(make):
        LEFT[make.__name__] = code, make
        return make

    return note


@left("SFX202")
def integers_for_a_parameter():
    model = linear()

    def step(x):
        model.weight.data = x.long()

    return model, step, rows


@left("SFX202")
def set_of_a_leaf():
    model = linear()

    def step(x):
        model.weight.set_(x)

    return model, step, rows


@left("SFX111")
def a_view_of_what_it_was():
    t = torch.ones(3, 3)

    def step(x):
        old = t.view(-1)
        t.data = t * 0.5
        return old

    return t, step, rows


@left("SFX108")
def a_storage():
    t = torch.ones(3)

    def step(x):
        t.set_(x.untyped_storage(), 0, (3,), (1,))
        return x * 2

    return t, step, numbers


@left("SFX109")
def enlarged_under_a_view_that_the_step_sees():
    t = torch.ones(3)
    view = t[1:]

    def step(x):
        t.resize_(6)
        t[3:] = 4
        view.add_(1)
        return t * 2

    return (t, view), step, numbers


@left("SFX108")
def an_output_argument_that_is_an_empty_part():
    whole = torch.zeros(10)

    def step(x, out):
        return torch.exp(x, out=out) * 2

    return whole, step, lambda i: (*rows(i), whole[3:3])


@left("SFX108")
def memory_of_a_view():
    t = torch.ones(4)
    view = t[1:]

    def step(x):
        view.data = x * 2
        return view + 1

    return (t, view), step, numbers


@case
def set_data_to_a_resized_tensor():
    t, resized = torch.zeros(3), torch.tensor(1.5)
    alias = t.data

    def step(x):
        resized.resize_(3).copy_(x)
        t.data = resized
        resized.add_(1)
        return alias * 2

    return (t, alias, resized), step, numbers


@case
def set_data_to_an_out_argument():
    t, out = torch.zeros(3), torch.tensor(1.5)

    def step(x):
        torch.sin(x, out=out)
        t.data = out
        return out

    return (t, out), step, numbers


@case
def swaps_data_with_a_resized_tensor():
    t, resized = torch.zeros(2, 3), torch.tensor(1.5)

    def step(x):
        resized.resize_(2, 3).copy_(x.expand(2, 3))
        before = t.data
        t.data = resized.data.t()
        resized.data = before
        return t + 1

    return (t, resized), step, numbers
