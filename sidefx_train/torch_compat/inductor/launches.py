"""Counts what Inductor's generated code launches on a device, from its text."""

from __future__ import annotations

import re

__all__ = ["launches_of"]

_KERNEL = re.compile(r"^ +\w+\.run\(.*\bstream=", re.MULTILINE)
_LIBRARY = re.compile(r"^ +(?:\w+ = )?(?:extern_kernels|torch\.ops|aten)\.\w", re.MULTILINE)


def launches_of(code: str) -> tuple[int, int]:
    """Returns how many Triton kernels one call of generated Python code launches, and how many operators it calls."""
    return len(_KERNEL.findall(code)), len(_LIBRARY.findall(code))
