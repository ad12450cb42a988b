"""``sidefx_train.fit``: model and tensors in, trained model out."""

from __future__ import annotations

import torch
import torchmetrics
from torch import nn

import sidefx_train


def main(epochs: int = 5, progress: bool = True) -> sidefx_train.FitResult:
    torch.manual_seed(0)
    x = torch.randn(2048, 8)
    y = (x[:, :4].sum(1) > x[:, 4:].prod(1)).long()
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    result = sidefx_train.fit(
        model,
        (x[:1792], y[:1792]),
        val_data=(x[1792:], y[1792:]),
        epochs=epochs,
        metrics={"accuracy": torchmetrics.classification.MulticlassAccuracy(num_classes=2, average="micro")},
        progress=progress,
    )
    print(result.report)
    print({name: round(value, 4) for name, value in result.metrics.items()})
    return result


if __name__ == "__main__":
    main()
