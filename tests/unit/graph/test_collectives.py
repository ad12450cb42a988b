"""What the report says about collectives: bytes, processes, and what runs meanwhile."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sidefx_train
from sidefx_train.communication import CommunicationRecord, scaling


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_report_lists_collectives(group):
    total, whole = torch.ones(6), torch.zeros(8, dtype=torch.float64)

    @sidefx_train.compile(backend="eager")
    def step(x):
        work = dist.all_reduce(total, async_op=True)
        y = x.sin().cos().exp()
        work.wait()
        dist.barrier()
        dist.all_gather_into_tensor(whole, whole * 2)
        return y + 1

    step(torch.ones(3))
    report = step.report()
    reduced, barrier, gathered = report.communication
    assert (barrier.operator, barrier.bytes, barrier.between, barrier.messages(4)) == ("barrier", 0, 0, 2)
    assert (reduced.operator, reduced.dtype, reduced.bytes, reduced.group_size) == ("all_reduce", "float32", 24, 1)
    assert (gathered.operator, gathered.bytes) == ("all_gather_into_tensor", 64), gathered
    assert reduced.between == 3 and gathered.between == 0, report.sources()["graph"]
    assert reduced.nodes == report.captures[0].nodes["capture"] and reduced.waited < gathered.starts
    assert "communication" in str(report) and report.to_dict()["captures"][0]["communication"][0]["bytes"] == 24


@pytest.mark.parametrize("reduces", ["activations", "gradients"])
def test_what_every_process_computes_does_not_depend_on_measurements(group, reduces):
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    parameters = [*first.parameters(), *second.parameters()]

    def step(x):
        y = first(x)
        if reduces == "activations":
            other = y.detach().clone()
            dist.all_reduce(other)
            y = y + other
        second(y).square().mean().backward()
        for p in parameters if reduces == "gradients" else ():
            dist.all_reduce(p.grad)

    compiled = sidefx_train.compile(step)
    compiled(torch.randn(64, 64))
    (capture,) = compiled.report().captures
    assert bool(capture.choices) == (reduces == "gradients")
    assert any("kernels are not measured" in note for note in capture.notes) == (reduces == "activations")


def test_steps_without_collectives_have_no_such_table():
    step = sidefx_train.compile(lambda x: x + 1, backend="eager")
    step(torch.ones(3))
    assert step.report().communication == [] and "communication" not in str(step.report())


def test_costs_are_those_of_rings():
    """A ring sends every part of the tensor to every process, and for a reduction every part around it once more."""
    record = CommunicationRecord("all_reduce", "float32", 4000, 2, 0, 5, 9)
    assert (record.sent(), record.messages()) == (4000, 2)
    assert record.sent(4) == 6000 and record.messages(4) == 6
    shard = CommunicationRecord("reduce_scatter_tensor", "float32", 4000, 2, 0, 5, 9)
    one, many = scaling([record, shard], [1, 4])
    assert (one.sent, one.messages) == (0, 0)
    assert (many.sent, many.messages, many.collectives) == (9000, 9, 2)
    assert many.seconds(bandwidth=1000, latency=0.5) == pytest.approx(13.5)
