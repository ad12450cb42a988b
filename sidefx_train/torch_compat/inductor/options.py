"""Inductor's options: patches, the key of its settings, its caches, its decompositions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sidefx_train.torch_compat.inductor.late_imports import _import_lowering


def known_inductor_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns those of ``options`` that this torch's Inductor has."""
    from torch._inductor import config

    known = config.get_config_copy()
    return {name: value for name, value in options.items() if name in known}


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
    """Returns Inductor's own table under the current options."""
    _import_lowering()  # some decompositions expect it to be imported
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def inductor_settings() -> str:
    """Returns Inductor's settings as text, including those changed by the user."""
    from torch._inductor import config

    return repr(sorted(config.save_config_portable().items(), key=lambda item: item[0]))
