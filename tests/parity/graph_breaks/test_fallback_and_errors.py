"""Steps that cannot be captured run eagerly, with one warning and counts; steps that raise, raise as in eager."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from sidefx_train.errors import BackendError, GraphBreakError, SideFXWarning
from tests.support.parity import Program, batches, classifier, mlp, parity, photograph, same

HERE = "test_fallback_and_errors.py"


class Outside:
    """An operation that cannot be captured: it needs the numbers, through a C library."""

    @staticmethod
    def numpy_mean(x: torch.Tensor) -> float:
        return float(np.unique(x.detach().numpy()).mean())


def uncapturable() -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log: list[object] = []
    state = {"calls": 0}

    def step(x, y):
        state["calls"] += 1
        log.append("before")
        loss = F.cross_entropy(model(x), y)
        log.append(Outside.numpy_mean(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.append("after")
        return loss.detach()

    return Program(step, batches((5, 6), classes=3), (model, optimizer, log, state))


def branching() -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log: list[str] = []

    def step(x, y):
        log.append("start")
        loss = F.cross_entropy(model(x), y)
        if loss > 1.1:
            log.append("high")
            loss = loss * 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(step, batches((5, 6), classes=3), (model, optimizer, log))


FAILING = {"uncapturable": uncapturable, "branching": branching}


@pytest.mark.parametrize("name", FAILING)
def test_falls_back_to_eager(name):
    """Right results, no side effect done twice, warned once, every eager step counted."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = parity(FAILING[name], whole=False, captures=None)
    ours = [w for w in caught if issubclass(w.category, SideFXWarning)]
    assert len(ours) == 1, f"{len(ours)} warnings: {[str(w.message) for w in ours]}"
    message = str(ours[0].message)
    assert HERE in message and "SFX" in message, f"no place or code in: {message}"
    assert report.breaks or report.fallbacks, str(report)
    assert report.replays + report.fallback_count == report.calls, str(report)


@pytest.mark.parametrize("name", FAILING)
def test_fullgraph_names_line_and_reason(name):
    program = FAILING[name]()
    before = photograph(program.watch)
    compiled = sidefx_train.compile(program.step, backend="eager", fullgraph=True)
    with pytest.raises(GraphBreakError) as caught:
        compiled(*program.batch(0))
    error = caught.value
    assert error.location is not None and error.location.file.endswith(HERE), f"{error}"
    assert error.location.line > 0 and error.reason, f"{error}"
    assert str(error.location.line) in str(error), f"{error}"
    same(before, photograph(program.watch), "state after the refused step", True)


def test_backend_that_raises():
    def broken(gm, example_inputs):
        raise RuntimeError("no code today")

    def make() -> Program:
        model = mlp()
        log: list[int] = []
        made = classifier(model, torch.optim.SGD(model.parameters(), lr=0.1), batches((5, 6), classes=3), log)
        inner = made.step

        def step(x, y):
            log.append(1)
            return inner(x, y)

        made.step = step
        return made

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Exact: the fallback is eager itself.
        eager = _drive(make, None)
        ours, report = _drive(make, broken)
    same(eager, ours, "state", True)
    assert report.fallback_count == report.calls == 10, str(report)
    assert "SFX201" in {record.code for record in report.fallbacks}, str(report)
    assert "no code today" in str(report), str(report)
    assert len([w for w in caught if issubclass(w.category, SideFXWarning)]) == 1, "warned other than once"


def test_backend_that_raises_is_not_asked_again_and_again():
    """Each attempt takes as long as a compilation, whatever else has changed since."""
    asked: list[int] = []

    def broken(gm, example_inputs):
        asked.append(1)
        raise RuntimeError(f"no code for {len(asked)}")

    notes = {"last": torch.zeros(2)}

    def step(x):
        return x.sin() + notes["last"]

    compiled = sidefx_train.compile(step, backend=broken)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        for call in range(8):
            assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin() + call)
            notes["last"] = torch.full((2,), call + 1.0)
    assert len(asked) == 2
    assert compiled.report().fallback_count == 8


def test_backend_that_raises_with_on_failure_raise():
    def broken(gm, example_inputs):
        raise RuntimeError("no code today")

    model = nn.Linear(2, 2)
    compiled = sidefx_train.compile(lambda x: model(x).detach(), backend=broken, on_failure="raise")
    with pytest.raises(sidefx_train.errors.BackendError, match="no code today"):
        compiled(torch.ones(1, 2))


def test_compiled_code_that_raises_later():
    """A backend whose code fails at run time: the step runs eagerly, without repeated effects."""
    calls = {"n": 0}

    def flaky(gm, example_inputs):
        def run(*args):
            calls["n"] += 1
            if calls["n"] == 3:
                raise RuntimeError("flaky kernel")
            return gm(*args)

        return run

    def make() -> Program:
        model = mlp()
        log: list[int] = []
        made = classifier(model, torch.optim.AdamW(model.parameters(), lr=0.01), batches((5, 6), classes=3), log)
        inner = made.step

        def step(x, y):
            log.append(len(log))
            return inner(x, y)

        made.step = step
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        eager = _drive(make, None)
        ours, report = _drive(make, flaky)
    same(eager, ours, "state", False)
    assert report.fallback_count >= 1, str(report)


def _drive(make, backend):
    torch.manual_seed(0)
    program = make()
    step = program.step if backend is None else sidefx_train.compile(program.step, backend=backend)
    outs = [step(*program.batch(i)) for i in range(10)]
    picture = photograph((outs, program.watch))
    return picture if backend is None else (picture, step.report())


def bad_label(index: int) -> tuple:
    x, y = batches((5, 6), classes=3)(index)
    if index in (4, 7):
        y = y.clone()
        y[2] = 99
    return x, y


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_step_that_raises(backend):
    """A bad label index: eager's exception, and model, optimizer and Python state as eager leaves them."""

    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        log: list[str] = []
        state = {"calls": 0}

        def step(x, y):
            state["calls"] += 1
            log.append("started")
            loss = F.cross_entropy(model(x), y)
            log.append("loss")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.append("done")
            return loss.detach()

        return Program(step, bad_label, (model, optimizer, log, state))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        report = parity(make, backend=backend, whole=False, captures=None)
    assert report.replays >= 8, str(report)


def test_step_that_raises_at_the_first_call():
    def make() -> Program:
        model = mlp()
        made = classifier(model, torch.optim.AdamW(model.parameters(), lr=0.01), batches((5, 6), classes=3))
        data = made.batch
        made.batch = lambda i: (data(i)[0], data(i)[1] + (50 if i == 0 else 0))
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        parity(make, whole=False, captures=None)


@pytest.mark.parametrize("kind", ["python", "shape", "assert"])
def test_python_exception_in_the_step(kind):
    def make() -> Program:
        model = mlp()
        log: list[int] = []

        def step(x, y, index):
            log.append(index)
            out = model(x)
            if index == 5 and kind == "python":
                raise ValueError(f"call {index}")
            if kind == "assert":
                assert index != 5, "not five"
            if kind == "shape" and index == 5:
                out = out @ x
            return out.detach()

        data = batches((5, 6), classes=3)
        return Program(step, lambda i: (*data(i), i), (model, log))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        parity(make, whole=False, captures=None)


def test_training_goes_on_after_an_error():
    def make() -> Program:
        model = mlp()
        return classifier(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), bad_label)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        report = parity(make, whole=False, captures=None, steps=14)
    assert report.replays >= 12, str(report)


def test_recapture_limit():
    """A value that changes every call is no longer captured, with one warning, and is counted."""
    model = nn.Linear(2, 2)

    def step(x, number):
        return model(x).detach() * number.real

    compiled = sidefx_train.compile(step, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(40):
            out = compiled(torch.ones(1, 2), complex(index, 1))
            assert torch.equal(out, step(torch.ones(1, 2), complex(index, 1))), f"call {index}"
    report = compiled.report()
    assert report.calls == 40 and report.replays + report.fallback_count == 40, str(report)
    assert len(report.captures) <= 16, str(report)
    assert "SFX203" in {record.code for record in report.fallbacks}, str(report)
    assert len([w for w in caught if issubclass(w.category, SideFXWarning)]) == 1, "warned other than once"


def test_pickling_and_copying_the_model_still_work():
    """Compiling leaves nothing on the model that breaks copies or checkpoints."""
    model = mlp()
    made = classifier(model, torch.optim.AdamW(model.parameters(), lr=0.01), batches((5, 6), classes=3))
    keys = list(model.state_dict())
    compiled = sidefx_train.compile(made.step, backend="eager")
    compiled(*made.batch(0))
    assert list(model.state_dict()) == keys, "state_dict keys changed"
    copied = copy.deepcopy(model)
    same(photograph([*model.parameters()]), photograph([*copied.parameters()]), "deep copy", True)
    assert type(model) is nn.Sequential and "forward" not in vars(model), "the model was changed"


def test_options_are_checked():
    with pytest.raises(ValueError, match="backend"):
        sidefx_train.compile(lambda x: x, backend="nonsense")


def test_decorator_forms():
    @sidefx_train.compile
    def plain(x):
        """doc"""
        return x + 1

    @sidefx_train.compile(backend="eager")
    def optioned(x):
        return x + 1

    assert plain.__name__ == "plain" and plain.__wrapped__.__doc__ == "doc", "a CompiledStep keeps its function's name"
    assert torch.equal(optioned(torch.zeros(2)), torch.ones(2)), "decorated with options"


def test_warning_points_at_the_call():
    """The warning's location is the user's call, in the slow path and after a graph that failed."""
    import os

    model = mlp()

    def step(x, y, clock):
        if clock:
            os.times()
        return F.cross_entropy(model(x), y).detach()

    compiled = sidefx_train.compile(step, backend="eager")
    x, y = torch.randn(3, 6), torch.tensor([0, 1, 2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(x, y, True)
    assert [w.filename for w in caught if w.category is SideFXWarning] == [__file__], [str(w) for w in caught]


def test_an_error_of_the_step_itself_is_not_called_internal():
    seen = {"missing": 0}

    def step(x, kind):
        seen["missing"] += 1
        if kind == "raise":
            raise ValueError(f"no {kind}")
        if kind == "key":
            return seen["nothing"]
        if kind == "name":
            return undefined_name  # noqa: F821
        return x * 2

    for kind, wanted in (("raise", ValueError), ("key", KeyError), ("name", NameError)):
        compiled = sidefx_train.compile(step, backend="eager")
        before = seen["missing"]
        with pytest.raises(wanted):
            compiled(torch.ones(2), kind)
        assert seen["missing"] == before + 1, "its effects are made once"
        report = compiled.report()
        assert [record.code for record in report.fallbacks] == ["SFX202"], str(report)
        assert wanted.__name__ in report.fallbacks[0].reason and not report.breaks
        assert torch.equal(compiled(torch.ones(2), "fine"), torch.full((2,), 2.0))
        assert compiled.report().calls == 2 == compiled.report().replays + compiled.report().fallback_count


def test_an_error_of_torch_that_the_step_catches_is_eagers():
    """Torch's fake tensor rules raise ``ValueError`` where its kernels raise ``RuntimeError``, with another text."""

    def make() -> Program:
        said: list[str] = []

        def step(x):
            try:
                said.append("before")
                x = torch.nn.functional.pad(x, (1, 1))[:, 1:-1].view(3, 4)
            except ValueError as error:
                said.append(f"wrong: {error}")
            except RuntimeError as error:
                said.append(str(error))
            return x + 1

        return Program(step, lambda index: (torch.ones(4, 3),), (said,))

    parity(make, steps=3, captures=None, whole=False)


_UNREAD = {
    "a number that is a truth value": lambda x, y: x - y.flag,
    "reversed": lambda x, y: y.flag - x,
    "in place": lambda x, y: x.clone().sub_(y.flag),
    "two masks": lambda x, y: (x > 0) - (x > 1),
    "a mask and a number": lambda x, y: (x > 0).sub(1),
    "a negated mask": lambda x, y: -(x > 0),
    "a comparison of complex numbers": lambda x, y: torch.complex(x, x) > 0,
    "what works": lambda x, y: (x > 0) * y.flag + x.masked_fill(x > 0, y.flag),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", _UNREAD)
def test_operations_that_nothing_reads_raise_as_in_eager(name, backend, capfd):
    """They are not in the graph, and fake tensors accept more than the kernels do."""
    owner = types.SimpleNamespace()

    def step(x):
        _UNREAD[name](x, owner)
        return x * 2

    compiled = sidefx_train.compile(step, backend=backend)
    for owner.flag in (1, True, True):
        found = []
        for run in (step, compiled):
            try:
                found.append(("returned", run(torch.ones(2)).tolist()))
            except (RuntimeError, NotImplementedError) as error:
                found.append((type(error).__name__, str(error)))
        assert found[1] == found[0]
    assert "Traceback" not in capfd.readouterr().err


def test_groups_handled_over_a_break():
    """The state of an exception group that a part after a break gets: the group, its exceptions, the remaining ones."""

    def step(x, n):
        seen = []
        try:
            raise ExceptionGroup("some", [ValueError(n), KeyError("new")])
        except* ValueError as group:
            os.times()
            seen.append((group.message, [error.args for error in group.exceptions]))
        except* KeyError as group:
            os.times()
            seen.append(len(group.exceptions))
        return x * 2, seen

    compiled = sidefx_train.compile(step, backend="eager")
    for n in (1, 1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SideFXWarning)
            assert str(compiled(torch.ones(2), n)) == str(step(torch.ones(2), n))
    assert compiled.report().replays == 3, str(compiled.report())
    assert not {"SFX204", "SFX201"} & {found.code for found in compiled.report().breaks}


def test_an_error_raised_in_c_while_another_is_handled_over_a_break():
    def step(x, names):
        try:
            names.remove(0)
        except KeyError as first:
            os.times()
            try:
                names.remove(1)
            except KeyError as second:
                found = (second.__context__ is first, first.__context__, second.args)
            x = x + 1
        return x, found

    compiled = sidefx_train.compile(step, backend="eager")
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SideFXWarning)
            assert str(compiled(torch.ones(2), {3})) == str(step(torch.ones(2), {3}))
    assert compiled.report().replays == 3, str(compiled.report())
    assert "SFX204" not in {found.code for found in compiled.report().breaks}


@pytest.mark.parametrize("handles", ["with", "try", "raise"])
def test_a_failed_capture_of_a_step_that_handled_exceptions_is_not_repeated(handles):
    """Regression: what the capture itself was handling was taken for what the caller handles, which changes."""
    weight = torch.ones(3, requires_grad=True)

    @contextlib.contextmanager
    def region():
        yield

    def step(x):
        if handles == "with":
            with region():
                loss = ((weight * x).tanh() * weight).sum()
        else:
            try:
                loss = ((weight * x).tanh() * weight).sum()
                if handles == "raise":
                    raise KeyError
            except KeyError:
                sys.exception()
        (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
        with torch.no_grad():
            weight.sub_(gradient, alpha=0.1)
        return loss  # leaves with a history whose weight has changed

    captured = sidefx_train.compile(step, backend="eager")
    tries = []
    capture = captured._capture_now
    captured._capture_now = lambda *call: tries.append(call) or capture(*call)
    with pytest.warns(sidefx_train.errors.SideFXWarning, match="SFX107"):
        for _ in range(5):
            captured(torch.ones(3))
    assert len(tries) == 1 and captured.report().fallback_count == 5, captured.report()


def test_a_storage_made_of_another_by_a_class_of_the_step():
    def step():
        class Own(torch._C.StorageBase):
            @staticmethod
            def __new__(cls, *args):
                return super().__new__(cls, *args)

        return len(Own(torch.UntypedStorage(5)))

    compiled = sidefx_train.compile(step, backend="eager")
    with pytest.warns(SideFXWarning, match="creates a storage from another one"):
        assert compiled() == 5
    assert compiled() == 5


@pytest.mark.parametrize("handles", [False, True])
def test_an_internal_error_is_not_repeated_while_what_it_read_is_the_same(handles, monkeypatch):
    attempts = []

    def broken(*args, **kwargs):
        attempts.append(args)
        raise AssertionError("a fault of the compiler")

    monkeypatch.setattr("sidefx_train.compile.pipeline.capture_run.collect", broken)
    scale = types.SimpleNamespace(value=2.0)

    def step(x):
        factor = scale.value
        if handles:
            try:
                raise ValueError
            except ValueError:
                return x * factor
        return x * factor

    compiled = sidefx_train.compile(step, backend="eager", warmup="now")
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        for value in (2.0, 2.0, 2.0, 3.0, 3.0):
            scale.value = value
            assert torch.equal(compiled(torch.ones(2)), step(torch.ones(2)))
            counts.append(len(attempts))
    assert counts[0] == counts[2] < counts[3] == counts[4], counts
    assert {found.code for found in compiled.report().breaks} == {"SFX204"}


@pytest.mark.parametrize("warmup", ["now", "background"])
@pytest.mark.parametrize(
    "error", [BackendError("SFX201", "refused"), AssertionError("a fault of the compiler")], ids=repr
)
def test_a_graph_that_cannot_be_compiled_is_tried_twice(error, warmup, monkeypatch):
    attempts = []

    def broken(*args, **kwargs):
        attempts.append(args)
        raise error

    monkeypatch.setattr("sidefx_train.compile.pipeline.compile_capture.partitioned", broken)
    compiled = sidefx_train.compile(lambda x: x * 2, warmup=warmup)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        for _ in range(6):
            assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert len(attempts) == 2
