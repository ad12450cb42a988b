"""Gradients and version counters of many tensors: natively as soon as the module is loaded, with torch until then."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.native.build import guards_if_done


def set_gradients(
    holders: tuple[torch.Tensor, ...], results: Sequence[torch.Tensor], positions: tuple[int, ...]
) -> None:
    """Sets the gradient of each holder, a ``Tensor`` or ``Parameter`` of no subclass.

    Args:
        holders: tensors that get gradients.
        results: what a graph returned.
        positions: position of the gradient among them, by holder.

    Raises:
        RuntimeError: what torch raises for a gradient that does not fit; earlier gradients are set then.
        TypeError: the same.
    """
    native = guards_if_done()
    if native is not None:
        native.set_gradients(holders, results, positions)
        return
    for holder, position in zip(holders, positions, strict=True):
        holder.grad = results[position]


def set_versions(tensors: Sequence[torch.Tensor], versions: tuple[int, ...]) -> None:
    """Sets the version counter of each tensor of a list or a tuple; its views share it.

    Raises:
        RuntimeError: a tensor has no version counter.
    """
    native = guards_if_done()
    if native is None or not native.set_versions(tensors, versions):
        compat.set_versions(tuple(tensors), versions)


def increment_versions(tensors: Sequence[torch.Tensor], positions: tuple[int, ...] | None = None) -> None:
    """Increments the version counter of each tensor that has one; of a tensor that occurs twice, by two.

    Args:
        tensors: a list or a tuple.
        positions: positions of the tensors meant; by default all.
    """
    native = guards_if_done()
    if native is None or not native.increment_versions(tensors, positions):
        compat.increment_version(tensors if positions is None else [tensors[i] for i in positions])
