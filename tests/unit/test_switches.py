"""``disabled_passes``: disables changes to Inductor's compilation for one step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sidefx_train
from sidefx_train.switches import SWITCHES, switched_off
from tests.support.disk_cache import new_cache


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    new_cache(tmp_path, monkeypatch)


def trained(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = sidefx_train.compile(step, fullgraph=True, **options)
    losses = [run(torch.ones(4, 8)).item() for _ in range(2)]
    return losses, run.report().captures[0]


def test_a_pass_is_left_out_and_the_report_says_so():
    plain, with_all = trained()
    others, without = trained(disabled_passes=("matmul", "decompose_variance"))
    assert others == pytest.approx(plain, rel=1e-5)
    assert with_all.choices and not without.choices, "the pass ran"
    assert "switched off: decompose_variance, matmul" in without.notes, without.notes
    assert not any("switched off" in note for note in with_all.notes), with_all.notes
    assert not switched_off(), "the option outlives the compilation"


def test_a_graph_of_another_choice_is_not_taken_from_the_cache():
    first, _ = trained()
    _, without = trained(disabled_passes=("matmul",))
    assert "lower" in without.seconds, "taken from the cache of a graph with all passes"
    _, again = trained(disabled_passes=("matmul",))
    assert "lower" not in again.seconds and "switched off: matmul" in again.notes, again.notes


def test_wrong_names_are_an_error_where_they_are_written():
    with pytest.raises(ValueError, match="no switch is called nothing; there are .*matmul"):
        sidefx_train.compile(trained, disabled_passes=("nothing",))
    with pytest.raises(ValueError, match="expected a tuple of names"):
        sidefx_train.SideFXCompile(disabled_passes="matmul")
    assert all(SWITCHES.values()), "a switch says nothing of what it does"


@pytest.mark.parametrize("make", [lambda: sidefx_train.compile(trained), lambda: sidefx_train.SideFXCompile()])
def test_wrong_names_in_the_environment_are_an_error_where_a_step_is_made(make, monkeypatch):
    """Regression: the error came up in the compilation, was taken for a failure of it, and the step ran eagerly."""
    monkeypatch.setenv("SIDEFX_DISABLE", "matmul, rematerialise")
    with pytest.raises(
        ValueError, match="SIDEFX_DISABLE: no switch is called rematerialise; there are .*rematerialize"
    ):
        make()
    monkeypatch.setenv("SIDEFX_DISABLE", " matmul, ,rematerialize,")
    make()
