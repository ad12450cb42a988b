"""Warnings of a step: as errors they stop it where they are issued, and torch's own are replayed like the program's."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

import sidefx_train


def caught(x, log):
    try:
        warnings.warn("w", stacklevel=1)
        log.append("went on")
    except UserWarning:
        log.append("caught")
    return x.sin()


def uncaught(x, log):
    log.append("before")
    warnings.warn("w", stacklevel=1)
    log.append("after")
    return x.sin()


def cleaned_up(x, log):
    try:
        warnings.warn("w", DeprecationWarning, stacklevel=1)
    finally:
        log.append("cleaned up")
    return x.sin()


def recorded(x, log):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.warn("inside", stacklevel=1)
    log.append(len(found))
    return x.sin()


def twice(x, log):
    warnings.warn("dup", stacklevel=1)
    warnings.warn("dup", stacklevel=1)
    return x.sin()


def with_a_value(x, log):
    log.append("before")
    warnings.warn(f"loss is {x.sum().item():.1f}", stacklevel=1)
    log.append("after")
    return x.sin()


def of_a_loss(x, log):
    log.append("before")
    loss = F.mse_loss(x, x[:1])
    log.append("after")
    return loss


def of_a_softmax(x, log):
    try:
        return F.softmax(x)
    except UserWarning:
        log.append("caught")
        return x


def explicit(x, log):
    log.append("before")
    warnings.warn_explicit("w", UserWarning, "file.py", 3)
    warnings.warn_explicit(UserWarning(f"w {x.sum().item():.1f}"), None, "other.py", lineno=len(log), module="other")
    log.append("after")
    return x.sin()


def explicit_and_caught(x, log):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            warnings.warn_explicit("w", UserWarning, "file.py", 3)
            log.append("went on")
        except UserWarning as error:
            log.append(str(error))
    return x.sin()


def explicit_and_recorded(x, log):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.warn_explicit("w", UserWarning, "file.py", 3)
    log.append([(str(each.message), each.filename, each.lineno) for each in found])
    return x.sin()


def explicit_with_a_registry(x, log):
    registry = {}
    for _ in range(2):
        warnings.warn_explicit("w", UserWarning, "file.py", 3, registry=registry)
    log.append(sorted(map(str, registry)))
    return x.sin()


STEPS = [caught, uncaught, cleaned_up, recorded, twice, with_a_value, of_a_loss, of_a_softmax]
STEPS += [explicit, explicit_and_caught, explicit_and_recorded, explicit_with_a_registry]
ORDERS = [
    ("ignore", "error", "ignore", "error", "always"),
    ("error", "always", "error"),
    ("always", "always", "ignore"),
]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_as_eager_warns(step, order):
    captured = sidefx_train.compile(step, backend="eager")
    for mode in order:
        outcomes = []
        for run in (step, captured):
            log = []
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter(mode)
                warnings.filterwarnings("ignore", category=sidefx_train.errors.SideFXWarning)
                try:
                    result = run(torch.ones(2, 2), log).tolist()
                except Warning as error:
                    result = f"raises {type(error).__name__}: {error}"
            outcomes.append((result, log, [(str(each.message), each.filename, each.lineno) for each in found]))
        assert outcomes[0] == outcomes[1], mode


def test_a_filter_on_the_message():
    captured = sidefx_train.compile(uncaught, backend="eager")
    for pattern, raises in (("w", True), ("other", False), ("w", True)):
        log = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=pattern)
            if raises:
                with pytest.raises(UserWarning):
                    captured(torch.ones(2), log)
            else:
                captured(torch.ones(2), log)
        assert log == (["before"] if raises else ["before", "after"])


def under_a_filter_with_words(x, log):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="NOT this")
        warnings.filterwarnings("error", message="nor", module="this")
        warnings.warn("not THIS", stacklevel=1)
        warnings.warn("but that", stacklevel=1)
    log.append([str(each.message) for each in found])
    return x.sin()


@pytest.mark.parametrize("step", [caught, of_a_loss, with_a_value, under_a_filter_with_words])
def test_filters_with_words_of_a_message_and_a_module(step):
    """Regression: patterns in filters are compiled already, which was an internal error of the capture."""
    settings = [
        {"message": "W"},
        {"message": "nothing", "category": DeprecationWarning},
        {"module": __name__.replace(".", "[.]")},
        {"module": "torch", "message": "Using a target size"},
        {"message": "loss"},
        {"message": "w", "lineno": 1},
    ]
    captured = sidefx_train.compile(step, backend="eager")
    for setting in (*settings, *reversed(settings)):
        outcomes = []
        for run in (step, captured):
            log = []
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                warnings.filterwarnings("error", **setting)
                warnings.filterwarnings("ignore", category=sidefx_train.errors.SideFXWarning)
                try:
                    result = run(torch.ones(2, 2), log).tolist()
                except Warning as error:
                    result = f"raises {type(error).__name__}: {error}"
            outcomes.append((result, log, [str(each.message) for each in found]))
        assert outcomes[0] == outcomes[1], setting
    report = captured.report()
    assert not [each for each in (*report.breaks, *report.fallbacks) if each.code == "SFX204"], report


def test_a_profiler_of_the_user_stays():
    import sys

    calls = []
    captured = sidefx_train.compile(of_a_loss, backend="eager")

    def look(frame, event, value):
        calls.append(event)

    sys.setprofile(look)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            captured(torch.ones(2, 2), [])
        assert sys.getprofile() is look
    finally:
        sys.setprofile(None)


def test_a_warning_about_the_caller_names_the_line_that_calls() -> None:
    def helper():
        warnings.warn("of the helper's caller's caller", stacklevel=3)

    def step(x):
        warnings.warn("of the caller", DeprecationWarning, stacklevel=2)
        helper()
        return x + 1

    def outer(run):
        return run(torch.ones(1))

    def lines(run):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                run(torch.ones(1))
                run(torch.ones(1))
                outer(run)
        return [(str(each.message), each.category, each.filename, each.lineno) for each in seen]

    compiled = sidefx_train.compile(step, backend="eager")
    assert lines(compiled) == lines(step)
    assert compiled.report().replays == 6
