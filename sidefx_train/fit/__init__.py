"""The plain training loop: epochs, progress, validation, checkpoints, exact resume on Lightning Fabric.

``sidefx_train.fit`` is also the public function: the package itself can be called.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    """Module class that makes the package callable as :func:`sidefx_train.fit.loop.fit`; calling it imports
    Lightning."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from sidefx_train.fit.loop import fit

        return fit(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
