"""Definition of operators in the namespace ``sidefx``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

UNDIFFERENTIABLE: set[Any] = set()
"""Operators of a backward that cannot be differentiated once more."""

_library = torch.library.Library("sidefx", "FRAGMENT")


def define_operator(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    key: str = "CPU",
    tags: tuple[torch.Tag, ...] = (),
    meta: Callable[..., Any] | None = None,
    differentiable: bool = True,
) -> None:
    """Defines ``torch.ops.sidefx.<name>``.

    Args:
        schema: ``name(arguments) -> results``, as :meth:`torch.library.Library.define` takes it.
        kernel: the implementation.
        fake: the same for fake tensors; ``None`` for an overload that is not traced.
        key: the dispatch key of the kernel.
        tags: what the operator is known for.
        meta: the implementation for meta tensors, in place of ``fake``; its registration takes no time.
        differentiable: False for an operator of a backward that is not to be differentiated.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)
    _library.impl(name, kernel, key)
    if not differentiable:
        UNDIFFERENTIABLE.add(getattr(torch.ops.sidefx, name).default)
    if meta is not None:
        _library.impl(name, meta, "Meta")
    if fake is not None:
        torch.library.register_fake(f"sidefx::{name}", fake, lib=_library)


def implement_operator(name: str, kernel: Callable[..., Any], key: str) -> None:
    """Adds a kernel to an operator of :func:`define_operator`.

    Args:
        name: name of the operator.
        kernel: the implementation.
        key: the dispatch key of the kernel.
    """
    _library.impl(name, kernel, key)
