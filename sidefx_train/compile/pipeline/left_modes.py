"""Modes and settings of torch that a step leaves changed: effects of the step, or refused."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.world.trace_world import TraceWorld


@dataclass(frozen=True)
class Modes:
    """What a step may leave changed, and a part of one inside ``with``: grad mode, autocast regions, settings."""

    grad: bool
    autocast: compat.AutocastState
    settings: compat.Settings

    @classmethod
    def now(cls) -> Modes:
        return cls(torch.is_grad_enabled(), compat.AutocastState.now(), compat.Settings.now())

    def set(self) -> None:
        torch.set_grad_enabled(self.grad)
        self.autocast.restore()
        self.settings.restore()

    def keep(self, world: TraceWorld, before: compat.GlobalState) -> None:
        """Keeps what the step, or the part so far, has changed since, as effects; refuses other settings.

        The settings are then those of the entry again, which guards compare.
        """
        now = Modes.now()
        self.set()
        changed = before.changed_settings()
        if changed:
            world.heap.refuse("SFX111", f"leaves a global setting of torch changed: {changed[0]}")
        torch.set_grad_enabled(now.grad)
        now.autocast.restore()
        if now.grad != self.grad:
            world.defer(compat.set_grad_enabled, (now.grad,), {})
        if now.autocast != self.autocast:
            world.defer(compat.AutocastState.restore, (now.autocast,), {})
        if now.settings != self.settings:
            world.defer(compat.Settings.restore, (now.settings,), {})
        threads = world.queries.now[compat.MULTITHREADING]
        if threads != world.queries.at_entry[compat.MULTITHREADING]:
            world.defer(compat.SET_MULTITHREADING, (threads,), {})
