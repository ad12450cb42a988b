"""``StepReport``: counting, printing, JSON."""

from __future__ import annotations

import json

from rich.console import Console

from sidefx_train.errors import Location
from sidefx_train.report import ChoiceRecord, CudaGraphRecord, GuardRecord, StepReport

HERE = Location("train.py", 12, "step")


def filled() -> StepReport:
    report = StepReport(name="train_step")
    report.record_capture(
        nodes={"capture": 30},
        seconds={"capture": 0.25, "lower": 1.0},
        inputs={"static": 4, "tensor": 2},
        effects=["sets stats['n']", "sets stats['n']"],
        guards=[GuardRecord("model.training", "equal", HERE)],
        sources={"residual": "one"},
        choices=[
            ChoiceRecord("(2, 3) @ (3, 4)", 5, 2, "tiles", {"mkl": 4e-6, "tiles": 1.5e-6}),
            ChoiceRecord("(9, 3) @ (3, 4)", 1, 2, "mkl", {}),
        ],
    )
    report.record_capture(
        trigger="model.training changed",
        graphs=2,
        guards=[GuardRecord("model.training", "equal", HERE)],
        sources={"residual": "two"},
    )
    for _ in range(3):
        report.record_break("SFX101", "if loss > 1", HERE)
    report.record_fallback("SFX101", "if loss > 1", HERE, count=2)
    report.record_fallback("SFX101", "if loss > 1", HERE)
    report.record_recapture("model.training", True, False, HERE, 0.5)
    return report


def test_equal_records_are_counted():
    report = filled()
    assert [(b.code, b.count) for b in report.breaks] == [("SFX101", 3)], report.breaks
    assert report.fallback_count == 3 and len(report.fallbacks) == 1, report.fallbacks
    assert report.effects == ["sets stats['n']"] and len(report.guards) == 1, "effects and guards are listed once"
    assert report.graph_count == 3 and report.capture_seconds == 1.25, str(report)


def test_sources_of_later_captures_do_not_hide_earlier_ones():
    assert filled().sources() == {"residual": "one", "residual#1": "two"}, filled().sources()


def test_printed_report_is_short():
    """The counts in a line, then captures, graph breaks and recaptures; each recapture is a sentence."""
    text = str(filled())
    assert text.splitlines()[0] == (
        "train_step [inductor]: 3 graphs, 1 graph break, 1 recapture; 0 calls: 0 replayed, 3 eager; 1.25 s capturing"
    )
    for part in ("captures", "graph breaks", "recaptures", "SFX101", "data-dependent branch"):
        assert part in text, f"{part!r} is not in:\n{text}"
    said = "model.training changed from True to False, read at train.py:12 in step; captured again in 0.50 s"
    assert said in text, text
    for part in ("guards", "autotuning", "stats['n']", "functionalize"):
        assert part not in text, f"{part!r} is among the first things that are shown:\n{text}"


def test_a_caveat_of_a_capture_is_shown_at_once():
    report = StepReport()
    report.record_capture(caveats=["assumes conditions on tensors"], notes=["tiny step"])
    assert "assumes conditions" in str(report) and "tiny step" not in str(report), str(report)
    assert "tiny step" in report.details(), report.details()


def test_what_a_replay_launches_is_shown():
    report = StepReport()
    graph = CudaGraphRecord(replays=7, recordings=1, plain={"first call": 1}, memory=2**20, reserved=2**22)
    graph.kernels, graph.library_calls = 12, 5
    report.record_capture(cuda_graph=graph)
    (row,) = [line for line in str(report).splitlines() if "12 kernels, 5 library calls" in line]
    assert "first call 1" in row and "1.0, 4.0" in row, str(report)


def test_html_has_tables_and_no_markup_of_the_users():
    report = filled()
    report.record_fallback("SFX103", "calls <script>", None)
    page = report.to_html()
    assert page.count("<table>") >= 6 and page.count("<details>") == 4, page
    assert "<script>" not in page and "&lt;script&gt;" in page, "text of the user's is markup"
    assert "<pre" not in page and report._repr_html_() == page, page


def test_details_say_it_all():
    text = filled().details()
    for part in (
        "train_step",
        "3 graphs",
        "SFX101",
        "data-dependent branch",
        "train.py:12 in step",
        "stats['n']",
        "tiles 1.5, mkl 4.0",
    ):
        assert part in text, f"{part!r} is not in:\n{text}"
    assert "nothing: the time limit was reached" in text, "a product that was not measured looks as if it was"
    assert "\x1b" not in text, "print(report) has colour codes"


def test_markup_in_users_text_is_text():
    report = StepReport()
    report.record_fallback("SFX103", "calls x[bold]y[/bold]", None)
    assert "x[bold]y[/bold]" in str(report), str(report)


def test_long_tables_are_cut_but_complete_as_data():
    report = StepReport()
    report.record_capture(guards=[GuardRecord(f"value_{i}", "equal") for i in range(50)])
    text = report.details()
    assert "38 more" in text and "value_49" not in text, text
    assert "value_49" in report.to_html(), "HTML is cut"
    assert len(report.to_dict()["guards"]) == 50, "to_dict is cut"


def test_batches_that_were_prefetched_are_a_row():
    report = StepReport()
    assert "prefetched" not in str(report)
    report.prefetches.prefetched, report.prefetches.used = 5, 3
    report.prefetches.drop("late")
    report.prefetches.drop("late")
    report.prefetches.refused = "no memory"
    (row,) = [line for line in str(report).splitlines() if "late" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["5", "3", "2", "late 2; no more: no memory"], row
    assert report.to_dict()["prefetches"]["dropped"] == {"late": 2}


def test_json_and_rich():
    data = json.loads(json.dumps(filled().to_dict()))
    assert data["breaks"][0]["location"] == {"file": "train.py", "line": 12, "function": "step"}, data["breaks"]
    choice = {"what": "(9, 3) @ (3, 4)", "count": 1, "threads": 2, "chosen": "mkl", "seconds": {}, "why_not": ""}
    assert data["captures"][0]["choices"][1] == choice, data["captures"]
    assert (data["graph_count"], data["fallback_count"], data["sources"]) == (3, 3, ["residual", "residual#1"]), data
    console = Console(record=True, width=120, quiet=False, file=open("/dev/null", "w"))
    console.print(filled())
    assert "train_step" in console.export_text(), "rich prints the report itself"


def test_other_arguments_are_not_called_global_state():
    import torch

    import sidefx_train

    step = sidefx_train.compile(lambda *given: given[0].sin(), backend="eager")
    step(torch.ones(1))
    step(torch.ones(1), 2)
    assert [record.source for record in step.report().recaptures] == ["the call"]
