"""Process constants, evaluated during the capture: packages, modules, what torch loads for its transforms."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from torch.autograd import forward_ad

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.world.native_calls.lru_cache import constant_result
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept(importlib.metadata.version)
def _version(_: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return constant_result(importlib.metadata.version, args, kwargs)


@registry.intercept(importlib.metadata.metadata)
def _metadata(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 1 or type(args[0]) is not str:
        return ABSENT
    with compat.real_world():
        found = importlib.metadata.metadata(args[0])
    return world.heap.shadow(found, world.heap.sources.const(found, f"the metadata of {args[0]}"))


@registry.intercept(importlib.util.find_spec)
def _find_spec(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the specification of an imported package, or that it is missing."""
    if kwargs or len(args) != 1 or type(args[0]) is not str:
        return ABSENT
    module = sys.modules.get(args[0])
    if module is None:
        if args[0] in sys.modules or importlib.util.find_spec(args[0]) is not None:
            return ABSENT
        world.queries.failed_import(args[0])
        return None
    spec = getattr(module, "__spec__", None)
    return ABSENT if spec is None else world.heap.shadow(spec, world.heap.sources.const(spec, f"the spec of {args[0]}"))


@registry.intercept(compat.loads_batching_rules())
def _load_batching_rules(_: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with compat.real_world():
        compat.loads_batching_rules()()


@registry.intercept(forward_ad.make_dual)
def _make_dual(_: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with compat.real_world():
        compat.load_forward_derivatives()
    return ABSENT
