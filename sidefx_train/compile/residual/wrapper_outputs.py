"""Wrapper subclasses that autograd outside differentiates: results with a history, gradients, and leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.plain_values import is_plain
from sidefx_train.errors import SideFXError


@dataclass(frozen=True)
class WrapperLayout:
    """How a wrapper consists of plain tensors.

    Attributes:
        cls: its class; ``None`` for a plain tensor.
        layout: shape, strides, offset, dtype and device.
        inner: its tensors, by name.
        others: its other attributes.
    """

    cls: type | None
    layout: tuple[Any, ...]
    inner: tuple[tuple[str, WrapperLayout], ...] = ()
    others: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, value: torch.Tensor) -> WrapperLayout | None:
        """Returns the layout of a tensor; ``None`` if it holds something else than tensors and plain values, or if a
        size changes."""
        layout = (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device)
        if not all(type(size) is int for size in (*layout[0], *layout[1], layout[2])):
            return None
        if not compat.is_wrapper(value):
            return cls(None, layout) if value.layout is torch.strided else None
        inner: list[tuple[str, WrapperLayout]] = []
        others: list[tuple[str, Any]] = []
        for name, item in vars(value).items():
            if isinstance(item, torch.Tensor):
                made = cls.of(item)
                if made is None:
                    return None
                inner.append((name, made))
            elif is_plain(item):
                others.append((name, item))
            else:
                return None
        return cls(type(value), layout, tuple(inner), tuple(others))

    def shell(self) -> Any:
        """Returns a wrapper without attributes."""
        assert self.cls is not None, "a plain tensor has no shell"
        return compat.make_wrapper(self.cls, *self.layout)

    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        """Returns a wrapper over plain tensors, in the order of :attr:`plain`, and with their strides in it."""
        if self.cls is None:
            return self._fit(next(tensors))
        made = self.shell()
        for name, inner in self.inner:
            vars(made)[name] = inner.build(tensors)
        vars(made).update(self.others)
        return made

    def _fit(self, value: torch.Tensor) -> torch.Tensor:
        size, stride, _, dtype, device = self.layout
        if value.stride() == stride or value.numel() == 0:
            return value
        return torch.empty_strided(size, stride, dtype=dtype, device=device).copy_(value)

    @property
    def plain(self) -> tuple[WrapperLayout, ...]:
        """The plain tensors that it consists of."""
        return (self,) if self.cls is None else tuple(each for _, inner in self.inner for each in inner.plain)

    def taken_apart(self, value: Any) -> list[torch.Tensor]:
        """Returns the plain tensors of a gradient of this layout.

        Raises:
            SideFXError: the gradient is of another class than the result, or its tensors have other sizes.
        """
        if self.cls is None:
            if type(value) is not torch.Tensor or tuple(value.shape) != self.layout[0]:
                raise SideFXError("SFX107", "a gradient of a tensor subclass consists of other tensors than the result")
            return [value]
        if type(value) is not self.cls:
            reason = f"a gradient of a {self.cls.__qualname__} is a {type(value).__qualname__}"
            raise SideFXError("SFX107", f"{reason}: the captured backward takes only what the result is")
        found: list[torch.Tensor] = []
        for name, inner in self.inner:
            found += inner.taken_apart(vars(value).get(name))
        return found


def plain_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    """Returns the plain tensors that a tensor of the trace consists of."""
    if not compat.is_wrapper(value):
        return [value]
    inner = [item for item in vars(value).values() if isinstance(item, torch.Tensor)]
    return [each for item in inner for each in plain_tensors(item)]


@dataclass
class Shells:
    """Results that are wrappers with a history: the joint graph makes them, the epilogue gives them their attributes.

    Attributes:
        values: the wrappers of the trace.
        now: those of the running call.
    """

    values: list[Any] = field(default_factory=list)
    now: list[Any] = field(default_factory=list)

    def take(self, i: int) -> Any:
        """Returns a wrapper of the running call, once."""
        value, self.now[i] = self.now[i], None
        return value
