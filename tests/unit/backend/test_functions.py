"""Small functions through every backend: mutation, views, aliasing, numbers, failures."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sidefx_train.compile.backend import inductor
from sidefx_train.compile.backend.compile_graph import build
from sidefx_train.config import CompileConfig
from tests.support.graphs import trace_fn

BACKENDS = ("eager", "aot_eager", "inductor")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seeds every run equally: some results are sums of numbers of either sign."""
    torch.manual_seed(0)


def clones(args: list[Any]) -> list[Any]:
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]


def flat(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def agree(
    fn: Callable[..., Any], args: list[Any], backend: Any, again: list[list[Any]] = [], exact: bool = True
) -> Any:
    """Runs ``fn`` eagerly and compiled on equal arguments; compares outputs and the arguments after the call."""
    executable = build(trace_fn(fn, clones(args)), CompileConfig(backend=backend))
    for values in [args, *again]:
        mine, theirs = clones(values), clones(values)
        with torch.no_grad():
            expected = flat(fn(*theirs))
        given = list(mine)
        got = executable.run(given)
        assert len(got) == len(expected)
        for g, e in zip([*got, *mine], [*expected, *theirs]):
            if isinstance(e, torch.Tensor):
                assert g.shape == e.shape and g.stride() == e.stride() and g.dtype == e.dtype
                if exact and backend != "inductor":
                    assert torch.equal(g, e), (g, e)
                else:
                    torch.testing.assert_close(g, e)
            else:
                assert g == pytest.approx(e, rel=1e-6)
    return executable


@pytest.mark.parametrize("backend", BACKENDS)
def test_mutation_through_views(backend: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        x[1:].mul_(2)
        x.view(-1)[0] = 7
        z = y.clone()
        z[:, 0].add_(x[:, 1])
        y.add_(z.t().contiguous().t())
        return z.sum(), x[0] * 3

    agree(fn, [torch.randn(4, 4), torch.randn(4, 4)], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_changing_numbers(backend: str) -> None:
    def fn(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, lr: Any, beta: Any, n: Any) -> Any:
        p.mul_(1 - lr * 0.1)
        m.lerp_(g, 1 - beta)
        p.addcdiv_(m, g.abs() + 1, value=-lr)
        p.add_(g, alpha=lr)
        p.sub_(g, alpha=lr * beta)
        q = torch.addcmul(p, g, m, value=beta) / (1 - beta)
        return q * n, p.clamp(min=-lr), torch.pow(g.abs(), beta), lr * 2.0, n + 1

    def values(lr: float, beta: float, n: int) -> list[Any]:
        return [torch.randn(5, 3), torch.randn(5, 3), torch.randn(5, 3), lr, beta, n]

    agree(fn, values(0.1, 0.9, 3), backend, [values(0.03, 0.5, 11), values(2.0, 0.1, -4)], exact=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_zero_dim_counters(backend: str, dtype: torch.dtype) -> None:
    def fn(step: torch.Tensor, x: torch.Tensor, total: torch.Tensor) -> Any:
        step += 1
        count = step.item()
        x.mul_(1 - 0.5**count)
        step.add_(2)
        total += x.sum().double()
        return step.item(), count * 2

    again = [[torch.tensor(9, dtype=dtype), torch.randn(3), torch.tensor(2.5, dtype=torch.float64)]]
    args = [torch.tensor(1, dtype=dtype), torch.randn(3), torch.zeros((), dtype=torch.float64)]
    agree(fn, args, backend, again, exact=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_late_numbers(backend: str) -> None:
    def fn(x: torch.Tensor) -> Any:
        loss = (x * x).sum()
        value = loss.item()
        return loss, value, value / 2 + 1

    agree(fn, [torch.randn(6)], backend, [[torch.randn(6)]], exact=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_are_those_of_the_moment_they_were_read(backend: str) -> None:
    def fn(x: torch.Tensor, n: torch.Tensor) -> Any:
        before = x.item()
        count = n.item()
        x.add_(1)
        y = x * 2
        middle = y.item()
        y.mul_(3)
        n.mul_(2)
        return before, middle, x.item(), y, count, n.item()

    args = [torch.tensor([2.0]), torch.tensor([3])]
    executable = agree(fn, args, backend, [[torch.tensor([5.5]), torch.tensor([7])]], exact=False)
    assert isinstance(executable.run(clones(args))[4], int)


@pytest.mark.parametrize("backend", BACKENDS)
def test_number_of_the_graph_feeds_a_tensor(backend: str) -> None:
    def fn(x: torch.Tensor) -> Any:
        norm = x.norm().item()
        x.mul_(1.0 / (norm + 1.0))
        return x.sum()

    agree(fn, [torch.randn(6)], backend, [[torch.randn(6) * 3]], exact=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_that_alias_inputs(backend: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(1)
        return x, x[1:], x.t(), y.view(-1), y, y

    executable = agree(fn, [torch.randn(3, 4), torch.randn(2, 2)], backend)
    x, y = torch.randn(3, 4), torch.randn(2, 2)
    whole, rows, transposed, line, same, twice = executable.run([x, y])
    assert whole is x and same is y and twice is y
    for view in (rows, transposed):
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    line[0] = 5
    assert y[0, 0] == 5
    rows[0, 0] = 6
    assert x[1, 0] == 6


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_that_share_an_intermediate(backend: str) -> None:
    def fn(x: torch.Tensor) -> Any:
        z = x * 2
        return z, z[1:], z.view(-1)

    executable = agree(fn, [torch.randn(3, 4)], backend)
    z, rows, line = executable.run([torch.randn(3, 4)])
    line[4] = 9
    assert rows[0, 0] == 9 and z[1, 0] == 9


@pytest.mark.parametrize("backend", BACKENDS)
def test_metadata_mutation(backend: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Any:
        x.t_()
        y.unsqueeze_(0)
        y.mul_(2)
        w.squeeze_(1)
        return x @ w

    agree(fn, [torch.randn(3, 4), torch.randn(2, 2), torch.randn(3, 1)], backend)


def test_metadata_mutation_waits_for_success() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor) -> Any:
        x.t_()
        x.add_(1)
        return F.embedding(i, x)

    for backend in BACKENDS:
        executable = build(trace_fn(fn, [torch.randn(3, 4), torch.tensor([0, 1])]), CompileConfig(backend=backend))
        x = torch.randn(3, 4)
        before = x.clone()
        with pytest.raises(IndexError):
            executable.run([x, torch.tensor([0, 4])])
        assert x.shape == (3, 4) and torch.equal(x, before)
        out = executable.run([x, torch.tensor([0, 3])])[0]
        assert x.shape == (4, 3) and torch.equal(out, x[[0, 3]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_failure_leaves_everything_as_it_was(backend: str) -> None:
    def fn(x: torch.Tensor, count: torch.Tensor, labels: torch.Tensor, table: torch.Tensor, where: torch.Tensor) -> Any:
        count.add_(1)
        x.mul_(0.5)
        loss = F.cross_entropy(x, labels)
        table.index_add_(0, where * 1, x)
        return loss

    args = [
        torch.randn(4, 3),
        torch.zeros(()),
        torch.tensor([0, 1, 2, -100]),
        torch.randn(6, 3),
        torch.tensor([0, 1, 2, 5]),
    ]
    executable = agree(fn, args, backend, exact=False)
    assert executable.atomic
    for bad_label, bad_row in ((3, 5), (1, 6), (-1, 0)):
        mine = clones(args)
        mine[2][0], mine[4][0] = bad_label, bad_row
        before = clones(mine)
        with pytest.raises((IndexError, RuntimeError)):
            executable.run(list(mine))
        for m, b in zip(mine, before):
            assert torch.equal(m, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_numbers_and_a_failure(backend: str) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor) -> Any:
        y = F.dropout(x, 0.5)
        return y[i + 1]

    traced = trace_fn(fn, [torch.ones(64), torch.tensor([1, 2])], rng=True)
    executable = build(traced, CompileConfig(backend=backend, rng="eager"))
    state = torch.get_rng_state()
    with pytest.raises((IndexError, RuntimeError)):
        executable.run([torch.ones(64), torch.tensor([1, 64])])
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(3)
    expected = fn(torch.ones(64), torch.arange(63))
    torch.manual_seed(3)
    assert torch.equal(executable.run([torch.ones(64), torch.tensor([1, 2])])[0], expected[[1, 2]])


def test_bad_index_in_a_parallel_kernel_raises() -> None:
    """An exception inside a parallel region of generated code would end the process."""

    def fn(seen: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> Any:
        seen.add_(1)
        return x[i + 1] * 2

    args = [torch.zeros(3), torch.randn(1000, 64), torch.randint(0, 999, (2000,))]
    executable = agree(fn, args, "inductor")
    args[2][1500] = 999
    with pytest.raises(IndexError):
        executable.run(list(args))
    assert torch.equal(args[0], torch.zeros(3))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_inputs_that_share_memory_see_each_others_writes(backend: Any) -> None:
    base = torch.randn(4, 4)

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(1)
        return y * 2

    x = base.clone()
    executable = build(trace_fn(fn, [base, base[1:]]), CompileConfig(backend=backend))
    out = executable.run([x, x[1:]])[0]
    torch.testing.assert_close(x, base + 1)
    torch.testing.assert_close(out, (base[1:] + 1) * 2)


def test_own_compiler_gets_the_functional_graph() -> None:
    seen = []

    def compiler(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        seen.append((module, examples))
        return module.forward

    def fn(p: torch.Tensor, g: torch.Tensor, lr: Any) -> Any:
        p.add_(g, alpha=-lr)
        return p.sum()

    agree(fn, [torch.randn(4), torch.randn(4), 0.1], compiler, [[torch.randn(4), torch.randn(4), 0.7]], exact=False)
    module, examples = seen[0]
    assert not any("add_" in str(n.target) for n in module.graph.nodes)
    assert all(isinstance(e, torch.Tensor) for e in examples)


def test_autocast_outside_does_not_touch_the_graph() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        return x @ w

    x, w = torch.randn(8, 8), torch.randn(8, 8)
    for backend in BACKENDS:
        executable = build(trace_fn(fn, [x, w]), CompileConfig(backend=backend))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert executable.run([x, w])[0].dtype == torch.float32


def test_graphs_are_lowered_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor patches its settings for a whole process; parts of a step are compiled in separate threads."""
    running, most = [], 0

    def lowered(*given: Any) -> Any:
        nonlocal most
        running.append(given)
        most = max(most, len(running))
        time.sleep(0.02)
        running.pop()

    monkeypatch.setattr(inductor, "_lower_alone", lowered)
    threads = [
        threading.Thread(target=inductor._lower, args=(None, CompileConfig(), inductor.Clock(), False))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and not running


def test_a_forked_process_does_not_wait_for_a_graph_that_is_lowered_in_its_parent() -> None:
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with inductor._lock:
            taken.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the test needs these threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if inductor._lock.acquire(timeout=5) else 1
        finally:
            os._exit(status)  # whatever happens: this process is a copy of the one that runs the tests
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert status == 0


@pytest.mark.parametrize("width", [33, 64])
@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_casts_round(backend: str, narrow: torch.dtype, width: int) -> None:
    """A cast to a narrow type rounds, even if the wide value is still available."""

    def quantized(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        error = x.to(narrow).float() - x
        wider = x.double().to(narrow).double() - x
        kept = (x * scale).to(narrow)  # returned, and read again
        return x + error, error, wider, kept, kept.float() - x * scale, (kept * 2).float() / 2 - x * scale

    # Rounding errors are about 1e-3 of the values: assert_close's 1e-5 distinguishes them from none.
    agree(quantized, [torch.randn(8, width), torch.rand(8, 1) + 0.5], backend)
