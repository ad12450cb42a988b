"""The compiler. ``sidefx_train.compile`` is also the public function: the package itself can be called.

pipeline     the order of the stages; read it first
step         what the user calls: dispatch, recapture, eager fallback
artifacts    what passes between the stages
registry     where ``optim`` and ``hooks`` plug in
capture/     bytecode interpreter, graph tracer, policy
heap/        shadows of outside objects, side effects, the capturing world
guards/      conditions of replay
functionalize/  in-place operations and views out of the graph
backend/     from graph to callable
residual/    generated prologue and epilogue
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    """The package as the function :func:`sidefx_train.compile.api.compile_step`."""

    def __call__(self, fn: Any = None, **options: Any) -> Any:
        from sidefx_train.compile.api import compile_step

        return compile_step(fn, **options)


sys.modules[__name__].__class__ = _CallablePackage
