"""Attributes of an ``nn.Module``: parameters, buffers and submodules, which it stores in dicts of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import hooks_loads, safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext

_MEMBERS = ("_parameters", "_buffers", "_modules")
_PLAIN_HOOKS = {name: vars(torch.nn.Module)[name] for name in ("__getattr__", "__setattr__", "__delattr__")}


def _plain_lookup(world: CaptureContext, cls: type, name: str) -> bool:
    """Returns True if the class inherits ``name`` (an attribute hook) from ``nn.Module``."""
    return world.class_attr(cls, name) is _PLAIN_HOOKS[name]


def module_getattr(world: CaptureContext, obj: Any, name: str) -> Any:
    """Loads parameters, buffers and submodules, which ``nn.Module`` stores in its own dicts."""
    cls = type(obj)
    if name == "__dict__" or world.class_attr(cls, name) is not ABSENT or hooks_loads(cls):
        return ABSENT
    value = world.instance_attr(obj, name)
    if value is not ABSENT:
        return value
    if not _plain_lookup(world, cls, "__getattr__"):
        return ABSENT
    return module_member(world, obj, name)


def module_member(world: CaptureContext, obj: Any, name: str) -> Any:
    """Returns a parameter, buffer or submodule, as ``nn.Module.__getattr__`` does; :data:`ABSENT` if there is none."""
    for member in _MEMBERS:
        entries = world.instance_attr(obj, member)
        if entries is ABSENT:
            continue
        record = world.heap.dict_record(entries)
        if record is not None and not record.filled:
            if name not in entries and name not in record.snapshot and not dict.__contains__(record.real, name):
                continue  # the dict that contains it is guarded; a name cannot be in two of them
            if record.bring(name):
                return dict.__getitem__(entries, name)
        elif name in entries:
            return dict.__getitem__(entries, name)
    return ABSENT


def module_setattr(world: CaptureContext, obj: Any, name: str, value: Any) -> bool:
    """Runs the default ``nn.Module.__setattr__`` of a plain attribute; that of members is interpreted."""
    return _plain_lookup(world, type(obj), "__setattr__") and set_plainly(world, obj, name, value)


def set_plainly(world: CaptureContext, obj: Any, name: str, value: Any) -> bool:
    """Runs ``nn.Module.__setattr__`` of a plain attribute, without reading the rest of the object."""
    if world.class_attr(type(obj), name) is not ABSENT:
        return False
    if safe_isinstance(value, (torch.nn.Parameter, torch.nn.Module)) or isinstance(value, torch.nn.Buffer):
        return False
    for member in _MEMBERS:
        entries = world.instance_attr(obj, member)
        if entries is ABSENT:
            return False
        record = world.heap.dict_record(entries)
        if record.bring(name) if record is not None else name in entries:
            return False
    world.set_instance_attr(obj, name, value)
    return True


def module_delattr(world: CaptureContext, obj: Any, name: str) -> bool:
    """Deletes a plain attribute; ``nn.Module.__delattr__`` deletes members."""
    if not _plain_lookup(world, type(obj), "__delattr__") or world.instance_attr(obj, name) is ABSENT:
        return False
    world.del_instance_attr(obj, name)
    return True
