"""A captured step that is slower than eager is left for eager; every call gives what eager gives.

Time is that of a clock that only advances where a backend or an operator of the tests says so.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch import nn

import sidefx_train
from sidefx_train.compile.native import guards_module, native_module, products_module
from sidefx_train.compile.runtime.timing import step_time
from sidefx_train.compile.runtime.timing.paired_blocks import BLOCK, WARM_UP
from sidefx_train.errors import SideFXWarning
from tests.lightning.harness import Classifier, data, quiet_trainer
from tests.support.parity import Program, batches, mlp, photograph, run, same

EAGER_SECONDS = 10.0
"""Time of an eager step."""

FIRST_EAGER = 1 + WARM_UP + BLOCK
"""Index of the first call that runs eagerly with ``warmup="now"``."""

DECIDED_SLOWER, DECIDED_FASTER = 1 + WARM_UP + 6 * BLOCK, 1 + WARM_UP + 4 * BLOCK
"""Calls after which a step is found to be much slower, or faster."""

NOW = [0.0]


@torch.library.custom_op("sidefx_comparison::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    NOW[0] += EAGER_SECONDS
    return x.clone()


@slow.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(step_time, "clock", lambda: NOW[0])
    monkeypatch.setattr(step_time, "waits", lambda: None)


def backend(seconds):
    """Returns a backend whose graphs take ``seconds``, or ``seconds(rows of the batch)``."""

    def compiled(module, examples):
        for node in module.graph.nodes:
            if node.target is torch.ops.sidefx_comparison.slow.default:
                node.target = torch.ops.aten.clone.default
        module.recompile()
        labels = (len(value) for value in examples if isinstance(value, torch.Tensor) and value.dtype is torch.int64)
        taken = seconds(next(labels)) if callable(seconds) else seconds

        def run(*args):
            NOW[0] += taken
            return module(*args)

        return run

    return compiled


FASTER, SLOWER = backend(1.0), backend(20.0)


class Momentum(torch.optim.Optimizer):
    """SGD in operations that a functional graph does not round in another way."""

    def __init__(self, weights):
        super().__init__(weights, {})
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["mean"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            mean = self.state[weight]["mean"]
            mean.mul_(0.9).add_(weight.grad)
            weight.sub_(mean * 0.05)


def program(breaks=False, rows=lambda i: 5):
    """Returns a training step with a slow operator."""
    model, counts = mlp(), {"calls": 0}
    optimizer = Momentum(model.parameters())

    def step(x, y):
        counts["calls"] += 1
        with torch.no_grad():
            seen = slow(x)
        loss = nn.functional.cross_entropy(model(seen), y)
        if breaks:
            os.times()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), seen

    return Program(step, lambda i: batches((rows(i), 6), classes=3)(i), (model, optimizer, counts))


def compared(steps, make=program, between=None, **options):
    """Returns the report, and the warnings, of a run that equals eager's bit for bit after every call."""
    made = []

    def wrap(fn):
        made.append(sidefx_train.compile(fn, **options))
        return made[-1]

    expected = run(make, steps, lambda fn: fn)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", SideFXWarning)
        got = run(make, steps, wrap, between and (lambda program, index: between(made[0], index)))
    for index, (want, have) in enumerate(zip(expected, got, strict=True)):
        same(want.outcome, have.outcome, f"call {index}: result", True)
        same(want.state, have.state, f"call {index}: state", True)
    report = made[0].report()
    assert report.calls == steps == report.replays + report.fallback_count, str(report)
    return report, [str(each.message) for each in said if each.category is SideFXWarning]


def eager_calls(report):
    return {record.code: record.count for record in report.fallbacks}


def test_slower_is_left_for_eager():
    report, said = compared(DECIDED_SLOWER + 4, backend=SLOWER)
    assert eager_calls(report) == {"SFX210": 3 * BLOCK, "SFX209": 4}
    timing = report.captures[0].timing
    assert (timing.decision, timing.captured_seconds, timing.eager_seconds) == ("eager", 20.0, 10.0)
    assert (timing.captured_steps, timing.eager_steps) == (3 * (BLOCK - 1), 3 * (BLOCK - 1))
    (text,) = said
    assert "[SFX209]" in text and "20 s" in text and "10 s" in text and "keep_slower=True" in text


def test_faster_is_kept():
    report, said = compared(DECIDED_FASTER + 4, backend=FASTER)
    assert eager_calls(report) == {"SFX210": 2 * BLOCK} and not said
    timing = report.captures[0].timing
    assert (timing.decision, timing.captured_seconds, timing.eager_seconds) == ("captured", 1.0, 10.0)


def test_a_backend_that_sleeps(monkeypatch):
    """With the clock of the machine."""
    monkeypatch.undo()

    def sleeping(module, examples):
        return lambda *args: time.sleep(0.02) or module(*args)

    report, _ = compared(DECIDED_SLOWER + 2, backend=sleeping, verify=0)
    assert eager_calls(report)["SFX209"] == 2
    assert report.captures[0].timing.captured_seconds >= 0.02 > report.captures[0].timing.eager_seconds > 0


@pytest.mark.parametrize(
    "options",
    [
        {"backend": SLOWER, "keep_slower": True},
        {"backend": SLOWER, "deterministic": True},
        {"backend": "eager"},
        {"backend": "aot_eager"},
    ],
    ids=["keep_slower", "deterministic", "eager", "aot_eager"],
)
def test_not_compared(options):
    report, said = compared(DECIDED_SLOWER + 2, **options)
    assert report.replays == report.calls and report.captures[0].timing is None and not said


@pytest.mark.parametrize("since", [0, FIRST_EAGER - 1])
def test_deterministic_algorithms(since):
    """Also where they are set while times are being compared."""
    try:
        report, _ = compared(
            FIRST_EAGER + 4,
            backend=SLOWER,
            between=lambda step, index: torch.use_deterministic_algorithms(index >= since),
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert report.replays == report.calls


@pytest.mark.parametrize("options", [{"fullgraph": True}, {"on_failure": "raise"}])
def test_being_slow_raises_nothing(options):
    report, said = compared(DECIDED_SLOWER + 2, backend=SLOWER, **options)
    assert eager_calls(report)["SFX209"] == 2 and len(said) == 1 and not report.breaks


def test_a_kept_entry_is_called_directly():
    training = program()
    step = sidefx_train.compile(training.step, backend=FASTER)
    for index in range(DECIDED_FASTER):
        assert step._cache.entries == [] or step._cache.entries[0].dispatch is not None
        step(*training.batch(index))
    (entry,) = step._cache.entries
    assert entry.dispatch is None
    called = []
    entry.replay.__globals__["run"], run_graph = called.append, entry.replay.__globals__["run"]
    entry.replay.__globals__["run"] = lambda inputs: called.append(1) or run_graph(inputs)
    step(*training.batch(0))
    assert called == [1]


class TestParts:
    def test_slower_is_left_for_eager_as_a_whole(self):
        report, said = compared(DECIDED_SLOWER + 12, lambda: program(breaks=True), backend=SLOWER)
        calls = eager_calls(report)
        assert set(calls) == {"SFX209", "SFX210"} and calls["SFX209"] >= 4
        assert report.parts and all(part.calls == report.replays and not part.fallbacks for part in report.parts)
        assert report.captures[0].timing.captured_seconds > 20, "all parts count"
        assert all(capture.timing is None for part in report.parts for capture in part.captures)
        assert len([text for text in said if "SFX209" in text]) == 1

    def test_faster_is_kept(self):
        report, _ = compared(DECIDED_FASTER + 12, lambda: program(breaks=True), backend=FASTER)
        assert eager_calls(report) == {"SFX210": 2 * BLOCK}
        assert report.captures[0].timing.decision == "captured"

    def test_calls_that_capture_a_part_again_do_not_count(self):
        def make():
            training = program()
            inner, modes = training.step, {}

            def step(x, y):
                os.times()
                return inner(x, y), modes["mode"] == "first"

            def batch(i):
                modes["mode"] = "first" if i < 4 else "second"
                return training.batch(i)

            return Program(step, batch, training.watch)

        report, _ = compared(FIRST_EAGER + 2, make, backend=FASTER, verify=0)
        assert len(report.captures) == 1 and sum(len(part.captures) for part in report.parts) > len(report.parts)
        assert eager_calls(report) == {"SFX210": 1}

    def test_a_part_that_runs_eagerly_at_its_limit_is_compared_again(self):
        """The first calls replay all parts, and are faster; later ones need other captures of the rest."""

        def compiled(module, examples):
            whole = any(node.target is torch.ops.sidefx_comparison.slow.default for node in module.graph.nodes)
            return backend(0.5 if whole else 8.0)(module, examples)

        def make():
            training = program()
            inner, modes = training.step, {}

            def step(x, y):
                x = x * 2
                os.times()
                return inner(x, y), modes["mode"] == "0"

            def batch(i):
                modes["mode"] = str(max(i - DECIDED_FASTER - 12, 0) if i % 3 else 0)
                return training.batch(i)

            return Program(step, batch, training.watch)

        report, said = compared(200, make, backend=compiled, verify=0, recapture_limit=2)
        timing = report.captures[0].timing
        assert (timing.decision, timing.statistic) == ("eager", "mean") and timing.captured_seconds > 11
        assert (timing.captured_steps, timing.eager_steps) == (8 * (BLOCK - 1), 8 * (BLOCK - 1))
        assert eager_calls(report)["SFX209"] > 60 and any("SFX209" in text for text in said)

    def test_background(self):
        """Calls in which a part is not compiled yet do not count."""
        native_modules()
        held = []

        def between(step, index):
            step._jobs.wait(60)
            if index < 12:
                held.extend(hold_back(part) for part in step._own_parts())
            else:
                release(held)
                step.wait(60)

        report, _ = compared(
            12 + DECIDED_SLOWER + 8,
            lambda: program(breaks=True),
            between=between,
            backend=SLOWER,
            warmup="background",
        )
        assert eager_calls(report) == {"SFX206": 2, "SFX210": 3 * BLOCK, "SFX209": 6}, str(report)
        timing = report.captures[0].timing
        assert (timing.captured_seconds, timing.captured_steps) == (80.0, 9), "four graphs"


def native_modules():
    for module in (products_module, native_module, guards_module):
        module()


def hold_back(step):
    """Makes the worker of a step appear busy; returns its job."""
    job = step._jobs.job
    if job is not None:
        job.done = lambda: False
    return job


def release(held):
    for job in held:
        if job is not None:
            vars(job).pop("done", None)
    held.clear()


class TestBackground:
    """Eager steps are timed while a worker compiles."""

    TAKES_OVER = 8

    def compared(self, make=program, **options):
        native_modules()
        held = []

        def between(step, index):
            if index < self.TAKES_OVER:
                held.append(hold_back(step))
            elif index == self.TAKES_OVER:
                release(held)
                step.wait(60)

        return compared(self.TAKES_OVER + 40, make, between, warmup="background", **options)

    def test_much_faster_costs_no_further_eager_step(self):
        report, said = self.compared(backend=FASTER)
        assert eager_calls(report) == {"SFX206": self.TAKES_OVER} and not said
        timing = report.captures[0].timing
        assert (timing.decision, timing.eager_seconds, timing.captured_steps) == ("captured", 10.0, BLOCK - 1)

    @pytest.mark.parametrize("seconds", [9.0, 20.0])
    def test_otherwise_blocks_alternate(self, seconds):
        report, _ = self.compared(backend=backend(seconds))
        calls = eager_calls(report)
        assert calls["SFX206"] == self.TAKES_OVER and calls["SFX210"] == (2 if seconds < 10 else 3) * BLOCK
        assert report.captures[0].timing.decision == ("captured" if seconds < 10 else "eager")

    def test_steps_of_other_shapes_do_not_count(self):
        def make():
            return program(rows=lambda i: 5 if i < 2 or i >= self.TAKES_OVER else 7)

        report, _ = self.compared(make, backend=FASTER, dynamic=False)
        assert eager_calls(report)["SFX210"] == 2 * BLOCK


def test_each_shape_is_decided_on_its_own():
    seconds = {5: 1.0, 7: 20.0}
    report, _ = compared(
        2 * DECIDED_SLOWER + 6,
        lambda: program(rows=lambda i: (5, 7)[i % 2]),
        backend=backend(seconds.get),
        dynamic=False,
    )
    decided = [(capture.timing.decision, capture.timing.captured_seconds) for capture in report.captures]
    assert decided == [("captured", 1.0), ("eager", 20.0)]
    assert eager_calls(report) == {"SFX210": 5 * BLOCK, "SFX209": 3}


def test_a_new_shape_is_captured_after_one_was_left():
    """It is left as well; there is one warning for the step."""
    report, said = compared(
        2 * DECIDED_SLOWER + 6,
        lambda: program(rows=lambda i: 5 if i < DECIDED_SLOWER + 3 else 7),
        backend=SLOWER,
        dynamic=False,
    )
    assert [capture.timing.decision for capture in report.captures] == ["eager", "eager"]
    assert eager_calls(report) == {"SFX210": 6 * BLOCK, "SFX209": 6} and len(said) == 1


def test_calls_that_do_more_than_replay_do_not_count():
    """Those that compare results, and those that run eagerly since an assumption failed."""

    def make():
        training = program()
        inner, batch = training.step, training.batch

        def step(x, y, scale):
            if not torch.isfinite(scale):
                return None
            return inner(x, y)

        odd = (3, 6)
        return Program(step, lambda i: (*batch(i), torch.tensor(float("nan") if i in odd else 1.0)), training.watch)

    report, _ = compared(FIRST_EAGER + 2 + 3 + 1, make, backend=FASTER, verify=4)
    assert eager_calls(report) == {"SFX208": 2, "SFX210": 1}, "two failed, and three after the first were compared"


def test_guards_of_an_entry_left_for_eager_are_tested_more_and_more_seldom():
    """A call of another shape is still captured, at the latest after a few calls."""
    training = program(rows=lambda i: 5)
    step = sidefx_train.compile(training.step, backend=SLOWER, dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        for index in range(DECIDED_SLOWER):
            step(*training.batch(index))
        (entry,) = step._cache.entries
        asked, entry.fetch = [], lambda *call, fetch=entry.fetch: asked.append(1) or fetch(*call)
        for index in range(32 + 200):
            step(*training.batch(index))
        assert 32 + 200 / 17 <= len(asked) <= 32 + 20
        other = batches((7, 6), classes=3)
        for index in range(18):
            step(*other(index))
    assert len(step.report().captures) == 2


def test_the_report():
    report, _ = compared(DECIDED_SLOWER + 2, backend=SLOWER)
    assert sidefx_train.report.StepReport is type(report)
    timing = report.to_dict()["captures"][0]["timing"]
    assert timing == {
        "decision": "eager",
        "captured_seconds": 20.0,
        "eager_seconds": 10.0,
        "captured_steps": 9,
        "eager_steps": 9,
        "why_not": "",
        "statistic": "median",
    }
    for text in (str(report), report.details(), report.to_html()):
        assert "compared with eager" in text and "left for eager" in text and "9, 9" in text
    assert "a captured step takes 20 s, an eager one 10 s (medians of 9 and 9 steps)" in report.to_html()


class TestOneSidedTimes:
    """Where the time of a call says nothing, no step runs eagerly."""

    def kept(self, fn, why_not, *args):
        step = sidefx_train.compile(fn, backend=SLOWER)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(FIRST_EAGER + 2):
                step(*args)
        report = step.report()
        assert report.replays == report.calls, str(report)
        assert report.captures[0].timing.why_not == why_not
        assert why_not in report.to_html() and "compared with eager" not in str(report)

    def test_a_model_alone(self):
        self.kept(nn.Linear(6, 3), "its backward runs outside of it", torch.ones(5, 6))

    def test_a_loss_in_parts(self):
        model = nn.Linear(6, 3)

        def loss(x):
            y = model(x)
            os.times()
            return {"loss": y.sum()}

        self.kept(loss, "its backward runs outside of it", torch.ones(5, 6))

    @pytest.mark.parametrize("breaks", [False, True])
    def test_other_devices(self, breaks):
        def step(x):
            if breaks:
                os.times()
            return x.to("meta") * 2

        self.kept(step, "host time is not the time of a step on meta", torch.ones(5, 6))


def test_an_error_ends_the_comparison():
    training = program()
    step = sidefx_train.compile(training.step, backend=SLOWER)
    for index in range(FIRST_EAGER):
        step(*training.batch(index))
    x, y = training.batch(0)
    with pytest.raises(IndexError, match="out of bounds"):
        step(x, y + 3)
    for index in range(DECIDED_SLOWER):
        step(*training.batch(index))
    report = step.report()
    assert report.captures[0].timing.why_not == "a step raised" and eager_calls(report) == {"SFX210": 1}
    assert report.calls == report.replays + 1


def test_calls_of_other_threads_do_not_count():
    others = []

    def compiled(module, examples):
        def run(*args):
            if len(others) == 0 and step.report().calls == FIRST_EAGER - 2:
                others.append(threading.Thread(target=step, args=training.batch(0)))
                others[0].start()
                others[0].join()
            NOW[0] += 20.0
            return module(*args)

        return run

    training = program()
    step = sidefx_train.compile(training.step, backend=compiled, verify=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(DECIDED_SLOWER + 2):
            step(*training.batch(index))
    report = step.report()
    assert len(others) == 1 and report.calls == DECIDED_SLOWER + 3
    assert eager_calls(report) == {"SFX210": 3 * BLOCK, "SFX209": 2}


@pytest.mark.parametrize("calls", [FIRST_EAGER - 2, FIRST_EAGER + 2, DECIDED_SLOWER + 2])
def test_no_model_is_kept_alive(calls):
    guards_module()
    step = sidefx_train.compile(lambda model, x: slow(model(x).detach()), backend=SLOWER)
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(calls):
            step(model, torch.ones(5, 6))
    assert len(step._cache.entries) == 1
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None and not step._cache.entries


def test_lightning(tmp_path):
    """The captured function is timed, and Lightning ends in the same state."""
    states = []
    for callbacks in ([], [sidefx_train.SideFXCompile(backend=SLOWER, warmup="now")]):
        torch.manual_seed(0)
        module = Classifier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quiet_trainer(tmp_path, callbacks=callbacks, max_epochs=4).fit(module, data(32))
        states.append(photograph((dict(module.state_dict()), module.seen)))
    same(*states, "fit", False)
    report = callbacks[0].report
    assert report.calls == 32 and eager_calls(report)["SFX209"] > 0, str(report)
