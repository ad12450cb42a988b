"""Numbers that only the graph knows (``t.item()``) as arguments that C++ code or a derivative reads."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import sidefx_train

STEPS = {
    "celu": lambda x, n: F.celu(x, alpha=n),
    "celu twice": lambda x, n: F.celu(F.celu(x, n) * 2, n + 1),
    "lerp": lambda x, n: torch.lerp(x, x * x, n),
    "power": lambda x, n: x.abs() ** n,
    "pow": lambda x, n: torch.pow(x.abs(), 2 * n),
    "power of a number": lambda x, n: n**x,
    "sum with a factor": lambda x, n: torch.add(x, x * x, alpha=n),
    "huber": lambda x, n: F.huber_loss(x, x.detach() * 2, delta=n),
    "smooth l1": lambda x, n: F.smooth_l1_loss(x, x.detach() * 2, beta=n),
    "distance": lambda x, n: torch.cdist(x, x * 2 + 1, p=n + 1),
    "dropout": lambda x, n: F.dropout(x, n / 10),
    "quantile": lambda x, n: torch.quantile(x, n / 10),
    "normal": lambda x, n: x * torch.normal(n, 1.0, (4,)),
    "uniform": lambda x, n: x * torch.empty(4).uniform_(0, n),
    "logit": lambda x, n: torch.logit(x, n / 10),
    "layer norm": lambda x, n: F.layer_norm(x, (4,), eps=n),
    "elu": lambda x, n: F.elu(x, n),
}


def run(call, numbers, backend="eager"):
    """Returns results and gradients of a step that computes its number, eagerly and captured, and the report."""

    def make():
        torch.manual_seed(1)
        weight = torch.nn.Parameter(torch.rand(4, 4))

        def step(x, number):
            y = call(x * weight, (number * weight.detach().mean() / weight.detach().mean()).item())
            (y * y).sum().backward()
            gradient, weight.grad = weight.grad, None
            return y.detach(), gradient

        return step

    def history(step):
        found = []
        for i, number in enumerate(numbers):
            torch.manual_seed(i)
            x = torch.rand(4, 4) + 0.1
            try:
                found.append(step(x, torch.tensor(number, dtype=torch.float64)))
            except (RuntimeError, ValueError) as error:
                found.append(str(error))
        return found

    compiled = sidefx_train.compile(make(), backend=backend, rng="eager")
    return history(make()), history(compiled), compiled.report()


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.every(3)
def test_one_graph_with_the_bits_of_eager(name):
    want, have, report = run(STEPS[name], (0.3, 0.75, 1.5, 0.9, 2.5))
    assert len(report.captures) == 1 and not report.breaks and report.replays == report.calls, str(report)
    for wanted, had in zip(want, have, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wanted, had, strict=True))


@pytest.mark.parametrize("name", ["celu", "lerp", "pow", "power of a number", "distance"])
@pytest.mark.every(2)
def test_compiled_code_reads_the_number(name):
    want, have, report = run(STEPS[name], (0.3, 0.75, 1.5, 0.9, 2.5), "inductor")
    assert len(report.captures) == 1 and not report.breaks and report.replays == report.calls, str(report)
    for wanted, had in zip(want, have, strict=True):
        torch.testing.assert_close(had, wanted, rtol=1e-4, atol=1e-5)


UNUSUAL = (0.3, 0.0, 0.7, -0.5, 1.0, 2.0, math.inf, 0.4, math.nan, -1.0, -math.inf, 5.0)


READS = ("celu", "lerp", "power", "power of a number", "huber", "smooth l1", "dropout", "logit")


@pytest.mark.parametrize("name", READS)
@pytest.mark.every(4)
def test_other_ways_of_the_kernel_are_left_to_eager(name):
    want, have, report = run(STEPS[name], UNUSUAL)
    assert report.replays > 0, str(report)
    for wanted, had in zip(want, have, strict=True):
        if isinstance(wanted, str):
            assert had == wanted
        else:
            torch.testing.assert_close(had, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("order", [torch.linalg.vector_norm, torch.norm], ids=lambda order: order.__name__)
def test_a_derivative_that_depends_on_the_number_is_captured_in_parts(order):
    want, have, report = run(lambda x, n: order(x, n + 1), (0.3, 0.75, 1.5, 0.9, 1.0, math.inf, 2.5))
    assert not report.fallbacks, str(report)
    for wanted, had in zip(want, have, strict=True):
        torch.testing.assert_close(had, wanted, rtol=0, atol=0, equal_nan=True)
