"""The batch after the current one: Lightning's data fetcher has it if it does not know the number of batches."""

from __future__ import annotations

from typing import Any

from sidefx_train.callbacks.training_step import Lightning
from sidefx_train.compile.api import loop_prefetch
from sidefx_train.report import PrefetchRecord


class NextBatch:
    """Has the next batch copied to the device while a step runs there; Lightning gets the copies when it moves it.

    Args:
        pl: Lightning's classes.
        trainer: the trainer.
        record: counts.

    Attributes:
        ahead: copies; ``None`` if nothing is prefetched.
    """

    def __init__(self, pl: Lightning, trainer: Any, record: PrefetchRecord) -> None:
        self._trainer = trainer
        self._to_device = trainer.strategy.batch_to_device
        moves = _is_moved_as_it_is(pl, trainer)
        self.ahead = loop_prefetch(trainer.strategy.root_device, record) if moves else None

    def prefetch(self) -> None:
        """Begins to copy the batch that the data fetcher has ready, if it has one."""
        if self.ahead is None:
            return
        ready = getattr(getattr(self._trainer.fit_loop, "_data_fetcher", None), "batches", None)
        if ready:
            batch, *_ = ready[0]
            self.ahead.prefetch(batch)

    def to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces ``Strategy.batch_to_device``: what has been prefetched is there already."""
        if self.ahead is not None and self._trainer.training:
            batch = self.ahead.moved(batch)
        return self._to_device(batch, *args, **kwargs)


def _is_moved_as_it_is(pl: Lightning, trainer: Any) -> bool:
    """Returns True if nothing of the program, and no precision, changes a batch before Lightning moves it."""
    plugins = pl.module("plugins.precision")
    if type(trainer.precision_plugin) not in (plugins.Precision, plugins.MixedPrecision):
        return False
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device")
    base = pl.module("core.hooks").DataHooks
    owners = [trainer.lightning_module, getattr(trainer, "datamodule", None)]
    for owner in [each for each in owners if each is not None]:
        for name in hooks:
            if getattr(getattr(owner, name), "__func__", None) is not getattr(base, name):
                return False
    return True
