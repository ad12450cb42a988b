"""Kernels that programs register in Python (``torch.library.Library.impl``)."""

from __future__ import annotations

import os
from functools import lru_cache

import torch

IMPLICIT = "CompositeImplicitAutograd"
BEFORE_RECORDING = (
    *("Autograd", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView", "AutocastCPU", "AutocastCUDA", IMPLICIT, ""),
)
"""Keys whose kernels the dispatcher calls before an operation is recorded; no key at all means the last but one."""
COMPUTING = ("CPU", "CUDA", "CompositeExplicitAutograd", "BackendSelect")
_TORCH = os.path.dirname(torch.__file__) + os.sep
FOR_OTHERS = os.path.join(_TORCH, "library.py")
"""Where the libraries are made whose functions a program passes to ``torch.library.impl``."""


def overriding_kernel() -> str:
    """Returns an operator of torch whose kernel a program has replaced in Python, and where; empty if there is none."""
    return _overriding_kernel(len(torch.library._impls))


@lru_cache(maxsize=8)
def _overriding_kernel(_: int) -> str:
    for registered in torch.library._impls:
        namespace, name, key = registered.split("/", 2)
        if namespace == "aten" and key in (*BEFORE_RECORDING, *COMPUTING):
            place = place_of(namespace, name, key)
            if place:
                return f"aten::{name} ({key or IMPLICIT}, {place})"
    return ""


def place_of(namespace: str, name: str, key: str) -> str:
    """Returns where a kernel is registered; empty if that is in torch."""
    for line in torch._C._dispatch_dump(f"{namespace}::{name}").splitlines():
        if line.startswith((f"{key or IMPLICIT}:", f"{key or IMPLICIT}[alias]:")):
            place = line.partition(": ")[2].partition(" :: ")[0]
            return "" if (_TORCH in place and FOR_OTHERS not in place) or ".cpp:" in place else place
    return ""
