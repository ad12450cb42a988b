"""``functools.lru_cache`` in a step.

A cache made in the step is C code around a function that re-enters the interpreter. A cache from outside cannot be
looked into: its function is interpreted at the first call with the same arguments in a step. That gives the cached
value, as long as the function does nothing else, which is checked.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from sidefx_train.compile.heap import effects
from sidefx_train.compile.heap.library import is_library
from sidefx_train.compile.heap.records import is_plain

if TYPE_CHECKING:
    from sidefx_train.compile.heap.calling import CallingWorld


class Caches:
    """The caches that one capture has met."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.made: dict[int, Any] = {}
        self.found: dict[Any, Any] = {}


def make(world: CallingWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``functools._lru_cache_wrapper(...)``."""
    wrapper = world.guarded(functools._lru_cache_wrapper, args, kwargs)
    world.caches.made[id(wrapper)] = wrapper
    return wrapper


def call(world: CallingWorld, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a cached function."""
    if id(fn) in world.caches.made:
        args = tuple(world.as_key(value) for value in args)
        with world.reentry.around(world.reentry.objects(fn, args)):
            return world.guarded(fn, args, kwargs)
    key = (id(fn), args, tuple(kwargs.items())) if is_plain(args) and is_plain(tuple(kwargs.values())) else None
    if key is not None and key in world.caches.found:
        return world.caches.found[key]
    trusted = is_library(fn.__module__)
    before = None if trusted else _traces(world)
    value = world.interp.call(fn.__wrapped__, args, kwargs)
    if not trusted and _traces(world) != before:
        world.heap.refuse("SFX111", f"calls {fn.__qualname__}, a cached function that does more than give a value")
    if key is not None:
        world.caches.found[key] = value
    return value


def check_method(world: CallingWorld, fn: Any, name: str) -> None:
    """Refuses ``cache_info`` and ``cache_clear`` of a cache from outside."""
    if id(fn) not in world.caches.made and name in ("cache_info", "cache_clear"):
        world.heap.refuse("SFX103", f"calls {name} of {fn.__qualname__}, whose cache is outside")


def _traces(world: Any) -> list[Any]:
    changes = effects.collect(world).changes
    return [len(world.deferred), *((c.kind, id(c.target), _identity(c.key), _identity(c.value)) for c in changes)]


def _identity(value: Any) -> Any:
    if isinstance(value, effects.TraceKey):
        value = value.value
    return [id(item) for item in value] if type(value) is list else id(value)
