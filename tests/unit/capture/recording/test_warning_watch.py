"""The watch sees each ``warnings.warn`` of its thread, by the native hook and by a profile function."""

from __future__ import annotations

import sys
import threading
import warnings
from warnings import warn

import pytest
import torch
import torch.nn.functional as F

import sidefx_train
from sidefx_train.compile.capture.recording import warning_watch
from sidefx_train.compile.native import build, guards_module


@pytest.fixture
def native():
    module = guards_module()
    if module is None:
        pytest.skip("native modules cannot be built here")
    return module


@pytest.fixture(params=["hook", "profile"])
def way(request, monkeypatch):
    module = request.getfixturevalue("native") if request.param == "hook" else None
    monkeypatch.setattr(warning_watch, "guards_if_stored", lambda: module)
    return request.param


def by_name():
    warn("text", stacklevel=2)


def by_attribute():
    list(map(warnings.warn, ["text"]))


@pytest.mark.parametrize("warns", [by_name, by_attribute])
def test_each_way_to_the_function_is_seen_before_it_runs(way, warns):
    seen = []

    def observer(frame):
        seen.append(frame.f_code.co_name)
        raise LookupError

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        if way == "hook" or warns is by_name:  # a profile function does not see what C code calls
            with pytest.raises(LookupError), warning_watch.watched(observer):
                warns()
            assert seen == [warns.__name__]
        assert not shown
        warns()  # unchanged without a watch
        assert [str(each.message) for each in shown] == ["text"]


def test_other_threads_and_suspended_watches_see_nothing(way):
    seen = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with warning_watch.watched(seen.append):
            other = threading.Thread(target=by_name)
            other.start()
            other.join()
            suspended = warning_watch.suspend()
            by_name()
            with warning_watch.watched(lambda frame: seen.append("nested")):
                by_name()
            by_name()
            warning_watch.resume(suspended)
            assert seen == ["nested"]
            by_name()
            assert [getattr(each, "f_code", each) for each in seen] == ["nested", by_name.__code__]
        by_name()
    assert len(seen) == 2 and len(shown) == 6 and sys.getprofile() is None


def test_a_suspended_watch_goes_on_after_an_error(way):
    seen = []
    with warnings.catch_warnings(), warning_watch.watched(seen.append):
        warnings.simplefilter("ignore")
        with pytest.raises(ZeroDivisionError), warning_watch.watched(seen.append):
            suspended = warning_watch.suspend()
            try:
                1 / 0  # noqa: B018
            finally:
                warning_watch.resume(suspended)
        by_name()
    assert len(seen) == 1


def of_a_softmax(x):
    return F.softmax(x)


def test_warnings_of_torch_are_replayed(way):
    captured = sidefx_train.compile(of_a_softmax, backend="eager")
    for _ in range(3):
        with pytest.warns(UserWarning, match="Implicit dimension choice for softmax"):
            captured(torch.ones(2, 2))
    assert captured.report().replays >= 2


def test_a_native_module_that_is_loaded_in_a_capture_is_not_recorded(native, monkeypatch):
    """Regression: the tensor by which the module finds its way was an operation of the graph, whose key changed."""
    counts = []

    def loaded():
        build._find_tensor_words(native)
        return native

    for load in (lambda: native, loaded):
        monkeypatch.setattr(warning_watch, "guards_if_stored", load)
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam([weight])

        def step(x, weight=weight, optimizer=optimizer):
            (weight * x).sum().backward()
            optimizer.step()

        captured = sidefx_train.compile(step, backend="eager")
        captured(torch.ones(2))
        counts.append(captured.report().captures[0].nodes["capture"])
    assert counts[0] == counts[1] and native.tensors_readable()


def test_a_profile_function_of_the_user_does_not_hide_them(native):
    captured, seen = sidefx_train.compile(of_a_softmax, backend="eager"), []

    def profile(frame, event, called):
        seen.append(event)

    for _ in range(3):
        with pytest.warns(UserWarning, match="Implicit dimension choice for softmax"):
            sys.setprofile(profile)
            try:
                captured(torch.ones(2, 2))
            finally:
                sys.setprofile(None)
    assert seen
