"""Holds what was captured for models and optimizers as long as the program holds those.

Guards and generated code refer to the objects that a step was captured for. A compiled step that lives longer than a
model, because the model is its argument or because a variable of its closure gets another value, must not keep the
model alive by that. Once a module or optimizer that an entry identifies has no other user, no call can replay the entry
any more, and the garbage collector says so by a weak reference's callback (see ``native/entry_holder.py``). Until the
native module is built, and where it cannot be, entries live as long as their step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from sidefx_train.compile.capture.guards.guard import Guard
from sidefx_train.compile.native import guards_module, guards_ready

_OWNERS = (nn.Module, torch.optim.Optimizer)
"""Classes whose instances a step is captured for: another of them is another step (``transient_objects.py``)."""


class Holder(Protocol):
    """What calls an entry, and gives it up once it is dropped."""

    @property
    def entry(self) -> Any:
        """What is held; ``None`` once it has been dropped."""

    def __call__(self, *args: Any) -> Any: ...

    def drop(self) -> None:
        """Frees the entry: from now on calls return what stands for a miss."""


class PlainHolder:
    """A holder without the native module: what it holds stays alive.

    Args:
        replay: what calls are passed to.
        entry: what is held.
        miss_value: what calls return once the entry has been dropped.
        on_built: ``on_built(holder)``, called once the native module is there, which holds it better.
    """

    __slots__ = ("_built", "_miss_value", "_replay", "entry")

    def __init__(
        self, replay: Callable[..., Any], entry: Any, miss_value: Any, on_built: Callable[[Holder], None] | None
    ) -> None:
        self._replay: Callable[..., Any] | None = replay
        self.entry, self._miss_value, self._built = entry, miss_value, on_built

    def __call__(self, *args: Any) -> Any:
        if self._built is not None and guards_ready():
            on_built, self._built = self._built, None
            on_built(self)
        return self._miss_value if self._replay is None else self._replay(*args)

    def drop(self) -> None:
        self._replay = self.entry = self._built = None


def hold(
    replay: Callable[..., Any],
    entry: Any,
    shared: tuple[Any, ...],
    guards: Iterable[Guard],
    miss_value: Any,
    on_ended: Callable[[Holder, str], None],
    on_built: Callable[[Holder], None] | None = None,
) -> Holder:
    """A callable in place of ``replay``, which owns ``replay`` and ``entry``.

    Args:
        replay: what calls are passed to.
        entry: what else refers to the program's objects.
        shared: the parts of both that do not, and may have weak references or finalizers.
        guards: conditions of the entry; what they identify ends it.
        miss_value: what calls return once the entry has been dropped.
        on_ended: ``on_ended(holder, label)``, called after the entry was dropped because this object is gone.
        on_built: ``on_built(holder)``, called if the native module is there later, to hold the same again.
    """
    ready = guards_ready()
    native = guards_module() if ready else None
    if native is None:
        return PlainHolder(replay, entry, miss_value, None if ready else on_built)
    owners = {id(g.value): g for g in guards if g.kind == "is" and issubclass(type(g.value), _OWNERS)}
    if not owners:
        return native.entry_holder(replay, entry, shared, miss_value)  # type: ignore[no-any-return]
    watches: list[Any] = []  # the holder keeps it: a weak reference that is garbage itself calls nothing
    holder: Holder = native.entry_holder(replay, entry, (shared, watches), miss_value)
    watches += [_watch(guard.value, holder, guard.source.label, on_ended) for guard in owners.values()]
    return holder


def _watch(owner: Any, holder: Holder, label: str, on_ended: Callable[[Holder, str], None]) -> weakref.ref[Any]:
    def gone(_: Any) -> None:
        if holder.entry is not None:
            holder.drop()
            on_ended(holder, label)

    return weakref.ref(owner, gone)
