"""``functools.lru_cache`` in a step.

A cache created in the step is C code around a function that re-enters the interpreter. The contents of an outside cache
are unknown: its function is interpreted at the first call with the same arguments in a step. This gives the cached
value if the function has no other effects and its value depends only on the arguments, which is checked. Where it
depends on more, such as ``dist.is_initialized()``, or is an object such as a tensor, the cache itself is asked, again
at each call of the step: its tensor is the same one every time, and keeps what is written into it. Others are called
natively, at a graph break. A function under ``torch.compiler.assume_constant_result`` is called during the
capture.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.guard import same_value
from sidefx_train.compile.capture.guards.kinds.objects import cell_is_set
from sidefx_train.compile.capture.shadows.definition_tracking import chains_of
from sidefx_train.compile.capture.side_effects import collect
from sidefx_train.compile.common.library_modules import is_library
from sidefx_train.compile.common.plain_values import is_definition, is_plain
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import attribute_of, safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.guards.guard import Guard
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext


_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, functools._lru_cache_wrapper)


class Caches:
    """The caches used in one capture."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.made: dict[int, Any] = {}
        self.found: dict[Any, Any] = {}
        self._computed: list[tuple[Any, torch.Tensor, int]] = []

    def note(self, fn: Any, value: Any) -> None:
        """Notes tensors that stand for those of an outside cache at arguments that only the graph knows."""
        self._computed += [(fn, leaf, leaf._version) for leaf in _tensors(value)]

    def check_written(self) -> None:
        """Refuses a step that has written into one of those: the cached tensor keeps what is written."""
        for fn, tensor, version in self._computed:
            if tensor._version != version:
                reason = f"writes into the result of {fn.__qualname__}, a cached function, for arguments that change"
                self.world.heap.refuse("SFX111", reason)


def make(world: CaptureContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Creates ``functools._lru_cache_wrapper(...)``."""
    wrapper = world.guarded(functools._lru_cache_wrapper, args, kwargs)
    world.caches.made[id(wrapper)] = wrapper
    return wrapper


def call(world: CaptureContext, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a cached function."""
    if id(fn) in world.caches.made:
        args = tuple(world.as_key(value) for value in args)
        with world.reentry.around(world.reentry.objects(fn, args)):
            return world.guarded(fn, args, kwargs)
    key = (id(fn), args, tuple(kwargs.items())) if is_plain(args) and is_plain(tuple(kwargs.values())) else None
    if key is not None and key in world.caches.found:
        return world.caches.found[key]
    if key is not None and compat.assumes_constant(fn.__wrapped__):
        value = constant_result(fn, args, kwargs)
        if value is not ABSENT:
            world.caches.found[key] = value
            return value
    if is_library(fn.__module__):
        value = world.interp.call(fn.__wrapped__, args, kwargs)
        if _tensors(value):
            value = _held_or_computed(world, fn, args, kwargs, value)
    else:
        value = _of_program(world, fn, args, kwargs)
    if key is not None:
        world.caches.found[key] = value
    return value


def _of_program(world: CaptureContext, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if type(fn.__wrapped__) not in _FUNCTIONS:  # a method, a partial: it refers to an object
        _refuse_more(world, fn)
    before, known = _traces(world), set(world.heap.guards)
    computed = world.interp.call(fn.__wrapped__, args, kwargs)
    read = [guard for guard_key, guard in world.heap.guards.items() if guard_key not in known]
    if _traces(world) != before:
        world.heap.refuse("SFX111", f"calls {fn.__qualname__}, a cached function that does more than return a value")
    depends = not _follows(fn.__wrapped__) or not all(map(_finds_definition, read))
    is_object = not is_plain(computed) and not safe_isinstance(computed, compat.SYMBOLS)
    if is_object and not (depends and _has_changed(world)):
        value = _held_or_computed(world, fn, args, kwargs, computed)
        if value is not computed:
            return value
    if depends:
        return _asked(world, fn, args, kwargs, computed)
    if is_object and not safe_isinstance(computed, torch.Tensor):
        reason = f"calls {fn.__qualname__}, a cached function that returns the same {type(computed).__qualname__} again"
        world.heap.refuse("SFX111", reason)
    return computed


def _asked(world: CaptureContext, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], computed: Any) -> Any:
    """Returns the value in an outside cache, and guards it; calls the function, which has no effects, if it has none.

    Args:
        world: the capture.
        fn: the cached function.
        args: its arguments.
        kwargs: the same, by name.
        computed: what the function returns in the state that the step has made.
    """
    value: Any = ABSENT
    if safe_isinstance(computed, compat.SYMBOLS) and not compat.is_unbacked(computed):
        computed = compat.hint_of(computed)
    if is_plain(args) and is_plain(tuple(kwargs.values())) and is_plain(computed):
        with compat.real_world():
            if same_value(fn.__wrapped__(*args, **kwargs), computed):  # else a miss would be stored before its time
                value = fn(*args, **kwargs)
    if not is_plain(value):
        _refuse_more(world, fn)
    with compat.real_world():
        world.queries.guard(functools.partial(fn, *args, **kwargs), f"{fn.__qualname__}(...)")
    return value


def _held_or_computed(
    world: CaptureContext, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], computed: Any
) -> Any:
    """Returns the shadow of the object in an outside cache, which the step finds there at every call; what the function
    has computed if an argument is not known before the step."""
    values = [_outside(world, value) for value in (*args, *kwargs.values())]
    if any(value is ABSENT for value in values):
        world.caches.note(fn, computed)
        return computed
    given, named = values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))
    ask = functools.partial(fn, *given, **named)
    with compat.real_world():
        real = ask()
    sources = world.heap.sources
    shadow = world.heap.shadow(real, sources.call(sources.const(ask, f"{fn.__qualname__}(...)")))
    world.touch(shadow, deep=False)
    return shadow


def _outside(world: CaptureContext, value: Any) -> Any:
    """Returns the object that the program passes, if it is the same at every call; else :data:`ABSENT`."""
    if is_plain(value) or type(value) in _CONSTANTS:
        return value
    record = world.heap.record_of(value)
    return record.real if record is not None and record.base.is_fixed else ABSENT


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = value if type(value) in (list, tuple) else (value,)
    return [leaf for leaf in leaves if safe_isinstance(leaf, torch.Tensor)]


def _has_changed(world: Any) -> bool:
    """Returns True if the step has changed something that a function may read."""
    return bool(len(world.deferred)) or any(change.kind != "set_grad" for change in collect.collect(world).changes)


def _refuse_more(world: CaptureContext, fn: Any) -> NoReturn:
    reason = f"calls {fn.__qualname__}, a cached function whose value depends on more than its arguments"
    world.heap.refuse("SFX111", reason)


def constant_result(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns a function's process-constant result; :data:`ABSENT` if an argument or the result is not a plain
    value."""
    if not is_plain(args) or not is_plain(tuple(kwargs.values())):
        return ABSENT
    with compat.real_world():
        value = fn(*args, **kwargs)
    return value if is_plain(value) else ABSENT


def _follows(fn: Any) -> bool:
    """Returns True if a function's result depends only on its arguments: it otherwise refers only to definitions."""
    todo, seen = [fn], set()
    while todo:
        fn = todo.pop()
        fn = fn.__wrapped__ if type(fn) is functools._lru_cache_wrapper else fn
        if type(fn) is not types.FunctionType or fn.__code__ in seen:
            continue
        seen.add(fn.__code__)
        cells = [cell.cell_contents for cell in fn.__closure__ or () if cell_is_set(cell)]
        names = {chain[0] for chain in chains_of(fn.__code__)}
        for value in (*cells, *(fn.__globals__[name] for name in names if name in fn.__globals__)):
            if not _is_fixed(value):
                return False
            if not is_library(str(attribute_of(value, "__module__", ""))):
                todo.append(value)
    return True


def _is_fixed(value: Any) -> bool:
    return is_definition(value) or type(value) is functools._lru_cache_wrapper


def _finds_definition(guard: Guard) -> bool:
    """Returns True for a guard that a definition is unchanged, or that a name does not exist."""
    return guard.kind in ("absent", "no_item") or (guard.kind == "is" and _is_fixed(guard.value))


def check_method(world: CaptureContext, fn: Any, name: str) -> None:
    """Refuses ``cache_info`` and ``cache_clear`` of an outside cache."""
    if id(fn) not in world.caches.made and name in ("cache_info", "cache_clear"):
        world.heap.refuse("SFX103", f"calls {name} of {fn.__qualname__}, whose cache is outside")


def _traces(world: Any) -> list[Any]:
    changes = collect.collect(world).changes
    counted = (len(world.deferred), world.heap.memory.count, len(world.random_draws.values))
    return [*counted, *((c.kind, id(c.target), _identity(c.key), _identity(c.value)) for c in changes)]


def _identity(value: Any) -> Any:
    if safe_isinstance(value, collect.TraceKey):
        value = value.value
    return [id(item) for item in value] if type(value) is list else id(value)
