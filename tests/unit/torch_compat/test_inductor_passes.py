"""What is left of a graph after Inductor's joint-graph passes."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from sidefx_train import torch_compat as compat

prims = torch.ops.prims


@pytest.mark.parametrize("used", [False, True])
def test_seeds_are_left_where_something_is_drawn(used):
    def drawing(x):
        drawn = torch.rand(3) + 1
        return x + drawn if used else x * 2

    module = make_fx(drawing, tracing_mode="fake")(torch.ones(3))
    with V.set_fake_mode(next(iter(module.graph.nodes)).meta["val"].fake_mode):
        graph = compat.inductor_passes(module).graph
    assert bool(graph.find_nodes(op="call_function", target=prims.inductor_seeds.default)) is used
    assert bool(graph.find_nodes(op="call_function", target=prims.inductor_lookup_seed.default)) is used
