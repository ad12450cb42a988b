"""Warnings that a thread makes inside a block are nobody's; those of other threads, and all filters, stay."""

from __future__ import annotations

import threading
import warnings

import pytest

from sidefx_train.compile.common.thread_warnings import matches, no_warnings
from sidefx_train.errors import SideFXWarning


def test_neither_shown_nor_an_error():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("error")
        before = list(warnings.filters)
        with no_warnings(), no_warnings():
            warnings.warn("inner", stacklevel=1)
        assert warnings.filters == before
        with pytest.raises(UserWarning, match="outer"):
            warnings.warn("outer", stacklevel=1)
    assert not found


def test_what_this_library_says_is_shown():
    with pytest.warns(SideFXWarning, match="a file is damaged"), no_warnings():
        warnings.warn("a file is damaged", SideFXWarning, stacklevel=1)


def test_of_this_thread_alone():
    with warnings.catch_warnings(record=True) as found, no_warnings():
        warnings.filterwarnings("always", append=True)
        thread = threading.Thread(target=warnings.warn, args=("from the other thread",))
        thread.start()
        thread.join()
        warnings.warn("from this one", stacklevel=1)
    assert [str(each.message) for each in found] == ["from the other thread"]


def test_what_has_been_shown_is_not_shown_again():
    """As it would be after ``catch_warnings``."""

    def warns():
        warnings.warn("once for each line", stacklevel=1)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            warns()
            with no_warnings():
                warns()
    assert len(found) == 1


def test_a_program_that_restores_its_filters_meanwhile():
    entered, left = threading.Event(), threading.Event()

    def compiles():
        with no_warnings():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=compiles)
    before = list(warnings.filters)
    with warnings.catch_warnings():
        thread.start()
        entered.wait(10)
    left.set()
    thread.join()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.warn("still", stacklevel=1)
    assert len(found) == 1 and warnings.filters == before


def test_as_python_matches():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some words", module="a[.]b")
        _, message, _, module, _ = warnings.filters[0]
    assert matches(message, "SOME WORDS and more") and not matches(message, "not some words")
    assert matches(module, "a.b.c") and not matches(module, "a_b")
    assert matches(None, "anything") and matches("whole", "whole") and not matches("whole", "whole and more")


@pytest.mark.parametrize("changed", [False, True])
def test_what_was_shown_is_not_shown_again(monkeypatch, changed):
    """Regression: the program's warnings were shown once more after each compiler run."""
    shown = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *rest, **named: shown.append(str(message)))
    monkeypatch.setattr(warnings, "filters", [("default", None, Warning, None, 0)])
    for _ in range(3):
        warnings.warn("once", FutureWarning, stacklevel=1)
        with no_warnings():
            with warnings.catch_warnings():  # as ``subprocess`` does
                warnings.simplefilter("ignore")
            if changed:  # by another thread: Python forgets then
                warnings.simplefilter("default")
                warnings.filters.insert(0, ("default", None, UserWarning, None, 0))
    assert shown == ["once"] * (3 if changed else 1)
