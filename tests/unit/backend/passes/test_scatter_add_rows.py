"""Index-add of rows by the native module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import sidefx_train
from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.cpp_codegen.wrapper_prelude import header_free_wrapper
from sidefx_train.compile.backend.passes import scatter_add_rows

aten = torch.ops.aten
LEFT_OUT = -(2**63)


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def summed(index, values, height):
    return torch.ops.sidefx.sum_rows.default(index, values, height)


@pytest.mark.parametrize(
    "count, columns, height",
    [(0, 16, 3), (5, 1, 1), (300, 16, 7), (2000, 17, 40), (2000, 40, 9), (900, 100, 1000), (700, 513, 3)],
)
def test_sums_are_those_of_index_add_to_the_last_bit(count, columns, height, threads):
    torch.manual_seed(0)
    index = torch.randint(0, height, (count,))
    values = torch.randn(count, columns)
    want = torch.zeros(height, columns)
    for place, row in zip(index.tolist(), values, strict=True):
        want[place] += row
    assert torch.equal(summed(index, values, height), want)


def test_places_count_from_the_end_and_may_be_left_out(threads):
    index = torch.tensor([0, -1, LEFT_OUT, 2, -3, LEFT_OUT]).repeat(400)
    values = torch.randn(2400, 24)
    kept = index != LEFT_OUT
    want = torch.zeros(3, 24).index_add(0, index[kept] % 3, values[kept])
    torch.testing.assert_close(summed(index, values, 3), want)


@pytest.mark.parametrize("wrong", [3, -4, 2**40, LEFT_OUT + 1])
def test_a_place_that_is_not_there_is_an_error(wrong, threads):
    index = torch.zeros(2000, dtype=torch.int64)
    index[1234] = wrong
    with pytest.raises(IndexError, match="out of bounds for dimension 0 with size 3"):
        summed(index, torch.randn(2000, 16), 3)


def test_results_are_laid_out_without_gaps():
    index, values = torch.randint(0, 9, (800,))[::2], torch.randn(32, 400).t()
    torch.testing.assert_close(summed(index, values, 9), torch.zeros(9, 32).index_add(0, index, values))


INDEX = torch.randint(0, 50, (1024,))
REWRITTEN = {
    "index_put": lambda x: aten.index_put(torch.zeros(50, 32), [INDEX], x, True),
    "several rows at once": lambda x: aten.index_put(
        torch.zeros(50, 32), [INDEX.view(32, 32)], x.view(32, 32, 32), True
    ),
    "rows of matrices": lambda x: aten.index_put(torch.zeros(50, 4, 8), [INDEX], x.view(-1, 4, 8), True),
    "short integers": lambda x: aten.index_put(torch.zeros(50, 32), [INDEX.int()], x, True),
    "to other rows": lambda x: aten.index_put(x[:50].clone(), [INDEX], x * 2, True),
    "to ones": lambda x: aten.index_put(torch.ones(50, 32), [INDEX], x, True),
    "another layout": lambda x: aten.index_put(torch.zeros(50, 32), [INDEX], x.t().contiguous().t(), True),
    "masked": lambda x: aten._unsafe_masked_index_put_accumulate(
        torch.zeros(50, 32), (INDEX % 3 > 0)[:, None], [INDEX], x
    ),
    "masked, and out of bounds": lambda x: aten._unsafe_masked_index_put_accumulate(
        torch.zeros(20, 32), (INDEX < 20)[:, None], [INDEX], x
    ),
}
LEFT = {
    "written, not added": lambda x: aten.index_put(torch.zeros(50, 32), [INDEX], x, False),
    "a column at a time": lambda x: aten.index_put(torch.zeros(32, 50), [None, INDEX], x.t(), True),
    "single numbers": lambda x: aten.index_put(torch.zeros(50, 32), [INDEX, INDEX % 32], x[:, 0], True),
    "one row for all": lambda x: aten.index_put(torch.zeros(50, 32), [INDEX], x[:1], True),
    "few": lambda x: aten.index_put(torch.zeros(50, 32), [INDEX[:100]], x[:100], True),
    "narrow rows": lambda x: aten.index_put(torch.zeros(2000, 8), [INDEX.repeat(4)], x.view(-1, 8), True),
    "a narrow type": lambda x: aten.index_put(
        torch.zeros(50, 32, dtype=torch.bfloat16), [INDEX], x.to(torch.bfloat16), True
    ),
    "a wide type": lambda x: aten.index_put(torch.zeros(50, 32, dtype=torch.float64), [INDEX], x.double(), True),
    "a mask for each number": lambda x: aten._unsafe_masked_index_put_accumulate(
        torch.zeros(50, 32), x > 0, [INDEX], x
    ),
}


def rewritten(net, x):
    module = make_fx(net, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    for node in module.graph.nodes:  # the form of zeros that a decomposition makes
        if node.target is aten.zeros.default:
            node.target, node.args = aten.full.default, (node.args[0], 0)
    mode = next(n.meta["val"].fake_mode for n in module.graph.nodes if hasattr(n.meta.get("val"), "fake_mode"))
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = mode.from_tensor(getattr(module, node.target))
    return module, scatter_add_rows.sum_rows_natively(module, mode)


@pytest.mark.parametrize("name", REWRITTEN)
def test_additions_by_index_are_what_they_were(name):
    torch.manual_seed(0)
    x = torch.randn(1024, 32)
    module, note = rewritten(REWRITTEN[name], x)
    assert note == "1 sums of rows by index by the native module"
    have, want = module(x), REWRITTEN[name](x)
    assert have.dtype == want.dtype and have.shape == want.shape and have.stride() == want.stride()
    torch.testing.assert_close(have, want)


def test_rows_that_are_a_sum_of_rows_themselves():
    def net(x):
        first = aten.index_put(torch.zeros(1024, 32), [INDEX], x, True)
        return aten.index_put(torch.zeros(50, 32), [INDEX], first, True)

    x = torch.randn(1024, 32)
    module, note = rewritten(net, x)
    assert note == "2 sums of rows by index by the native module"
    torch.testing.assert_close(module(x), net(x))


@pytest.mark.parametrize("name", LEFT)
def test_others_stay(name):
    assert rewritten(LEFT[name], torch.randn(1024, 32))[1] == ""


def captured_and_eager(make_step, calls=3):
    """Returns the results of each call of a step, eager and captured."""
    eager, captured = make_step(), sidefx_train.compile(make_step())
    pairs = [(eager(), captured()) for _ in range(calls)]
    report = captured.report()
    assert report.fallback_count == 0 and "aoti_torch_sidefx_sum_rows(" in report.sources()["inductor"]
    return pairs


@pytest.mark.parametrize("padding", [None, 3])
def test_the_gradient_of_an_embedding(padding, threads):
    def make_step():
        torch.manual_seed(0)
        table = nn.Embedding(100, 48, padding_idx=padding)
        words, given = torch.randint(0, 100, (16, 32)), torch.randn(16, 32, 48)

        def step():
            table.weight.grad = None
            (table(words) * given).sum().backward()
            return table.weight.grad

        return step

    for want, have in captured_and_eager(make_step):
        torch.testing.assert_close(have, want)


def test_messages_to_the_nodes_of_a_graph(threads):
    def make_step():
        torch.manual_seed(0)
        x = torch.randn(60, 32, requires_grad=True)
        start, end = torch.randint(0, 60, (2, 2000))

        def step():
            x.grad = None
            got = x.index_add(0, end, x[start].tanh())
            got.square().mean().backward()
            return got.detach(), x.grad

        return step

    for want, have in captured_and_eager(make_step):
        torch.testing.assert_close(have, want)


def test_a_sum_is_the_same_each_time():
    """With atomic additions of several threads the order differs, and with it the last digits."""
    torch.manual_seed(0)
    index, x = torch.randint(0, 4, (20000,)), torch.randn(20000, 16)
    step = sidefx_train.compile(lambda: torch.zeros(4, 16).index_add(0, index, x), keep_slower=True)
    first = step()
    assert torch.equal(first, torch.zeros(4, 16).index_add(0, index, x))
    assert all(torch.equal(step(), first) for _ in range(20))


def test_an_index_out_of_bounds_raises_and_leaves_what_eager_leaves():
    x, seen = torch.randn(1024, 32), []

    @sidefx_train.compile
    def step(index):
        seen.append(len(seen))
        return torch.zeros(50, 32).index_add(0, index * 1, x)

    good, bad = torch.randint(0, 50, (1024,)), torch.full((1024,), 50)
    step(good), step(good)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        step(bad)
    assert seen == [0, 1, 2]
    torch.testing.assert_close(step(good), torch.zeros(50, 32).index_add(0, good, x))


@pytest.mark.parametrize("words, expected", [(64, False), (1024, True)])
def test_the_module_is_built_for_graphs_that_may_need_it(words, expected):
    def step(table, places):
        return aten.embedding_dense_backward(table[places], places, 50, -1, False)

    graph = make_fx(step, tracing_mode="fake")(torch.randn(50, 32), torch.randint(0, 50, (words,))).graph
    assert scatter_add_rows.may_add_rows(graph) is expected


def test_without_the_native_module_loops_are_used(monkeypatch):
    monkeypatch.setattr(scatter_add_rows, "rows_module", lambda: None)
    assert rewritten(REWRITTEN["index_put"], torch.randn(1024, 32))[1] == ""


def test_a_caller_of_narrow_products_needs_no_header_of_torchs():
    names = [
        f"{compat.KERNEL_FUNCTION}{name}" for name in ("product", "product_relu_narrow", "products_narrow", "sum_rows")
    ]
    assert header_free_wrapper("\n".join(f"auto made = {name}(a, b, c);" for name in names)) is not None
