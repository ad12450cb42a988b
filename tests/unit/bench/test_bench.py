"""The benchmark's arithmetic, its command line, and one real process."""

from __future__ import annotations

import json
import math
import os
import signal
import sys

import pytest
import torch
from rich.console import Console

from sidefx_train.bench import rounds, show, workloads
from sidefx_train.bench.__main__ import choose, main
from sidefx_train.bench.contenders import CONTENDERS, ON_DEVICE, REFERENCE
from sidefx_train.bench.process import Process
from sidefx_train.bench.rounds import Plan, order
from sidefx_train.bench.summary import summarize


def run(contender: str, index: int, step: float, **values):
    fixed = {"status": "ok", "slices": [step] * 3, "first_s": 5.0 - index, "memory_mb": 100.0}
    errors = {"loss_error": 0.0, "parameter_error": 0.0}
    return {"workload": "mlp_tiny", "contender": contender, "round": index, **fixed, **errors, **values}


PLAN = Plan("core", {"mlp_tiny": ["eager", "sidefx"]}, rounds=3)


def test_ratios_are_of_the_same_round():
    runs = [run("eager", i, s) for i, s in enumerate((1.0, 2.0, 4.0))]
    runs += [run("sidefx", i, s, graphs=1) for i, s in enumerate((0.5, 0.5, 1.0))]
    eager, ours = summarize(PLAN, runs)
    assert eager.ratio == 1.0, eager
    assert (ours.ratio, ours.ratio_low, ours.ratio_high) == (4.0, 2.0, 4.0), ours
    assert (ours.first_cold_s, ours.first_warm_s) == (5.0, 3.5), ours
    assert ours.correct and ours.graphs == 1, ours


def test_ratios_compare_adjacent_rounds():
    runs = [run("eager", 0, 1.0, slices=[1.0, 8.0, 2.0]), run("sidefx", 0, 1.0, slices=[0.5, 4.0, 1.5])]
    _, ours = summarize(PLAN, runs)
    assert ours.ratio == 2.0 and ours.step_s == 1.5 and ours.step_min_s == 0.5, ours


def test_wrong_results_and_failures_show():
    runs = [run("eager", 0, 1.0), run("sidefx", 0, 0.5, loss_error=math.inf)]
    _, ours = summarize(PLAN, runs)
    assert not ours.correct, ours
    failed = {"workload": "mlp_tiny", "contender": "sidefx", "round": 0, "status": "failed", "note": "no compiler"}
    rows = summarize(PLAN, [run("eager", 0, 1.0), failed])
    console = Console(width=140, record=True, file=open("/dev/null", "w"))
    console.print(show.tables(rows, workloads.GOALS))
    assert "no compiler" in console.export_text(), "the reason of a failure is not shown"
    json.dumps([row.to_dict() for row in rows], allow_nan=False)


def test_the_plot_shows_ranges_and_what_is_wrong(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    runs = [run("eager", i, s) for i, s in enumerate((1.0, 2.0, 4.0))]
    runs += [run("sidefx", i, s, held_mb=30.0) for i, s in enumerate((0.5, 0.5, 1.0))]
    runs += [run("other", 0, 0.5, parameter_error=1.0), {**run("third", 0, 1.0), "status": "failed", "note": "-"}]
    plan = Plan("core", {"mlp_tiny": ["eager", "sidefx", "other", "third"]}, rounds=3)
    show.plot(tmp_path / "bench.png", summarize(plan, runs), workloads.GOALS)
    speed, first, _ = figures[0].axes
    shown = {text.get_text() for text in speed.texts}
    assert shown == {"4.00", "2.00, wrong"}, shown
    ours, eagers = speed.patches[0], first.patches[0]
    assert ours.get_facecolor() == first.patches[1].get_facecolor() != eagers.get_facecolor(), "a colour per contender"
    (low, high) = [line[:, 1] for line in speed.collections[0].get_segments()][0]
    assert (low, high) == (2.0, 4.0), "the range of the rounds"
    assert speed.collections[-1].get_segments()[0][0][1] == workloads.GOALS["mlp_tiny"], "the goal"


def test_order_rotates_and_starts_with_the_reference():
    names = ["eager", "a", "b", "c"]
    orders = [order(names, index) for index in range(4)]
    assert orders[0][0] == REFERENCE, orders
    assert all(sorted(o) == sorted(names) for o in orders), orders
    assert len({tuple(o) for o in orders}) == 4, orders


def test_choose():
    assert choose("core", "mlp_tiny:sidefx") == {"mlp_tiny": ["eager", "sidefx"]}, "a pair"
    assert choose("core", "lstm") == {"lstm": ON_DEVICE["cpu"]}, "a workload"
    assert set(choose("core", "sidefx")) == set(workloads.CORE), "a contender"
    with pytest.raises(SystemExit, match="nonsense"):
        choose("core", "nonsense")


def test_every_workload_has_a_goal_and_trains():
    assert set(workloads.GOALS) == set(workloads.CORE), "goals"
    for name in ("mlp_tiny", "lstm"):
        workload = workloads.build("core", name)
        loss = workload.loss(workload.model, workload.batches[0])
        again = workloads.build("core", name)
        assert torch.equal(loss, again.loss(again.model, again.batches[0])), f"{name} is not the same twice"


def test_one_process(tmp_path):
    out = tmp_path / "bench.json"
    plot = tmp_path / "bench.png"
    arguments = ["--only", "mlp_tiny:eager", "--rounds", "1", "--seconds", "0.05", "--threads", "1"]
    assert main([*arguments, "--json", str(out), "--plot", str(plot)]) == 0, "exit status"
    figures = json.loads(out.read_text())
    (row,) = figures["summary"]
    assert row["status"] == "ok" and row["ratio"] == 1.0 and row["correct"], row
    assert plot.stat().st_size > 1000, "no plot"


@pytest.mark.slow
def test_two_processes(tmp_path):
    """The second process runs the steps of the first; what they send is measured."""
    out = tmp_path / "bench.json"
    arguments = ["--suite", "distributed", "--only", "gpt_tiny:eager", "--rounds", "1", "--seconds", "0.05"]
    assert main([*arguments, "--json", str(out)]) == 0, "exit status"
    figures = json.loads(out.read_text())
    (row,) = figures["summary"]
    assert row["status"] == "ok" and row["correct"] and row["communication_s"] > 0, row
    assert figures["meta"]["threads"] == 1, figures["meta"]


def test_scaling_is_shown():
    """Of several processes, their collectives are shown in place of dispatch goals."""
    scaling = [(2, 3.5, 2), (8, 6.125, 14)]
    measured = run("sidefx", 0, 1.0, communication_s=0.001, hidden=0.25, sent_mb=3.5, scaling=scaling)
    rows = summarize(Plan("distributed", {"mlp_tiny": ["sidefx"]}), [measured])
    console = Console(width=160, record=True, file=open("/dev/null", "w"))
    console.print(show.tables(rows, {}, console.width))
    shown = console.export_text()
    assert all(text in shown for text in ("25%", "3.50", "8 processes", "6.12, 14")), shown


def test_a_step_holds_no_more_than_eagers():
    from sidefx_train.bench.peak_memory import held_mb

    held = {}
    for contender in ("eager", "sidefx"):
        workload = workloads.build("core", "mlp_tiny")
        step = CONTENDERS[contender](workload)
        for batch in workload.batches[:3]:
            step(batch)
        held[contender] = held_mb(step, workload.batches[0])
    assert held["sidefx"] <= 1.01 * held["eager"], held


PROCESS = """
import json, sys
name, result, shared = sys.argv[1:]
say = lambda text: open(shared, "a").write(f"{name} {text}\\n")
if name == "early":
    sys.exit(3)
say("first steps")
print("ready", flush=True)
for i, line in enumerate(sys.stdin):
    say(line.strip())
    if line.strip() == "end":
        json.dump({"status": "ok"}, open(result, "w"))
        break
    if name == "late" and i == 2:
        sys.exit("no more")
    if name == "silent" and i == 1:
        sys.stdin.read()
    print("no time" if name == "odd" and i == 3 else 0.25, flush=True)
"""


def test_processes_alternate_and_end_alone(tmp_path, monkeypatch):
    names = ["eager", "early", "late", "silent", "odd", "sidefx"]

    def start(plan, workload, contender, index, folder):
        command = [sys.executable, "-c", PROCESS, contender, str(folder / contender), str(tmp_path / "said")]
        return Process(command, dict(os.environ), folder / contender, folder / f"{contender}.log", plan.timeout)

    monkeypatch.setattr(rounds, "start", start)
    runs = rounds.measure(Plan("core", {"mlp_tiny": names}, rounds=1, seconds=0.6, timeout=5.0), lambda run: None)
    found = {run["contender"]: run for run in runs}
    assert found["early"]["note"] == "exit: 3" and found["late"]["note"] == "exit: 1"
    assert found["silent"]["note"] == "exit: timeout after 5 s"
    assert found["odd"]["note"] == "it answered 'no time'" and found["odd"]["status"] == "failed"
    assert [len(found[name]["slices"]) for name in names] == [5, 0, 2, 1, 3, 5]
    said = [line for line in (tmp_path / "said").read_text().splitlines() if line.split()[0] in ("eager", "sidefx")]
    first = [f"{name} first steps" for name in ("eager", "sidefx")]
    assert said == [*first, *["eager go", "sidefx go"] * 5, "eager end", "sidefx end"]


def test_processes_end_with_the_benchmark(tmp_path, monkeypatch):
    begun = []

    def start(plan, workload, contender, index, folder):
        if contender == "sidefx":
            raise KeyboardInterrupt
        command = [sys.executable, "-c", PROCESS, contender, str(folder / contender), str(tmp_path / "said")]
        begun.append(Process(command, dict(os.environ), folder / contender, folder / "log", plan.timeout))
        return begun[-1]

    monkeypatch.setattr(rounds, "start", start)
    with pytest.raises(KeyboardInterrupt):
        rounds.measure(PLAN, lambda run: None)
    assert begun[0]._process.returncode == -signal.SIGKILL


def test_a_cold_process_finds_no_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(tmp_path / "used before"))
    seen = []
    monkeypatch.setattr(rounds, "Process", lambda command, environment, *_: seen.append(environment))
    for contender in ("eager", "sidefx"):
        rounds.start(Plan("core", {}), "mlp_tiny", contender, 0, tmp_path)
    folders = {(env["SIDEFX_CACHE_DIR"], env["TORCHINDUCTOR_CACHE_DIR"]) for env in seen}
    assert len(folders) == 2 and all(str(tmp_path / "used before") != folder for folder, _ in folders), folders


def test_guard_cost_is_per_parameter():
    from sidefx_train.bench.guard_cost import GuardCost, guard_cost

    assert GuardCost((10, 100), (3e-6, 12e-6)).per_parameter == pytest.approx(1e-7)
    assert "100 ns for each further one" in str(GuardCost((10, 100), (3e-6, 12e-6)))
    found = guard_cost()
    assert found.parameters == (10, 100) and 0 < found.seconds[0] < found.seconds[1]


def test_imports_before_a_first_step_are_reported():
    from sidefx_train.bench import imports

    text = str(imports.ImportCost(1.0, 1.25, 0.75))
    assert "torch 1.00 s, sidefx_train 1.25 s more" in text and "in 0.75 s" in text
    torch_s, decimal_s = imports._seconds("decimal")
    assert torch_s > decimal_s > 0
