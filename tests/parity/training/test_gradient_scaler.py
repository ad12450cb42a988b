"""``GradScaler``: one graph, which takes an update back where a gradient is infinite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, batches, mlp, parity

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {}, "Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {"foreach": True},
    "Adamax": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.9}, "Rprop": {}, "SGD": {"momentum": 0.9},
}  # fmt: skip
QUICK = ("AdamW", "ASGD", "SGD")
INFINITE = (2, 4, 5)


def overflowing(calls=INFINITE):
    """Batches of which some make gradients infinite."""
    usual = batches((4, 6), classes=3)

    def batch(index):
        x, y = usual(index)
        return (x * float("inf") if index in calls else x), y

    return batch


def scaler_of(watch: list[Any]) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    watch.append(scaler)
    return scaler


def check(make, steps=8, captures=1, eager=("SFX211",), **options):
    """Compares with eager; only first steps run eagerly. Returns the report."""
    report = parity(make, steps=steps, whole=False, captures=captures, fullgraph=True, on_failure="raise", **options)
    assert [record.code for record in report.fallbacks] == list(eager) and not report.breaks, f"{report}"
    return report


def trained(optimizer_of, calls=INFINITE, scheduled=False, clipped=True) -> Program:
    model, watch = mlp(), []
    optimizer = optimizer_of(model.parameters())
    scaler, scales = scaler_of(watch), []
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) if scheduled else None

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        norm = None
        if clipped:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
        scales.append(scaler.get_scale())
        return loss.detach(), norm

    return Program(step, overflowing(calls), (model, optimizer, watch, scales, scheduler and scheduler.last_epoch))


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS]
)
def test_every_optimizer(name):
    made = getattr(torch.optim, name)
    report = check(lambda: trained(lambda p: made(p, **OPTIMIZERS[name])))
    assert report.replays == 7, f"{report}"


def test_first_steps_that_are_skipped_run_eagerly():
    """The state of the optimizer exists only after the first update."""
    report = check(lambda: trained(torch.optim.AdamW, (0, 1, 5), clipped=False), eager=("SFX211", "SFX211"))
    assert report.replays == 5, f"{report}"


def test_scheduler():
    def make():
        return trained(lambda p: torch.optim.SGD(p, lr=0.1), (0, 1, 4), scheduled=True)

    with pytest.warns(UserWarning, match="before `optimizer.step"):
        report = check(make, eager=("SFX211", "SFX211"))
    assert report.replays == 5, f"{report}"


@pytest.mark.slow
def test_compiled_by_inductor():
    def make():
        program = trained(lambda p: torch.optim.Adam(p, lr=0.01), clipped=False)

        def step(x, y):
            loss, _ = program.step(x / (x[0, 0] != 5), y)
            program.watch[1].zero_grad()
            return loss.nan_to_num()  # results of rounding are not compared with NaN

        usual = batches((4, 6), classes=3)

        def batch(index):
            x, y = usual(index)
            if index in INFINITE:
                x[0, 0] = 5
            return x, y

        return Program(step, batch, program.watch)

    check(make, backend="inductor")


def test_two_optimizers_with_one_scaler():
    """Each is skipped for its own gradients; the scale follows both."""

    def make():
        one, two, watch = mlp(), mlp(), []
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.RMSprop(two.parameters())]
        scaler = scaler_of(watch)

        def step(x, y):
            for model, optimizer, value in zip(
                (one, two), optimizers, (x, x.nan_to_num(posinf=1.0, neginf=-1.0)), strict=True
            ):
                optimizer.zero_grad()
                scaler.scale(F.cross_entropy(model(value), y)).backward()
                scaler.step(optimizer)
            scaler.update()

        return Program(step, overflowing(), (one, two, optimizers, watch))

    check(make)


def test_python_objects_that_the_update_changes():
    """A hook counts updates: that no gradient is infinite is assumed, and a step that is to be skipped runs eagerly."""

    def make():
        program = trained(torch.optim.SGD)
        optimizer, counts = program.watch[1], []
        optimizer.register_step_post_hook(lambda *_: counts.append("updated"))
        return Program(program.step, program.batch, (*program.watch, counts))

    report = check(make, steps=6, eager=("SFX211", "SFX208"))
    assert {record.code: record.count for record in report.fallbacks} == {"SFX211": 1, "SFX208": 3}, f"{report}"


def test_many_skipped_steps_of_an_update_that_changes_python_objects():
    """What does not hold often is assumed no longer: the update runs between two parts."""

    def make():
        program = trained(torch.optim.SGD, (1, 2, 3, 6))
        optimizer, counts = program.watch[1], []
        optimizer.register_step_post_hook(lambda *_: counts.append("updated"))
        return Program(program.step, program.batch, (*program.watch, counts))

    report = parity(make, steps=9, whole=False, captures=None)
    assert [record.code for record in report.breaks] == ["SFX101"] and report.replays, f"{report}"


def test_state_that_the_step_reads_after_its_update():
    """The host does not know whether the counter has advanced."""

    def make():
        program = trained(lambda p: torch.optim.Adam(p, lr=0.01))
        optimizer, seen = program.watch[1], []

        def step(x, y):
            result = program.step(x, y)
            weight = optimizer.param_groups[0]["params"][0]
            seen.append(optimizer.state[weight]["step"].item())
            return result, optimizer.state[weight]["exp_avg"] * 2, weight.detach().sum()

        return Program(step, program.batch, (*program.watch, seen))

    check(make)


def test_only_the_update_is_captured():
    """The gradients were unscaled outside."""

    def make():
        program = trained(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        model, optimizer, (scaler,), *_ = program.watch

        def batch(index):
            if index:
                scaler.update()
            optimizer.zero_grad()
            x, y = program.batch(index)
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)
            return ()

        return Program(lambda: scaler.step(optimizer), batch, (model, optimizer))

    report = check(make, steps=4, captures=None)  # the dict of flags is another in every call
    assert report.replays == 3, f"{report}"


class Noisy(torch.optim.Optimizer):
    """Draws noise for its update, and replaces the memory of what it averages."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        for p in self.param_groups[0]["params"]:
            self.state[p]["average"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["average"].view(-1).mul_(0.5)
            p.add_(p.grad + torch.randn_like(p), alpha=-0.1)


def test_random_numbers_are_not_drawn_by_a_skipped_update():
    def make():
        program = trained(Noisy)

        def step(x, y):
            return program.step(x, y), torch.rand(2)

        return Program(step, program.batch, program.watch)

    check(make, steps=6, eager=("SFX211", "SFX208"))


class Own(torch.amp.GradScaler):
    """Counts the updates."""

    updates = 0

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        self.updates += 1
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)


def test_scaler_of_the_program():
    def make():
        model, scaler = mlp(), Own("cpu", init_scale=16.0, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()

        return Program(step, overflowing(), (model, scaler))

    check(make)


def test_rare_skips_do_not_end_the_replays():
    """A predicated update assumes nothing, so that no number of skipped steps makes the step run otherwise."""
    report = check(lambda: trained(torch.optim.SGD, range(1, 12)), steps=14)
    assert report.replays == 13, f"{report}"


def test_step_is_not_captured_for_what_the_scaler_was():
    """A loaded scale and another growth interval are seen."""
    torch.manual_seed(0)
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        program = trained(torch.optim.SGD)
        scaler = program.watch[2][0]
        step = sidefx_train.compile(program.step, backend="eager", keep_slower=True) if compiled else program.step
        for index in range(8):
            if index == 3:
                scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0, "growth_interval": 1})
            step(*program.batch(index))
        ends.append((scaler.state_dict(), program.watch[3]))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("write", ["p.data = p.data - 0.1 * p.grad", "p.set_(p - 0.1 * p.grad)"])
def test_updates_that_replace_a_parameters_storage(write):
    """Regression: they were applied in a skipped step too, and the weights stayed NaN."""
    code = compile(write, write, "exec")

    class Replacing(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                exec(code, {"p": p})

    parity(lambda: trained(Replacing, clipped=False), steps=8, captures=None, whole=False)
