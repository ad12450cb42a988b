"""Sentinels shared by parts of the compiler and compared by identity. Imports nothing of the compiler."""

from __future__ import annotations

from typing import Any

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "<absent>", "__bool__": lambda self: False})()
"""Result of a lookup that found nothing."""

NATIVE_CODE: set[int] = set()
"""Ids of code of this package's functions that interpreted programs may hold: run natively, never interpreted."""

DYNAMIC_DIMS = "_sidefx_dynamic"
"""Attribute of a tensor with the dimensions that :func:`sidefx_train.mark_dynamic` marked."""
