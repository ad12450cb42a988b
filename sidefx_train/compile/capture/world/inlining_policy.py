"""Decides which Python functions the interpreter inlines."""

from __future__ import annotations

import functools
import types

from sidefx_train.compile.capture.resume.resume_function import is_continuation
from sidefx_train.compile.common.trace_rules import (
    DECIDING_OPTIMIZERS,
    DEVICE_MODULES,
    DEVICE_QUERIES,
    INLINED_FUNCTIONS,
    NATIVE_PYTHON,
    NATIVE_UPDATES,
)


class TraceRulesPolicy:
    """The policy of a capture, from the tables of ``common/trace_rules.py``."""

    def inline(self, fn: types.FunctionType) -> bool:
        if is_continuation(fn):  # of a function that was interpreted up to a break
            return True
        # Both: ``functools.wraps`` copies torch's __module__ to a user's function, and a user's to torch's wrappers.
        modules = (fn.__module__ or "", str(fn.__globals__.get("__name__", "")))
        return any(_inlined(module, fn.__name__, fn.__code__.co_varnames[:1]) for module in modules)


@functools.lru_cache(maxsize=4096)
def _inlined(module: str, name: str, first: tuple[str, ...]) -> bool:
    if not module.startswith("torch"):
        return True
    if name in INLINED_FUNCTIONS:
        return True
    if module in DEVICE_MODULES and name in DEVICE_QUERIES:
        return False
    if any(module == prefix or module.startswith(prefix + ".") for prefix in NATIVE_PYTHON):
        return module in ("torch.autograd.grad_mode", "torch.autograd.function") or (
            first == ("self",) and (module.startswith(("torch.amp", "torch.autograd.grad_mode", "torch.backends")))
        )
    return module in DECIDING_OPTIMIZERS or not (module.startswith("torch.optim.") and name.startswith(NATIVE_UPDATES))
