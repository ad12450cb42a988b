"""Which source files are the user's own."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


@functools.cache
def is_user_file(file: str) -> bool:
    """False for the standard library, torch, this package and generated code."""
    if file.startswith("<"):
        return False
    if file.startswith(_PACKAGE):
        return False
    if "site-packages" not in file:
        for name in ("stdlib", "platstdlib"):
            if file.startswith(sysconfig.get_path(name) + os.sep):
                return False
    torch = sys.modules.get("torch")
    where = getattr(torch, "__file__", None)
    return where is None or not file.startswith(os.path.dirname(where) + os.sep)
