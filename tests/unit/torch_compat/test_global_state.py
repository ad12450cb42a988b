"""Thread-wide settings of torch are restored after a capture that stopped (`torch_compat/state/global_state.py`)."""

from __future__ import annotations

import pytest
import torch

import sidefx_train
from sidefx_train import torch_compat as compat


def keys():
    return str(torch._C._dispatch_tls_local_include_set()), str(torch._C._dispatch_tls_local_exclude_set())


def test_a_guard_in_the_traceback_does_not_change_the_dispatch_keys_later():
    """Torch's ``_str`` holds a guard in a local variable, which an error keeps until the traceback is dropped."""
    before = keys()
    names = {"__name__": "torch.printing", "torch": torch}
    exec("def fails():\n    guard = torch._C._DisableFuncTorch()\n    raise ValueError('no text')", names)
    try:
        with (
            compat.restoring_state(),
            torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)),
        ):
            names["fails"]()
    except ValueError as error:
        kept = error
    assert keys() == before
    del kept
    assert keys() == before


@pytest.mark.parametrize("transform", [torch.func.hessian, lambda f: torch.func.jacfwd(torch.func.jacfwd(f))])
def test_a_failed_capture_of_nested_transforms_leaves_torch_usable(transform):
    def step(rows):
        return torch.func.vmap(transform(lambda row: row.pow(3).sum() * row.prod()))(rows)

    rows = torch.linspace(1, 2, 6).reshape(2, 3)
    wanted, before = step(rows), keys()
    assert torch.equal(sidefx_train.compile(step, backend="eager")(rows), wanted)
    assert keys() == before
    assert torch.equal(step(rows), wanted)
