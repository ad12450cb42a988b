"""Typical user steps: each against eager, bitwise, captured whole."""

from __future__ import annotations

import functools
import io
import logging
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sidefx_train
from sidefx_train.errors import SideFXWarning
from tests.support.parity import Program, batches, mlp, parity


def momentum_sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def check(body, optimizer=momentum_sgd, **options):
    """Checks parity of ``body(model, optimizer) -> step`` over the harness's batches."""

    def make() -> Program:
        model = mlp()
        made = optimizer(model.parameters())
        return Program(body(model, made), batches((4, 6), classes=3), ([*model.parameters()], made))

    return parity(make, **options)


def train(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_autocast_clip_and_formatted_prints():
    def body(model, optimizer):
        def step(x, y):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            print(f"loss {loss.item():.4f}", loss.item(), "lr", optimizer.param_groups[0]["lr"])
            print("%.3f" % loss.item(), "{:.2f}".format(loss.item()), str(loss.detach()))
            return {"loss": loss.detach(), "rows": x.shape[0], "nested": [(loss.detach(),)]}

        return step

    check(body, captures=2)  # only at the first call, there are no gradients


def test_bound_method_with_accumulation_and_running_total():
    class Trainer:
        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer
            self.count, self.total = 0, 0.0

        def step(self, x, y):
            loss = F.cross_entropy(self.model(x), y) / 2
            loss.backward()
            self.count += 1
            if self.count % 2 == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.total += loss.item()
            self.last = {"loss": loss.item(), "count": self.count}
            return self.count, self.total, self.last

    check(lambda model, optimizer: Trainer(model, optimizer).step, captures=2)


def test_partial_with_keyword_arguments():
    def body(model, optimizer):
        def step(model, x, y, *, scale=1.0, **extra):
            loss = F.cross_entropy(model(x), **{"target": y}) * scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), extra

        return functools.partial(step, model, scale=2.0, tag="kept")

    check(body)


def test_functional_gradients_and_manual_update(caplog):
    log = logging.getLogger("everyday")

    def body(model, optimizer):
        def step(x, y):
            named = dict(model.named_parameters())
            decay = sum(p.pow(2).sum() for name, p in named.items() if name.endswith("weight"))
            loss = F.cross_entropy(model(x), y) + 1e-3 * decay
            grads = torch.autograd.grad(loss, list(named.values()))
            with torch.no_grad():
                for p, g in zip(named.values(), grads, strict=True):
                    p -= 0.1 * g
            log.warning("loss %s", loss.detach())
            warnings.warn("a warning of the step", stacklevel=1)
            return [g.norm() for g in grads], max(enumerate([3, 1, 2]), key=lambda pair: pair[1])

        return step

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        check(body, steps=5)
    texts = [record.getMessage() for record in caplog.records if record.name == "everyday"]
    assert len(texts) == 10, f"{len(texts)} log records, 5 eager and 5 captured were made"
    assert texts[:5] == texts[5:], "log records differ from eager's"


def test_moving_average_of_the_state_dict():
    def body(model, optimizer):
        average = {name: value.clone() for name, value in model.state_dict().items()}

        def step(x, y):
            loss = train(model, optimizer, x, y)
            with torch.no_grad():
                for name, value in model.state_dict().items():
                    average[name].mul_(0.9).add_(value, alpha=0.1)
            return loss, {name: value.sum() for name, value in average.items()}

        return step

    check(body)


def test_hook_registered_and_removed_in_the_step():
    def body(model, optimizer):
        def step(x, y):
            seen = []
            handle = model[0].register_forward_hook(lambda module, args, out: seen.append(out.detach().mean()))
            loss = F.cross_entropy(model(x), y)
            handle.remove()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return seen

        return step

    check(body)


def test_hook_left_registered_is_refused_with_a_reason():
    model = mlp()

    def step(x):
        model[0].register_forward_hook(lambda module, args, out: None)
        return model(x).detach()

    compiled = sidefx_train.compile(step, backend="eager")
    with pytest.warns(SideFXWarning, match="SFX111"):
        compiled(torch.ones(2, 6))
    assert len(model[0]._forward_hooks) == 1, "the step must have run once, eagerly"


def test_random_numbers_of_every_kind():
    def body(model, optimizer):
        def step(x, y):
            order = torch.randperm(4)
            x, y = x[order], y[order]
            x = (x + 0.1 * torch.randn_like(x)) * torch.bernoulli(torch.full_like(x, 0.5))
            loss = F.cross_entropy(F.dropout(model(x), 0.1), y, label_smoothing=0.1) * torch.rand(())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    check(body, torch.optim.Adam)


MORE_OPTIMIZERS = {
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "rprop": torch.optim.Rprop,
    "amsgrad_foreach": lambda p: torch.optim.Adam(p, amsgrad=True, foreach=True),
    "nesterov_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "tensor_lr": lambda p: torch.optim.AdamW(p, maximize=True, lr=torch.tensor(0.01)),
}


@pytest.mark.parametrize("name", MORE_OPTIMIZERS)
@pytest.mark.every(3)
def test_more_optimizers(name):
    check(lambda model, optimizer: functools.partial(train, model, optimizer), MORE_OPTIMIZERS[name])


def test_closure():
    def body(model, optimizer):
        def step(x, y):
            def closure():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        return step

    check(body)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.factor = 2
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.factor + x * 0


def test_autograd_function():
    def body(model, optimizer):
        def step(x, y):
            loss = F.cross_entropy(Doubled.apply(model(x)), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    check(body)


def test_python_numbers_out_of_tensors():
    def body(model, optimizer):
        def step(x, y):
            loss = train(model, optimizer, x, y)
            accuracy = (model(x).argmax(-1) == y).float().mean()
            return loss.item(), accuracy.item(), float(accuracy), int((accuracy * 100).long())

        return step

    check(body)


def test_an_integer_out_of_a_float_tensor_is_a_break():
    """NaN has no integer value: Python raises after all earlier effects."""

    def body(model, optimizer):
        def step(x, y):
            train(model, optimizer, x, y)
            accuracy = (model(x).argmax(-1) == y).float().mean()
            return int(accuracy * 100), round(accuracy.item())

        return step

    report = check(body, whole=False, captures=3)
    assert not report.fallbacks and not any(part.fallbacks for part in report.parts)


def test_clock_in_the_step_is_read_between_two_parts_and_it_is_said():
    import time

    def body(model, optimizer):
        def step(x, y):
            x = x * 2
            time.time()
            return train(model, optimizer, x, y)

        return step

    with pytest.warns(SideFXWarning, match=r"SFX103.*time\.time"):
        report = check(body, whole=False, captures=None)
    assert report.fallback_count == 0 and report.graph_count >= 1, str(report)
    assert sum(part.fallback_count for part in report.parts) == 0, str(report)


def test_mutable_default_argument():
    def body(model, optimizer):
        def step(x, y, seen=[]):  # noqa: B006 - the point of the test
            seen.append(x.shape[0])
            return train(model, optimizer, x, y), len(seen)

        return step

    check(body, captures=None, steps=4)


def test_function_made_in_the_step_escapes():
    def body(model, optimizer):
        made = []

        def step(x, y):
            loss = train(model, optimizer, x, y)
            made.append(lambda scale=2: loss * scale)
            return [fn() for fn in made[-1:]]

        step.made = made
        return step

    def make() -> Program:
        model = mlp()
        step = body(model, momentum_sgd(model.parameters()))
        return Program(step, batches((4, 6), classes=3), ([*model.parameters()],))

    parity(make, captures=None, steps=4)


class Point:
    """Hash and equality read attributes: C containers call them for their arguments."""

    kind = "class default"

    def __init__(self, kind):
        self.kind = kind

    def __hash__(self):
        return hash(self.kind)

    def __eq__(self, other):
        return self.kind == other.kind


def test_keys_that_hash_and_compare_in_python():
    def body(model, optimizer):
        points = [Point("a"), Point("b")]
        scores = {points[0]: 1, points[1]: 2}

        def step(x, y):
            train(model, optimizer, x, y)
            return scores[Point("b")], points.index(Point("b")), Point("a") in {points[0]}, len({*points})

        return step

    check(body, captures=1)


def test_copies_of_outside_objects_made_in_the_step():
    import copy

    class Settings:
        def __init__(self):
            self.scale, self.parts = 2.0, [1, 2]

    def body(model, optimizer):
        settings = Settings()

        def step(x, y):
            mine = copy.copy(settings)
            deep = copy.deepcopy(settings)
            mine.scale = 3.0
            deep.parts.append(3)
            return train(model, optimizer, x, y) * mine.scale, settings.scale, settings.parts, deep.parts

        return step

    check(body, captures=1)


def test_arguments_that_come_to_share_memory():
    """A step that writes one argument while it reads another, called with separate tensors and then with one."""

    def step(x, y):
        x.add_(1)
        return (y * 2).sum() + x.sum()

    compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
    shared, copied = torch.ones(6), torch.ones(6)
    for make in (lambda t: (t[:3].clone(), t[3:].clone()), lambda t: (t, t), lambda t: (t[:3], t[:3])):
        for _ in range(2):
            assert torch.equal(step(*make(shared)), compiled(*make(copied))), "results differ"
            assert torch.equal(shared, copied), "the shared memory differs"


def test_what_python_says_of_itself():
    """``sys.version_info`` and similar tuples cannot be constructed."""

    def make() -> Program:
        seen: list[object] = []

        def step(x, y):
            if sys.version_info >= (3, 11) and not sys.flags.optimize > 5:
                x = x + sys.version_info.major
            seen.append((sys.version_info, sys.float_info.epsilon))
            return x.sum()

        return Program(step, batches((5, 6), classes=3), (seen,))

    parity(make)


def test_progress_bar_read_after_an_update():
    """Its call runs after the graph, and later reads in the step see the call's effects."""
    tqdm = pytest.importorskip("tqdm", reason="progress bars of tqdm")

    def body(model, optimizer):
        bar = tqdm.tqdm(total=20, file=io.StringIO())

        def step(x, y):
            loss = train(model, optimizer, x, y)
            before = bar.n
            bar.update(2)
            bar.set_postfix(loss=f"{loss.item():.3f}")
            return before, bar.n, bar.n % 4 == 0, bar.postfix

        return step

    report = check(body, captures=2)
    assert not report.breaks, str(report)


def test_progress_bar_that_is_only_updated():
    tqdm = pytest.importorskip("tqdm", reason="progress bars of tqdm")

    def body(model, optimizer):
        bar = tqdm.tqdm(total=20, file=io.StringIO())

        def step(x, y):
            loss = train(model, optimizer, x, y)
            bar.set_postfix(loss=f"{loss.item():.3f}", at=bar.n)
            bar.update()
            return loss

        return step

    check(body, captures=2)
