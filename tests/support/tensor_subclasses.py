"""Tensor subclasses with a ``__torch_dispatch__``, for tests: a pair of tensors, and int8 weights with scales."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

CALLS: list[str] = []
"""What :class:`Counted` has run."""
FACTOR = [1.0]
"""What :class:`Counted` multiplies the result of ``relu`` with."""


class Pair(torch.Tensor):
    """Two tensors of one size; every operator runs on both."""

    @staticmethod
    def __new__(cls, a, b, tag="x"):
        layout = {"strides": a.stride(), "storage_offset": a.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, a.size(), **layout, dtype=a.dtype, device=a.device)

    def __init__(self, a, b, tag="x"):
        self.a, self.b, self.tag = a, b, tag

    def __tensor_flatten__(self):
        return ["a", "b"], self.tag

    @classmethod
    def __tensor_unflatten__(cls, inner, tag, size, stride):
        return cls(inner["a"], inner["b"], tag)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}

        def run(name):
            def inner(value):
                return getattr(value, name) if isinstance(value, Pair) else value

            return pytree.tree_flatten(func(*pytree.tree_map(inner, args), **pytree.tree_map(inner, kwargs)))

        (first, spec), (second, _) = run("a"), run("b")
        pairs = zip(first, second, strict=True)
        made = [cls(a, b) if isinstance(a, torch.Tensor) else a for a, b in pairs]
        return return_and_correct_aliasing(func, args, kwargs, pytree.tree_unflatten(made, spec))


class Counted(Pair):
    """A pair that notes its operators, and multiplies what ``relu`` returns."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        CALLS.append(str(func))
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.relu.default:
            made.a.mul_(FACTOR[0])
        return made


class Quantized(torch.Tensor):
    """A float matrix as int8 with a scale for each row; operators compute with the floats, writes quantize again."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data, scale):
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["data_"], inner["scale"])

    @classmethod
    def of(cls, values):
        scale = values.abs().amax(1, keepdim=True) / 127
        return cls((values / scale).round().clamp(-127, 127).to(torch.int8), scale)

    def floats(self):
        return self.data_.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].data_), func(args[0].scale))

        def floats(value):
            return value.floats() if isinstance(value, Quantized) else value

        plain = pytree.tree_map(floats, args)
        made = func(*plain, **pytree.tree_map(floats, kwargs))
        if func._schema.is_mutable and isinstance(args[0], Quantized):
            new = cls.of(plain[0])
            args[0].data_.copy_(new.data_)
            args[0].scale.copy_(new.scale)
            return args[0]
        return made


def paired(model: nn.Module, cls: type = Pair) -> nn.Module:
    """Replaces the parameters of a model by pairs; the second of each is twice the first."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = parameter.detach()
            setattr(module, name, nn.Parameter(cls(value.clone(), value * 2)))
    return model


def pair(*shape: int, seed: int = 0, cls: type = Pair) -> torch.Tensor:
    """Returns a pair of random tensors."""
    generator = torch.Generator().manual_seed(seed)
    return cls(torch.randn(*shape, generator=generator), torch.randn(*shape, generator=generator))
