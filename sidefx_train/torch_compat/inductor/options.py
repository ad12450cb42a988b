"""Inductor's options: patches, the key of its settings, its caches."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

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


def inductor_settings() -> str:
    """Returns Inductor's settings as text, including those changed by the user."""
    from torch._inductor import config

    with _without_importing_choices():
        return repr(sorted(config.save_config_portable().items(), key=lambda item: item[0]))


def users_passes() -> list[Any] | None:
    """Returns what identifies passes of the user's own in Inductor's compilation; ``None`` if one has no identity."""
    from torch._inductor import config

    found = []
    for name in _PASSES:
        given = getattr(config, name, None)
        for each in given if isinstance(given, (list, tuple)) else [given]:
            identity = getattr(each, "uuid", lambda: None)()
            if each is not None and identity is None:
                return None
            found.append((name, identity))
    return found


_PASSES = (
    *("pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass"),
    *("post_grad_custom_post_pass", "_pre_fusion_custom_pass", "_post_fusion_custom_pass"),
)
"""Settings that the text of :func:`inductor_settings` omits: functions."""


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
