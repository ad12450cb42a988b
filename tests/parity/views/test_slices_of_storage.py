"""Tensors over a part of a larger memory: written, returned as views, and with offsets that change between calls."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch

import sidefx_train
from tests.support.parity import Program, parity


class Plain:
    """An instance of a user class."""


def rows(step):
    """Returns a factory of programs: ``step(box, x)`` on a box with a buffer and one of its rows."""

    def make() -> Program:
        box = Plain()
        box.buf = torch.arange(12.0).reshape(4, 3)
        box.row = box.buf[1]
        box.part = torch.arange(24.0).reshape(4, 6)[1:, 2:5]
        return Program(lambda x: step(box, x), lambda index: (torch.ones(2),), (box,))

    return make


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_row_of_a_buffer_is_written(backend):
    """Regression: functionalization forgot the row's offset, and the write went to the start of the buffer."""

    def step(box, x):
        box.row.add_(1)
        box.part.mul_(2)
        return x * 2

    parity(rows(step), steps=3, backend=backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("write", [True, False], ids=["written", "read"])
def test_views_of_a_row(backend, write):
    def step(box, x):
        if write:
            box.row.add_(1)
            box.part.mul_(2)
        return box.row[1:], box.row, box.part.t()[1], box.part

    parity(rows(step), steps=3, backend=backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("write", [True, False], ids=["written", "read"])
def test_a_row_at_another_storage_offset(backend, write):
    """Regression: a view of an input was created at the offset of the first call."""

    def step(box, x):
        if write:
            box.row.add_(1)
        return box.row[1:], x * 2

    def between(program, index):
        box = program.watch[0]
        box.row = box.buf[index % 4]

    parity(rows(step), steps=5, backend=backend, between=between, captures=3)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_layout_changed_in_place_stays_at_its_offset(backend):
    def step(box, x):
        box.part.t_()
        return x * 2

    def between(program, index):
        box = program.watch[0]
        box.part = torch.arange(24.0).reshape(4, 6)[index % 2 :, 2:5][:3]

    parity(rows(step), steps=4, backend=backend, between=between, captures=3)


def test_a_step_over_module_hooks_is_freed_with_its_model():
    """Such hooks run in an autograd function, which the capture copies: caches must not keep that class."""

    def run():
        model = torch.nn.Linear(3, 2)
        seen = []
        model.register_full_backward_hook(lambda module, grads, outputs: seen.append(len(outputs)))

        def step(x):
            model(x).sum().backward()

        compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
        for _ in range(3):
            compiled(torch.ones(4, 3))
        assert compiled.report().replays == 3
        model.weight._backward_hooks = None
        return weakref.ref(model)

    reference = run()
    gc.collect()
    assert reference() is None


_DELETERS = """
import abc, gc
import torch, sidefx_train

class Plain:
    def __init__(self): self.opened = True
    def __del__(self): died.append(self.opened)

class Abstract(abc.ABC):
    def __init__(self): self.opened = True
    def __del__(self): died.append(self.opened)

class Slots:
    __slots__ = ("opened", "name")
    def __init__(self): self.opened, self.name = True, "slots"
    def __del__(self): died.append(self.opened)

died = []
owned = [Plain(), Abstract(), Slots()]
names = ["plain", "abstract", "slots"]

def step(x):
    for one, name in zip(owned, names):
        if not isinstance(one, Slots):
            one.name = name
        x = x * len(one.name)
    return x

compiled = sidefx_train.compile(step, backend="eager", fullgraph=True)
for _ in range(2):
    compiled(torch.ones(2))
assert died == [], died
del owned[:], compiled  # an entry keeps what it has read
gc.collect()
assert died == [True] * 3, died
"""


def test_stand_ins_of_objects_with_del_end_quietly():
    """Also at the end of the process."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", _DELETERS], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_offsets_matter_only_where_memory_is_viewed_by_them():
    """Batches that are slices of one tensor are no new captures because the step makes views of something else."""
    rows, state = torch.arange(48.0).view(12, 4), torch.arange(6.0)

    def step(x, by_offset):
        state.add_(1)
        seen = state.as_strided((2, 2), (2, 1), 1)
        return x.as_strided((2, 2), (1, 2), x.storage_offset() + 1) + seen if by_offset else x[:2, :2] * seen

    for by_offset, captures in ((False, 1), (True, 3)):
        state.copy_(torch.arange(6.0))
        expected = [step(rows[i : i + 4], by_offset) for i in (0, 4, 8, 0)]
        state.copy_(torch.arange(6.0))
        compiled = sidefx_train.compile(step, backend="eager")
        found = [compiled(rows[i : i + 4], by_offset) for i in (0, 4, 8, 0)]
        assert all(map(torch.equal, found, expected))
        assert len(compiled.report().captures) == captures, str(compiled.report())
