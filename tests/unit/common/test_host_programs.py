"""Programs that the prologue runs (`compile/common/host_programs.py`)."""

from __future__ import annotations

import math

import torch

from sidefx_train.compile.common.host_programs import HostProgram, NumberCall, Slot, Step


def test_a_number_is_computed_once_for_guards_of_capture_and_backend():
    calls = []

    def root(value):
        calls.append(value)
        return math.sqrt(value)

    program = HostProgram((), (Step(NumberCall(root), (Slot(0),), {}),))
    number, other = float("4.0"), float("4.0")
    assert program(number) == program(number) == [2.0] and len(calls) == 1
    assert program(other) == [2.0] and len(calls) == 2
    assert program(float("9.0")) == [3.0] and program(number) == [2.0]
    assert program("4") == [] and program(float("-1.0")) == []


def test_a_tensor_is_read_each_time():
    program = HostProgram((), (Step(torch.ops.aten.neg.default, (Slot(0),), {}),))
    tensor = torch.ones(2)
    assert program(tensor) == [-1.0, -1.0]
    tensor.mul_(3)
    assert program(tensor) == [-3.0, -3.0]
