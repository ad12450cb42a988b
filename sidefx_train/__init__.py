"""Captures whole training steps as one graph and keeps every Python side effect.

Trainer(callbacks=[SideFXCompile()]).fit(model, data)   # Lightning
sidefx_train.fit(model, data)                           # plain training loop
step = sidefx_train.compile(train_step); step(batch)    # any function
"""

from __future__ import annotations

from typing import Any

from sidefx_train.gc_control import fewer_collections as _fewer_collections

with _fewer_collections():
    from sidefx_train import compile as compile
    from sidefx_train import errors as errors
    from sidefx_train import fit as fit
    from sidefx_train.compile.api import explain as explain
    from sidefx_train.compile.api import mark_dynamic as mark_dynamic
    from sidefx_train.compile.torch_support import CompiledStep as CompiledStep
    from sidefx_train.disk_cache import cache_dir as cache_dir
    from sidefx_train.errors import SideFXWarning as SideFXWarning
    from sidefx_train.report import StepReport as StepReport

__version__ = "0.1.0"
__all__ = [
    "CompiledStep",
    "FitResult",
    "SideFXCompile",
    "SideFXWarning",
    "StepReport",
    "cache_dir",
    "compile",
    "errors",
    "explain",
    "fit",
    "mark_dynamic",
]

_LAZY = {
    "SideFXCompile": "sidefx_train.callbacks",
    "FitResult": "sidefx_train.fit.loop",
}
"""Names whose modules import Lightning, which costs seconds: imported on first use."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
