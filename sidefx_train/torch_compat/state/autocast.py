"""The autocast regions that the thread is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class AutocastState:
    """The autocast regions that the thread is in.

    Attributes:
        casts: for each kind of device whether autocast is on, and the dtype that it casts to.
        cached: casts of weights are cached.
        depth: number of regions.
    """

    casts: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool
    depth: int

    @classmethod
    def now(cls) -> AutocastState:
        casts = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        )
        return cls(casts, torch.is_autocast_cache_enabled(), _autocast_nesting())

    def restore(self) -> None:
        """Makes this the state of the thread; drops the cached casts if no region is left."""
        left = self.depth == 0 and _autocast_nesting() > 0
        _nest_autocast(self.depth)
        for kind, enabled, dtype in self.casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cached)
        if left:
            torch.clear_autocast_cache()


def autocast_dtypes() -> dict[tuple[Any, tuple[str]], torch.dtype]:
    """Returns the dtype that autocast casts to, for each kind of device, by the function that is asked for it."""
    return {(torch.get_autocast_dtype, (kind,)): dtype for kind, _, dtype in AutocastState.now().casts}


def general_query(fn: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Returns the function, with its arguments, that replaces a deprecated one about one kind of device."""
    kind = _OF_ONE_KIND.get(fn)
    return (fn, args) if kind is None else (torch.get_autocast_dtype, (kind,))


_OF_ONE_KIND = {torch.get_autocast_cpu_dtype: "cpu", torch.get_autocast_gpu_dtype: "cuda"}


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _nest_autocast(depth: int) -> None:
    """Makes the thread ``depth`` autocast regions deep: torch drops its casts of weights when it leaves the last."""
    while _autocast_nesting() > depth:
        torch.autocast_decrement_nesting()
    while _autocast_nesting() < depth:
        torch.autocast_increment_nesting()


@contextmanager
def autocast_depth_kept() -> Iterator[None]:
    """Context that leaves the autocast regions which other code has entered in it, and not left."""
    depth = _autocast_nesting()
    try:
        yield
    finally:
        _nest_autocast(depth)


autocast_enabled = torch._C._is_any_autocast_enabled


def autocast_off() -> AbstractContextManager[Any]:
    """Returns a context with autocast off for all devices."""
    return torch._C._DisableAutocast()  # type: ignore[no-any-return]


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Context whose autocast copies of weights are not cached beyond it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def without_autocast(function: Any, *args: Any) -> Any:
    """Calls ``function`` with autocast off: the captured graph contains the casts already."""
    with torch._C._DisableAutocast():
        return function(*args)
