"""Operators with changing numbers on outside objects of C that have no shadow: the capture neither reads nor writes."""

from __future__ import annotations

import array
import ctypes
import operator
import random

import numpy as np
import pytest
import torch

import sidefx_train


def increased(held, x, i):
    held[i % 4] += 1
    return x * held[i % 4]


def deleted(held, x, i):
    del held[i % 3]
    return x * held[i % 3]


def repeated(held, x, i):
    held *= 1 + i % 2
    return x * len(held)


def read(held, x, i):
    return x * held[i % 4] + len(held[i % 4 :]) + (i in held)


def shuffled(held, x, i):
    random.Random(i).shuffle(held)
    return x * held[0]


def sliced(held, x, i):
    operator.setitem(held, slice(i % 4, i % 4 + 1), held[i % 4 + 1 : i % 4 + 2])
    return x


OBJECTS = {
    "bytearray": lambda: bytearray(range(20)),
    "memoryview": lambda: memoryview(bytearray(range(20))),
    "array": lambda: array.array("l", range(20)),
    "ctypes": lambda: (ctypes.c_int * 20)(*range(20)),
    "object array": lambda: np.array([[1], [2], [3], [4]] * 5, dtype=object),
}
STEPS = {
    "bytearray": (increased, deleted, repeated, read, shuffled, sliced),
    "memoryview": (increased, read, shuffled, sliced),
    "array": (increased, deleted, repeated, read, shuffled, sliced),
    "ctypes": (increased, read, shuffled, sliced),
    "object array": (repeated,),
}


@pytest.mark.parametrize(("kind", "step"), [(kind, step) for kind, steps in STEPS.items() for step in steps])
def test_values_and_contents(kind, step):
    outcomes = []
    for captured in (False, True):
        held = OBJECTS[kind]()

        def run(x, i, held=held):
            return step(held, x, i)

        call = sidefx_train.compile(run, backend="eager") if captured else run
        outcomes.append([(call(torch.ones(2), i).tolist(), list(held)) for i in range(5)])
    assert outcomes[0] == outcomes[1]
