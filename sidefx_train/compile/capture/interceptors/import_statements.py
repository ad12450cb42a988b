"""Imports in a step, by statement and by function: the module's own code runs in the real world."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext


@registry.intercept(builtins.__import__)
def _import(_: CaptureContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a module's code on real tensors; the interpreter records what the import finds."""
    with compat.real_world():
        return builtins.__import__(*args, **kwargs)


@registry.intercept(importlib.import_module)
def _import_module(world: CaptureContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("name", "package"), args, strict=False)) | kwargs
    name, package = given.get("name"), given.get("package")
    if type(name) is not str or (package is not None and type(package) is not str):
        return ABSENT
    if name.startswith("."):
        name = importlib.util.resolve_name(name, package)
    try:
        with compat.real_world():
            importlib.import_module(name)
    except ImportError as error:
        world.not_imported(error, name)
        raise
    world.imported(name, {}, 0)
    return sys.modules[name]
