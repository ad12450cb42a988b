"""Decides which modules belong to libraries: their definitions are guarded by namespace, not one by one."""

from __future__ import annotations

import functools
import sys

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
