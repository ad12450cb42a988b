"""Registers the interceptors of Lightning's calls with the compiler, where the installed torch is supported.

The two modules that define them import the compiler.
"""

from __future__ import annotations

from sidefx_train.callbacks.training_step import Lightning
from sidefx_train.compile.torch_support import unsupported


def intercept_logging(pl: Lightning) -> None:
    """Makes captures defer ``self.log``; idempotent."""
    if unsupported() is None:
        from sidefx_train.callbacks.deferred_log import defer_logging_of

        defer_logging_of(pl)


def intercept_hooks(pl: Lightning) -> None:
    """Makes captures follow the hooks that Lightning calls; idempotent."""
    if unsupported() is None:
        from sidefx_train.callbacks.hook_calls import follow_calls_of

        modules = "trainer.call", "plugins.precision", "profilers", "overrides.distributed"
        follow_calls_of(pl.package, *map(pl.module, modules))
