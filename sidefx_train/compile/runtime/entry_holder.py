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
        missed: what calls return once the entry has been dropped.
        built: ``built(holder)``, called once the native module is there, which holds it better.
    """

    __slots__ = ("_built", "_missed", "_replay", "entry")

    def __init__(
        self, replay: Callable[..., Any], entry: Any, missed: Any, built: Callable[[Holder], None] | None
    ) -> None:
        self._replay: Callable[..., Any] | None = replay
        self.entry, self._missed, self._built = entry, missed, built

    def __call__(self, *args: Any) -> Any:
        if self._built is not None and guards_ready():
            built, self._built = self._built, None
            built(self)
        return self._missed if self._replay is None else self._replay(*args)

    def drop(self) -> None:
        self._replay = self.entry = self._built = None


def hold(
    replay: Callable[..., Any],
    entry: Any,
    shared: tuple[Any, ...],
    guards: Iterable[Guard],
    missed: Any,
    ended: Callable[[Holder, str], None],
    built: Callable[[Holder], None] | None = None,
) -> Holder:
    """A callable in place of ``replay``, which owns ``replay`` and ``entry``.

    Args:
        replay: what calls are passed to.
        entry: what else refers to the program's objects.
        shared: the parts of both that do not, and may have weak references or finalizers.
        guards: conditions of the entry; what they identify ends it.
        missed: what calls return once the entry has been dropped.
        ended: ``ended(holder, label)``, called after the entry was dropped because this object is gone.
        built: ``built(holder)``, called if the native module is there later, to hold the same again.
    """
    ready = guards_ready()
    native = guards_module() if ready else None
    if native is None:
        return PlainHolder(replay, entry, missed, None if ready else built)
    owners = {id(g.value): g for g in guards if g.kind == "is" and issubclass(type(g.value), _OWNERS)}
    if not owners:
        return native.entry_holder(replay, entry, shared, missed)  # type: ignore[no-any-return]
    watches: list[Any] = []  # the holder keeps it: a weak reference that is garbage itself calls nothing
    holder: Holder = native.entry_holder(replay, entry, (shared, watches), missed)
    watches += [_watch(guard.value, holder, guard.source.label, ended) for guard in owners.values()]
    return holder


def _watch(owner: Any, holder: Holder, label: str, ended: Callable[[Holder, str], None]) -> weakref.ref[Any]:
    def gone(_: Any) -> None:
        if holder.entry is not None:
            holder.drop()
            ended(holder, label)

    return weakref.ref(owner, gone)
