"""Inductor's options: patches, the key of its settings, its caches, its decompositions."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from sidefx_train.torch_compat.inductor.late_imports import _import_lowering

aten = torch.ops.aten

_P = ParamSpec("_P")
_T = TypeVar("_T")


def known_inductor_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns those of ``options`` that this torch's Inductor has."""
    from torch._inductor import config

    known = config.get_config_copy()
    return {name: value for name, value in options.items() if name in known}


def in_copied_context(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator: runs ``fn`` in a copy of the context.

    Each ``config.patch`` of torch sets a context variable of its own and never resets it, so the context would grow
    with each graph that is lowered.
    """

    @wraps(fn)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return contextvars.copy_context().run(fn, *args, **kwargs)

    return run


@contextmanager
def inductor_options(options: dict[str, Any]) -> Iterator[None]:
    from torch._inductor import config

    with config.patch(options):
        yield


@contextmanager
def inductor_cache_of(maker: str) -> Iterator[None]:
    """Context in which Inductor's own cache contains only entries of the same ``maker``.

    Inductor's key covers torch's sources, but not this library's, which also affect the entries.
    """
    settings = torch.compiler.config
    with settings.patch(cache_key_tag=f"{settings.cache_key_tag}:{maker}"):  # type: ignore[attr-defined]
        yield


def forget_compile_threads() -> None:
    """Resets Inductor's threads in a forked process: they do not exist there, and work passed to them would hang."""
    threads = sys.modules.get("torch._inductor.async_compile")
    if threads is not None:
        threads.AsyncCompile.pool.cache_clear()


def inductor_decompositions() -> dict[Any, Any]:
    """Returns Inductor's own table under the current options, except for operators that check values."""
    _import_lowering()  # some decompositions expect it to be imported
    from torch._inductor.decomposition import select_decomp_table

    table = {op: rule for op, rule in select_decomp_table().items() if op not in _CHECKS_VALUES}
    table[aten.div.Tensor_mode] = _divided(table.get(aten.div.Tensor_mode))
    return table


_CHECKS_VALUES = frozenset(
    {aten.binary_cross_entropy.default, aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default}
)
"""Their kernels raise for values that decompositions accept: a probability or a class out of range."""


def _divided(rule: Callable[..., Any] | None) -> Callable[..., Any]:
    """Returns a decomposition of ``div`` that truncates integers by operations which report a division by zero.

    The C++ that Inductor writes for it ends the process (torch 2.11 to 2.15).
    """

    def divided(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
        floats = isinstance(b, (float, torch.SymFloat)) or any(
            value.is_floating_point() for value in (a, b) if isinstance(value, torch.Tensor)
        )
        if rounding_mode == "trunc" and not floats:
            return torch.floor_divide(a - torch.fmod(a, b), b)
        return NotImplemented if rule is None else rule(a, b, rounding_mode=rounding_mode)

    return divided


def inductor_settings() -> str:
    """Returns Inductor's settings as text, including those changed by the user."""
    from torch._inductor import config

    with _without_importing_choices():
        return repr(sorted(config.save_config_portable().items(), key=lambda item: item[0]))


@contextmanager
def _without_importing_choices() -> Iterator[None]:
    """Context in which reading the settings does not import Inductor's lowerings, as it does from torch 2.15 on.

    It asks ``torch._inductor.choices`` for the key of registered choices; until that is imported, there are none.
    """
    from torch._inductor import config

    attributes = vars(config)
    serialize = attributes.get("_cache_config_serializer")
    if serialize is None or config.inductor_choices_class is not None or "torch._inductor.choices" in sys.modules:
        yield
        return
    attributes["_cache_config_serializer"] = None
    try:
        yield
    finally:
        attributes["_cache_config_serializer"] = serialize
