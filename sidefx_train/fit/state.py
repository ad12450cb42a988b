"""State of a ``fit``: position, random state, logs and progress."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.loggers import Logger
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


@dataclass
class Position:
    """Position in the training: the content of a checkpoint other than model, optimizers and schedulers."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    epoch_random: dict[str, Any] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)


class Mean:
    """Row-weighted means by name."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, values: Mapping[str, float], rows: int) -> None:
        for name, value in values.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + float(value) * rows, count + rows

    def values(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in self._sums.items()}


class Logged(Logger):
    """Logger for ``self.log`` of a LightningModule under Fabric; keeps values until the step's history entry takes
    them."""

    name = "sidefx_train"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._values.update(metrics)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Ignores hyperparameters: they belong to the caller."""

    def take(self) -> dict[str, float]:
        values, self._values = self._values, {}
        return values


def _generators(loader: Any) -> list[torch.Generator]:
    found = [getattr(loader, "generator", None), getattr(getattr(loader, "sampler", None), "generator", None)]
    return [g for index, g in enumerate(found) if g is not None and g not in found[:index]]


def random_state(loader: Any) -> dict[str, Any]:
    """Returns the state of every generator that data or model may draw from, as plain data."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss),
        "loader": [generator.get_state() for generator in _generators(loader)],
    }


def set_random_state(state: dict[str, Any], loader: Any) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    for generator, saved in zip(_generators(loader), state["loader"], strict=True):
        generator.set_state(saved)


def begin_at_epoch(loader: Any, epoch: int) -> None:
    """Makes the next pass over a loader that of an epoch: Fabric's loader counts its passes, and the sampler of several
    processes shuffles by that number."""
    if hasattr(loader, "_num_iter_calls"):
        loader._num_iter_calls = epoch


def checkpoint_to_resume(resume: str | Path | bool, checkpoints: Path | None) -> Path:
    if resume is True:
        if checkpoints is None:
            raise ValueError("resume=True needs checkpoint_dir=; or give the checkpoint's path as resume=")
        resume = checkpoints / "last.ckpt"
    path = Path(str(resume))
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint to resume from at {path}")
    return path


def of_all_processes(value: Any) -> list[Any]:
    """Returns the value of every process, in order of rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def own_position(positions: list[dict[str, Any]], fabric: Fabric, path: Path) -> Position:
    """Returns where this process was when a checkpoint was written.

    Raises:
        ValueError: another number of processes wrote it.
    """
    if len(positions) != fabric.world_size:
        raise ValueError(
            f"{path} was written by {len(positions)} processes, and {fabric.world_size} run now. Processes divide the"
            " batches and draw their own random numbers, so training would not continue exactly. Resume it with"
            f" devices={len(positions)}, or load its weights into a new model: torch.load(path)['model']."
        )
    return Position(**positions[fabric.global_rank])


class Bar:
    """Progress bar of the current epoch; updates loss and steps per second a few times a second."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._steps, self._since, self._shown = 0, time.perf_counter(), 0.0

    def start(self, epoch: int, total: int | None) -> None:
        if self._progress is None:
            return
        if self._task is not None:
            self._progress.stop_task(self._task)
        self._task = self._progress.add_task(f"epoch {epoch}", total=total, note="")
        self._steps, self._since = 0, time.perf_counter()

    def advance(self, loss: torch.Tensor | None) -> None:
        if self._progress is None or self._task is None:
            return
        self._steps += 1
        self._progress.advance(self._task)
        now = time.perf_counter()
        if now - self._shown > 0.2:
            self._shown = now
            shown = "" if loss is None else f"loss {float(loss):.4f}  "
            self._progress.update(self._task, note=f"{shown}{self._steps / (now - self._since):.1f} steps/s")


@contextmanager
def progress_bar(shown: bool) -> Iterator[Bar]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, TextColumn("{task.fields[note]}")) if shown else None
    with progress if progress is not None else nullcontext():
        yield Bar(progress)
