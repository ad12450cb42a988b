"""Training steps in plain loops with the optimizers of libraries."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.nn import functional as F

from tests.libraries.training_steps import PROGRAMS, Make, Program, classes, mlp


def _optimized(package: str, kind: str, twice: bool = False, **options: Any) -> Make:
    def make() -> Program:
        model = mlp()
        optimizer = getattr(importlib.import_module(package), kind)(model.parameters(), **options)
        if package == "schedulefree":
            optimizer.train()

        def loss_of(x: Any, y: Any) -> Any:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = loss_of(x, y)

            def again() -> Any:
                optimizer.zero_grad()
                return loss_of(x, y)

            optimizer.step(*((again,) if twice else ()))
            return loss.detach()

        return Program(step, classes, model)

    return make


_OPTIMIZERS: dict[str, dict[str, dict[str, Any]]] = {
    "schedulefree": dict.fromkeys(("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"), {"lr": 1e-2}),
    "lion_pytorch": {"Lion": {"lr": 1e-4}},
    "prodigyopt": {"Prodigy": {"lr": 1.0}},
    "torch_optimizer": dict.fromkeys(
        ("AccSGD", "AdaBound", "AdamP", "AggMo", "Apollo", "DiffGrad", "Lamb", "MADGRAD", "NovoGrad", "PID", "QHAdam")
        + ("RAdam", "Ranger", "SWATS", "Shampoo", "Yogi"),
        {},
    ),
    "pytorch_optimizer": dict.fromkeys(
        ("ADOPT", "AdEMAMix", "Adai", "Amos", "CAME", "FOCUS", "Grams", "Kron", "LaProp", "MARS", "SOAP", "SPAM")
        + ("ScalableShampoo", "StableAdamW", "TAM", "Tiger"),
        {},
    )
    | {"SAM": {"twice": True, "base_optimizer": torch.optim.SGD, "lr": 0.1}},
}
PROGRAMS |= {
    f"{package}.{kind}": _optimized(package, kind, **options)
    for package, kinds in _OPTIMIZERS.items()
    for kind, options in kinds.items()
}
