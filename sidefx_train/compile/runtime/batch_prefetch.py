"""Finds the tensors of the next call that a replay will copy to the device, and has them copied ahead of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.guards.source import Source
from sidefx_train.compile.gpu.prefetch import Prefetcher
from sidefx_train.compile.pipeline.entry import Entry
from sidefx_train.config import CompileConfig
from sidefx_train.report import PrefetchRecord


class BatchPrefetch:
    """Prefetches the batches of one step. All its entries take from the same memory, whichever is replayed next.

    It keeps no entry: that would keep alive what the entry was captured for.

    Args:
        config: options.
        record: counts.
        entries: returns the entries of the step.
    """

    def __init__(self, config: CompileConfig, record: PrefetchRecord, entries: Callable[[], list[Entry]]) -> None:
        self._config, self._record, self._entries = config, record, entries
        self._prefetcher: Prefetcher | None = None
        self._is_current = False
        self._sources: tuple[Source, ...] = ()

    def entries_changed(self) -> None:
        """Makes the next prefetch look at the entries again."""
        self._is_current = False

    def prefetch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Begins to copy what a replay with these arguments would copy; returns True if that is anything."""
        if not self._is_current:
            self._look_at(self._entries())
        if not self._sources or compat.unsupported_ambient_mode(functions=False) is not None:
            return False
        if not any(_can_replay(entry) for entry in self._entries()):
            return False
        assert self._prefetcher is not None, "made with the sources"
        found = [_fetched(source, args, kwargs) for source in self._sources]
        return self._prefetcher.prefetch([each for each in found if each is not None])

    def _look_at(self, entries: list[Entry]) -> None:
        """Finds the sources of the batches, and lets all entries take from the same memory."""
        self._is_current = True
        found: dict[str, Source] = {}
        for entry in entries:
            section = entry.executable.device_section
            if section is None:
                continue
            if self._prefetcher is None:
                self._prefetcher = Prefetcher(section.device, self._record, self._config.cuda_graph_limit)
            section.take_from(self._prefetcher)
            tensors = [guard.source for guard in entry.guards if guard.kind == "tensor"]
            found |= {
                source.label: source
                for source in tensors
                if source.label in section.batch and source.from_arguments and not source.reads_contents
            }
        self._sources = tuple(found.values())


def _can_replay(entry: Entry) -> bool:
    section = entry.executable.device_section
    return section is not None and section.can_replay


def _fetched(source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns a value of the next call; ``None`` if its arguments are others than the captured ones."""
    try:
        return source.fetch(args, kwargs)
    except (LookupError, AttributeError, TypeError):
        return None
