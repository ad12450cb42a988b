"""Guards evaluated the slow way, where the world has become quite another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidefx_train.compile.capture.guards.guard import Guard, NumberCondition, TensorFacts
from sidefx_train.compile.capture.guards.python_check import failing
from sidefx_train.compile.capture.guards.source import SourceTable

TABLE = SourceTable()
FIRST, SECOND = TABLE.arg(0), TABLE.item(TABLE.arg(1), 1)
LIKE = TensorFacts.of(torch.ones(2))

GUARDS = {
    "same": Guard("same", FIRST, SECOND),
    "distinct": Guard("distinct", FIRST, SECOND),
    "placed": Guard("placed", FIRST, (SECOND, 0)),
    "counted": Guard("counted", FIRST, (SECOND, True)),
    "separate": Guard("separate", FIRST, (FIRST, SECOND)),
    "disjoint": Guard("disjoint", FIRST, ((FIRST,), (SECOND,))),
    "no_overlap": Guard("no_overlap", FIRST, frozenset()),
    "length": Guard("length", FIRST, 2),
    "keys": Guard("keys", FIRST, ("a",)),
    "tensor": Guard("tensor", FIRST, LIKE),
    "number": Guard("number", FIRST, NumberCondition("a < b", (("a", FIRST), ("b", SECOND)))),
}


@pytest.mark.parametrize("kind", GUARDS)
@pytest.mark.parametrize("args", [((), ()), (None, None), ("text", (1,)), (3.5, [])], ids=str)
def test_a_guard_fails_where_what_it_is_about_is_gone(kind: str, args: tuple[Any, ...]) -> None:
    """The second path leads nowhere, and the first to something of another kind."""
    missed, found = failing(GUARDS[kind], args, {})
    assert missed and found is not None


def test_guards_that_hold() -> None:
    x = torch.ones(2)
    for kind, second, value in (
        ("same", x, True),
        ("distinct", torch.ones(1), True),
        ("separate", torch.ones(1), True),
        ("disjoint", torch.ones(1), True),
    ):
        assert failing(GUARDS[kind], (x, [0, second]), {})[0] is not value
