"""Loading native modules."""

from __future__ import annotations

import pytest
from torch.overrides import TorchFunctionMode

from sidefx_train.compile.native import build, guards_module


class Asked(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_loading_a_module_asks_no_function_mode():
    """Regression: a capture ran the mode's Python, which needed the module that was being loaded: it never ended."""
    module = guards_module()
    if module is None or not module.tensors_readable():
        pytest.skip("the native module cannot read tensors")
    with Asked() as mode:
        build._find_tensor_words(module)
    assert not mode.functions
