"""Vision models of torchvision and timm, where these are installed; all of them: ``make vision``."""

from __future__ import annotations

import importlib.util

import pytest

from tests.vision.models import MODELS
from tests.vision.run import compared

QUICK = ("torchvision resnet18", "torchvision fasterrcnn_mobilenet_v3_large_320_fpn", "timm vit_tiny_patch16_224")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MODELS]
)
def test_a_vision_model_equals_eager(name):
    package = name.partition(" ")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: it needs a torch that is built like it")
    good, rows = compared(name, ["eager"], steps=3)
    assert good, rows
