"""Operators that torch calls on a GPU where it calls another one on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

DEVICE_OPERATORS: dict[Any, Callable[[fx.Node], None]] = {}
"""Operator of the CPU -> changes a node that calls it to what a GPU runs."""
