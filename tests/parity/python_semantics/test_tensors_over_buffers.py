"""``torch.from_dlpack`` and ``torch.frombuffer``: tensors over the memory of arrays; other objects break the graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sidefx_train

CAPTURED = {
    "given to dlpack": lambda x, a: (x * torch.from_dlpack(a), None),
    "given to utils.dlpack": lambda x, a: (x * torch.utils.dlpack.from_dlpack(a), None),
    "given": lambda x, a: (x * torch.frombuffer(a, dtype=torch.float32), None),
    "written": lambda x, a: (torch.from_dlpack(a).add_(1) * x, torch.frombuffer(a, dtype=torch.float32).mul_(2).sum()),
    "made": lambda x, a: (x * torch.from_dlpack(np.arange(4, dtype=np.float32)), None),
    "a matrix": lambda x, a: (x * torch.frombuffer(np.ones((2, 2), dtype=np.float32), dtype=torch.float32), None),
}
NATIVELY = {
    "bytes": lambda x, a: (x * torch.frombuffer(bytearray(a.tobytes()), dtype=torch.float32), None),
    "other type": lambda x, a: (x, torch.frombuffer(a, dtype=torch.int32)),
    "part": lambda x, a: (x, torch.frombuffer(a, dtype=torch.float32, offset=8)),
    "tensor": lambda x, a: (x + 1, torch.from_dlpack(x)),
}


def called(function, compiled, **options):
    run = sidefx_train.compile(function, backend="eager", keep_slower=True, **options) if compiled else function
    found = []
    for index in range(5):
        array = np.arange(4, dtype=np.float32) + index
        made, other = run(torch.ones(4) * index, array)
        found.append((made.tolist(), None if other is None else other.tolist(), array.tolist()))
    return found, run


@pytest.mark.parametrize("function", CAPTURED.values(), ids=CAPTURED)
def test_over_an_array(function):
    found, run = called(function, True, fullgraph=True, on_failure="raise")
    assert found == called(function, False)[0]
    assert len(run.report().captures) == 1


@pytest.mark.parametrize("function", NATIVELY.values(), ids=NATIVELY)
def test_over_another_object(function):
    found, run = called(function, True)
    assert found == called(function, False)[0]
    assert {record.code for record in run.report().breaks} <= {"SFX104"}
