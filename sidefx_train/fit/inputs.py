"""Converts what ``fit`` accepts (data, losses, optimizers, metrics in several forms) into one form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics import Metric, MetricCollection

BATCH_SIZE = 32
"""Batch size if ``data`` is a Dataset or a tuple of tensors."""

Loss = Callable[[Any, Any], torch.Tensor]


def loaders(fabric: lightning.Fabric, data: Any, val_data: Any, move: bool) -> tuple[Any, Any]:
    """Returns the loaders of training and validation.

    Args:
        fabric: moves what they load to the device.
        data: as for ``fit``.
        val_data: as for ``fit``.
        move: move the batches of training; those of validation are moved in any case.
    """
    if isinstance(data, lightning.LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        module, data = data, data.train_dataloader()
        if val_data is None and _overrides(module, lightning.LightningDataModule, "val_dataloader"):
            val_data = module.val_dataloader()
    made = _loader(data, shuffle=True)
    made_val = None if val_data is None else _loader(val_data, shuffle=False)
    loader = fabric.setup_dataloaders(made, move_to_device=move)
    return loader, None if made_val is None else fabric.setup_dataloaders(made_val)


def _loader(data: Any, shuffle: bool) -> Any:
    if isinstance(data, DataLoader):
        return data
    if isinstance(data, torch.Tensor):
        data = (data,)
    if isinstance(data, (tuple, list)) and data and all(isinstance(item, torch.Tensor) for item in data):
        data = TensorDataset(*data)
    if isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=BATCH_SIZE)
    if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return DataLoader(data, batch_size=BATCH_SIZE, shuffle=shuffle)
    raise TypeError(
        f"data of type {type(data).__name__}: expected a DataLoader, a Dataset, a LightningDataModule or a tuple of "
        "tensors, e.g. fit(model, (inputs, targets))"
    )


def loss_and_output(model: Any, batch: Any, loss: Loss | None) -> tuple[torch.Tensor, Any]:
    """Returns loss and output of a plain module on a batch."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], torch.Tensor):
        output, target = model(batch[0]), batch[1]
        if loss is not None:
            return loss(output, target), output
        if target.is_floating_point():
            return nn.functional.mse_loss(output, target), output
        return nn.functional.cross_entropy(output, target), output
    if loss is not None:
        raise TypeError("loss= needs batches (input, target); for other batches the model returns its loss")
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch)
    else:
        output = model(batch)
    found = loss_in(output)
    if found is None:
        raise TypeError(f"the model returned a {type(output).__name__} without a loss")
    return found, output


def loss_in(output: Any) -> torch.Tensor | None:
    if output is None or isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output["loss"] if "loss" in output else None
    return getattr(output, "loss", None)


def configured_optimizers(configured: Any) -> tuple[list[torch.optim.Optimizer], list[dict[str, Any]]]:
    """Returns optimizers and scheduler configurations from any value that ``configure_optimizers`` may return."""
    schedulers: Sequence[Any] = ()
    if isinstance(configured, Mapping):
        schedulers = [configured["lr_scheduler"]] if "lr_scheduler" in configured else []
        optimizers = [configured["optimizer"]]
    elif isinstance(configured, (tuple, list)):
        first = configured[0] if configured else None
        if isinstance(first, (tuple, list)):
            optimizers = list(first)
            schedulers = configured[1] if isinstance(configured[1], (tuple, list)) else [configured[1]]
        elif isinstance(first, Mapping):
            optimizers = [entry["optimizer"] for entry in configured]
            schedulers = [entry["lr_scheduler"] for entry in configured if "lr_scheduler" in entry]
        else:
            optimizers = [entry for entry in configured if isinstance(entry, torch.optim.Optimizer)]
            schedulers = [entry for entry in configured if not isinstance(entry, torch.optim.Optimizer)]
    else:
        optimizers = [configured]
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is not a torch optimizer")
    configs = []
    for entry in schedulers:
        config = dict(entry) if isinstance(entry, Mapping) else {"scheduler": entry}
        configs.append({"interval": "epoch", "frequency": 1, "monitor": "val_loss", **config})
    return optimizers, configs


def metric_collection(metrics: Any) -> MetricCollection:
    if metrics is None:
        return MetricCollection({})
    if isinstance(metrics, MetricCollection):
        return metrics.clone()
    if isinstance(metrics, Metric):
        return MetricCollection([metrics.clone()])
    if isinstance(metrics, Mapping):
        return MetricCollection({name: metric.clone() for name, metric in metrics.items()})
    return MetricCollection([metric.clone() for metric in metrics])


def takes_index(step: Callable[..., Any]) -> bool:
    """Returns True if ``training_step`` takes a batch index after the batch."""
    code = getattr(step, "__code__", None) or step.__call__.__code__  # type: ignore[operator]
    return code.co_argcount >= 3 or bool(code.co_flags & 0x04)


def through_wrapper(wrapper: nn.Module, module: nn.Module, name: str) -> Callable[..., Any]:
    """Returns a function that calls a module's method as the forward of its wrapper, which synchronizes processes."""

    def call(*args: Any) -> Any:
        own = vars(module).get("forward")

        def forward(*inputs: Any) -> Any:
            if own is None:
                del module.forward
            else:
                module.forward = own
            return getattr(module, name)(*inputs)

        module.forward = forward
        return wrapper(*args)

    return call


def _overrides(instance: Any, parent: type, name: str) -> bool:
    return getattr(type(instance), name) is not getattr(parent, name)


def rows(batch: Any) -> int:
    """Returns the number of rows of a batch: the length of its first tensor."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((rows(item) for item in items if isinstance(item, (torch.Tensor, Mapping, tuple, list))), 1)
