"""Function modes, and classes with a ``__torch_function__``, that record what torch shows them."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

CALLS: list[tuple] = []


def note(who, func, types, args, kwargs):
    """Records a call as a program can compare it."""
    name = getattr(func, "__qualname__", str(func))
    owner = getattr(func, "__self__", None)
    CALLS.append((who, name, getattr(owner, "__name__", ""), types, len(args), sorted(kwargs or {})))


class Noting(TorchFunctionMode):
    """Records each function, and runs it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        note("mode", func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class Scaling(TorchFunctionMode):
    """Scales sums and products, and counts them in an attribute."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in (torch.add, torch.Tensor.add, torch.Tensor.mul):
            self.seen += 1
            return made * self.factor
        return made


class Tagged(torch.Tensor):
    """A tensor with a dict of tags, which results inherit."""

    @staticmethod
    def __new__(cls, data, tags=None):
        return torch.as_tensor(data).as_subclass(cls)

    def __init__(self, data, tags=None):
        super().__init__()
        self.tags = dict(tags or {})

    @property
    def weight(self):
        return self.tags.get("weight", 1.0)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        note(cls.__name__, func, types, args, kwargs)
        made = super().__torch_function__(func, types, args, kwargs)
        if isinstance(made, Tagged) and "tags" not in made.__dict__:
            made.tags = dict(next((a.__dict__.get("tags", {}) for a in args if isinstance(a, Tagged)), {}))
            made.tags["ops"] = made.tags.get("ops", 0) + 1
        return made

    def __add__(self, other):
        CALLS.append("__add__")
        return super().__add__(other)

    def doubled(self):
        return self * 2


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


class Scalar:
    """No tensor: a number with a unit, which functions of torch accept."""

    def __init__(self, value):
        self.value = value

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        note("Scalar", func, types, args, kwargs)
        if func is torch.stack:
            args = ([item.value for item in args[0]],)
        args = tuple(arg.value if isinstance(arg, Scalar) else arg for arg in args)
        return Scalar(func(*args, **(kwargs or {})))


class Batch(Scalar):
    """A sequence, which functions of torch accept instead of a tensor."""

    def __len__(self):
        return len(self.value)

    def __getitem__(self, index):
        return Batch(self.value[index])
