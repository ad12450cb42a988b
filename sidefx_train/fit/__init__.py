"""The plain training loop: epochs, progress, validation, checkpoints, exact resume on Lightning Fabric.

``sidefx_train.fit`` is also the public function: the package itself can be called.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    """The package as the function :func:`sidefx_train.fit.loop.fit`, whose module imports Lightning when called."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from sidefx_train.fit.loop import fit

        return fit(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
