"""Vision models of torchvision and timm, small and with random weights, and a training step for each.

Both packages need a torch that is built like theirs, which the pinned CPU build is not: see ``make vision``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Loss = Callable[[nn.Module, tuple[Any, ...]], torch.Tensor]

CLASSES = 5


def _images(size: int, count: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, size, size), torch.randint(CLASSES, (count,))


def classify(model: nn.Module, batch: tuple[Any, ...]) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def detect(model: nn.Module, batch: tuple[Any, ...]) -> torch.Tensor:
    images, targets = batch
    return sum(model(images, targets).values())  # type: ignore[return-value]


def segment(model: nn.Module, batch: tuple[Any, ...]) -> torch.Tensor:
    images, labels = batch
    found = model(images)
    return F.cross_entropy(found["out"], labels) + 0.4 * F.cross_entropy(found["aux"], labels)


def _boxes() -> tuple[Any, ...]:
    corner = 8 * torch.rand(3, 2)
    boxes = torch.cat((corner, corner + 20 + 20 * torch.rand(3, 2)), 1)
    target = {"boxes": boxes, "labels": torch.randint(1, CLASSES, (3,))}
    return [torch.rand(3, 64, 64), torch.rand(3, 64, 64)], [target, {k: v.clone() for k, v in target.items()}]


def _pixels() -> tuple[Any, ...]:
    return torch.randn(2, 3, 48, 48), torch.randint(CLASSES, (2, 48, 48))


def _torchvision(name: str, size: int = 64, **options: Any) -> tuple[Callable[[], nn.Module], Loss, Callable[[], Any]]:
    def build() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)

    return build, classify, lambda: _images(size)


def _timm(name: str, size: int = 64, **options: Any) -> tuple[Callable[[], nn.Module], Loss, Callable[[], Any]]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)

    return build, classify, lambda: _images(size)


def _detector() -> nn.Module:
    import torchvision

    make = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn
    return make(weights=None, weights_backbone=None, num_classes=CLASSES, min_size=64, max_size=64)


def _segmenter() -> nn.Module:
    import torchvision

    make = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large
    return make(weights=None, weights_backbone=None, num_classes=CLASSES, aux_loss=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[[], Any]]] = {
    "torchvision resnet18": _torchvision("resnet18"),
    "torchvision mobilenet_v3_small": _torchvision("mobilenet_v3_small"),
    "torchvision efficientnet_b0": _torchvision("efficientnet_b0"),
    "torchvision convnext_tiny": _torchvision("convnext_tiny"),
    "torchvision vit_b_16": _torchvision("vit_b_16", image_size=64),
    "torchvision swin_t": _torchvision("swin_t"),
    "torchvision fasterrcnn_mobilenet_v3_large_320_fpn": (_detector, detect, _boxes),
    "torchvision deeplabv3_mobilenet_v3_large": (_segmenter, segment, _pixels),
    "timm resnet10t": _timm("resnet10t"),
    "timm vit_tiny_patch16_224": _timm("vit_tiny_patch16_224", img_size=64),
    "timm swin_tiny_patch4_window7_224": _timm("swin_tiny_patch4_window7_224", size=56, img_size=56),
    "timm convnext_atto": _timm("convnext_atto"),
    "timm efficientnet_lite0": _timm("efficientnet_lite0"),
    "timm mixer_s32_224": _timm("mixer_s32_224", img_size=64),
    "timm regnetx_002": _timm("regnetx_002"),
    "timm densenet121": _timm("densenet121"),
    "timm mobilevit_xxs": _timm("mobilevit_xxs"),
    "timm poolformer_s12": _timm("poolformer_s12"),
}
"""By package and name: makes the model, computes its loss, makes a batch."""
