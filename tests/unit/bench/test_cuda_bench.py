"""The benchmark for CUDA, without a device: its processes, models and figures, and the order of a graph by hand."""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from sidefx_train.bench import contenders, device, rounds, show, workloads
from sidefx_train.bench.__main__ import choose, main
from sidefx_train.bench.contenders import ON_DEVICE
from sidefx_train.bench.hand_graph import HandGraph
from sidefx_train.bench.process import Process
from sidefx_train.bench.rounds import Plan, groups
from sidefx_train.bench.summary import summarize
from sidefx_train.bench.worker import PART, _add, _compare

PROCESS = """
import json, sys
name, result, shared = sys.argv[1:]
say = lambda text: open(shared, "a").write(f"{name} {text}\\n")
if "early" in name:
    sys.exit(3)
say("first steps")
sys.stdout.write("ready\\n")  # in one write, also unbuffered
sys.stdout.flush()
for line in sys.stdin:
    say(line.strip())
    if line.strip() == "end":
        json.dump({"status": "ok"}, open(result, "w"))
        break
    print(0.25, flush=True)
"""


def start(plan, workload, contender, index, folder):
    name = f"{workload}:{contender}"
    command = [sys.executable, "-c", PROCESS, name, str(folder / name), str(folder.parent / "said")]
    return Process(command, dict(os.environ), folder / name, folder / f"{name}.log", plan.timeout)


def test_no_device_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^--device cuda: no CUDA device: torch [^\n]* finds none$"):
        main(["--device", "cuda"])


def test_choose():
    assert choose("launch", "gpt_launch", "cuda") == {"gpt_launch": ON_DEVICE["cuda"]}, "a workload"
    assert list(choose("gpu", "", "cuda")) == [*workloads.LAUNCH, *workloads.LARGE], "all"
    with pytest.raises(SystemExit, match="hand-graph"):
        choose("launch", "hand-graph", "cpu")
    assert {name for names in ON_DEVICE.values() for name in names} == set(contenders.CONTENDERS)


def test_workloads_run_together_if_they_fit():
    pairs = choose("gpu", "", "cuda")
    launch = list(workloads.LAUNCH)
    large = list(workloads.LARGE)
    assert groups(Plan("gpu", pairs, device_gib=45.0)) == [launch, *([name] for name in large)], "memory"
    for gib in (71.0, 125.0, 1000.0):
        assert groups(Plan("gpu", pairs, device_gib=gib)) == [[*launch, large[0]], large[1:]], "twenty processes"
    assert groups(Plan("gpu", pairs)) == [[name] for name in pairs], "one by one on the CPU"


def test_first_steps_of_all_come_before_any_timing(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "start", start)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(rounds.tempfile, "tempdir", str(tmp_path))
    pairs = {"mlp_tiny": ["eager", "early", "sidefx"], "gpt_tiny": ["eager", "sidefx"]}
    runs = rounds.measure(Plan("gpu", pairs, rounds=1, seconds=0.6, timeout=60.0, device_gib=70.0), lambda run: None)
    failed = [run for run in runs if run["status"] != "ok"]
    assert [(run["contender"], run["note"]) for run in failed] == [("early", "exit: 3")]
    said = (tmp_path / "said").read_text().splitlines()
    first, timed = said[:4], said[4:]
    assert all(line.endswith("first steps") for line in first), said
    in_order = [
        line
        for workload in pairs
        for line in [
            *[f"{workload}:{contender} go" for _ in range(5) for contender in ("eager", "sidefx")],
            *[f"{workload}:{contender} end" for contender in ("eager", "sidefx")],
        ]
    ]
    assert timed == in_order, "one process at a time"


def test_nothing_is_started_after_the_limit(monkeypatch):
    monkeypatch.setattr(rounds, "start", None)
    told = []
    assert rounds.measure(Plan("gpu", {"mlp_tiny": ["eager"]}, limit=0.0, device_gib=70.0), told.append) == []
    assert [run["status"] for run in told] == ["given up"] * 3


def test_a_process_that_was_ready_in_time_is_not_late(tmp_path):
    process = start(Plan("gpu", {}, timeout=60.0), "mlp_tiny", "eager", 0, tmp_path)
    try:
        assert select.select([process._process.stdout], [], [], 60.0)[0], "it has not started"
        process._timeout = 0.0  # others took all the time until it is asked
        assert process.becomes_ready()
    finally:
        process.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: workloads.gpt2(vocabulary=50, width=16, heads=2, layers=1, length=8, rows=2),
        lambda: workloads.llama(vocabulary=50, width=16, heads=2, layers=1, hidden=24, length=8, rows=2),
        lambda: workloads.resnet(depths=(1, 2), width=4, size=32, rows=2),
    ],
    ids=["gpt2", "llama", "resnet"],
)
def test_large_models_train(make, monkeypatch):
    monkeypatch.setitem(workloads.SUITES, "tiny", {"one": make})
    results = []
    foreach = lambda made: workloads.train_step(made.model, made, made.optimizer(False))
    for build_step in (contenders.eager, foreach):
        workload = workloads.build("tiny", "one")
        before = workloads.parameters(workload.model)
        step = build_step(workload)
        results.append((float(step(workload.batches[0])), workloads.parameters(workload.model)))
        assert math.isfinite(results[-1][0]), "the loss"
        moved = (workloads.parameters(workload.model) - before).norm()
        assert moved > 0, "no parameter has changed"
    assert results[0][0] == results[1][0], "another model the second time"
    assert (results[0][1] - results[1][1]).norm() < 1e-2 * moved, "another update by the fused optimizer"


def test_large_models_have_their_sizes(monkeypatch):
    monkeypatch.setattr(workloads, "_batches", lambda make: [])
    with torch.device("meta"):
        models = {name: make().model for name, make in workloads.LARGE.items()}
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert sizes == {"gpt2_124m": 124_439_808, "llama_300m": 296_784_896, "resnet50": 25_557_032}, sizes


def test_later_positions_do_not_change_earlier_ones():
    from sidefx_train.bench.large_models import Llama

    model = Llama(vocabulary=20, width=16, heads=2, layers=2, hidden=24, length=8)
    ids = torch.arange(8).reshape(1, 8)
    whole, part = model(ids), model(ids[:, :5])
    assert torch.allclose(whole[:5], part, atol=1e-5), "attention is not causal"
    same = torch.full((1, 3), 7)
    first, second, third = model.blocks[0](torch.zeros(1, 3, 16), model.cos[:3], model.sin[:3])[0]
    assert torch.equal(first, second) and torch.equal(second, third), "zeros have no positions"
    swapped = ids.clone()
    swapped[0, :2] = swapped[0, :2].flip(0)
    assert not torch.allclose(model(swapped)[-1], whole[-1], atol=1e-5), "positions have no effect"
    assert model(same).shape == (3, 20)


class Recorder:
    """Replaces what :class:`HandGraph` uses of ``torch.cuda``; notes what is called."""

    def __init__(self, monkeypatch) -> None:
        self.events: list[str] = []
        stream = SimpleNamespace(wait_stream=lambda other: None)
        graph = SimpleNamespace(replay=lambda: self.events.append("replay"))
        for name, value in {
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda stream: self.around("side"),
            "CUDAGraph": lambda: graph,
            "graph": lambda graph: self.around("record"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextlib.contextmanager
    def around(self, name: str):
        self.events.append(name)
        yield
        self.events.append(f"end of {name}")


def test_a_graph_by_hand_is_recorded_once_after_training_steps(monkeypatch):
    recorder = Recorder(monkeypatch)
    seen = []

    def step(batch):
        recorder.events.append("step")
        seen.append(batch[0])
        return batch[0].sum()

    batches = [(torch.full((2,), float(i)), torch.tensor(i)) for i in range(5)]
    hand = HandGraph(step, batches[0])
    losses = [float(hand(batch)) for batch in batches]
    side, record = ["side", "step", "end of side"], ["record", "step", "end of record", "replay"]
    assert recorder.events == side * 3 + record + ["replay"], recorder.events
    assert losses[:4] == [0.0, 2.0, 4.0, 6.0], "steps of the batches"
    assert all(x is seen[0] and x is not batches[0][0] for x in seen) and seen[0][0] == 4.0, "static inputs"


def test_a_graph_by_hand_needs_a_device():
    with pytest.raises(workloads.Unavailable, match="CUDA device"):
        contenders.hand_graph(workloads.build("core", "mlp_tiny"))


def test_optimizers_can_be_recorded():
    for name, capturable in (("mlp_tiny", True), ("cnn_small", None)):
        optimizer = workloads.build("core", name).optimizer(True, capturable=True)
        assert optimizer.defaults["fused"] and optimizer.defaults.get("capturable") is capturable, name


def test_launches_are_per_step(monkeypatch):
    counts = {"cudaLaunchKernel": 6, "cuLaunchKernelEx": 2, "cudaGraphLaunch": 4, "cudaMemcpyAsync": 1, "cutlass": 9}
    events = [SimpleNamespace(key=key, count=count) for key, count in counts.items()]
    found = SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(device, "profile", lambda activities: contextlib.nullcontext(found))
    ran = []
    figures = device.launch_counts(ran.append, [1, 2, 3], "cpu")
    calls = {"cudaLaunchKernel": 3, "cuLaunchKernelEx": 1, "cudaGraphLaunch": 2, "cudaMemcpyAsync": 0.5}
    assert figures == {"launches": 4, "graph_launches": 2, "copies": 0.5, "calls": calls}
    assert ran == [1, 2]


def test_a_figure_that_cannot_be_measured_leaves_the_others():
    result = {"status": "ok", "first_s": 1.0}

    def fail():
        raise RuntimeError("no profiler")

    _add(result, lambda: {"host_s": 2.0})
    _add(result, fail)
    assert result == {"status": "ok", "first_s": 1.0, "host_s": 2.0, "note": "RuntimeError: no profiler"}


def test_results_are_compared_with_eagers(tmp_path):
    reference, tolerance = tmp_path / "eager.pt", workloads.BFLOAT16
    after = torch.zeros(PART + 2)
    allowed = {"loss_tolerance": tolerance.loss, "parameter_tolerance": tolerance.parameters}
    assert _compare(reference, [1.0], after, tolerance) == allowed, "eager has failed"
    torch.save({"after": after, "changed": 10.0, "losses": [1.0, 2.0]}, reference)
    other = after.clone()
    other[0], other[-1] = 3.0, 4.0
    errors = {"loss_error": 0.5, "parameter_error": 0.5}
    assert _compare(reference, [1.5, 2.0], other, tolerance) == {**allowed, **errors}
    assert _compare(reference, [1.0, math.nan], other, tolerance)["loss_error"] == math.inf


def test_figures_of_a_device_are_shown():
    def run(contender, **values):
        fixed = {"status": "ok", "slices": [0.001], "first_s": 1.0, "memory_mb": 9.0}
        return {"workload": "gpt_launch", "contender": contender, "round": 0, **fixed, **values}

    figures = {"host_s": 0.00025, "launches": 123.0, "graph_launches": 1.0, "copies": 2.0}
    memory = {"held_mb": 10.0, "reserved_mb": 30.0}
    right = {"loss_error": 0.01, "parameter_error": 0.1, "loss_tolerance": 0.02, "parameter_tolerance": 0.2}
    runs = [run("eager", held_mb=20.0, reserved_mb=20.0), run("sidefx", **figures, **memory, **right)]
    eager, ours = rows = summarize(Plan("launch", {"gpt_launch": ["eager", "sidefx"]}), runs)
    assert (ours.held_ratio, ours.reserved_ratio, ours.host_ms, ours.correct) == (0.5, 1.5, 0.25, True), ours
    assert not eager.compared and not eager.wrong and not eager.correct, "eager's results are missing"
    console = Console(width=160, record=True, file=open(os.devnull, "w"))
    console.print(show.tables(rows, {}, 160))
    text = console.export_text()
    assert all(part in text for part in ("host ms", "0.250", "123", "reserved", "1.50")), text
