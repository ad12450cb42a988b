"""Inductor's options: patches, the key of its settings, its caches, its decompositions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sidefx_train.torch_compat.inductor.late_imports import _import_lowering


def known_inductor_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that this torch's Inductor knows."""
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
    """Inductor's own cache gives what the same ``maker`` has left in it, and nothing that others have.

    It knows torch's sources, not ours, which have a part in what it keeps.
    """
    settings = torch.compiler.config
    with settings.patch(cache_key_tag=f"{settings.cache_key_tag}:{maker}"):  # type: ignore[attr-defined]
        yield


def forget_compile_threads() -> None:
    """For a forked process: Inductor's threads stayed behind, and what is given to them would be waited for forever."""
    threads = sys.modules.get("torch._inductor.async_compile")
    if threads is not None:
        threads.AsyncCompile.pool.cache_clear()


def inductor_decompositions() -> dict[Any, Any]:
    """Inductor's own table under the present options."""
    _import_lowering()  # some decompositions take it for imported
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def inductor_settings() -> str:
    """Inductor's settings as text, those changed by the user included."""
    from torch._inductor import config

    return repr(sorted(config.save_config_portable().items(), key=lambda item: item[0]))
