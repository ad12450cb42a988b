"""warmup="background": training starts at once, and the captured step takes over between two steps."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import sidefx_train
from sidefx_train import torch_compat as compat
from sidefx_train.compile.native import guards_module, native_module, products_module
from sidefx_train.compile.runtime import background_compile
from sidefx_train.errors import BackendError
from tests.support.disk_cache import new_cache


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    new_cache(tmp_path, monkeypatch)
    with compat.inductor_options({"cpp_cache_precompile_headers": False}):
        yield tmp_path


class Training:
    """A model, its optimizer and Python state that a step changes."""

    def __init__(self, fused=True):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=fused)
        self.ran, self.log = 0, []

    def step(self, x, y):
        self.ran += 1
        self.opt.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.opt.step()
        self.log.append(loss.detach())
        return loss.detach()

    def state(self):
        values = [p.detach() for p in self.model.state_dict().values()]
        return [*values, *(v for s in self.opt.state.values() for v in s.values()), *self.log]


def batch(i, rows=6):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(rows, 8, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def run(steps, wait_after=(0, 1), rows=lambda i: 6, **options):
    training = Training()
    step = sidefx_train.compile(training.step, **options) if options else training.step
    for i in range(steps):
        step(*batch(i, rows(i)))
        if options and i in wait_after:
            assert step.wait(300)
    return training, step


def test_equal_to_eager_bit_for_bit():
    expected, _ = run(8)
    found, step = run(8, backend="eager", warmup="background")
    assert found.ran == expected.ran == 8
    for a, b in zip(found.state(), expected.state(), strict=True):
        assert torch.equal(a, b)
    report = step.report()
    assert (report.calls, report.replays, report.fallback_count) == (8, 6, 2)
    assert [record.code for record in report.fallbacks] == ["SFX206"]
    assert not report.breaks


def test_inductor_compiled_by_a_process_equals_eager_and_now(empty_cache, monkeypatch):
    started = []
    begin = background_compile.start
    monkeypatch.setattr(background_compile, "start", lambda *given: started.append(begin(*given)) or started[-1])
    expected, _ = run(8)
    found, step = run(8, warmup="background")
    now, _ = run(8, warmup="now")
    assert [type(job) for job in started] == [background_compile._Process]
    for a, b, c in zip(found.state(), expected.state(), now.state(), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5)
        assert torch.allclose(c.double(), b.double(), rtol=1e-4, atol=1e-5)
    report = step.report()
    assert (report.calls, report.replays) == (8, 6)
    assert "in the background" in report.captures[0].seconds


def test_what_an_earlier_process_compiled_is_taken_at_once(empty_cache):
    run(3, warmup="background")
    _, step = run(3, wait_after=(0,), warmup="background")
    assert (step.report().replays, step.report().fallback_count) == (2, 1)


def test_steps_run_eagerly_while_the_worker_is_busy(monkeypatch):
    import threading

    go = threading.Event()
    compile_graphs = background_compile.compile_capture.compile_graphs

    def slow(captured, config, compiler, *rest):
        if compiler is background_compile.build:
            assert go.wait(60)
        return compile_graphs(captured, config, compiler, *rest)

    monkeypatch.setattr(background_compile.compile_capture, "compile_graphs", slow)
    products_module()
    native_module()
    guards_module()
    training = Training()
    step = sidefx_train.compile(training.step, backend="eager", warmup="background")
    for i in range(5):
        step(*batch(i))
    assert (step.report().replays, training.ran) == (0, 5)
    assert not step.wait(0.01)
    go.set()
    assert step.wait(60)
    step(*batch(5))
    assert (step.report().replays, training.ran) == (1, 6)


def test_a_world_that_changed_meanwhile_is_captured_again():
    """The guards are checked when the captured step takes over."""

    def both(**options):
        training = Training()
        training.scale = 1.0

        def step(x, y):
            training.opt.zero_grad()
            loss = nn.functional.cross_entropy(training.model(x), y) * training.scale
            loss.backward()
            training.opt.step()
            training.log.append(loss.detach())

        call = sidefx_train.compile(step, **options) if options else step
        for i in range(10):
            if i == 2:
                training.scale = 3.0
            call(*batch(i))
            if options:
                call.wait(60)
        return training, call

    expected, _ = both()
    found, step = both(backend="eager", warmup="background")
    for a, b in zip(found.state(), expected.state(), strict=True):
        assert torch.equal(a, b)
    assert step.report().replays > 0


def test_another_batch_size_is_compiled_in_the_background_too():
    def rows(i):
        return 6 if i < 4 else 3

    expected, _ = run(10, rows=rows)
    found, step = run(10, wait_after=range(10), rows=rows, backend="eager", warmup="background")
    for a, b in zip(found.state(), expected.state(), strict=True):
        assert torch.equal(a, b)
    assert step.report().replays >= 6


@pytest.mark.parametrize("where", ["thread", "process"])
def test_a_worker_that_fails_leaves_a_line_and_training_goes_on(where, empty_cache, monkeypatch):
    def broken(*given):
        raise BackendError("SFX201", "out of luck")

    expected, _ = run(8)
    monkeypatch.setattr(background_compile, "build", broken)
    monkeypatch.setattr(background_compile, "hand_over", broken)
    options = {"backend": "eager"} if where == "thread" else {}
    found, step = run(8, wait_after=range(8), warmup="background", **options)
    assert found.ran == 8
    for a, b in zip(found.state(), expected.state(), strict=True):
        assert torch.equal(a, b)
    report = step.report()
    assert [(record.code, record.count) for record in report.breaks] == [("SFX201", 2)]
    assert "out of luck" in report.breaks[0].reason
    assert (report.replays, report.fallback_count) == (0, 8)


def test_a_graph_that_cannot_be_handed_over_is_compiled_by_a_thread(empty_cache, monkeypatch):
    """A recurrent layer is an operator written in Python; if C++ cannot call it, the graph is not one library."""
    for module in (compat, compat.inductor.dispatched_calls):
        monkeypatch.setattr(module, "calls_dispatcher", lambda: False)

    def trained(**options):
        torch.manual_seed(0)
        model = nn.LSTM(4, 4, batch_first=True)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            opt.zero_grad()
            loss = model(x)[0].square().sum()
            loss.backward()
            opt.step()
            return loss.detach()

        call = sidefx_train.compile(step, **options) if options else step
        losses = []
        for i in range(6):
            losses.append(float(call(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(i)))))
            if options:
                assert call.wait(300)
        return losses, call

    expected, _ = trained()
    found, call = trained(warmup="background")
    assert found == pytest.approx(expected, rel=1e-4)
    assert call.report().replays > 0 and not call.report().breaks


def test_a_forked_worker_has_compile_threads_of_its_own(tmp_path, monkeypatch):
    """Inductor's threads do not exist in a forked process: work submitted to them would never finish."""
    import os

    from torch._inductor.async_compile import AsyncCompile

    def compile_on_a_thread(*given):
        return AsyncCompile.pool().submit(bool, 1).result(timeout=20)

    assert compile_on_a_thread()
    monkeypatch.setattr(background_compile, "hand_over", compile_on_a_thread)
    said = tmp_path / "said.txt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the test needs these threads
        child = os.fork()
    if child == 0:
        background_compile._work([None], None, str(said))
    _, status = os.waitpid(child, 0)
    assert status == 0 and not said.exists()


def test_a_killed_worker_counts_as_failed(empty_cache, monkeypatch):
    import os
    import signal

    monkeypatch.setattr(background_compile, "hand_over", lambda *given: os.kill(os.getpid(), signal.SIGKILL))
    found, step = run(6, wait_after=range(6), warmup="background")
    assert found.ran == 6
    assert "ended with status" in step.report().breaks[0].reason


def test_fullgraph_raises_what_the_worker_met(monkeypatch):
    def broken(*given):
        raise BackendError("SFX201", "out of luck")

    monkeypatch.setattr(background_compile, "build", broken)
    with pytest.raises(BackendError, match="out of luck"):
        run(4, backend="eager", warmup="background", fullgraph=True)


def test_an_error_of_the_step_is_raised_once_and_changes_what_eager_changes():
    def failing(training, i):
        x, y = batch(i)
        return x, y + 100 if i == 4 else y

    outcomes = []
    for options in ({}, {"backend": "eager", "warmup": "background"}):
        training = Training()
        step = sidefx_train.compile(training.step, **options) if options else training.step
        errors = []
        for i in range(7):
            try:
                step(*failing(training, i))
            except IndexError as error:
                errors.append((i, str(error)))
            if options:
                step.wait(60)
        outcomes.append((errors, training.ran, [t.tolist() for t in training.state()]))
    assert outcomes[0] == outcomes[1]
    assert [i for i, _ in outcomes[0][0]] == [4]


def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_why():
    seen = []

    def step(x):
        if x.dot(x) > 0:
            seen.append(1)
        return x + 1

    call = sidefx_train.compile(step, backend="eager", warmup="background")
    with pytest.warns(sidefx_train.errors.SideFXWarning):
        for _ in range(4):
            assert torch.equal(call(torch.ones(2)), torch.full((2,), 2.0))
            call.wait(60)
    assert len(seen) == 4
    assert call.report().breaks[0].code == "SFX101"


def test_reset_forgets_the_worker():
    products_module()
    native_module()
    guards_module()
    training = Training()
    step = sidefx_train.compile(training.step, backend="eager", warmup="background")
    for i in range(2):
        step(*batch(i))
    step.reset()
    assert step.wait(1)
    assert step.report().calls == 0


def test_a_wrong_option_is_named():
    with pytest.raises(ValueError, match="warmup='later'"):
        sidefx_train.compile(lambda: None, warmup="later")


PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
from tests.unit.runtime.test_background_compile import Training, batch, sidefx_train
from sidefx_train.compile.runtime import background_compile as background
from sidefx_train.compile.native import guards_module, native_module, products_module
{setup}
products_module(), native_module(), guards_module()
training = Training()
step = sidefx_train.compile(training.step, warmup="background")
for i in range(2):
    step(*batch(i))
assert step._jobs.job is not None
print("worker", getattr(step._jobs.job, "_child", 0), time.time())
{end}
"""


ENDS_AND_KINDS = [
    # The end of the process does not depend on the kind of its worker: two of four combinations have all values.
    pytest.param(end, kind, marks=pytest.mark.slow if bool(end) == (kind == "process") else ())
    for kind in ("process", "thread")
    for end in ("", "raise KeyboardInterrupt")
]


@pytest.mark.parametrize(("end", "kind"), ENDS_AND_KINDS)
@pytest.mark.every(2)
def test_the_process_ends_without_waiting_for_the_worker(empty_cache, kind, end):
    root = str(Path(__file__).parents[3])
    if kind == "process":
        setup = "background.hand_over = lambda *given: time.sleep(60)"
    else:
        setup = "background.can_be_handed_over = lambda *given: False\nbackground.build = lambda *given: time.sleep(60)"
    program = PROGRAM.format(root=root, setup=setup, end=end)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=root)
    ended = time.time()
    said = done.stdout.split()
    assert said[:1] == ["worker"], done.stderr
    assert ended - float(said[2]) < 30
    assert done.returncode == (0 if not end else 130) or done.returncode == -2
    if kind == "process":
        assert not Path(f"/proc/{said[1]}").exists() or "Z" in Path(f"/proc/{said[1]}/stat").read_text()
