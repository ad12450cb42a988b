"""Decides which modules belong to libraries: their definitions are guarded by namespace, not one by one."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from typing import Any

_STANDARD = sys.stdlib_module_names
_LIBRARIES = {"torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "sidefx_train"}


@functools.cache
def is_library(module: str) -> bool:
    """Returns True if a module belongs to the standard library or an installed package."""
    root = module.partition(".")[0]
    if root == "builtins":
        return True
    if is_standard(module) or root in _LIBRARIES:
        return True
    found = sys.modules.get(module) or sys.modules.get(root)
    file = getattr(found, "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def is_standard(module: str) -> bool:
    """Returns True if a module belongs to the standard library."""
    root = module.partition(".")[0]
    return root in _STANDARD and root != "__main__"


def calls_back(target: Any) -> bool:
    """Returns True if finalizing an object runs code of the program through a weak reference or ``weakref.finalize``,
    not only that of a weak container."""
    for ref in weakref.getweakrefs(target) if weakref.getweakrefcount(target) else ():
        call = _callback_of(ref)
        if call is not None and not is_library(getattr(call, "__module__", None) or ""):
            return True
    return False


def _callback_of(ref: Any) -> Any:
    """Returns the callback of a reference or proxy; attributes of a proxy are those of its referent."""
    proxy = not issubclass(type(ref), weakref.ReferenceType)
    callback = next(iter(gc.get_referents(ref)), None) if proxy else ref.__callback__
    if type(callback) is weakref.finalize:
        pending = callback.peek()
        return None if pending is None else pending[1]
    return callback
