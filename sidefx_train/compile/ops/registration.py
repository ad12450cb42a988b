"""Definition of operators in the namespace ``sidefx``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("sidefx", "FRAGMENT")


def define_operator(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None = None, key: str = "CPU"
) -> None:
    """Defines ``torch.ops.sidefx.<name>``.

    Args:
        schema: ``name(arguments) -> results``, as :meth:`torch.library.Library.define` takes it.
        kernel: the implementation.
        fake: the same for fake tensors; ``None`` for an overload that is not traced.
        key: the dispatch key of the kernel.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, key)
    if fake is not None:
        torch.library.register_fake(f"sidefx::{name}", fake, lib=_library)
