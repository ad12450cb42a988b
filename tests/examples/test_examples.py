"""The examples run without errors."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def load(monkeypatch, tmp_path):
    """Imports an example as ``python examples/name.py`` would, in an empty folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")

    def load_example(name: str):
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load_example


def test_plain_loop(load, capsys):
    losses = load("plain_loop").main(steps=60, backend="eager")
    assert losses[-1] < losses[0] - 0.1, f"the loss went from {losses[0]} to {losses[-1]}"
    assert "60 steps" in capsys.readouterr().out, "the counter is not right"


def test_fit(load):
    result = load("fit").main(epochs=2, progress=False)
    assert result.metrics["val_accuracy"] > 0.7, result.metrics
    assert "SFX206" in {record.code for record in result.report.fallbacks} <= {"SFX206", "SFX210"}, str(result.report)


def test_quickstart(load, capsys, tmp_path):
    assert load("quickstart").main(["--steps", "12", "--rows", "2", "--backend", "eager", "--cpu"]) == 0, "exit status"
    shown = capsys.readouterr().out
    assert "speed-up" in shown and "recaptures" in shown, shown
    page = (tmp_path / "runs/quickstart/report.html").read_text()
    assert page.count("<svg") == 2 and "http" not in page.replace("http://www.w3.org", ""), "the page is not on its own"
    assert 'class="sidefx-report"' in page and "┏" not in page, "the report is a box of text"
    assert "white-space: pre-wrap" in page, "long lines of the sample are cut"
    ends = [float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="middle"', page)]
    assert max(ends) <= 860 - 20, "a label at the right edge is cut"


def test_percentile_bands(load):
    page = load("page")
    found = page.bands([1.0] * 99 + [50.0], groups=10)
    assert len(found) == 10 and all(high == 1.0 for *_, high in found), "one slow step of ten stretches the band"
    assert page.bands([1.0, 2.0, 3.0]) == [(0.0, 1.0, 1.0, 1.0), (1.0, 2.0, 2.0, 2.0), (2.0, 3.0, 3.0, 3.0)]


def test_quickstart_fits_agree(load):
    """Same losses and the same Python counter, one graph, nothing eager."""
    quickstart = load("quickstart")
    from argparse import Namespace

    from sidefx_train import SideFXCompile

    text, args = quickstart.corpus(20_000), Namespace(steps=8, rows=2, cpu=True)
    eager = quickstart.fit("eager", text, args, None)
    compiler = SideFXCompile(backend="eager", warmup="now", fullgraph=True, on_failure="raise")
    ours = quickstart.fit("captured", text, args, compiler)
    assert eager.losses == ours.losses, "the losses differ"
    assert eager.model.characters_seen == ours.model.characters_seen == 8 * 2 * quickstart.LENGTH, "the counter differs"
    assert (ours.report.graph_count, ours.report.fallback_count) == (1, 0), str(ours.report)


@pytest.mark.parametrize("low, high", [(0.0, 399.0), (0.0, 2999.0), (1.71, 4.68), (4.0, 4.000001), (-0.3, 0.2)])
def test_axes_have_round_numbers(load, low, high):
    ticks = load("page")._ticks(low, high)
    assert ticks[0] <= low + 1e-9 and ticks[-1] >= high - 1e-9 and 4 <= len(ticks) <= 11, ticks
    step = ticks[1] - ticks[0]
    assert f"{step:.0e}"[0] in "125", f"the distance of two labels is {step}"


def test_speed_counts_the_steps_that_were_replayed(load):
    """A short fit ends soon after the graph is compiled in the background."""
    quickstart = load("quickstart")
    from sidefx_train import StepReport

    report = StepReport()
    report.record_fallback("SFX206", "the graph is not compiled yet", count=8)
    seconds = [1.0] * 8 + [0.1] * 2
    assert quickstart.Fit("captured", None, [], seconds, report).steps_per_second == pytest.approx(10.0)
    assert quickstart.Fit("eager", None, [], seconds).steps_per_second == pytest.approx(1.0)
