"""Compares two worlds object by object: contents, order, and references."""

from __future__ import annotations

import collections
import functools
import types
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_ATOMS = (int, float, complex, str, bytes, bool, type(None), range, torch.dtype, torch.device, torch.Size)


class Differs(AssertionError):
    """The two worlds differ; the message shows where."""


class Pairing:
    """Objects of the eager world and their counterparts, over several comparisons.

    Attributes:
        forth: ``id`` of an eager object to its counterpart.
        back: the reverse mapping.
    """

    def __init__(self) -> None:
        self.forth: dict[int, Any] = {}
        self.back: dict[int, Any] = {}
        self.memory: dict[int, int] = {}
        self.memory_back: dict[int, int] = {}
        self.keep: list[Any] = []

    def compare(self, want: Any, have: Any, where: str) -> None:
        """Raises :class:`Differs` unless the two are equal."""
        if type(want).__qualname__ != type(have).__qualname__:
            raise Differs(f"{where}: {_short(have)}, eager has {_short(want)}")
        if isinstance(want, _ATOMS):
            if want != have and not (want != want and have != have):
                raise Differs(f"{where}: {_short(have)}, eager has {_short(want)}")
            return
        if isinstance(want, (type, types.ModuleType, types.BuiltinFunctionType)) and not isinstance(
            getattr(want, "__self__", None), (list, dict, set)
        ):
            if getattr(want, "__qualname__", want.__name__) != getattr(have, "__qualname__", have.__name__):
                raise Differs(f"{where}: {have}, eager has {want}")
            return
        if type(want) in (tuple, frozenset) and not want and not have:
            return
        known, mate = self.forth.get(id(want)), self.back.get(id(have))
        if known is not None or mate is not None:
            if known is not have or mate is not want:
                raise Differs(f"{where}: refers to another {type(want).__qualname__} than in eager")
            return
        if not isinstance(want, (tuple, frozenset, types.MethodType)):
            self.forth[id(want)], self.back[id(have)] = have, want
            self.keep += [want, have]
        self._contents(want, have, where)

    def _contents(self, want: Any, have: Any, where: str) -> None:
        if isinstance(want, torch.Tensor):
            self._tensor(want, have, where)
            return
        if isinstance(want, torch.optim.Optimizer):
            self.compare(want.param_groups, have.param_groups, f"{where}.param_groups")
            self.compare(dict(want.state), dict(have.state), f"{where}.state")
            return
        if isinstance(want, types.MethodType):
            self.compare(want.__self__, have.__self__, f"{where}.__self__")
            self.compare(want.__func__, have.__func__, f"{where}.__func__")
            return
        if isinstance(want, types.FunctionType):
            self._function(want, have, where)
            return
        if isinstance(want, weakref.ReferenceType):
            self.compare(want(), have(), f"{where}()")
            return
        if isinstance(want, (weakref.WeakSet, weakref.WeakKeyDictionary)):
            a = sorted(_weak(want), key=repr)
            self.compare(a, sorted(_weak(have), key=repr), where)
            return
        if isinstance(want, RemovableHandle):
            self.compare(_is_registered(want), _is_registered(have), f"{where} is registered")
            return
        if isinstance(want, types.CellType):
            self.compare(_cell(want), _cell(have), where)
            return
        if isinstance(want, functools.partial):
            self.compare((want.func, want.args, want.keywords), (have.func, have.args, have.keywords), where)
            return
        if isinstance(want, (list, tuple, collections.deque)):
            if len(want) != len(have):
                raise Differs(f"{where}: {_short(have)}, eager has {_short(want)}")
            for index, (a, b) in enumerate(zip(want, have, strict=True)):
                self.compare(a, b, f"{where}[{index}]")
            if isinstance(want, collections.deque) and want.maxlen != have.maxlen:
                raise Differs(f"{where}: maxlen {have.maxlen}, eager has {want.maxlen}")
        elif isinstance(want, dict):
            if len(want) != len(have):
                raise Differs(f"{where}: keys {list(have)}, eager has {list(want)}")
            for (a, x), (b, y) in zip(want.items(), have.items(), strict=True):
                self.compare(a, b, f"a key of {where}")
                self.compare(x, y, f"{where}[{_short(a)}]")
            self.compare(getattr(want, "default_factory", None), getattr(have, "default_factory", None), where)
        elif isinstance(want, (set, frozenset)):
            a, b = sorted(want, key=repr), sorted(have, key=repr)
            self.compare(a, b, where)
        self._attributes(want, have, where)

    def _attributes(self, want: Any, have: Any, where: str) -> None:
        mine, yours = dict(getattr(want, "__dict__", {})), dict(getattr(have, "__dict__", {}))
        if isinstance(want, nn.Module):
            for space in (mine, yours):
                for name in [n for n in space if n.endswith("_hooks") or "hooks_" in n]:
                    space[name] = len(space[name])
        for cls in type(want).__mro__:
            for name in cls.__dict__.get("__slots__", ()):
                for obj, space in ((want, mine), (have, yours)):
                    if name != "__weakref__" and hasattr(obj, name):
                        space[name] = getattr(obj, name)
        if list(mine) != list(yours):
            raise Differs(f"{where}: attributes {list(yours)}, eager has {list(mine)}")
        for name in mine:
            self.compare(mine[name], yours[name], f"{where}.{name}")

    def _function(self, want: Any, have: Any, where: str) -> None:
        for name in ("__qualname__", "__module__", "__doc__"):
            if getattr(want, name) != getattr(have, name):
                raise Differs(f"{where}: {name} {getattr(have, name)!r}, eager has {getattr(want, name)!r}")
        if want.__code__.co_code != have.__code__.co_code:
            raise Differs(f"{where}: other code than in eager")
        self.compare(want.__defaults__, have.__defaults__, f"defaults of {where}")
        self.compare(want.__closure__, have.__closure__, f"variables of {where}")
        self.compare(vars(want), vars(have), f"{where}.__dict__")

    def _tensor(self, want: torch.Tensor, have: torch.Tensor, where: str) -> None:
        for name in ("dtype", "shape", "requires_grad", "is_leaf"):
            if getattr(want, name) != getattr(have, name):
                raise Differs(f"{where}: {name} {getattr(have, name)}, eager has {getattr(want, name)}")
        if (want.stride(), want.storage_offset()) != (have.stride(), have.storage_offset()):
            raise Differs(f"{where}: strides {have.stride()}, eager has {want.stride()}")
        a, b = want.detach(), have.detach()
        if not torch.equal(a, b) and not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
            raise Differs(f"{where}: {b.flatten()[:6].tolist()}, eager has {a.flatten()[:6].tolist()}")
        if want.numel():
            place, other = want.untyped_storage().data_ptr(), have.untyped_storage().data_ptr()
            if self.memory.setdefault(place, other) != other or self.memory_back.setdefault(other, place) != place:
                raise Differs(f"{where}: shares memory with another tensor than in eager")
        if want.is_leaf:
            self.compare(want.grad, have.grad, f"{where}.grad")


def _weak(value: Any) -> list[Any]:
    if isinstance(value, weakref.WeakSet):
        return [(getattr(item, "n", None), type(item).__name__) for item in value]
    return [(getattr(key, "n", None), held) for key, held in value.items()]


def _is_registered(handle: RemovableHandle) -> bool:
    hooks = handle.hooks_dict_ref()
    return hooks is not None and handle.id in hooks


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "<empty>"


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = f"a recursive {type(value).__qualname__}"
    return text if len(text) < 160 else text[:160] + "..."
