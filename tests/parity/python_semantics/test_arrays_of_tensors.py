"""Arrays of NumPy over tensors of a step: what computes with them and keeps them is computed after the graph."""

from __future__ import annotations

import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from sidefx_train.errors import SideFXWarning

pytestmark = pytest.mark.filterwarnings(f"ignore::{SideFXWarning.__module__}.{SideFXWarning.__qualname__}")


def stores(kept, p, y):
    kept.predictions.append(p.detach().cpu().numpy())
    kept.copies.append(p.detach().numpy().copy())
    kept.last = kept.same = p.detach().numpy()


def measures(kept, p, y):
    right = p.argmax(1).numpy() == y.numpy()
    kept.values += [right.mean(), right.sum(), float(right.mean()), right.mean().item(), int(right.sum())]
    kept.total += right.sum()
    kept.seen += len(y)
    kept.share = round(right.sum() / len(y), 3)


def computes(kept, p, y):
    a = p.detach().numpy()
    chances = np.exp(a - a.max(1, keepdims=True))
    chances = chances / chances.sum(1, keepdims=True)
    kept.values += [-(chances * np.log(chances)).sum(1).mean(), np.linalg.norm(a), abs(a), a @ a.T, a**2, 2 - a, -a]
    kept.values += [a > 0, (a > 0) & (a < 1), ~(a > 0), a.astype(np.float64), a.astype("float16"), np.float32(a.mean())]
    kept.values += [np.concatenate([a, a * 2]), np.stack((a, a)), a.mean(0).tolist(), np.isnan(a).any(), a // 1, a % 1]


def looks(kept, p, y):
    a = p.detach().numpy()
    kept.values += [a.shape, a.ndim, a.dtype, a.size, isinstance(a, np.ndarray), type(a), type(a.mean()), a is None]
    kept.text = f"{a.mean():.3f} of {a.shape}"


def takes_parts(kept, p, y):
    a = p.detach().numpy()
    kept.values += [a[0], a[0, 1], a[:, 1:3], a.T, a.transpose(1, 0), a.reshape(-1), a.ravel()[:3], a[0].tolist()]
    kept.whole = a


def converts(kept, p, y):
    kept.values += [np.asarray(p.detach()), np.array(p.detach()), np.mean(p.detach().numpy())]
    a = p.detach().numpy()
    kept.values += [np.asarray(a) is a]


def is_written_later(kept, p, y):
    made = p.detach().clone()
    a = made.numpy()
    row, flipped, before, first = a[1], a.T, a.sum(), a[0, 0]
    made.mul_(2)
    kept.values += [row, flipped, before, first, a.sum(), row.mean(), a, made]


def is_of_a_weight(kept, p, y):
    weight = kept.model[0].weight.detach().numpy()
    kept.values += [weight.mean(), weight.copy()]
    kept.weight = weight


def warns(kept, p, y):
    a = p.detach().numpy() * 0
    kept.values += [np.log(a), 1.0 / a.sum(), a / a]


def is_known_to_hooks(kept, p, y):
    p.register_hook(lambda grad: kept.values.append(grad.numpy().copy()))


def is_of_numbers(kept, p, y):
    loss, right = p.square().mean().item(), (p.argmax(1) == y).sum().item()
    kept.values += [np.sqrt(loss), np.exp(loss) / 2, np.log(-loss), np.float32(loss), np.clip(loss, 0, 1e-3)]
    kept.values += [np.mean([loss, right]), np.std([loss, 1.0]), np.array([loss, 2.0]), np.array([right, 1])]
    kept.values += [np.maximum(loss, 0.1), np.round(loss, 3), np.float64(loss) / (loss - loss), np.square(right)]
    kept.text = f"{np.log10(loss):.3f} {np.mean((right, 2))}"
    kept.total += np.power(right, 2.0)


WHOLE = [
    stores, measures, computes, looks, takes_parts, converts, is_written_later, is_of_a_weight, warns,
    is_known_to_hooks, is_of_numbers,
]  # fmt: skip


def decides(kept, p, y):
    kept.seen += p.detach().numpy().mean() > 0 and 1


def writes(kept, p, y):
    a = p.detach().numpy().copy()
    a[0] = 7
    kept.last = a


def adds_in_place(kept, p, y):
    made = p.detach().clone()
    a = made.numpy()
    a += 1
    kept.values += [a, made]


def iterates(kept, p, y):
    for guess, label in zip(p.argmax(1).numpy(), y.numpy(), strict=True):
        kept.seen += int(guess == label)


def is_a_key(kept, p, y):
    kept.at[p.argmax(1).numpy().sum()] = 1


def asks_for_an_error(kept, p, y):
    try:
        kept.values.append(1 / int((p.argmax(1).numpy() == 9).sum()))
    except ZeroDivisionError:
        kept.values.append("zero")


def raises(kept, p, y):
    a = p.detach()
    for call in (p.numpy, a.bfloat16().numpy, lambda: a.numpy()[:, 9], lambda: a.numpy() @ 1):
        try:
            kept.values.append(call())
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            kept.values.append(str(error))


def goes_to_a_library(kept, p, y):
    kept.values.append(np.unique(p.argmax(1).numpy()))


def takes_powers(kept, p, y):
    for exponent in (y - 9).numpy():
        try:
            kept.values.append(2**exponent)
        except ValueError as error:
            kept.values.append(str(error))


IN_PARTS = [
    decides, writes, adds_in_place, iterates, is_a_key, asks_for_an_error, raises, goes_to_a_library, takes_powers,
]  # fmt: skip


def fresh():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return types.SimpleNamespace(
        model=model, predictions=[], copies=[], values=[], total=0, seen=0, at={}, last=None, text="", whole=None
    )


def trained(use, wrap, sizes=(6, 6, 6, 6)):
    kept = fresh()
    optimizer = torch.optim.AdamW(kept.model.parameters(), lr=1e-2)
    kept.optimizer = types.SimpleNamespace(param_groups=optimizer.param_groups)

    def step(x, y):
        optimizer.zero_grad()
        p = kept.model(x)
        use(kept, p, y)
        loss = F.cross_entropy(p, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run, draw = wrap(step), torch.Generator().manual_seed(1)
    kept.losses = [
        run(torch.randn(size, 8, generator=draw), torch.randint(0, 4, (size,), generator=draw)) for size in sizes
    ]
    return kept, run


def equal(a, b):
    if isinstance(a, nn.Module):
        return equal(a.state_dict(), b.state_dict())
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        kinds = type(a) is type(b) and a.dtype == b.dtype and a.flags.writeable == b.flags.writeable
        return kinds and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(equal, a.values(), b.values()))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def compared(use, **options):
    want, _ = trained(use, lambda step: step, **options)
    have, run = trained(use, lambda step: sidefx_train.compile(step, backend="eager", warmup="now"), **options)
    for name in vars(want).keys() - {"optimizer"}:
        assert equal(getattr(want, name), getattr(have, name)), name
    return want, have, run.report()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("use", WHOLE, ids=lambda use: use.__name__)
def test_captured_whole(use):
    *_, report = compared(use)
    assert not report.breaks and not report.fallbacks


@pytest.mark.parametrize("use", IN_PARTS, ids=lambda use: use.__name__)
def test_captured_in_parts(use):
    *_, report = compared(use)
    assert "SFX106" in {each.code for each in report.breaks} and not report.fallbacks


@pytest.mark.parametrize("use", [stores, measures, computes], ids=lambda use: use.__name__)
def test_batches_of_changing_sizes(use):
    *_, report = compared(use, sizes=(6, 5, 7, 3, 6))
    assert not report.breaks and len(report.captures) <= 3


def test_the_memory_is_that_of_the_tensor():
    for kept in compared(is_written_later)[:2]:
        row, flipped, _, _, _, _, whole, made = kept.values[-8:]
        assert all(np.shares_memory(each, made.numpy()) for each in (row, flipped, whole))
    for kept in compared(is_of_a_weight)[:2]:
        assert np.shares_memory(kept.weight, kept.model[0].weight.detach().numpy())
    for kept in compared(stores)[:2]:
        assert kept.last is kept.same and not np.shares_memory(kept.copies[-1], kept.last)


def test_a_warning_of_numpy_names_the_line():
    lines = []
    for wrap in (lambda step: step, lambda step: sidefx_train.compile(step, backend="eager", warmup="now")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(warns, wrap)
        lines.append([(str(each.message), each.filename, each.lineno) for each in caught])
    assert lines[0] == lines[1] and len(lines[0]) > 2


def test_warnings_that_are_errors_are_raised_at_their_line():
    def outcome(wrap):
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            with pytest.raises(RuntimeWarning) as error:
                trained(warns, wrap)
        return str(error.value)

    assert outcome(lambda step: step) == outcome(lambda step: sidefx_train.compile(step, backend="eager", warmup="now"))


def test_numpy_may_raise_from_some_call_on():
    def step(x):
        return np.log(x.sum().numpy() * 0)

    compiled = sidefx_train.compile(step, backend="eager", warmup="now")
    with np.errstate(all="ignore"):
        assert compiled(torch.ones(3)) == compiled(torch.ones(3)) == -np.inf
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        compiled(torch.ones(3))


@pytest.mark.parametrize("use", ["rate", "truth", "factor"])
def test_a_result_that_the_step_needs_ends_a_part_where_it_is_computed(use):
    """What follows is captured with it, the update of the optimizer among it."""

    def needs(kept, p, y):
        loss = p.square().mean().item()
        if use == "rate":
            kept.optimizer.param_groups[0]["lr"] = np.clip(loss, 1e-3, 1e-2)
        elif use == "truth":
            kept.seen += 1 if not np.isnan(loss) and np.mean([loss, 1.0]) > 0.6 else 2
        else:
            kept.values.append(p.detach() * np.sqrt(loss))

    *_, report = compared(needs)
    assert [each.code for each in report.breaks] == ["SFX101"] and not report.fallbacks
    assert "needs a value" in report.breaks[0].reason and "SFX106" not in str(report)


def test_logged_in_a_module_of_lightning(tmp_path):
    pytest.importorskip("lightning")
    import lightning as L

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.guesses = nn.Linear(8, 4), []

        def training_step(self, batch, index):
            x, y = batch
            p = self.layer(x)
            self.guesses.append(p.argmax(1).numpy())
            self.log("right", float((p.argmax(1).numpy() == y.numpy()).mean()))
            self.log("mean", p.detach().numpy().mean())
            return F.cross_entropy(p, y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fitted(callbacks):
        torch.manual_seed(0)
        net, draw = Net(), torch.Generator().manual_seed(1)
        data = torch.utils.data.TensorDataset(
            torch.randn(24, 8, generator=draw), torch.randint(0, 4, (24,), generator=draw)
        )
        trainer = L.Trainer(
            callbacks=callbacks, max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=6))
        return net.guesses, {name: float(value) for name, value in trainer.callback_metrics.items()}, net.state_dict()

    callback = sidefx_train.SideFXCompile(backend="eager", warmup="now")
    assert equal(fitted([]), fitted([callback]))
    assert not callback.report.breaks


def test_an_array_whose_length_only_the_graph_knows():
    """Pairs of samples with equal labels, as losses of metric learning choose them: a part ends before ``numpy``."""

    def step(x, y):
        first, second = torch.where((y[:, None] == y).fill_diagonal_(False))
        _, chosen = np.unique(y[first].cpu().numpy(), return_index=True)
        return x[first[chosen]].sum(), second[chosen]

    compiled = sidefx_train.compile(step, backend="eager")
    for i in range(4):
        generator = torch.Generator().manual_seed(i)
        x, y = torch.randn(16, 4, generator=generator), torch.randint(0, 4, (16,), generator=generator)
        for wanted, made in zip(step(x, y), compiled(x, y), strict=True):
            assert torch.equal(wanted, made)
    assert not compiled.report().fallbacks, str(compiled.report())
