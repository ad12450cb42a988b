"""The compiler. ``sidefx_train.compile`` is also the public function: the package itself can be called.

api.py              the public functions compile, explain, mark_dynamic
runtime/            dispatch to cache entries, recapture, eager fallback (Dynamo: eval_frame, convert_frame)
pipeline/           the order of the stages; read it first (torch.compile: compile_fx, OutputGraph)
autograd/           joint graph, partitioner, autograd.Function at run time (AOTAutograd)
residual/           generated prologue and epilogue, view replay (Dynamo: codegen; AOTAutograd: runtime_wrappers)
backend/            eager, aot_eager, Inductor; passes, autotuning, verification (Inductor)
functionalization/  in-place operations, views, numbers out of the graph (AOTAutograd: functional_utils)
distributed/        collectives in a step
capture/            Python step -> graph, side effects, guards (Dynamo)
graph/              the values between stages, view chains, validation (AOTAutograd: schemas)
native/             C++ modules: kernels, guards, optimizer updates
ops/                definitions of the ``sidefx::`` operators
common/             rules shared by several stages: trace rules, the registry for ``optim``, ``hooks`` and interceptors
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    """Module class that makes the package callable as :func:`sidefx_train.compile.api.compile_step`."""

    def __call__(self, fn: Any = None, **options: Any) -> Any:
        from sidefx_train.compile.api import compile_step

        return compile_step(fn, **options)


sys.modules[__name__].__class__ = _CallablePackage
