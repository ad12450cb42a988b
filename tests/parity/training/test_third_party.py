"""einops, einx, jaxtyping, beartype and torch's parametrizations inside a captured step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from tests.support.parity import Program, mlp, parity
from tests.support.training_steps import trained


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


# ---------------------------------------------------------------------- einops
def einops_functions() -> Program:
    einops = pytest.importorskip("einops")

    def loss(model, x, y):
        hidden = einops.rearrange(model(x), "(b c) d -> b c d", c=1)
        hidden = einops.repeat(hidden, "b c d -> b (r c) d", r=2)
        hidden = einops.einsum(hidden, torch.eye(3), "b r d, d e -> b r e")
        return F.cross_entropy(einops.reduce(hidden, "b r e -> b e", "mean"), y)

    return trained(loss)


def einops_layers() -> Program:
    layers = pytest.importorskip("einops.layers.torch")
    fold = layers.Rearrange("b (h d) -> b d h", h=2)
    return trained(cross_entropy, nn.Sequential(nn.Linear(6, 6), fold, nn.Flatten(), nn.Linear(6, 3)))


# ---------------------------------------------------------------------- einx
def einx_operations() -> Program:
    einx = pytest.importorskip("einx")

    def loss(model, x, y):
        hidden = einx.id("(b c) d -> b c d", model(x), c=1)
        hidden = einx.add("b c d, d -> b c d", hidden, torch.ones(3)) + einx.dot(
            "b c d, d e -> b c e", hidden, torch.eye(3)
        )
        chosen = einx.get_at("b [d], b -> b", einx.mean("b [c] d", hidden), y)
        return F.cross_entropy(hidden.flatten(1), y) - chosen.mean()

    return trained(loss)


# ---------------------------------------------------------------------- runtime type checkers
def jaxtyped() -> Program:
    jaxtyping = pytest.importorskip("jaxtyping")
    beartype = pytest.importorskip("beartype").beartype

    @jaxtyping.jaxtyped(typechecker=beartype)
    def loss_of(
        logits: jaxtyping.Float[torch.Tensor, "batch classes"], y: jaxtyping.Int[torch.Tensor, "batch"]
    ) -> jaxtyping.Float[torch.Tensor, ""]:
        return F.cross_entropy(logits, y)

    return trained(lambda model, x, y: loss_of(model(x), y))


def beartyped() -> Program:
    beartype = pytest.importorskip("beartype").beartype

    @beartype
    def loss_of(logits: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return F.cross_entropy(logits, y) * scale

    return trained(lambda model, x, y: loss_of(model(x), y, 0.5))


# ---------------------------------------------------------------------- parametrizations
def first_layer(change) -> Program:
    model = mlp()
    change(model[0])
    return trained(cross_entropy, model)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


def weight_norm() -> Program:
    return first_layer(parametrizations.weight_norm)


def spectral_norm() -> Program:
    return first_layer(parametrizations.spectral_norm)


def orthogonal() -> Program:
    return first_layer(parametrizations.orthogonal)


def orthogonal_cayley() -> Program:
    return first_layer(lambda layer: parametrizations.orthogonal(layer, orthogonal_map="cayley"))


def weight_norm_by_hook() -> Program:
    return first_layer(nn.utils.weight_norm)


def spectral_norm_by_hook() -> Program:
    return first_layer(nn.utils.spectral_norm)


def own_parametrization() -> Program:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return trained(cross_entropy, model)


def cached_parametrization() -> Program:
    model = mlp()
    parametrizations.weight_norm(model[0])

    def loss(model, x, y):
        with parametrize.cached():
            return F.cross_entropy(model(x) + model(x * 2), y)

    return trained(loss, model)


CASES = [
    einops_functions,
    einops_layers,
    einx_operations,
    jaxtyped,
    beartyped,
    weight_norm,
    spectral_norm,
    orthogonal,
    orthogonal_cayley,
    weight_norm_by_hook,
    spectral_norm_by_hook,
    own_parametrization,
    cached_parametrization,
]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.every(2)
def test_library(make):
    parity(make, steps=4)


@pytest.mark.parametrize("checker", ["beartype", "jaxtyping"])
def test_type_error_is_eagers(checker):
    """A checked function that is given a wrong value raises what it raises eagerly."""
    beartype = pytest.importorskip("beartype").beartype
    jaxtyping = pytest.importorskip("jaxtyping")

    def make() -> Program:
        if checker == "beartype":

            @beartype
            def checked(x: torch.Tensor, scale: float) -> torch.Tensor:
                return x * scale

        else:

            @jaxtyping.jaxtyped(typechecker=beartype)
            def checked(x: jaxtyping.Float[torch.Tensor, "batch 6"], scale: float) -> torch.Tensor:
                return x * scale

        def step(x, scale):
            return checked(x, scale)

        bad = (torch.ones(2, 5), 1.0) if checker == "jaxtyping" else (torch.ones(2, 6), "two")
        return Program(step, lambda i: bad if i == 2 else (torch.ones(2, 6), 1.0))

    from sidefx_train import compile

    step, eager = compile(make().step, backend="eager"), make()
    for index in range(4):
        outcomes = []
        for fn in (eager.step, step):
            try:
                outcomes.append(fn(*eager.batch(index)).tolist())
            except Exception as error:
                outcomes.append((type(error).__name__, str(error).splitlines()[0][:60]))
        assert outcomes[0] == outcomes[1]
