"""``verify``: a wrong backend is found, its results are not used, and the report says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sidefx_train
from sidefx_train import disk_cache
from sidefx_train.compile.backend import inductor
from sidefx_train.compile.backend.verification import comparison
from sidefx_train.errors import SideFXWarning, VerificationError
from tests.support.disk_cache import new_cache


def make(**options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, sidefx_train.compile(step, **options) if options else step


def wrong(gm, example_inputs):
    def run(*args):
        return [out * 1.5 if isinstance(out, torch.Tensor) and out.dim() == 0 else out for out in gm(*args)]

    return run


BATCHES = [(torch.randn(5, 4), torch.randint(0, 3, (5,))) for _ in range(4)]


def test_right_backend_passes():
    plain, eager = make()
    model, step = make(backend="aot_eager", verify=2)
    for batch in BATCHES:
        assert torch.equal(eager(*batch), step(*batch)), "losses differ"
    assert torch.equal(plain.weight, model.weight), "parameters differ"
    assert not step.report().breaks, str(step.report())


def test_wrong_backend_is_found_and_not_used():
    plain, eager = make()
    model, step = make(backend=wrong, verify=1)
    with pytest.warns(SideFXWarning, match="SFX205"):
        losses = [step(*batch) for batch in BATCHES]
    assert all(torch.equal(a, eager(*b)) for a, b in zip(losses, BATCHES, strict=True)), "a wrong loss was returned"
    assert torch.equal(plain.weight, model.weight), "parameters differ"
    assert [b.code for b in step.report().breaks] == ["SFX205"], str(step.report())


def test_wrong_backend_raises_on_request():
    _, step = make(backend=wrong, verify=1, on_failure="raise")
    with pytest.raises(VerificationError, match="off by"):
        step(*BATCHES[0])


def _changed(change):
    """Returns a backend whose every result is ``change(result)``."""

    def backend(gm, example_inputs):
        return lambda *args: [change(out) if isinstance(out, torch.Tensor) else out for out in gm(*args)]

    return backend


def _updated_slightly_otherwise(gm, example_inputs):
    """A backend whose parameter update is one percent too large: the parameter differs in the sixth digit."""

    def run(*args):
        before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        results = gm(*args)
        for arg, old in zip(args, before, strict=True):
            if isinstance(arg, torch.Tensor) and arg.is_floating_point() and not torch.equal(arg, old):
                arg.add_(arg - old, alpha=0.01)
        return results

    return run


def test_by_default_the_first_run_is_compared():
    model, step = make()
    _, captured = make(backend="inductor")
    for batch in BATCHES:
        assert torch.allclose(captured(*batch), step(*batch))
    (found,) = captured.report().captures[0].verification
    assert found.startswith("equal to the captured graph run op by op (the comparison took")
    assert "comparison" in captured.report().details()


def test_nothing_is_compared_on_request():
    _, step = make(backend="inductor", verify=0)
    step(*BATCHES[0])
    assert step.report().captures[0].verification == []


def test_update_is_compared_by_its_own_size():
    plain, eager = make()
    model, step = make(backend=_updated_slightly_otherwise)
    with pytest.warns(SideFXWarning, match=r"SFX205.*model.*weight.*change"):
        losses = [step(*batch) for batch in BATCHES]
    assert all(torch.equal(a, eager(*b)) for a, b in zip(losses, BATCHES, strict=True))
    assert torch.equal(plain.weight, model.weight)


def test_not_a_number_is_no_zero():
    step = sidefx_train.compile(lambda x: x / x + 1, backend=_changed(torch.nan_to_num))
    with pytest.warns(SideFXWarning, match="SFX205"):
        assert step(torch.zeros(3)).isnan().all()


def test_a_graph_whose_results_are_zeros_is_compared_again():
    """Wrong by a factor, which the first results do not show."""
    step = sidefx_train.compile(lambda x: x * 3, backend=_changed(lambda out: out * 1.5), keep_slower=True)
    for _ in range(3):
        assert torch.equal(step(torch.zeros(3)), torch.zeros(3))
    step(torch.zeros(3))  # compared again without effect
    with pytest.warns(SideFXWarning, match="SFX205"):
        results = [step(torch.ones(3)) for _ in range(40)]
    assert torch.equal(results[-1], torch.full((3,), 3.0))


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_model_compiled_alone_is_compared_in_both_directions(part):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    inputs = torch.randn(5, 4)
    model(inputs).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    wrong = _changed(lambda out: out * 1.1 if (out.shape == (5, 1)) == (part == "forward") else out)
    captured = sidefx_train.compile(model, backend=wrong)
    with pytest.warns(SideFXWarning, match=f"SFX205.*{part}"):
        captured(inputs).sum().backward()
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def _with_norm(clamp):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), clamp, nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), clamp)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize(
    "clamp", [nn.ReLU6(), pytest.param(nn.Hardtanh(-0.2, 0.2), marks=pytest.mark.slow)], ids=["relu6", "hardtanh"]
)
def test_what_is_all_rounding_is_no_mistake(clamp):
    """Gradients of biases before a norm are only rounding error, and Adam makes full-size steps from them."""
    step = sidefx_train.compile(_with_norm(clamp), verify=3, fullgraph=True)
    for seed in range(3):
        step(torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(seed)))
    assert not step.report().breaks, str(step.report())
    assert len(step.report().captures[0].verification) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.every(2)
def test_other_types(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(8) % 4).backward()
        optimizer.step()

    captured = sidefx_train.compile(step, verify=2)
    for _ in range(3):
        captured(torch.randn(8, 16).to(dtype))
    assert not captured.report().breaks, str(captured.report())


def test_nothing_stays_in_the_way_of_a_graph_that_has_proved_itself():
    _, step = make(backend="inductor")
    step(*BATCHES[0])
    (entry,) = step._cache.entries
    assert entry.replay.__globals__["run"] is not entry.executable.run
    step(*BATCHES[1])
    assert len(step.report().captures[0].verification) == 1


class Drawing(nn.Module):
    """Draws masks, noise and integers in the step."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = F.dropout(torch.relu(self.first(x)), 0.3) + 0.1 * torch.randn(x.shape[0], 16)
        h = h * (torch.rand_like(h) < 0.8) + torch.randint(0, 3, (16,)) * 0.01
        return F.alpha_dropout(self.second(F.dropout1d(h, 0.2)), 0.1, self.training)


def _drawing_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_a_graph_that_draws_its_own_random_numbers_is_compared():
    torch.manual_seed(0)
    step = sidefx_train.compile(_drawing_step(Drawing()), verify=2, fullgraph=True)
    for _ in range(3):
        step(torch.randn(6, 12))
    assert not step.report().breaks, str(step.report())
    found = step.report().captures[0].verification
    assert len(found) == 2 and all(text.startswith("equal") for text in found), found


def test_comparing_draws_no_random_number():
    results = []
    for verify in (0, 2):
        torch.manual_seed(0)
        step = sidefx_train.compile(_drawing_step(Drawing()), verify=verify)
        torch.manual_seed(1)
        results.append([step(torch.ones(6, 12)) for _ in range(3)] + [torch.rand(2)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_kept_graph_that_draws_random_numbers_is_compared_once(tmp_path, monkeypatch):
    """The reference for the comparison needs a functionalization; a proof is valid for one library."""
    new_cache(tmp_path, monkeypatch)

    def text(**options):
        torch.manual_seed(0)
        step = sidefx_train.compile(_drawing_step(Drawing()), fullgraph=True, **options)
        step(torch.ones(6, 12))
        (found,) = step.report().captures[0].verification
        return found

    assert "the comparison took" in text()
    assert "an earlier process compared" in text()
    assert "the comparison took" in text(verify=1)
    (proof,) = disk_cache.cache_dir().glob("proofs/*")
    library = proof.stem.partition("_")[2]
    assert disk_cache.library(library) is not None, "the proof names no library"
    proof.rename(proof.with_stem(proof.stem.replace(library, "0" * 64)))
    assert "the comparison took" in text()


def test_what_was_lowered_is_not_functionalized_again_to_compare(tmp_path, monkeypatch):
    new_cache(tmp_path, monkeypatch)
    functionalize, calls = inductor.functionalize, []
    monkeypatch.setattr(inductor, "functionalize", lambda *a, **k: calls.append(1) or functionalize(*a, **k))
    step = sidefx_train.compile(_drawing_step(Drawing()), fullgraph=True)
    step(torch.ones(6, 12))
    (found,) = step.report().captures[0].verification
    assert found.startswith("equal") and len(calls) == 1
    assert not step._cache.entries[0].executable.functional, "the graph lives on"


def test_a_graph_that_failed_leaves_no_proof(tmp_path, monkeypatch):
    new_cache(tmp_path, monkeypatch)
    monkeypatch.setattr(comparison, "FACTOR", -1.0)
    monkeypatch.setattr(comparison, "EXACT_FACTOR", -1e9)
    monkeypatch.setattr(comparison, "RELATIVE", -1.0)
    step = sidefx_train.compile(_drawing_step(Drawing()), fullgraph=True)
    with pytest.warns(SideFXWarning, match="SFX205"):
        step(torch.ones(6, 12))
    assert not list(disk_cache.cache_dir().glob("proofs/*"))


def test_integers_are_equal_or_not():
    """Rounding cannot cause a relative difference of one in ten thousand between integers."""
    off_by_one = _changed(lambda out: out + 1 if not out.is_floating_point() else out)
    step = sidefx_train.compile(lambda x: (x > 0).long() + 10_001, backend=off_by_one)
    with pytest.warns(SideFXWarning, match="SFX205"):
        assert torch.equal(step(torch.ones(3)), torch.full((3,), 10_002))


def test_sparse_gradients():
    torch.manual_seed(0)
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    def step(ids):
        optimizer.zero_grad()
        table(ids).square().mean().backward()
        optimizer.step()

    captured = sidefx_train.compile(step)
    for _ in range(3):
        captured(torch.tensor([1, 2, 2]))
    assert not [b for b in captured.report().breaks if b.code in ("SFX205", "SFX204", "SFX202")], str(captured.report())


@pytest.mark.parametrize("view", [lambda x: x[:, 2:7], lambda x: x[:1].expand(4, 9), lambda x: x.t()[::2]])
def test_inputs_that_have_gaps_or_overlap(view):
    """Compiled code relies on the strides of its inputs: the copies have them."""
    step = sidefx_train.compile(lambda x: torch.softmax(x * 2, -1).sum(0))
    x = view(torch.arange(36.0).reshape(4, 9) / 9)
    torch.testing.assert_close(step(x), torch.softmax(x * 2, -1).sum(0))
    assert not step.report().breaks, str(step.report())
    assert step.report().captures[0].verification[0].startswith("equal")


def test_noise_that_leads_out_of_a_domain_is_no_error_of_the_step():
    """Probabilities of exactly one cannot be perturbed: without a rounding reference, the result stays uncertain."""
    step = sidefx_train.compile(
        lambda p, y: F.binary_cross_entropy((p * 1.0), y), backend=_changed(lambda out: out * 1.01)
    )
    p, y = torch.ones(64), torch.zeros(64)
    with pytest.warns(SideFXWarning, match="SFX205"):
        assert torch.equal(step(p, y), F.binary_cross_entropy(p, y))
    assert step.report().replays == 1 and not step.report().fallbacks, str(step.report())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_who_overflows_on_the_way_is_no_measure(dtype):
    """Eager's GELU kernel overflows to infinity or NaN where the compiled one has the right values."""
    numbers = torch.tensor([3e38, -3e38, 1.8e38, 1e38, float("inf"), float("-inf"), float("nan"), 1e20, -10.0, 0.5] * 4)
    step = sidefx_train.compile(lambda x: F.gelu(x))
    step(numbers.to(dtype))
    assert not step.report().breaks, str(step.report())
    (found,) = step.report().captures[0].verification
    assert found.startswith("equal"), found


def test_an_infinity_at_the_edge_of_a_domain_hides_nothing_else():
    """Rounding decides whether one element is finite; the other elements are still wrong."""
    step = sidefx_train.compile(lambda x: torch.log1p(-(x * 1.0)), backend=_changed(lambda out: out * 1.1))
    x = torch.tensor([0.5, 1.0, 0.25, 0.125] * 8)
    with pytest.warns(SideFXWarning, match="SFX205"):
        assert torch.equal(step(x), torch.log1p(-x))


@pytest.mark.parametrize("wrong", [float("inf"), float("nan"), float("-inf")])
def test_one_element_that_should_be_finite(wrong):
    def spoilt(out):
        out = out.clone()
        out[5] = wrong
        return out

    step = sidefx_train.compile(lambda x: x * 3, backend=_changed(spoilt))
    with pytest.warns(SideFXWarning, match=r"SFX205.*element 5 \(1 of 8 are"):
        assert torch.equal(step(torch.ones(8)), torch.full((8,), 3.0))


def _in_float64(gm, example_inputs):
    """A compiler that is more exact than eager."""

    def run(*args):
        wide = [arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args]
        return [out.float() for out in gm(*wide)]

    return run


def _ill_conditioned():
    n = 5
    rows = torch.arange(1.0, n + 1)
    return 1 / (rows[:, None] + rows - 1), torch.ones(n)


@pytest.mark.parametrize("right", [True, False])
def test_a_graph_that_is_more_exact_than_eager_is_no_mistake(right):
    """Eager's float32 has two correct digits of the solution; the comparison in float64 decides."""
    backend = _in_float64 if right else _changed(lambda out: out * 1.1)
    step = sidefx_train.compile(torch.linalg.solve, backend=backend)
    matrix, side = _ill_conditioned()
    if right:
        step(matrix, side)
        assert not step.report().breaks, str(step.report())
    else:
        with pytest.warns(SideFXWarning, match="SFX205"):
            assert torch.equal(step(matrix, side), torch.linalg.solve(matrix, side))


def _line_of(marker):
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if line.rstrip().endswith(f"# {marker}"))


def test_the_first_wrong_value_is_named_with_its_operator_and_line():
    def step(x, y):
        a = torch.tanh(x)
        b = a + y  # here it goes wrong
        return b * 2, a, b

    wrong = sidefx_train.compile(step, backend=_wrong_from("aten.add.Tensor"))
    with pytest.warns(SideFXWarning, match="SFX205") as caught:
        wrong(torch.ones(4), torch.ones(4))
    (text,) = [str(each.message) for each in caught if "SFX205" in str(each.message)]
    place = f"{__file__}:{_line_of('here it goes wrong')}"
    assert f"output 2, computed by aten.add.Tensor at {place} in " in text and "1 more differ" in text, text


def _wrong_from(operator):
    """Returns a backend that changes the result of every call of an operator."""

    def backend(gm, example_inputs):
        class Wrong(torch.fx.Interpreter):
            def call_function(self, target, args, kwargs):
                made = super().call_function(target, args, kwargs)
                return made * 1.5 if str(target) == operator else made

        return lambda *args: Wrong(gm).run(*args)

    return backend


def test_of_a_written_input_what_is_written_is_named():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def step(x):
        loss = torch.sigmoid(model(x)).sum()  # what is differentiated
        loss.backward()
        with torch.no_grad():
            model.bias.copy_(model.bias.grad * 0.5)  # what is written
        model.zero_grad(set_to_none=False)
        return model.bias.grad

    wrong = sidefx_train.compile(step, backend=_wrong_from("aten.sum.dim_IntList"))
    step(torch.randn(5, 4))
    with pytest.warns(SideFXWarning, match="SFX205") as caught:
        wrong(torch.randn(5, 4))
    (text,) = [str(each.message) for each in caught if "SFX205" in str(each.message)]
    assert f"computed by aten.mul.Tensor at {__file__}:{_line_of('what is written')} in " in text, text


def test_of_a_gradient_the_line_of_the_forward_is_named():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def step(x):
        loss = torch.sigmoid(model(x)).sum()  # what has a derivative
        loss.backward()
        return loss.detach()

    wrong = sidefx_train.compile(step, backend=_wrong_from("aten.mm.default"))
    with pytest.warns(SideFXWarning, match="SFX205") as caught:
        wrong(torch.randn(5, 4))
    (text,) = [str(each.message) for each in caught if "SFX205" in str(each.message)]
    assert (
        f"computed by aten.mm.default in the derivative of {__file__}:{_line_of('what has a derivative')} in " in text
    )


@pytest.mark.parametrize("kind", ["empty", "new_empty", "empty_like", "empty_strided"])
@pytest.mark.parametrize("row", [1, 2])
def test_what_is_in_unwritten_memory_is_not_compared(kind, row):
    """Regression: a solver that fills its results row by row, over a graph break, was left for eager."""
    makes = {
        "empty": lambda x: torch.empty(4, 3),
        "new_empty": lambda x: x.new_empty(4, 3),
        "empty_like": lambda x: torch.empty_like(x.expand(4, 3)),
        "empty_strided": lambda x: torch.empty_strided((4, 3), (1, 4)),
    }

    def step(x):
        out = makes[kind](x)
        out[0], out[2] = x.sin(), x * 2
        return out

    def backend(gm, example_inputs):
        def run(*args):
            results = gm(*args)
            for result in results:
                result[[3, row]] = torch.tensor([torch.nan, 1e30, -torch.inf])
            return results

        return run

    captured, x = sidefx_train.compile(step, backend=backend), torch.ones(3)
    if row == 2:  # which the step has written
        with pytest.warns(SideFXWarning, match=r"SFX205.*in element 6 \(2 of 12 "):
            captured(x)
        return
    for _ in range(3):
        found = captured(x)
        assert torch.equal(found[[0, 2]], step(x)[[0, 2]]) and found[3, 0].isnan()
    assert not captured.report().breaks
