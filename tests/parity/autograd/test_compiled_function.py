"""The backward of a captured part: saved and freed tensors, tangents, threads, errors."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import sidefx_train

BACKENDS = ["eager", "aot_eager", "inductor"]


def both(fn, backend="aot_eager", **options):
    """Returns the function, uncaptured and captured."""
    return fn, sidefx_train.compile(fn, backend=backend, fullgraph=True, on_failure="raise", **options)


def made(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def equal(wanted, found, exact=True):
    assert len(wanted) == len(found), f"{len(found)} values, eager has {len(wanted)}"
    for i, (a, b) in enumerate(zip(wanted, found, strict=True)):
        assert (a is None) == (b is None), f"{i}: {b}, eager has {a}"
        if a is not None:
            assert a.shape == b.shape and a.dtype == b.dtype, f"{i}: another layout"
            assert torch.equal(a, b) if exact else torch.allclose(a, b, atol=1e-5), f"{i}: {b}, eager has {a}"


# --- saved tensors -----------------------------------------------------------------------------------------------


def _gated(x, w, g):
    h = x @ w
    n = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * g
    return F.silu(n) * torch.sigmoid(n).cos() @ w


def _masked(x, w, g):
    h = (x @ w).masked_fill(x > 0, 0.0)
    return torch.where(h > g, h.exp(), h.tanh()).softmax(-1)


def _dropped(x, w, g):
    return (F.dropout(F.gelu(x @ w) * g, 0.3).cos() * g).sin()


def _written(x, w, g):
    h = (x @ w).mul_(2)
    h[0].zero_()
    return (h.cos() * g).sin().exp()


def _several(x, w, g):
    h = (x @ w).cos()
    return h, (h * g).sin().exp().sum(), h.t()[0]


FUNCTIONS = {f.__name__[1:]: f for f in (_gated, _masked, _dropped, _written, _several)}


def _run(call, steps=2):
    seen = []
    for i in range(steps):
        x, w, g = made(8, 16, seed=i), made(16, 16, seed=5), made(16, seed=6)
        torch.manual_seed(i)
        out = call(x, w, g)
        flat = out if isinstance(out, tuple) else (out,)
        sum((t * torch.linspace(0.5, 2, t.numel()).view(t.shape)).sum() for t in flat).backward()
        seen += [*(t.detach() for t in flat), x.grad, w.grad, g.grad]
    return seen


@pytest.mark.parametrize("partition", ["min_cut", "default"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.covering(1)
def test_partitions(name, backend, partition):
    if backend == "inductor" and (name != "gated" or partition == "default"):
        pytest.skip("one of each is enough under Inductor")
    eager, captured = both(FUNCTIONS[name], backend, partition=partition, rng="eager")
    equal(_run(eager), _run(captured), exact=backend != "inductor")


def saved_bytes(out):
    """Returns the memory that the autograd node of an output keeps, by storage."""
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in out.grad_fn.saved_tensors}
    return sum(kept.values())


def test_less_is_saved():
    kept = {}
    for partition in ("default", "min_cut"):
        call = both(_gated, "eager", partition=partition)[1]
        x, w, g = made(512, 16), made(16, 16, seed=5), made(16, seed=6)
        kept[partition] = saved_bytes(call(x, w, g)) - sum(t.untyped_storage().nbytes() for t in (x, w, g))
    assert kept["min_cut"] < 0.5 * kept["default"], f"bytes saved: {kept}"


def test_what_autograd_does_not_save_may_change():
    """Saving ``x`` in place of ``x + 1``, which eager saves, would make a change of ``x`` an error."""

    def fn(x, w):
        return ((x + 1).sin() * w).exp()

    seen = []
    for call in both(fn):
        x, w = made(4, 4), made(4, 4, seed=1)
        out = call(x, w)
        with torch.no_grad():
            x.mul_(3)
        out.sum().backward()
        seen.append((out.detach(), x.grad, w.grad))
    equal(*seen)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_saved_memory_is_freed_by_backward(backend):
    def fn(x, w):
        return (torch.sin(x @ w) @ w).cumsum(0).sum()

    call = both(fn, backend)[1]
    for retain in (True, False):
        x, w = made(64, 64), made(64, 64, seed=1)
        out = call(x, w)
        held = {t.untyped_storage().data_ptr() for t in (x, w, out)}
        saved = [t.untyped_storage() for t in out.grad_fn.saved_tensors]
        watched = [StorageWeakRef(s) for s in saved if s.data_ptr() not in held]
        del saved
        assert watched and not any(ref.expired() for ref in watched), "nothing is saved"
        out.backward(retain_graph=retain)
        assert all(ref.expired() != retain for ref in watched), f"after backward(retain_graph={retain})"


# --- tangents ----------------------------------------------------------------------------------------------------


def _convolved(x, w):
    return F.conv2d(x, w, padding=1).relu()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tangents_with_other_layouts(backend):
    def layouts(shape):
        yield torch.linspace(-1, 1, 2 * 4 * 5 * 5).view(shape)
        yield torch.linspace(-1, 1, 2 * 4 * 5 * 5).view(shape).contiguous(memory_format=torch.channels_last)
        yield torch.ones(1, 1, 1, 1).expand(shape)
        yield torch.linspace(-1, 1, 2 * 4 * 5 * 5).view(5, 5, 4, 2).permute(3, 2, 1, 0)
        yield torch.linspace(-1, 1, 4 * 4 * 5 * 5).view(4, 4, 5, 5)[::2]
        yield torch.zeros(()).expand(shape)

    seen = []
    for call in both(_convolved, backend):
        found = []
        for tangent in layouts((2, 4, 5, 5)):
            x, w = made(2, 3, 5, 5), made(4, 3, 3, 3, seed=1)
            call(x, w).backward(tangent)
            found += [x.grad, w.grad]
        seen.append(found)
    equal(*seen, exact=False)  # a convolution of another layout rounds differently


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_outputs_that_nobody_differentiates(backend):
    def fn(x, w):
        return (x * 2).exp(), (w * x).sin(), w.cos()

    def uses(a, b, c):
        yield a.sum()
        yield b.sum() + c.sum()
        with torch.no_grad():
            unused = a * 2
        yield (c * unused).sum()
        yield (a.detach() * b).sum()

    seen = []
    for call in both(fn, backend):
        found = []
        for i in range(4):
            x, w = made(3, 4), made(3, 4, seed=1)
            list(uses(*call(x, w)))[i].backward()
            found += [x.grad, w.grad]
        seen.append(found)
    equal(*seen)


def test_gradients_asked_for_one_by_one():
    def fn(x, w):
        return (x @ w).sin(), (x @ w).cos()

    seen = []
    for call in both(fn):
        x, w = made(3, 3), made(3, 3, seed=1)
        a, b = call(x, w)
        found = [*torch.autograd.grad(a.sum(), [w], retain_graph=True)]
        found += torch.autograd.grad(b.sum(), [x], retain_graph=True)
        found += torch.autograd.grad([a, b], [x, w], [torch.ones(3, 3), torch.eye(3)])
        seen.append(found)
    equal(*seen)


# --- more than once ----------------------------------------------------------------------------------------------


def test_backward_twice():
    def fn(x):
        return x.sin().exp().sum()

    seen, said = [], []
    for call in both(fn):
        x = made(5)
        out = call(x)
        out.backward(retain_graph=True)
        out.backward()
        seen.append([x.grad])
        with pytest.raises(RuntimeError) as error:
            out.backward()
        said.append(str(error.value))
    equal(*seen)
    assert said[0] == said[1]


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_second_derivative_is_never_missing(backend, needs_grad):
    """A gradient treated as a constant must not stay hidden by another term that can be differentiated."""
    seen = []
    for call in both(lambda x, w: (x @ w).sin(), backend):
        x, w = made(3, 3), made(3, 3, seed=1)
        tangent = torch.ones(3, 3, requires_grad=needs_grad)
        (grad,) = torch.autograd.grad(call(x, w), x, tangent, create_graph=True)
        (grad.pow(2).sum() + w.sum()).backward()
        seen.append([grad.detach(), x.grad, w.grad, tangent.grad])
    equal(*seen, exact=False)


def test_a_penalty_on_a_gradient_inside_the_captured_function():
    def fn(x, w):
        out = (x @ w).sin().sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        return out + grad.pow(2).sum()

    seen = []
    for call in both(fn):
        x, w = made(3, 3), made(3, 3, seed=1)
        call(x, w).backward()
        seen.append([x.grad, w.grad])
    equal(*seen)


# --- threads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_in_another_thread(backend):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    seen = []
    for call in both(lambda x: model(x).square().sum(), backend):
        model.zero_grad()
        failed = []

        def work(loss):
            try:
                loss.backward()
            except Exception as error:
                failed.append(error)

        for i in range(2):
            thread = threading.Thread(target=work, args=(call(made(5, 4, seed=i)),))
            thread.start()
            thread.join()
        assert not failed, failed
        seen.append([p.grad.clone() for p in model.parameters()])
    equal(*seen, exact=backend != "inductor")


# --- checkpointed regions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_nothing_inside_a_checkpoint_is_saved(reentrant):
    def inner(x, w):
        for _ in range(4):
            x = torch.sin(x @ w).exp().clamp(max=2.0)
        return x

    def plain(x, w):
        return inner(x, w).sum()

    def checkpointed(x, w):
        return torch.utils.checkpoint.checkpoint(inner, x, w, use_reentrant=reentrant).sum()

    eager, seen, kept = [], [], []
    for fn in (plain, checkpointed):
        for call in (fn, sidefx_train.compile(fn, backend="aot_eager")):
            x, w = made(64, 16), made(16, 16, seed=1)
            out = call(x, w)
            if call is not fn and call.report().fallback_count == 0:
                kept.append(saved_bytes(out))
            out.backward()
            (eager if call is fn else seen).append((x.grad, w.grad))
    equal([t for pair in eager for t in pair], [t for pair in seen for t in pair])
    if len(kept) == 2:
        assert kept[1] <= (64 * 16 + 16 * 16) * 4, f"{kept[1]} bytes are saved, {kept[0]} without the checkpoint"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_draws_the_same_numbers_again(backend):
    def inner(x, w):
        return F.dropout(torch.sin(x @ w), 0.5).exp()

    def fn(x, w):
        return torch.utils.checkpoint.checkpoint(inner, x, w, use_reentrant=False).sum()

    seen, states = [], []
    for call in both(fn, backend, rng="eager"):
        x, w = made(6, 4), made(4, 4, seed=1)
        torch.manual_seed(3)
        out = call(x, w)
        out.backward()
        seen.append([out.detach(), x.grad, w.grad])
        states.append(torch.get_rng_state())
    equal(*seen, exact=backend != "inductor")
    assert torch.equal(*states), "another random state"


# ---------------------------------------------------------------------- what sees the backward
class Shown(TorchDispatchMode):
    """Lists the operators that it is shown, without ``detach``, and doubles matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.detach.default:
            self.names.append(str(func))
        return made * 2 if func is torch.ops.aten.mm.default else made


def outcome_under_modes(wrap) -> tuple:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    compiled, found = wrap(model), []
    for call in range(3):
        loss = compiled(torch.ones(3, 4) + call).square().mean()
        counter, mode = FlopCounterMode(display=False), Shown()
        with counter if call == 1 else mode:
            loss.backward()
        found.append((sorted(mode.names), counter.get_flop_counts()))  # gradients of leaves are added at the end
    return found, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_dispatch_mode_around_the_backward(backend):
    """Regression: it was shown the captured operators, or none; a counter of operations counted nothing."""
    wanted = outcome_under_modes(lambda model: model)
    found = outcome_under_modes(lambda model: sidefx_train.compile(model, backend=backend))
    assert found[0] == wanted[0]
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0)


def test_hooks_of_all_modules_are_not_called_for_a_graph():
    seen: list[str] = []
    compiled = sidefx_train.compile(lambda x: x.sin(), backend="eager")
    x = torch.ones(3, requires_grad=True)
    made = compiled(x)
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, _: seen.append(type(module).__name__))
    try:
        made.sum().backward()
    finally:
        handle.remove()
    assert seen == []
