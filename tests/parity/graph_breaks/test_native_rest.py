"""What follows the last tensor operation runs natively from the first decision on a number on: one capture."""

from __future__ import annotations

import contextlib
import csv
import datetime
import json
import math
import os
import pickle
import shutil
import time
import types
import warnings
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sidefx_train
from tests.support.native_rest import lines_of, runs_natively
from tests.support.parity import Program, parity


def trained(rest, **options):
    """Returns a program that trains a small layer and then calls ``rest(state, loss, optimizer)``."""

    def make() -> Program:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        state = types.SimpleNamespace(
            n=0, seen=[], at={}, optimizer=optimizer, model=model, average=torch.ones(1, 3), **options
        )

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return rest(state, loss)

        return Program(step, lambda index: (torch.randn(4, 3),), (state,))

    return make


def logs(state, loss):
    state.n += 1
    if state.n % 3 == 0:
        state.seen.append((state.n, loss.item()))
    return loss.detach(), state.n


def logs_before_counting(state, loss):
    if state.n % 4 == 0:
        state.seen.append(loss.detach())
    state.n += 1
    return state.n


def keeps_an_array(state, loss):
    state.losses[state.n] = loss.item()
    state.n += 1
    recent = state.losses[: state.n]
    if recent[-1] < recent.mean():
        state.seen.append(float(recent.std()))
    return recent.max(), loss.detach()


def test_a_numpy_array_of_losses():
    """The step writes to it and reads what it holds: one graph, whatever the numbers are."""
    make = trained(keeps_an_array, losses=np.zeros(20))
    report = parity(make, steps=12)
    assert runs_natively(report), f"{report}"


def warms_up(state, loss):
    state.n += 1
    if state.n < 4:
        rate = 0.1 * state.n / 4
    elif state.n < 8:
        rate = 0.1
    else:
        rate = 0.05 * (1 + math.cos(math.pi * min(1.0, (state.n - 8) / 5)))
    for group in state.optimizer.param_groups:
        group["lr"] = rate


def numbers_a_dict(state, loss):
    state.at[state.n] = f"{loss.item():.4f}"
    state.n += 1


def in_a_helper(state, loss):
    def due(n):
        return n % 3 == 1

    for k in range(2):
        if due(state.n + k):
            state.seen.append(k)
    state.n += 1
    return [loss.detach(), due(state.n)]


def in_with_and_try(state, loss):
    with contextlib.suppress(KeyError):
        try:
            state.n += 1
            if state.n % 3 == 0:
                raise KeyError(state.n)
            state.seen.append("went on")
        finally:
            state.seen.append(state.n)
    return state.n


def prints(state, loss):
    print("step", state.n)
    state.n += 1
    if state.n % 3 == 0:
        print("third", state.n, len(state.seen))
    state.seen.append(state.n)


def keeps_the_best(state, loss):
    state.n += 1
    value = loss.item()
    if value < state.at.get("best", math.inf):
        state.at["best"], state.at["bad"] = value, 0
    else:
        state.at["bad"] += 1
    if state.at["bad"] > 1:
        state.optimizer.param_groups[0]["lr"] *= 0.5
    return loss.detach(), value


def compares_the_tensor(state, loss):
    if loss > 1.0:
        state.seen.append("large")
    return {"loss": loss.detach(), "seen": len(state.seen)}


def lists(state, loss):
    state.seen.append(loss.tolist())
    state.at[state.n] = [round(value, 3) for value in state.seen]
    state.n += 1


def makes_an_array(state, loss):
    array = np.unique(loss.detach().numpy())
    state.seen += [float(array[0]), array.shape, str(array.dtype)]
    return loss.detach()


@pytest.mark.parametrize(
    "rest", [keeps_the_best, compares_the_tensor, lists, makes_an_array], ids=lambda rest: rest.__name__
)
def test_a_rest_that_needs_values_of_the_graph(rest):
    assert runs_natively(parity(trained(rest), steps=9))


def appends_a_line(state, loss):
    state.n += 1
    with open(state.path, "a", encoding="utf-8") as file:
        file.write(f"{state.n} {loss.item():.4f}\n")
    return loss.detach()


def appends_a_line_in_a_helper(state, loss):
    def log(text):
        with open(state.path, "a", encoding="utf-8") as file:
            print(text, file=file)

    state.n += 1
    log(f"{state.n} {loss.item():.4f}")


def writes_rows(state, loss):
    state.n += 1
    with open(state.path, "a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow([state.n, loss.item()])
        csv.DictWriter(file, ["n", "loss"]).writerow({"n": state.n, "loss": loss.item()})
        file.writelines(["a\n", "b\n"])
        json.dump({"n": state.n}, file)


def writes_bytes(state, loss):
    with open(state.path, "ab") as file:
        pickle.dump((state.n, loss.item()), file)
        file.write(b"|")
    state.n += 1
    return loss.item()


def saves_a_checkpoint(state, loss):
    folder = state.path.parent / "checkpoints"
    folder.mkdir(exist_ok=True)
    if not (folder / "first").exists():
        torch.save(state.model.state_dict(), folder / "first")
    state.path.write_text(f"{state.n} {loss.item()}")
    shutil.copy(state.path, folder / "copy")
    state.n += 1
    return state.n


def measures_the_time(state, loss):
    now = time.perf_counter()
    state.at["passed"] = now > state.started > 0
    state.started = now if state.n < 0 else 0.5
    state.seen.append((state.n, loss.item(), datetime.datetime.now() > state.date))
    state.n += 1


def updates_a_meter(state, loss):
    def update(**values):
        state.seen.append({name: value.item() for name, value in values.items() if name != "seconds"})

    update(loss=loss, seconds=time.time() - state.started)
    return loss.detach()


def fills_a_dict(state, loss):
    logs = {"loss": loss.detach()}
    logs["positive"] = time.time() > state.started
    logs.update(n=state.n)
    state.seen.append(list(logs))
    return {"size": len(loss.shape), "same": logs["loss"].item(), **logs}


def writes_in_a_loop(state, loss):
    with open(state.path, "a", encoding="utf-8") as file:
        for name, value in {"loss": loss, "n": state.n}.items():
            file.write(f"{name} = {value:.3f}\n")
    state.n += 1


@pytest.mark.parametrize(
    "rest",
    [
        updates_a_meter,
        fills_a_dict,
        writes_in_a_loop,
        appends_a_line,
        appends_a_line_in_a_helper,
        writes_rows,
        writes_bytes,
        saves_a_checkpoint,
        measures_the_time,
    ],
    ids=lambda rest: rest.__name__,
)
def test_a_rest_with_files_and_clocks(rest, tmp_path, monkeypatch):
    """No break, whatever is done with a file: the rest is the program's own Python."""
    folders = [tmp_path / name for name in ("eager", "captured")]
    left = iter(folders)

    def make() -> Program:
        folder = next(left)
        folder.mkdir()
        monkeypatch.chdir(folder)
        return trained(rest, path=Path("log"), started=0.5, date=datetime.datetime(2020, 1, 1))()

    assert runs_natively(parity(make, steps=5))
    eager, captured = (
        {each.name: each.read_bytes() for each in folder.rglob("*") if each.is_file()} for folder in folders
    )
    assert eager == captured


def test_a_file_that_decides_on_tensors_is_a_break(tmp_path):
    path = tmp_path / "pause"

    def scales_if_there_is_none(state, loss):
        state.seen.append(os.listdir(path.parent))
        return loss.detach() * 2

    report = parity(trained(scales_if_there_is_none), steps=4, captures=None, whole=False)
    assert {found.code for found in report.breaks} == {"SFX103"} and not report.fallbacks


def test_a_rest_behind_a_call_that_is_found_to_compute_is_captured_in_parts(tmp_path):
    def averages(state, loss):
        state.seen.append(os.listdir(tmp_path))
        state.average.mul_(0.5)
        return loss.detach()

    report = parity(trained(averages), steps=6, captures=None, whole=False)
    assert {found.code for found in report.breaks} == {"SFX103"} and not report.fallbacks
    assert runs_natively(report, 0) and not runs_natively(report)


def scales_what_is_large(state, loss):
    if loss > 0.1:
        loss = loss * 2
    return loss.detach()


def averages_now_and_then(state, loss):
    value = loss.item()
    state.n += 1
    for _ in range(state.n % 2):
        if value < 1e9:
            state.average.mul_(0.5)
    return value


@pytest.mark.parametrize("rest", [scales_what_is_large, averages_now_and_then], ids=lambda rest: rest.__name__)
def test_a_value_that_decides_on_tensors_is_a_break(rest):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        report = parity(trained(rest), steps=8, captures=None, whole=False)
    assert {found.code for found in report.breaks} == {"SFX101"} and not report.fallbacks


def test_a_rest_that_is_found_to_compute_is_captured_in_parts():
    def computes(state, loss):
        if loss.item() < 1e9:
            state.average.mul_(0.5)
        return loss.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sidefx_train.errors.SideFXWarning)
        report = parity(trained(computes), steps=8, captures=None, whole=False)
    assert {found.code for found in report.breaks} == {"SFX101"} and not report.fallbacks
    assert runs_natively(report, 0) and not runs_natively(report)


@pytest.mark.parametrize(
    "rest",
    [logs, logs_before_counting, warms_up, numbers_a_dict, in_a_helper, in_with_and_try, prints],
    ids=lambda rest: rest.__name__,
)
def test_one_capture(rest):
    report = parity(trained(rest), steps=14)
    assert runs_natively(report)


def test_under_inductor():
    assert runs_natively(parity(trained(logs), steps=5, backend="inductor"))


def raises_in_the_rest(state, loss):
    state.n += 1
    if state.n % 3 == 0:
        state.seen.append("raises")
        raise ValueError(state.n)
    return state.n


def test_an_exception_is_eagers():
    assert runs_natively(parity(trained(raises_in_the_rest), steps=7))


def test_an_exception_comes_from_the_programs_lines():
    program = trained(raises_in_the_rest)()
    want = [lines_of(program.step, torch.ones(4, 3)) for _ in range(6)]
    program = trained(raises_in_the_rest)()
    compiled = sidefx_train.compile(program.step, backend="eager")
    assert [lines_of(compiled, torch.ones(4, 3)) for _ in range(6)] == want
    assert len(want[2]) == 2 and len(compiled.report().captures) == 1


def test_what_only_the_rest_reads_is_not_guarded():
    def rest(state, loss):
        if state.n % state.period == 0:
            state.seen.append((state.n, state.label, state.period))
        state.n += 1

    def between(program, index):
        (state,) = program.watch
        state.period = 2 + index % 3
        state.label = f"phase {index // 2}"
        if index == 5:
            state.n = 100

    assert runs_natively(parity(trained(rest, period=2, label="first"), steps=12, between=between))


def test_what_the_graph_reads_is_guarded():
    def between(program, index):
        (state,) = program.watch
        if index == 4:
            state.model.bias.requires_grad_(False)
        if index == 6:
            state.optimizer.param_groups[0]["nesterov"] = True

    report = parity(trained(logs), steps=8, between=between, captures=None)
    assert len(report.captures) == 3 and runs_natively(report)


def averages(state, loss):
    state.n += 1
    if state.n % state.period == 0:
        state.average.mul_(0.9).add_(state.model.weight.detach(), alpha=0.1)
        state.seen.append(state.average.sum().item())


def test_a_rest_that_often_computes_is_captured():
    report = parity(trained(averages, period=3), steps=12, captures=None, whole=False)
    assert [runs_natively(report, i) for i in range(len(report.captures))] == [True, False, False], str(report)
    assert not report.breaks and report.replays == 12


def test_a_rest_that_rarely_computes_stays_native():
    assert runs_natively(parity(trained(averages, period=25), steps=55, whole=False))


@pytest.mark.parametrize("first", [0, 1])
def test_accumulated_gradients_are_captured(first):
    """``zero_grad`` in the branch that the first call does not take, and a branch that it takes."""

    def make() -> Program:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = types.SimpleNamespace(n=first, model=model, optimizer=optimizer)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            if state.n % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            state.n += 1
            return loss.detach()

        return Program(step, lambda index: (torch.randn(4, 3),), (state,))

    report = parity(make, steps=12, captures=4)
    assert not any(runs_natively(report, i) for i in range(len(report.captures))), str(report)


def test_a_decision_that_leads_to_tensors_in_another_call_is_captured():
    """The first call takes the branch that computes: the decision belongs to the graph."""

    def rest(state, loss):
        if state.n % 3 == 0:
            state.average.mul_(0.9)
        state.n += 1

    report = parity(trained(rest), steps=9, captures=2)
    assert not any(runs_natively(report, i) for i in range(2)), str(report)


def test_after_a_break():
    """The rest of a part that ends with a scheduler runs natively too."""

    def make() -> Program:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        seen = []

        def step(x):
            loss = model(x).square().mean()
            if loss > 0.5:
                seen.append("large")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            return loss.detach()

        return Program(step, lambda index: (torch.randn(4, 3),), (model, optimizer, scheduler, seen))

    report = parity(make, steps=10, whole=False, captures=None)
    parts = report.parts
    assert parts and all(len(part.captures) == 1 for part in parts), str(report)


def test_a_rest_behind_a_decision_of_the_graph(tmp_path):
    """Gradients are accumulated, and now and then a file is written, whose name is made by code with a loop."""

    def make() -> Program:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = types.SimpleNamespace(n=0, model=model, optimizer=optimizer, total=torch.zeros(()))

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            state.total += loss.detach()
            if state.n % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            state.n += 1
            if state.n % 5 < 2:
                with open(os.path.join(tmp_path, "logs", f"{state.n}"), "w", encoding="utf-8") as file:
                    json.dump({"loss": state.total.item() / state.n}, file)

        return Program(step, lambda index: (torch.randn(4, 3),), (state,))

    (tmp_path / "logs").mkdir()
    report = parity(make, steps=16, captures=5)
    assert runs_natively(report), str(report)


def behind_a_break(rest, **options):
    """Returns a program that takes its batch from an iterator over a dict, a break, and goes on as :func:`trained`."""

    def make() -> Program:
        program = trained(rest, **options)()
        batches = iter(dict(enumerate([torch.randn(4, 3) for _ in range(20)])).values())
        return Program(lambda: program.step(next(batches)), lambda index: (), program.watch)

    return make


@pytest.mark.parametrize(
    "rest", [keeps_the_best, lists, writes_bytes, measures_the_time], ids=lambda rest: rest.__name__
)
def test_the_rest_of_a_part(rest, tmp_path):
    make = behind_a_break(rest, path=tmp_path / "log", started=0.5, date=datetime.datetime(2020, 1, 1))
    report = parity(make, steps=8, captures=None, whole=False)
    assert len(report.breaks) == 1 and not report.fallbacks, str(report)
    assert not any(part.breaks or part.fallbacks for part in report.parts), str(report)


def test_the_rest_of_a_part_that_is_found_to_compute_is_captured():
    """It is noticed also if an exception leaves the rest of the part, which the frame outside handles."""

    def averages(state, loss):
        state.seen.append(loss.item() < 1e9)
        if state.seen[-1]:
            state.average.mul_(0.5)
        return loss.detach()

    def raises(state, loss):
        try:
            averages(state, loss)
            raise_if_third(state, loss)
        except ValueError as error:
            state.seen.append(str(error))
        return loss.detach()

    def raise_if_third(state, loss):
        state.n += 1
        if loss.item() < 1e9 and state.n % 3 == 0:
            state.average.mul_(0.5)
            raise ValueError(state.n)

    for rest in (averages, raises):
        report = parity(behind_a_break(rest), steps=9, captures=None, whole=False)
        assert not report.fallbacks, str(report)
        computing = [part for part in report.parts if len(part.breaks) > 0]
        assert computing and all(not runs_natively(part) for part in computing), str(report)
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@pytest.mark.parametrize("window", [3, 40])
@pytest.mark.parametrize("kind", ["deque", "list"])
def test_running_mean_of_losses(window, kind):
    """The lengths of a list that is read after the last tensor operation need no capture each."""

    def run(wrap):
        torch.manual_seed(0)
        model, log = nn.Linear(4, 4), []
        losses = deque(maxlen=window) if kind == "deque" else []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) >= window:
                log.append(sum(losses) / len(losses))
            return loss.detach()

        stepped = wrap(step)
        out = [stepped(torch.randn(5, 4)) for _ in range(window + 4)]
        return stepped, [each.tolist() for each in out], list(losses), log, model.weight.tolist()

    _, *expected = run(lambda step: step)
    captured, *made = run(lambda step: sidefx_train.compile(step, backend="eager", rng="eager"))
    assert made == expected
    report = captured.report()
    assert len(report.captures) <= 3 and not report.breaks and not report.fallbacks


def test_a_list_read_before_a_tensor_operation_is_captured_for_each_length():
    def run(wrap):
        scales, out = deque(maxlen=4), []

        def step(x):
            y = x * 2
            scales.append(len(scales) + 1.0)
            return y * sum(scales)

        stepped = wrap(step)
        for _ in range(7):
            out.append(stepped(torch.ones(2)).tolist())
        return out, list(scales)

    assert run(lambda step: sidefx_train.compile(step, backend="eager")) == run(lambda step: step)
