"""Guard kinds: all registered, each described, tested by generated Python, and checked without it."""

from __future__ import annotations

import typing

import pytest

from sidefx_train.compile.capture.guards.guard import GuardKind
from sidefx_train.compile.capture.guards.kinds import KINDS, Kind
from sidefx_train.compile.native.guards.guard_program import TESTS


def test_every_name_has_a_class_and_every_class_a_name() -> None:
    assert set(KINDS) == set(typing.get_args(GuardKind))
    assert len({type(kind) for kind in KINDS.values()}) == len(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_says_what_it_tests(name: GuardKind) -> None:
    kind = KINDS[name]
    assert type(kind).__doc__ and kind.phase in ("value", "tensor", "relation")
    for method in ("describe", "check", "python_test"):
        assert getattr(type(kind), method) is not getattr(Kind, method), f"{name} has no {method}"
    if kind.native and kind.phase != "tensor":
        own = type(kind).instruction is not Kind.instruction
        assert own or name in TESTS, f"{name} has no instruction for the native program"


def test_names_of_native_tests_are_kinds_or_the_forms_they_take() -> None:
    forms = {"none", "empty", "items", "distinct"}
    assert set(TESTS) - forms <= set(KINDS)
