"""A fixed sample of torch's lists through ``aot_eager``, against eager; ``make opinfo`` runs all of them."""

from __future__ import annotations

import pytest
import torch

from tests.opinfo.modules import check_module
from tests.opinfo.run import MOST, check, entries, known_differences, operators

SAMPLE = (
    "argwhere", "bincount", "unique",
    "add", "as_strided", "cat", "complex", "cummax", "fft.rfft", "imag", "index_put", "index_select", "linalg.eigvalsh",
    "masked.log_softmax", "max.reduction_with_dim", "nn.functional.dropout", "nn.functional.interpolate.bilinear",
    "nn.functional.layer_norm", "polygamma.polygamma_n_1", "softmax", "split", "squeeze", "t", "unfold",
    "view_as_complex",
)  # fmt: skip
OTHERS = (
    "function CubeGenVmapAutogradFunction", "function SortGenVmapAutogradFunction",
    "function ScaleGradGenVmapAutogradFunction", "function ZeroGradientsGenVmapAutogradFunction", "hop cond.simple",
    "hop while_loop.simple",
)  # fmt: skip
MODULES = (
    "nn.Linear", "nn.BatchNorm1d", "nn.Conv2d", "nn.Bilinear", "nn.Embedding", "nn.LSTM",
    "nn.CrossEntropyLoss", "nn.GroupNorm", "nn.LazyConv1d", "nn.MultiheadAttention", "nn.PReLU",
)  # fmt: skip


@pytest.fixture(scope="module")
def database():
    return entries()


@pytest.mark.parametrize("name", SAMPLE + OTHERS)
@pytest.mark.every(4)
def test_operator(database, name):
    found = check(database[name])
    if name == "fft.rfft" and torch.__version__ < "2.12":  # its fake tensors have other strides than the real ones
        found = [result for result in found if result.state != "left"]
    agree(found)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.every(6)
def test_module(database, name):
    agree(check_module(database[f"module {name}"], inputs=1))


def agree(found):
    wrong = [f"{result.variant} {result.state}: {result.why}" for result in found if result.state != "captured"]
    assert found and not wrong, "\n".join(wrong)


def test_list_of_differences(database):
    known = known_differences()
    newest = torch.__version__ >= "2.13"  # the list belongs to the newest torch
    assert not newest or not set(known) - set(database), f"torch has no {set(known) - set(database)}"
    listed = [name for name, (kind, _) in known.items() if kind != "undefined" and name in operators()]
    assert len(listed) <= MOST / 100 * len(operators()), f"{len(listed)} operators are listed"
