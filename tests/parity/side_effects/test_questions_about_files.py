"""``os.path.exists`` and the like: asked before the graph runs, at every call; a decision on the answer is a guard."""

from __future__ import annotations

import os
import pathlib
import weakref

import pytest
import torch
from torch import nn

from tests.support.parity import Program, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")

ASKED = {
    "exists": lambda path: os.path.exists(path),
    "isfile": lambda path: os.path.isfile(path),
    "isdir": lambda path: not os.path.isdir(path.parent),
    "joined": lambda path: os.path.exists(os.path.join(os.path.dirname(path), "stop")),
    "method": lambda path: path.exists(),
    "is_file": lambda path: (path.parent / "stop").is_file(),
    "identity": lambda path: path.exists() is True,
    "size": lambda path: path.exists() and os.path.getsize(path) > 2,
    "time": lambda path: path.exists() and os.path.getmtime(path) > 0,
}


def trained(folder, use):
    """A program whose step uses ``folder / "stop"``, which is there at some calls, empty or not."""

    def make() -> Program:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        path = folder / "stop"
        path.unlink(missing_ok=True)

        def step(x):
            loss = model(x).square().mean()
            result = use(pathlib.Path(path), loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach(), result

        return Program(step, lambda i: (torch.full((2, 3), i + 1.0),), (model, optimizer))

    def between(program, index):
        path = folder / "stop"
        if index % 3 == 2:
            path.write_text("a" * index)
        else:
            path.unlink(missing_ok=True)

    return make, between


@pytest.mark.parametrize("name", ASKED)
def test_each_call_sees_the_file(tmp_path, name):
    make, between = trained(tmp_path, lambda path, loss: (loss * 2 if ASKED[name](path) else loss, ASKED[name](path)))
    report = parity(make, steps=9, captures=4, between=between)
    assert len(report.captures) <= (4 if name in ("size", "time") else 2), f"{report}"


def creates_and_asks(path, loss):
    seen = [path.exists()]
    path.write_text("b")
    seen.append(path.exists())
    path.unlink()
    return [*seen, path.exists()]


def prints_and_asks(path, loss):
    print(loss.item())
    return loss * 2 if path.exists() else loss


def asks_for_a_missing_one(path, loss):
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return None


def asks_with_a_changing_name(path, loss):
    return [os.path.exists(f"{path}{i}") for i in range(2)], os.path.exists(b"/"), os.path.exists(0)


def hands_it_on(path, loss):
    return {"there": os.path.exists(path), "text": f"{os.path.exists(path)}"}, loss * os.path.exists(path)


@pytest.mark.parametrize(
    "use", [creates_and_asks, prints_and_asks, asks_for_a_missing_one, asks_with_a_changing_name, hands_it_on]
)
def test_other_uses(tmp_path, use):
    make, between = trained(tmp_path, use)
    parity(make, steps=7, captures=None, between=between, whole=False)


def test_written_files_are_asked_for_behind_the_graph(tmp_path):
    """What is written is deferred: a question about the file is asked after that."""

    def make() -> Program:
        path = tmp_path / "log"
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115

        def step(x):
            y = x * 2
            file.write(f"{y.sum()}\n")
            file.flush()
            return y * os.path.getsize(path)

        return Program(step, lambda i: (torch.full((2,), i + 1.0),))

    parity(make, steps=4, captures=None, whole=False)


def test_a_replaced_function_is_called(tmp_path, monkeypatch):
    make, _ = trained(tmp_path, lambda path, loss: loss * 2 if os.path.exists(path) else loss)
    answers = []

    def between(program, index):
        answers.append(index)
        if index == 2:
            monkeypatch.setattr(os.path, "exists", lambda path: len(answers) % 2 == 0)
        if index == 5:
            monkeypatch.undo()

    parity(make, steps=8, captures=None, between=between, whole=False)


class Removes:
    """Removes its file when it is freed."""

    def __init__(self, path):
        self.path = path
        path.touch()

    def __del__(self):
        self.path.unlink(missing_ok=True)


def opened(path):
    held = open(path, "w")  # noqa: SIM115 - the step closes it
    held.write("abc")
    return held


def finalized(path):
    path.touch()
    held = Holder()
    weakref.finalize(held, os.remove, path)
    return held


class Holder:
    """Holds something that changes a file when it is freed."""


def sets(holder):
    holder.held = None


def deletes(holder):
    del holder.held


def empties(holder):
    holder.within.clear()


def replaces(holder):
    holder.by_name["held"] = 4


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("made", [opened, finalized, Removes])
@pytest.mark.parametrize("drop", [sets, deletes, empties, replaces])
@pytest.mark.covering(1)
def test_files_that_freed_objects_change(tmp_path, drop, made, first):
    """The step drops an object that changes the file when it is freed, at all calls or from the third on."""
    path = tmp_path / "held"

    def make() -> Program:
        holder = Holder()

        def step(x):
            drop(holder)
            there = os.path.exists(path)
            return x * 2, there, os.path.getsize(path) if there else None

        program = Program(step, lambda i: (torch.full((2,), i + 1.0),), ())
        program.holder = holder
        return program

    def between(program, index):
        holder = program.holder
        holder.held = holder.within = holder.by_name = None
        path.write_text("")
        held = made(path) if index >= first else 3
        holder.held = held if drop in (sets, deletes) else None
        holder.within = [held] if drop is empties else []
        holder.by_name = {"held": held if drop is replaces else 3}
        del held

    parity(make, steps=5, captures=None, between=between, whole=False)


def test_a_whole_step_that_notes_results_and_asks(tmp_path):
    def make() -> Program:
        model, notes = nn.Linear(3, 2), {"loss": None, "calls": 0}

        def step(x):
            loss = model(x).square().mean()
            notes["loss"], model.latest = loss.detach(), loss.detach()
            notes["calls"] += 1
            return loss.detach() * 2 if os.path.exists(tmp_path / "stop") else loss.detach()

        return Program(step, lambda i: (torch.full((2, 3), i + 1.0),), (model, notes))

    parity(make, steps=6, captures=2)
