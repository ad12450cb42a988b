"""The list of a step's arguments, changed into the list of its device section's."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import sidefx_train
from sidefx_train.compile.backend.runners.runner_arguments import _edits
from sidefx_train.compile.gpu.replaying import recording_on_host
from sidefx_train.compile.gpu.simulation.recorder import HostRecorder


@pytest.mark.parametrize("seed", range(20))
def test_edits_make_the_list_of_names(seed):
    draw = random.Random(seed)
    count = draw.randrange(8)
    inputs = [f"a{i}" for i in range(count)]
    names = [name for name in inputs if draw.random() < 0.7]
    for other in ("packed", "s0", "b0", *draw.sample(inputs, min(count, 2))):
        if draw.random() < 0.6:
            names.insert(draw.randrange(len(names) + 1), other)
    made = list(inputs)
    for start, stop, new in reversed(_edits(tuple(names), count)):
        made[start:stop] = new
    assert made == names


def test_a_list_that_is_the_sections_already_stays():
    assert _edits(("a0", "a1", "a2"), 3) == [] and _edits((), 0) == []


@pytest.mark.parametrize("layers", [2, 16], ids=["variables", "the_list"])
def test_a_step_with_many_inputs(layers):
    """Gives numbers between its tensors, an input that is read before, and one that is replaced between calls."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(5, 4), *(nn.Linear(4, 4) for _ in range(layers)))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)

        def step(x, scale, net=net, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (net(x) * scale).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        with recording_on_host(HostRecorder()):
            run = sidefx_train.compile(step, backend="aot_eager", keep_slower=True) if compiled else step
            losses = []
            for call in range(6):
                optimizer.param_groups[0]["lr"] = 0.1 / (call + 1)
                if call == 4:
                    net[1].weight.data = torch.ones(4, 4)
                losses.append(run(torch.arange(3) + call % 2, 1.0 + call % 2).detach())
            with pytest.raises(IndexError):
                run(torch.tensor([0, 1, 5]), 1.0)
        found.append([*losses, *(p.detach() for p in net.parameters()), *(p.grad for p in net.parameters())])
    assert run.report().captures[-1].cuda_graph.replays >= 2
    source = "".join(run.report().sources().values())
    assert ("section(args)" in source) == ("return results" in source) == (layers == 16)
    for eager, captured in zip(*found, strict=True):
        torch.testing.assert_close(captured, eager)
