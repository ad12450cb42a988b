"""Tensors made from constants are known, with what constants write to them; other writes to their memory end that."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sidefx_train


def through_an_item(x):
    t = torch.zeros(3)
    t[0] = x[0]
    return t.sum().item()


def through_a_view(x):
    t = torch.zeros(3)
    t.view(3)[0:1].add_(x[0])
    return 1 if t.sum() > 0 else 0


def a_number_through_a_view(x):
    t = torch.tensor(1.0)
    t.view(1).add_(x[:1])
    return t.item()


def what_was_made_of_it_later(x):
    t = torch.tensor(1.0)
    t.view(1).add_(x[:1])
    return (t * 2).item()


def detached(x):
    t = torch.zeros(2)
    t.detach().add_(x)
    return t.tolist()


def data(x):
    t = torch.zeros(2)
    t.data.add_(x)
    return int(t.sum())


def bits(x):
    t = torch.zeros(2)
    t.view(torch.int32).copy_(x.int())
    return t.tolist()


def parts(x):
    t = torch.zeros(2)
    t.split(1)[0].add_(x[0])
    first, _ = t.unbind()
    return (first > 0).item(), t.tolist()


def strided(x):
    t = torch.zeros(2)
    torch.as_strided(t, (1,), (1,), 1).copy_(x[:1])
    return t.tolist()


def a_list_of_them(x):
    t = torch.zeros(2)
    torch._foreach_add_([t.view(2)], [x])
    return t.tolist()


def a_size(x):
    t = torch.zeros(3, dtype=torch.long)
    t[1:].add_(x.long())
    return torch.zeros(4)[int(t[1]) :].shape[0]


def before_and_after(x):
    t = torch.zeros(2)
    total = t.sum()
    before = total.item()
    t[:1] += x[0]
    return before, t.sum().item(), total.item()


def a_loop(x):
    t = torch.zeros(3)
    for place in range(3):
        t[place] = x[0] * place
    return [place for place in range(3) if t[place] > 1]


WRITES = (
    through_an_item, through_a_view, a_number_through_a_view, what_was_made_of_it_later, detached, data, bits, parts,
    strided, a_list_of_them, a_size, before_and_after, a_loop,
)  # fmt: skip


def called(step, compiled: bool):
    run = sidefx_train.compile(step, backend="eager") if compiled else step
    return [run(torch.full((2,), value)) for value in (0.0, 1.0, 2.0)]


@pytest.mark.parametrize("step", WRITES, ids=lambda step: step.__name__)
def test_a_constant_that_is_written_is_none(step):
    assert called(step, True) == called(step, False)


def a_scratch_array(x):
    scratch, made = np.zeros(2, "float32"), []
    for value in range(3):
        scratch[:] = value
        made.append(torch.tensor(scratch))
    return (torch.stack(made) + x).tolist()


def a_copy_of_another_type(x):
    array = np.zeros(2)
    made = torch.as_tensor(array, dtype=torch.float32)
    array[0] = 5
    return (made + x).tolist(), array.tolist()


def written_behind_the_tensor(x):
    array = np.zeros(2, "float32")
    over = torch.from_numpy(array)
    before = over + x
    array[0] = 5
    return before.tolist(), (over + x).tolist()


def a_view_written_behind_the_tensor(x):
    array = np.arange(4.0)
    over = torch.as_tensor(array.reshape(2, 2)[0])
    array += 1
    return (over + x).tolist()


def written_through_the_tensor(x):
    array = np.zeros(2, "float32")
    torch.asarray(array).add_(x)
    return array.tolist()


def over_a_break(x):
    array = np.zeros(2, "float32")
    over = torch.from_numpy(array)
    if (over + x).sum() > 1:
        over.add_(x)
    return over.tolist(), array.tolist()


ARRAYS = {
    a_scratch_array: True, a_copy_of_another_type: True, written_behind_the_tensor: False,
    a_view_written_behind_the_tensor: False, written_through_the_tensor: False, over_a_break: False,
}  # fmt: skip


@pytest.mark.parametrize("step", ARRAYS, ids=lambda step: step.__name__)
def test_arrays_made_in_a_step(step):
    """A tensor over the memory of an array is a constant only if its separate memory is not observable."""
    captured = ARRAYS[step]
    run = sidefx_train.compile(step, backend="eager")
    xs = [torch.full((2,), value) for value in (0.0, 1.0, 2.0)]
    assert [run(x) for x in xs] == [step(x) for x in xs]
    refused = [record for record in run.report().fallbacks if "NumPy array" in record.reason]
    assert bool(refused) != captured


def test_arrays_that_die_in_a_step_are_captured():
    def step(x):
        array = np.tri(2, dtype="float32")
        mask = torch.from_numpy(array) * 2
        return (mask @ x + torch.asarray(np.ones(2, "float32"))[:2]).sum()

    run = sidefx_train.compile(step, backend="eager", fullgraph=True, on_failure="raise")
    for value in (0.0, 1.0, 2.0):
        x = torch.full((2,), value)
        assert run(x) == step(x)


def crops(x):
    sizes = torch.tensor([3, 3, 2, 2, 2])
    ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
    start, made = 0, []
    for end in ends:
        made.append(x[start:end].sum())
        start = end
    return torch.stack(made)


def places(x):
    return [x[place] for place in (torch.arange(5) % 2 == 0).nonzero().flatten()]


def pairs(x):
    return [x[a] * x[b] for a, b in torch.combinations(torch.arange(3))] + [x[a] for a, _ in torch.eye(2).nonzero()]


def kept(x):
    sizes = torch.tensor([3, 0, 2])
    made = [x[:n].sum() for n in sizes[sizes > 0]] + [x[:n].sum() for n in sizes.masked_select(sizes > 1)]
    return (
        made + [x[n] for n in torch.arange(3).repeat_interleave(sizes)] + [x[i] for i in torch.where(sizes)[0].tolist()]
    )


def rows(x):
    found, place, counts = torch.unique(
        torch.tensor([[1, 2], [1, 2], [0, 4]]), dim=0, return_inverse=True, return_counts=True
    )
    return [x[a] * b for a, b in found] + [x[n] for n in counts.tolist()] + [x[place]]


def written(x):
    table = torch.zeros(4, dtype=torch.long)
    table[1], table[3] = 2, 1
    before = table.sum()
    counts = torch.tensor([1, 2, 0])
    view = counts[1:]
    counts += 1
    view.mul_(2)
    return [x[n] for n in table] + [x[n - 1] for n in view] + [x[int(before)], x[counts.tolist()[0]]]


def written_by_lists(x):
    table = torch.zeros(3, dtype=torch.long)
    torch._foreach_add_([table[:1], table[1:]], [torch.tensor([2]), torch.tensor([1, 3])])
    return [x[n] for n in table]


KNOWN = (crops, places, pairs, kept, rows, written, written_by_lists)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("step", KNOWN, ids=lambda step: step.__name__)
def test_results_of_constants_are_known(step, backend):
    run = sidefx_train.compile(step, backend=backend, fullgraph=True, on_failure="raise", keep_slower=True)
    for value in (0.0, 1.0, 2.0):
        x = torch.arange(6.0) * 1.5 + value
        for made, wanted in zip(run(x), step(x), strict=True):
            torch.testing.assert_close(made, wanted, rtol=0, atol=0)
    assert len(run.report().captures) == 1
