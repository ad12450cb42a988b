"""Attribute hooks of ``nn.Module`` that a class of the program calls from its own (``super().__setattr__(...)``).

They read the whole ``__dict__`` of the module, so every attribute would be guarded. Here they read what they need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.capture.world.attributes import module_members
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import hooks_loads, safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

_GET = torch.nn.Module.__getattr__


@registry.intercept(torch.nn.Module.__setattr__)
def _set(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 3 or kwargs or type(args[1]) is not str or not safe_isinstance(args[0], torch.nn.Module):
        return ABSENT
    return None if module_members.set_plainly(world, *args) else ABSENT


@registry.intercept(_GET)
def _get(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs or type(args[1]) is not str or not safe_isinstance(args[0], torch.nn.Module):
        return ABSENT
    module, name = args
    found = module_members.module_member(world, module, name)
    if found is not ABSENT or hooks_loads(type(module)):
        return found
    return world.guarded(_GET, (object.__new__(type(module)), name), {})  # raises torch's own message
