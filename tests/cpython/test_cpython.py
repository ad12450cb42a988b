"""A sample of CPython's own tests, interpreted; ``make cpython`` runs all of them."""

from __future__ import annotations

import importlib.util

import pytest

from tests.cpython import run

SAMPLE = (
    "test_generators", "test_with", "test_scope", "test_super", "test_extcall", "test_unpack_ex", "test_patma",
    "test_except_star", "test_dictcomps", "test_property", "test_yield_from", "test_class", "test_raise", "test_list",
)  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("test.test_with") is None, reason="this Python comes without its tests")
@pytest.mark.parametrize("name", SAMPLE)
def test_module(name):
    result = run.in_process_of_its_own(name)
    found = run.problems(name, "", result, run.known_differences().get(name, {}))
    assert not found, "\n".join(found)
    assert len(result["cases"]) > 5, f"{name} has hardly any cases: {result['cases']}"


@pytest.mark.skipif(importlib.util.find_spec("test.test_with") is None, reason="this Python comes without its tests")
def test_the_runner_can_fail():
    """A case that is listed and passes, one that does not exist, and one that differs unlisted are all reported."""
    result = {
        "cases": ["A.good", "A.bad", "A.known"],
        "failures": {"A.bad": "trace", "A.known": "trace"},
        "left": ["A.skipped"],
    }
    known = {"A.known": "reason", "A.good": "stale", "A.gone": "stale", "A.skipped": "reason"}
    found = run.problems("module", "", result, known)
    assert [line.partition(": ")[2].split(" ")[0] for line in found] == ["A.bad", "A.good", "A.gone"]
    assert run.problems("module", "", {"error": "crashed"}, {}) == ["module: crashed"]


def test_every_known_difference_has_a_reason():
    for module, cases in run.known_differences().items():
        assert module in run.modules(), f"{module} has known differences and is not run"
        assert all(reason.strip() for reason in cases.values()), f"{module}: a difference without a reason"
