"""Whole training steps with the kernels that a GPU would run, against eager."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sidefx_train.compile.gpu.replaying import recording_on_host
from sidefx_train.compile.gpu.simulation import DeviceAssertFailed, SimulatedStep
from sidefx_train.compile.gpu.simulation.recorder import HostRecorder
from sidefx_train.config import CompileConfig
from tests.gpu_sim.simulated import simulated, skipped_by_a_scaler
from tests.support import device_programs as programs
from tests.support.parity import Program, batches, classifier, mlp

pytest.importorskip("triton")

ROUNDED = {"rtol": 2e-2, "atol": 1e-3}
"""Tolerances of bfloat16, which has 8 digits."""

PROGRAMS = {make.__name__: partial(make, "cpu") for make in programs.INTERPRETED}
MORE = {make.__name__: partial(make, "cpu") for make in programs.MORE_INTERPRETED}
OPTIONS = {"dropout": {"rng": "eager"}, "autocast": ROUNDED, "bfloat16": ROUNDED, "resized": {"captures": 2}}

OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"
)  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.every(4)
def test_three_steps_are_those_of_eager(name):
    simulated(PROGRAMS[name], **OPTIONS.get(name, {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PROGRAMS, *MORE])
def test_ten_steps_and_code_for_both_kinds_of_gpu(name):
    step = simulated((PROGRAMS | MORE)[name], steps=10, **{"rtol": 1e-4, "atol": 1e-5, **OPTIONS.get(name, {})})
    made = step.compile_kernels(80, 90, every_config=True)
    assert {each.kernel for each in made} == {each.name for each in step.kernels}


def trained_by(name: str, **options) -> Program:
    model = mlp()
    if name == "RMSprop":  # a gradient of 8.5e-7 is near its `eps` of 1e-8, which would show the rounding of 1e-8 in it
        options["eps"] = 1e-3
    return classifier(model, getattr(torch.optim, name)(model.parameters(), **options), batches((5, 6), classes=3))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"foreach": True}], ids=["loop", "foreach"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name, options):
    simulated(partial(trained_by, name, **options), rtol=1e-4, atol=1e-5)
    with recording_on_host(HostRecorder()):  # says whether it could
        step = simulated(partial(trained_by, name, **options), steps=1, rtol=1e-4, atol=1e-5)
    (capture,) = step.report().captures
    assert not capture.cuda_graph.refused, step.report()


@pytest.mark.slow
@pytest.mark.parametrize("foreach", [False, True])
def test_an_update_that_a_scaler_skips(foreach):
    """The counters on the host wait for the device's flag; nothing else does, and the graph has none of them."""
    make = partial(skipped_by_a_scaler, partial(torch.optim.AdamW, lr=0.01, foreach=foreach))
    step = simulated(make, steps=6, rtol=1e-4, atol=1e-5, eager=1)
    (graph,) = step.graphs
    assert "if r" in graph.executable.sources["runner"], graph.executable.sources["runner"]
    with recording_on_host(HostRecorder()):  # says whether it could
        step = simulated(make, steps=2, rtol=1e-4, atol=1e-5, eager=1)
    (capture,) = step.report().captures
    assert not capture.cuda_graph.refused, step.report()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adagrad", "Adam", "AdamW", "SGD"])
def test_fused_optimizers(name):
    simulated(partial(trained_by, name, lr=0.01, fused=True), rtol=1e-4, atol=1e-5, captures=2)  # Adagrad checks once


def test_a_loss_whose_backward_runs_outside():
    model, batch = mlp(), batches((5, 6), classes=3)(0)

    def loss(x, y):
        return torch.nn.functional.cross_entropy(model(x), y)

    loss(*batch).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    step = SimulatedStep(loss)
    step(*batch).backward()
    assert len(step.graphs) == 2, "a forward, and its backward"
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_random_numbers_of_kernels_are_those_of_the_seed():
    def losses(seed):
        torch.manual_seed(0)
        program = PROGRAMS["dropout"]()
        step = SimulatedStep(program.step, CompileConfig(verify=0, on_failure="raise"))
        torch.manual_seed(seed)
        return [step(*program.batch(0)).item() for _ in range(3)]

    first = losses(1)
    assert losses(1) == first and losses(2) != first and len(set(first)) == 3


def test_an_index_out_of_range_stops_the_kernel_that_uses_it():
    program = PROGRAMS["embedding"]()
    step = SimulatedStep(program.step)
    ids, picked = program.batch(0)
    step(ids, picked)
    for wrong in ((ids + 7, picked), (ids, picked + 4)):
        with pytest.raises(DeviceAssertFailed, match="index out of bounds"):
            step(*wrong)


def test_zeros_of_both_signs_are_different_numbers():
    """The block of numbers is copied to the device only if one has changed."""

    def step(x, number):
        return x * number

    simulated_step = SimulatedStep(step, CompileConfig(verify=0))
    x = torch.ones(4)
    for number in (1.0, 2.0, 0.0, -0.0, 0.0):
        found = simulated_step(x, number)
        assert torch.equal(found, step(x, number)) and torch.equal(found.signbit(), step(x, number).signbit()), number
