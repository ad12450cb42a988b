"""Values that are equal but behave differently: a step that read one is not replayed for the other."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning


class Box:
    pass


def resized(*members: Any) -> set[Any]:
    """Returns a set whose table is larger than its members need, which changes their order."""
    made = set(range(100, 200)) | set(members)
    made -= set(range(100, 200))
    return made


PAIRS = {
    "set": ({8, 0}, {0, 8}),
    "resized_set": ({16, 8, 3}, resized(16, 8, 3)),
    "set_of_bools": ({1, 8}, {True, 8}),
    "frozenset": (frozenset([8, 0]), frozenset([0, 8])),
    "frozenset_in_a_tuple": ((1, frozenset([8, 0])), (1, frozenset([0, 8]))),
    "int_and_bool_in_a_tuple": ((1, 2), (True, 2)),
    "nested_tuple": (((1,), "a"), ((True,), "a")),
    "zero": (0.0, -0.0),
    "complex_zero": (complex(0.0, 1.0), complex(-0.0, 1.0)),
    "key": ({1: "a", 2: "b"}, {True: "a", 2: "b"}),
    "key_in_a_tuple": ({(1, 0): "a"}, {(True, 0): "a"}),
    "float_key": ({0.0: "a"}, {-0.0: "a"}),
    "range": (range(0, 3, 2), range(0, 4, 2)),
    "empty_range": (range(0), range(1, 1)),
    "slice": (slice(0.0, 1), slice(-0.0, 1)),
    "numpy_zero": (np.float32(0.0), np.float32(-0.0)),
    "numpy_zero_in_a_tuple": ((np.float64(0.0),), (np.float64(-0.0),)),
    "numpy_complex_zero": (np.complex64(0.0), np.complex64(-0.0)),
    "numpy_date": (np.datetime64("2020", "Y"), np.datetime64("2020-01-01", "D")),
    "numpy_duration": (np.timedelta64(1, "m"), np.timedelta64(60, "s")),
}


@pytest.mark.parametrize("reached_by", ["closure", "argument"])
@pytest.mark.parametrize("name", PAIRS)
def test_equal_values_of_different_types_are_distinguished(name, reached_by):
    first, second = PAIRS[name]
    assert first == second, "the pair is to be equal"
    box = Box()

    def shown(x, value):
        return x + 1, repr(value), [*value] if hasattr(value, "__iter__") else value

    def step(x, argument):
        return shown(x, box.value if reached_by == "closure" else argument)

    captured = sidefx_train.compile(step, backend="eager", fullgraph=True)
    for value in (first, second, first, second):
        box.value = value
        have, want = captured(torch.ones(2), value), step(torch.ones(2), value)
        assert have[1:] == want[1:], f"{have[1:]}, eager gives {want[1:]}"
        assert [*map(repr, have)] == [*map(repr, want)], f"{have}, eager gives {want}"


def test_the_order_of_a_changed_set_is_read_again():
    names = {3, 8}

    def step(x):
        return x + 1, [*names], sorted(names, key=lambda name: name % 4)

    captured = sidefx_train.compile(step, backend="eager", fullgraph=True)
    for change in (None, lambda: names.add(0), lambda: names.discard(8), lambda: names.add(8), None):
        if change is not None:
            change()
        assert captured(torch.ones(2))[1:] == step(torch.ones(2))[1:]
    assert sidefx_train.explain(captured).replays == 5


class Item:
    """Hashed by address: its shadow has another position in a set."""

    def __init__(self, n: int) -> None:
        self.n = n


def test_a_set_of_objects_is_walked_by_python_itself():
    items = {Item(n) for n in range(8)}

    def step(x):
        return x * 2, [item.n for item in items]

    captured = sidefx_train.compile(step, backend="eager")
    with pytest.warns(SideFXWarning, match="in an order that depends on its history"):
        assert captured(torch.ones(2))[1] == step(torch.ones(2))[1]
    assert captured(torch.ones(2))[1] == step(torch.ones(2))[1]


def test_membership_needs_no_order():
    items = [Item(n) for n in range(8)]
    known = set(items)

    def step(x):
        return x * 2, items[3] in known, len(known), known >= {items[1]}, bool(known)

    captured = sidefx_train.compile(step, backend="eager", fullgraph=True)
    assert captured(torch.ones(2))[1:] == (True, 8, True, True)
    known.discard(items[3])
    assert captured(torch.ones(2))[1:] == (False, 7, True, True)
    known.discard(items[1])
    assert captured(torch.ones(2))[1:] == (False, 6, False, True)


TRUTHS = (
    "truth is True",
    "truth is not False",
    "truth is truth",
    "truth is None",
    "box.n is box.before",
    "truth == True",
    "False != truth",
    "(box.n > 0) == (box.n > 2)",
    "truth < True",
    "truth ^ True",
    "~truth",
    "[truth] == [True]",
    "(truth, 1) == (True, 1)",
    "True in [truth]",
    "truth in (True,)",
    "{True: 1}.get(truth)",
    "sum([truth, truth])",
    "sorted([truth, False])",
    "[k for k, g in itertools.groupby([1, 0, 3], key=lambda v: v > box.n)]",
    "max([1, 2, 3], key=lambda v: v > box.n)",
    "isinstance(truth, bool), type(truth) is bool, f'{truth}'",
)


@pytest.mark.parametrize("expression", TRUTHS)
def test_a_comparison_of_a_number_that_changes_is_a_bool(expression: str) -> None:
    space: dict[str, Any] = {"itertools": itertools}
    exec(
        "def step(box, x):\n    truth = box.n > 1\n"
        f"    box.log.append(repr(({expression}, )))\n    box.before = box.n\n    box.n += 1\n    return x * 2",
        space,
    )

    def history(run: Any) -> list[str]:
        box = Box()
        box.n, box.before, box.log = 0, 0, []
        for call in range(5):
            if call == 3:
                box.n = box.before
            run(box, torch.ones(1))
        return box.log

    compiled = sidefx_train.compile(space["step"], backend="eager")
    assert history(compiled) == history(space["step"])
    assert not compiled.report().fallbacks, str(compiled.report())


@pytest.mark.parametrize(
    "value", [np.float32("nan"), np.float64("nan"), np.complex64("nan"), np.datetime64("NaT"), (np.float32("nan"),)]
)
def test_values_of_numpy_that_do_not_equal_themselves(value):
    captured = sidefx_train.compile(lambda x, argument: (x + 1, repr(argument)), backend="eager", fullgraph=True)
    for _ in range(3):
        assert captured(torch.ones(2), copy.deepcopy(value))[1] == repr(value)
    assert captured.report().replays == 3 and len(captured.report().captures) == 1
