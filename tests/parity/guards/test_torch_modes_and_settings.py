"""Torch's modes, thread-wide settings and tensor subclasses, around a step and inside it."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import sidefx_train
from sidefx_train.compile.capture.world.inlining_policy import TraceRulesPolicy
from tests.support.function_overrides import CALLS, Noting, Scaling
from tests.support.graph_breaks import outside
from tests.support.parity import Program, batches, mlp, parity
from tests.support.training_steps import refused, trained

SEEN: list[str] = []


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        SEEN.append("function")
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        SEEN.append(str(func))
        return func(*args, **(kwargs or {}))


def packing():
    return torch.autograd.graph.saved_tensors_hooks(lambda t: SEEN.append("pack") or t, lambda t: t)


@pytest.mark.parametrize("order", [(False, True, False), (True, False, True)], ids=["after", "before"])
@pytest.mark.parametrize("around", [Operations, packing])
def test_modes_around_a_step_see_its_operations(around, order):
    weight = torch.randn(3, requires_grad=True)

    def step(x):
        return (x * weight).exp().sum().detach()

    compiled = sidefx_train.compile(step, backend="eager")

    def seen(fn, inside):
        SEEN.clear()
        with around() if inside else contextlib.nullcontext():
            fn(torch.ones(3))
        return list(SEEN)

    expected = {inside: seen(step, inside) for inside in (False, True)}
    assert expected[True] and not expected[False]
    for inside in order:
        assert seen(compiled, inside) == expected[inside]
    report = sidefx_train.explain(compiled)
    assert report.replays == order.count(False)
    assert [(f.code, f.count) for f in report.fallbacks] == [("SFX111", order.count(True))]


def under(modes, step, *args):
    """Calls a step inside modes; returns its value, or its error."""
    with contextlib.ExitStack() as entered:
        for mode in modes:
            entered.enter_context(mode)
        try:
            return step(*args)
        except (RuntimeError, IndexError) as error:
            return str(error)


def same_under_modes(step, calls, replays=None):
    """Compares calls of a captured step with eager's, bit for bit, and what modes noted; each is a function that
    returns the modes around the call."""
    results = []
    compiled = sidefx_train.compile(step, backend="eager")
    for run in (step, compiled):
        CALLS.clear()
        told = []
        for modes in calls:
            entered = modes()
            told.append((under(entered, run, torch.arange(3.0)), [getattr(mode, "seen", None) for mode in entered]))
        results.append((told, list(CALLS)))
    (wanted, noted), (found, renoted) = results
    assert noted == renoted
    for (value, seen), (other, reseen) in zip(wanted, found, strict=True):
        assert seen == reseen and type(value) is type(other)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
    if replays is not None:
        assert sidefx_train.explain(compiled).replays == replays
        assert not sidefx_train.explain(compiled).fallbacks
    return compiled


def added(x):
    return (torch.add(x, 1) * 2).sum()


def test_function_mode_around_a_step_is_captured():
    """Its ``__torch_function__`` is interpreted: results and effects are eager's, for every instance of the class."""
    compiled = same_under_modes(added, [lambda: [Scaling(3.0)]] * 4, replays=4)
    assert len(sidefx_train.explain(compiled).captures) == 1


def test_function_modes_around_a_step_are_guarded():
    """Another class, order or attribute, or none, is not replayed with the capture of the first."""
    ways = [
        lambda: [],
        lambda: [Scaling(3.0)],
        lambda: [Scaling(4.0)],
        lambda: [Noting()],
        lambda: [Scaling(3.0), Noting()],
        lambda: [Noting(), Scaling(3.0)],
    ]
    same_under_modes(added, [*ways, *ways, *ways[::-1]], replays=18)


class Arguments(TorchFunctionMode):
    """Notes the arguments that are not tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        CALLS.append((func.__name__, [value for value in args if not isinstance(value, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inside", [False, True])
def test_function_mode_is_shown_changing_numbers(inside):
    """It gets the number itself, and none of what the capture does to follow it."""
    numbers = {"factor": 0.0}

    def step(x):
        with Arguments() if inside else contextlib.nullcontext():
            return (torch.add(x, 1) * numbers["factor"]).sum()

    def modes(factor):
        numbers["factor"] = factor
        return [] if inside else [Arguments()]

    compiled = same_under_modes(step, [lambda f=f: modes(f) for f in (3.0, 4.5, 5.5, 6.5)], replays=4)
    assert len(sidefx_train.explain(compiled).captures) == 2


def test_function_mode_around_a_step_that_raises():
    def step(x):
        return torch.add(x, 1)[(x.sum() * 2).long()].sum()

    same_under_modes(step, [lambda: [Noting()]] * 3)


def test_function_modes_around_and_inside():
    def step(x):
        with Scaling(2.0):
            return torch.add(x, torch.add(x, 1))

    same_under_modes(step, [lambda: [Noting()], lambda: [], lambda: [Scaling(5.0), Noting()]] * 2, replays=6)


def test_function_mode_around_a_training_step():
    def run(compiles):
        torch.manual_seed(0)
        weight = torch.randn(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

        def step(x):
            optimizer.zero_grad()
            loss = torch.add(x * weight, 1).pow(2).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = sidefx_train.compile(step, backend="eager") if compiles else step
        mode = Scaling(1.5)
        losses = [under([mode], step, torch.arange(3.0) + index) for index in range(5)]
        return losses, mode.seen, weight

    (losses, seen, weight), (relosses, reseen, reweight) = run(False), run(True)
    assert all(map(torch.equal, losses, relosses)) and seen == reseen and torch.equal(weight, reweight)


def waiting(x):
    print("waits")
    return torch.add(x, 1)


def halved(x):
    first = torch.add(x, 1)
    sidefx_train_breaks(first)
    return torch.add(first, 1)


def sidefx_train_breaks(value):
    return open(os.devnull).read()


@pytest.mark.parametrize("step", [waiting, halved], ids=lambda step: step.__name__)
def test_refused_under_function_modes(step):
    """What a replay would show to the mode, or hide from it, runs eagerly."""
    compiled = same_under_modes(step, [lambda: [Scaling(3.0)]] * 3)
    assert sidefx_train.explain(compiled).replays == 0


def test_differentiated_outside_of_a_function_mode():
    weight = torch.ones(3, requires_grad=True)
    compiled = sidefx_train.compile(lambda x: torch.add(x, weight), backend="eager")
    made = under([Scaling(3.0)], compiled, torch.ones(3))
    made.sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 3.0)) and sidefx_train.explain(compiled).replays == 0


def test_default_device_is_guarded():
    compiled = sidefx_train.compile(lambda: torch.ones(2), backend="eager", on_failure="raise")
    for kind in ("cpu", "meta", "cpu", "meta"):
        with torch.device(kind):
            assert compiled().device.type == kind
    assert compiled().device.type == "cpu"
    assert sidefx_train.explain(compiled).graph_count == 3


def sets_the_default_device_for_a_while(x):
    before = torch.get_default_device()
    torch.set_default_device("meta")
    made = torch.ones(2)
    torch.set_default_device(before)
    return x * 2, made.device


def leaves_a_default_device(x):
    torch.set_default_device("meta")
    return x * 2, torch.ones(2).device


def breaks_with_a_default_device(x):
    torch.set_default_device("meta")
    value = outside(x.sum())
    made = torch.ones(2)
    torch.set_default_device(None)
    return x * value, made.device


def sets_the_default_device_inside_a_function_mode(x):
    with Noting():
        torch.set_default_device("meta")
        made = torch.ones(2)
        torch.set_default_device("cpu")
    return x * 2, made.device


@pytest.mark.parametrize("inside_a_mode", [False, True])
@pytest.mark.parametrize(
    "step",
    [
        sets_the_default_device_for_a_while,
        leaves_a_default_device,
        breaks_with_a_default_device,
        sets_the_default_device_inside_a_function_mode,
    ],
    ids=lambda step: step.__name__,
)
@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
def test_step_that_sets_the_default_device(step, inside_a_mode):
    """Inside a function mode it is run eagerly, and the mode sees every function once."""

    def outcome(run):
        CALLS.clear()
        told = []
        for number in range(3):
            with Noting() if inside_a_mode else contextlib.nullcontext():
                value, device = run(torch.full((2,), number, device="cpu"))
            told.append((value.tolist(), device, torch.get_default_device(), torch.utils._device.CURRENT_DEVICE))
            torch.set_default_device(None)
        return told, list(CALLS)

    compiled = sidefx_train.compile(step, backend="eager")
    try:
        assert outcome(compiled) == outcome(step)
    finally:
        torch.set_default_device(None)
    report = sidefx_train.explain(compiled)
    assert {each.code for each in report.fallbacks} == ({"SFX111"} if inside_a_mode else set())
    assert report.replays == (0 if inside_a_mode else 3)


def test_default_device_of_the_caller_is_not_the_compilers():
    """Tensors that the compiler creates keep the compiler's device."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])

    def step(x):
        (x * weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(torch.ones(3))  # torch 2.11 creates an optimizer's counter on the caller's device
    with torch.device("meta"):
        compiled = sidefx_train.compile(step, backend="inductor", on_failure="raise", fullgraph=True)
        for _ in range(3):
            compiled(torch.ones(3, device="cpu"))
    assert sidefx_train.explain(compiled).replays == 3


def state() -> tuple:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


CONTEXTS = [
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu", dtype=torch.float16),
    lambda: torch.device("meta"),
    packing,
    lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    torch.autograd.detect_anomaly,
    torch.autograd.forward_ad.dual_level,
]


@pytest.mark.parametrize("index", range(len(CONTEXTS)))
@pytest.mark.filterwarnings("ignore:Anomaly")
def test_capture_that_stops_inside_a_context_leaves_it(index):
    def step(x):
        with CONTEXTS[index]():
            if x.dot(x) > 100:
                return x
        return x * 2

    compiled = sidefx_train.compile(step, backend="eager")
    before = state()
    for _ in range(2):
        compiled(torch.ones(3))
        assert state() == before
    assert {found.code for found in sidefx_train.explain(compiled).breaks} == {"SFX101"}
    SEEN.clear()
    (torch.ones(3, requires_grad=True) ** 2).sum().backward()
    assert not SEEN, "hooks on saved tensors were left behind"


def test_capture_that_stops_inside_a_transform_leaves_it():
    def step(x):
        return torch.func.grad(lambda v: v.sum() if v.dot(v) > 0 else v.prod())(x)

    compiled = sidefx_train.compile(step, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(3)), torch.ones(3))
    assert torch.equal(torch.ones(3) + 1, torch.full((3,), 2.0))
    assert {found.code for found in sidefx_train.explain(compiled).breaks} == {"SFX101"}


@pytest.mark.parametrize("setting", ["dtype", "deterministic"])
def test_setting_changed_by_the_step(setting):
    def step(x):
        if setting == "dtype":
            torch.set_default_dtype(torch.float64)
        else:
            torch.use_deterministic_algorithms(True)
        return x + torch.ones(3, dtype=torch.get_default_dtype())

    compiled = sidefx_train.compile(step, backend="eager")
    try:
        for _ in range(2):
            assert compiled(torch.ones(3)).dtype == (torch.float64 if setting == "dtype" else torch.float32)
            assert torch.are_deterministic_algorithms_enabled() == (setting == "deterministic")
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    report = sidefx_train.explain(compiled)
    assert report.replays == 2 and not report.fallbacks


# ---------------------------------------------------------------------- inside a step
def autocast(model, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model(x)
        assert hidden.dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            loss = F.cross_entropy(hidden.float(), y)
    assert not torch.is_autocast_enabled("cpu")
    return loss + cast(model, x).float().mean()


@torch.autocast("cpu", dtype=torch.bfloat16)
def cast(model, x):
    return model(x)


def inference(model, x, y):
    with torch.inference_mode():
        target = model(x).softmax(-1)
    return F.cross_entropy(model(x) + target.clone(), y)


def default_device(model, x, y):
    with torch.device("cpu"):
        return F.cross_entropy(model(x + torch.ones(5, 6)), y)


@pytest.mark.parametrize("loss", [autocast, inference, default_device], ids=lambda loss: loss.__name__)
def test_context_inside(loss):
    parity(lambda: trained(loss), steps=4)


def test_dispatch_mode_inside_is_refused():
    def loss(model, x, y):
        with Operations():
            return F.cross_entropy(model(x), y)

    refused(loss, "SFX111", "enters Operations, a TorchDispatchMode")


class Tagged(torch.Tensor):
    """Plain data in a user class."""


def test_subclass_made_inside():
    parity(lambda: trained(lambda model, x, y: F.cross_entropy(model(x.as_subclass(Tagged) * 1), y)), steps=3)


def test_parameter_of_a_subclass_is_refused():
    def make() -> Program:
        model = mlp()
        program = trained(lambda model, x, y: F.cross_entropy(model(x), y), model)
        model[0].weight = torch.nn.Parameter(model[0].weight.detach().as_subclass(Tagged))
        return program

    report = parity(make, steps=3, captures=None, whole=False)
    reason = "model.0.weight is a Tagged, a tensor subclass that requires gradients"
    assert ("SFX109", reason) in {(b.code, b.reason) for b in report.breaks}


def test_module_made_in_a_step_after_torch_compile():
    """``torch.compile`` records every module created afterwards; in a captured step that is not a side effect."""
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(2))
    compiled = sidefx_train.compile(lambda x: torch.nn.Softmax(0)(x), backend="eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 0.5))
    report = sidefx_train.explain(compiled)
    assert report.effects == [] and report.graph_count == 1, report


def test_plain_batch_still_replays():
    """The refusals above are about subclasses, not about parameters and buffers."""
    parity(lambda: trained(lambda model, x, y: F.cross_entropy(model(x), y)), steps=3)
    assert batches((1,))(0)[0].shape == (1,)


def _default(setter, getter, value):
    before = getter()
    setter(value)
    return lambda: setter(before)


SETTINGS = {
    "default dtype": lambda: _default(torch.set_default_dtype, torch.get_default_dtype, torch.float64),
    "determinism": lambda: _default(
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True
    ),
    "precision of products": lambda: _default(
        torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "high"
    ),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_changes_between_calls(name, backend):
    """It gets its own entry, and the first one is reused."""

    def step(x):
        return (x @ x.t()) * torch.full((4, 4), 0.5), torch.get_default_dtype()

    SETTINGS[name]()()  # torch does not restore the precision of CUDA's products, which 2.15 compares too
    call = sidefx_train.compile(step, backend=backend, fullgraph=True, on_failure="raise")
    x = torch.linspace(-1, 1, 20).view(4, 5)
    for changed in (False, True, False, True):
        undo = SETTINGS[name]() if changed else lambda: None
        try:
            (want, dtype), (have, other) = step(x), call(x)
        finally:
            undo()
        assert torch.equal(want, have) and want.dtype == have.dtype and dtype == other, f"{name} changed: {changed}"
    assert call.report().graph_count == 2, str(call.report())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_autocast_that_is_entered_between_calls(backend):
    call = sidefx_train.compile(lambda x: x @ x.t(), backend=backend, fullgraph=True, on_failure="raise")
    x = torch.linspace(-1, 1, 20).view(4, 5)
    for kind in (None, torch.bfloat16, torch.float16, None, torch.bfloat16):
        with torch.autocast("cpu", dtype=kind or torch.bfloat16, enabled=kind is not None):
            want, have = x @ x.t(), call(x)
        assert torch.equal(want, have) and want.dtype == have.dtype, f"autocast to {kind}"
    assert call.report().graph_count == 3, str(call.report())


@pytest.mark.parametrize("ask", [torch.cuda.is_available, torch.cuda.device_count, torch.xpu.is_available])
def test_asking_for_devices_loads_no_driver_while_capturing(ask):
    """If torch is built for CUDA, a query for devices opens the driver's library."""
    assert not TraceRulesPolicy().inline(ask)
    step = sidefx_train.compile(lambda x: x * 2 if ask() else x + 1, fullgraph=True)
    assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))


class _PartlyCast(nn.Module):
    """One part runs under autocast, if that is on, and one part never does."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.exact, self.last = (
            nn.Linear(6, 6),
            nn.LayerNorm(6),
            nn.Linear(6, 4),
            nn.Conv1d(1, 2, 3),
        )

    def forward(self, x):
        hidden = self.norm(self.first(x)).relu()
        with torch.autocast("cpu", enabled=False):
            hidden = self.exact(hidden.float())
        return self.last(hidden.unsqueeze(1)), hidden


def _gradients_under(forward, model, x, casts):
    """Returns gradients of a forward and a backward, each with or without autocast."""
    for parameter in model.parameters():
        parameter.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts[0]):
        out, hidden = forward(x)
        loss = out.float().sin().sum() + hidden.exp().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts[1]):
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.every(2)
def test_backward_under_another_autocast_than_the_forward(backend):
    torch.manual_seed(0)
    model, x = _PartlyCast(), torch.randn(3, 6)
    call = sidefx_train.compile(model, backend=backend, fullgraph=True, on_failure="raise")
    for casts in ((False, False), (False, True), (True, False), (True, True), (False, True)):
        want, have = _gradients_under(model, model, x, casts), _gradients_under(call, model, x, casts)
        for name, a, b in zip(dict(model.named_parameters()), want, have, strict=True):
            if backend != "inductor":
                assert torch.equal(a, b), f"{name}, forward and backward under autocast: {casts}"
            else:  # it skips roundings of eager; without casts, the results are close
                close = (5e-2, 5e-2) if any(casts) else (1e-5, 1e-5)
                torch.testing.assert_close(
                    a, b, rtol=close[0], atol=close[1], msg=lambda m, n=name: f"{n}, {casts}: {m}"
                )
