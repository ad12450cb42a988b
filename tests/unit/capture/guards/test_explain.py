"""Guards evaluated in Python one by one, after the world has changed a lot."""

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
    "no_shared_storage": Guard("no_shared_storage", FIRST, SECOND),
    "same_storage_offset": Guard("same_storage_offset", FIRST, (SECOND, 0)),
    "version_counter": Guard("version_counter", FIRST, (SECOND, True)),
    "all_distinct": Guard("all_distinct", FIRST, (FIRST, SECOND)),
    "disjoint_sets": Guard("disjoint_sets", FIRST, ((FIRST,), (SECOND,))),
    "no_overlap": Guard("no_overlap", FIRST, frozenset()),
    "length": Guard("length", FIRST, 2),
    "keys": Guard("keys", FIRST, ("a",)),
    "tensor": Guard("tensor", FIRST, LIKE),
    "number": Guard("number", FIRST, NumberCondition("a < b", (("a", FIRST), ("b", SECOND)))),
}


@pytest.mark.parametrize("kind", GUARDS)
@pytest.mark.parametrize("args", [((), ()), (None, None), ("text", (1,)), (3.5, [])], ids=str)
def test_a_guard_fails_where_what_it_is_about_is_gone(kind: str, args: tuple[Any, ...]) -> None:
    """The second path no longer resolves, and the first leads to an object of another kind."""
    missed, found = failing(GUARDS[kind], args, {})
    assert missed and found is not None


def test_guards_that_hold() -> None:
    x = torch.ones(2)
    for kind, second, value in (
        ("same", x, True),
        ("no_shared_storage", torch.ones(1), True),
        ("all_distinct", torch.ones(1), True),
        ("disjoint_sets", torch.ones(1), True),
    ):
        assert failing(GUARDS[kind], (x, [0, second]), {})[0] is not value
