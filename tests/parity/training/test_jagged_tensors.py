"""Steps over jagged nested tensors: one graph, with eager's numbers bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nested import nested_tensor_from_jagged as jagged
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sidefx_train
from sidefx_train.errors import GraphBreakError

ROWS = ((2, 3, 4), (3, 5, 2), (4, 4, 6), (2, 1, 3))


def rows(sizes=ROWS[0], seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 5, generator=generator).requires_grad_(requires_grad) for size in sizes]


def nested(sizes=ROWS[0], seed=0, requires_grad=False):
    return torch.nested.nested_tensor(rows(sizes, seed), layout=torch.jagged, requires_grad=requires_grad)


def compiled(step, **options):
    return sidefx_train.compile(step, **{"backend": "eager", "fullgraph": True, **options})


def flat(value):
    """Returns everything that eager and a captured step must have in common."""
    if isinstance(value, (list, tuple)):
        return [type(value), *(part for item in value for part in flat(item))]
    if isinstance(value, torch.SymInt):
        return [torch.SymInt]
    if not isinstance(value, torch.Tensor):
        return [value]
    state = [type(value), value.requires_grad, value.is_leaf, type(value.grad_fn).__name__, value._version]
    if not value.is_nested:
        return [*state, value.shape, value.stride(), value.detach().tolist()]
    parts = [value._values.detach(), value._offsets, value._lengths, *value._metadata_cache.values()]
    assert value.shape[value._ragged_idx] == value.sin().shape[value._ragged_idx], "the size belongs to the offsets"
    return [*state, value._ragged_idx, list(value._metadata_cache), *flat(parts)]


def same(eager, captured):
    assert flat(eager) == flat(captured)


def captures(step):
    return len(step.report().captures)


class Encoder(nn.Module):
    """A layer of attention and one of two products."""

    def __init__(self):
        super().__init__()
        self.norm, self.project = nn.LayerNorm(8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, given):
        heads = [each(given).unflatten(-1, (2, 4)).transpose(1, 2) for each in self.project]
        given = given + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2)
        return given + self.outer(F.gelu(self.inner(self.norm(given))))


def batch(index):
    generator = torch.Generator().manual_seed(index)
    lengths = torch.tensor(ROWS[index % len(ROWS)])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.randn(int(offsets[-1]), 8, generator=generator), offsets


def dense(model, values, offsets):
    padded = torch.nested.to_padded_tensor(model(jagged(values, offsets)), 0.0)
    return (padded.softmax(-1) * padded).mean()


def given_nested(model, values, offsets):
    return (model(values) - offsets).pow(2).values().mean()


@pytest.mark.parametrize("loss_of", [dense, given_nested])
def test_training(loss_of):
    """Offsets, the number of values and the longest row change from call to call."""

    def run(wrap):
        torch.manual_seed(0)
        model = Encoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(*inputs):
            loss = loss_of(model, *inputs)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step, found = wrap(step), []
        for index in range(6):
            inputs = batch(index)
            if loss_of is given_nested:
                given = jagged(*inputs)
                inputs = given, jagged(inputs[0] * 0.5, given.offsets())
            found.append(step(*inputs))
        return step, found, list(model.parameters())

    _, *eager = run(lambda step: step)
    step, *captured = run(compiled)
    same(eager, captured)
    assert captures(step) == (2 if loss_of is dense else 1)


def pointwise(x):
    y = x * 2
    y.add_(1)
    return y, y.sin() * x, torch.where(x > 0, x, -x), x.to(torch.float64), torch.zeros_like(x)


def shapes(x):
    y = jagged(x.values() * 2, x.offsets().clone())
    same_rows = x.shape == x.cos().shape, x.shape == y.shape, x.size(1) == y.size(1), x.size(1) * 2 == x.size(1) * 2
    kinds = isinstance(x.shape[1], int), type(x.shape[1]), x.is_nested, x.layout, x.dim(), x.numel()
    return same_rows, kinds, (x * 2).shape, x.stride()


def made(x):
    padded = x.to_padded_tensor(0.0)
    narrowed = torch.nested.narrow(padded, 1, torch.tensor([0, 1, 0]), torch.tensor([2, 1, 2]), layout=torch.jagged)
    listed = torch.nested.as_nested_tensor([row * 2 for row in x.unbind()], layout=torch.jagged)
    by_lengths = jagged(x.values() * 2, lengths=x.offsets().diff())
    return (
        padded,
        narrowed.sin(),
        listed,
        by_lengths,
        torch.nested.nested_tensor([padded[0], padded[1][:1]], layout=torch.jagged),
    )


def views(x):
    y = x * 2
    return x, x.values(), x.unbind()[1], y.values()[1:], y.transpose(1, 2).sin()


def leaf(x):
    leaf = torch.nested.nested_tensor([torch.ones(2, 5), torch.ones(3, 5)], layout=torch.jagged, requires_grad=True)
    (leaf.sin() * 2).values().sum().backward()
    return leaf, leaf.grad.values(), f"{x.shape[0]} rows", {x.shape: 1}[x.shape]


def random(x):
    return torch.randn_like(x), F.dropout(x, 0.5)


@pytest.mark.parametrize("step", [pointwise, shapes, made, views, leaf, random])
@pytest.mark.every(2)
def test_results(step):
    run = compiled(step)
    for index, sizes in enumerate(ROWS[:3]):
        x, y = nested(sizes, index), nested(sizes, index)
        torch.manual_seed(3)
        eager = step(x)
        torch.manual_seed(3)
        same(eager, run(y))
        same(x, y)


def several(x):
    y = x * 3
    return y.sin(), y.values().sum(), y.transpose(1, 2) * 2, x.softmax(-1)


def views_with_history(x):
    y = x * 2
    return y, y.values(), x.unbind()


def layers(x):
    weight = torch.eye(5) * 2
    return F.layer_norm(F.linear(x, weight), (5,)), torch.cat([x, x * 2], -1), x @ weight[:, :3], x.mean()


def padded(x):
    return x.to_padded_tensor(0.5), jagged(x.values() * 2, x.offsets())


@pytest.mark.parametrize("step", [several, views_with_history, layers, padded])
@pytest.mark.every(2)
def test_gradients_outside(step):
    """The backward of results runs outside, and the gradients of inputs with an autograd history leave the step."""
    run = compiled(step)
    for index, sizes in enumerate(ROWS[:2]):
        found = []
        for each in (step, run):
            leaves = rows(sizes, index, requires_grad=True)
            results = each(torch.nested.as_nested_tensor(leaves, layout=torch.jagged))
            parts = [part for item in results for part in (item if isinstance(item, tuple) else (item,))]
            sum((part._values if part.is_nested else part).detach().sum() for part in parts)
            sum((part.values() if part.is_nested else part).cos().sum() for part in parts).backward()
            found.append((results, [leaf.grad for leaf in leaves]))
        for eager, captured in zip(found[0][0], found[1][0], strict=True):
            assert [type(each) for each in flat(eager)] == [type(each) for each in flat(captured)]
        same(found[0][1], found[1][1])


def test_leaves():
    def outside(x):
        return (x.sin() * x).values().sum()

    def inside(x):
        loss = outside(x)
        loss.backward()
        return loss.detach()

    for step in (inside, lambda x: outside(x).backward()):
        found = []
        for each in (step, compiled(step) if step is inside else lambda x, run=compiled(outside): run(x).backward()):
            x = nested(requires_grad=True)
            found.append((each(x), x.grad))
        same(*found)


def test_attention_without_gradients():
    def step(x):
        heads = x.unflatten(-1, (1, 5)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads * 2, scale=0.3).transpose(1, 2)

    run = compiled(step)
    for index, sizes in enumerate(ROWS[:2]):
        same(step(nested(sizes, index)), run(nested(sizes, index)))
    assert captures(run) == 1


def test_checkpoint_and_hook():
    layer = nn.Linear(5, 5)

    def step(x):
        hidden = checkpoint(lambda value: F.gelu(layer(value)), x, use_reentrant=False)
        hidden.register_hook(lambda gradient: gradient * 2)
        with torch.autocast("cpu", torch.bfloat16):
            loss = layer(hidden).values().float().sum()
        loss.backward()
        return loss.detach()

    found = []
    for each in (step, compiled(step)):
        found.append((each(nested()), layer.weight.grad.clone()))  # a capture adds gradients out of place
        layer.zero_grad()
    same(*found)


# ---------------------------------------------------------------------- guards
def test_other_offsets_are_another_size():
    def step(x, y):
        return x + y if x.shape == y.shape else x.sin()

    run, x, y = compiled(step), nested(), nested(seed=1)
    for other in (y, jagged(y.values(), x.offsets()), x, y):
        same(step(x, other), run(x, other))
    assert captures(run) == 3


def test_error_of_other_offsets():
    def step(x, y):
        return x + y

    run, x = compiled(step, fullgraph=False), nested()
    shared = jagged(x.values() * 2, x.offsets())
    same(step(x, shared), run(x, shared))
    for each in (step, run):
        with pytest.raises(RuntimeError, match="with inputs of shapes"):
            each(x, nested())
    same(step(x, shared), run(x, shared))


def test_written_offsets():
    def step(x):
        return [row * 2 for row in x.unbind()], x.to_padded_tensor(0.0)

    x = jagged(torch.randn(9, 5), torch.tensor([0, 2, 5, 9]))
    run = compiled(step)
    for middle in (2, 3, 4):
        x.offsets()[1] = middle
        same(step(x), run(x))


def test_lengths_and_cache():
    def step(x):
        return x.sin(), x._get_max_seqlen()

    run, values, offsets = compiled(step), torch.randn(9, 5), torch.tensor([0, 2, 5, 9])
    for lengths in (None, torch.tensor([1, 2, 3]), None):
        x, y = jagged(values, offsets, lengths), jagged(values, offsets, lengths)
        for _ in range(2):  # the first call fills the cache
            same(step(x), run(y))
            same(x, y)


def test_memory_shared_with_values():
    def step(values, x):
        values.add_(1)
        x.mul_(2)
        return x.sin(), values.sum()

    run, offsets = compiled(step), torch.tensor([0, 2, 5, 9])
    for shares in (True, False):
        found = []
        for each in (step, run):
            values = torch.ones(9, 5)
            x = jagged(values if shares else values.clone(), offsets)
            found.append((each(values, x), values, x))
        same(*found)


def test_break_between():
    layer = nn.Linear(5, 5)

    def step(x):
        hidden = layer(x)
        assert "NestedTensor" in str(hidden)
        loss = F.gelu(hidden).values().sum()
        loss.backward()
        return loss.detach()

    run = compiled(step, fullgraph=False)
    for index in range(2):
        found = []
        for each in (step, run):
            found.append((each(nested(seed=index)), layer.weight.grad))
            layer.zero_grad()
        same(*found)


def test_results_are_used_further():
    x = nested()
    made = compiled(lambda x: x * 2)(x)
    same((made + x).to_padded_tensor(0.0), x.to_padded_tensor(0.0) * 3)


# ---------------------------------------------------------------------- what is refused
def with_its_view(x):
    y = x * 2
    return y, y.transpose(1, 2)


def size_of_dense(x):
    return torch.ones(1, 1, 1).expand(x.shape)


@pytest.mark.parametrize("step", [with_its_view, size_of_dense])
def test_refused(step):
    with pytest.raises(GraphBreakError, match="SFX107|SFX109"):
        compiled(step)(nested())


def test_an_input_written_before_a_backward_outside():
    """Its values may share its version counter, and are counted as written after the forward has saved them."""
    layer = nn.Linear(5, 5)

    def step(x):
        x.mul_(1.5)
        return layer(x).values().square().sum()

    with pytest.raises(GraphBreakError, match="in place, and the backward runs outside"):
        compiled(step)(nested())
    run, found = compiled(step, fullgraph=False), []
    for each in (step, run):
        x = nested()
        each(x).backward()
        found.append((x, layer.weight.grad))
        layer.zero_grad()
    same(*found)


def test_a_view_that_crosses_a_break():
    layer = nn.Linear(5, 5)

    def step(x):
        values = layer(x).values()
        assert "Parameter" in str(layer.weight)
        values.square().sum().backward()

    run, found = compiled(step, fullgraph=False), []
    for each in (step, run):
        each(nested())
        found.append(layer.weight.grad)
        layer.zero_grad()
    same(*found)
    assert all(record.code != "SFX204" for record in run.report().breaks), str(run.report())


def test_inference_tensor():
    with torch.inference_mode():
        x = nested()
    with pytest.raises(GraphBreakError, match="inference mode"):
        compiled(lambda x: x * 2)(x)
