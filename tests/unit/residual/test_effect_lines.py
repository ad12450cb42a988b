"""Effects as lines of an epilogue, on objects of Python's classes and of the program's own."""

from __future__ import annotations

from collections import OrderedDict, deque

import pytest
import torch

from sidefx_train.compile.capture.guards.source import SourceTable
from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.capture.side_effects.effect import Effect
from sidefx_train.compile.residual.effect_lines import (
    GradientLine,
    effect_lines,
    gradients_at_once,
    switch_line,
)


class Values:
    """Writes plain values in place of values of the trace."""

    def expression(self, value):
        return repr(value)

    def position(self, expression):
        return None


def overriding(base):
    """Returns a subclass whose own methods must not run."""

    def forbidden(self, *args):
        raise AssertionError("an override ran")

    names = ("__setitem__", "__delitem__", "clear", "extend", "append", "update", "discard")
    return type(f"Own{base.__name__}", (base,), {name: forbidden for name in names if hasattr(base, name)})


def applied(effect_of, target):
    """Applies an effect on an argument and returns it."""
    writer = Writer()
    effect = effect_of(SourceTable().arg(0))
    lines = effect_lines(writer, Values(), effect)
    exec("\n".join([*writer.fetched, *lines]), {**writer.names, "args": (target,)})
    return target


CHANGES = [
    (dict, {"a": 1}, ("set_item", "b", 2), {"a": 1, "b": 2}),
    (dict, {"a": 1, "b": 2}, ("del_item", "a", None), {"b": 2}),
    (OrderedDict, {"a": 1}, ("clear", None, None), {}),
    (list, [1], ("extend", None, [2]), [1, 2]),
    (list, [1], ("extend", None, [2, 3]), [1, 2, 3]),
    (list, [1], ("replace", None, [4]), [4]),
    (list, [1], ("replace", None, []), []),
    (set, {1}, ("add", None, [2, 3]), {1, 2, 3}),
    (set, {1, 2}, ("remove", None, [2]), {1}),
]


@pytest.mark.parametrize(("base", "before", "change", "after"), CHANGES)
def test_containers(base, before, change, after):
    kind, key, value = change
    plain = applied(lambda source: Effect(kind, source, key, value), base(before))
    assert type(plain) is base and plain == base(after)
    own = overriding(base)
    made = own() if issubclass(base, dict) else own.__new__(own)
    if issubclass(base, dict):
        for name, item in before.items():
            base.__setitem__(made, name, item)
    else:
        base.__init__(made, before)
    changed = applied(lambda source: Effect(kind, source, key, value, base), made)
    assert type(changed) is own and base.__eq__(changed, base(after))


def test_deques_keep_their_limit():
    changed = applied(lambda source: Effect("replace", source, None, [2, 3], deque), deque([0, 1], maxlen=2))
    assert changed == deque([2, 3], maxlen=2) and changed.maxlen == 2


def test_attributes_bypass_setattr():
    class Slots:
        __slots__ = ("x",)

        def __setattr__(self, name, value):
            raise AssertionError("an override ran")

    class Plain:
        __setattr__ = Slots.__setattr__

    assert applied(lambda source: Effect("set_slot", source, "x", 1), Slots()).x == 1
    assert applied(lambda source: Effect("set_attr", source, "x", 1), Plain()).x == 1
    assert applied(lambda source: Effect("set_class_attr", source, "x", 1), Plain).x == 1
    assert applied(lambda source: Effect("set_attr", source, "x", 2), Plain()).x == 2


def test_effects_before_all_others_write_no_line_here():
    source = SourceTable().arg(0)
    for kind in ("set_data", "grow", "detach", "set_requires_grad"):
        assert effect_lines(Writer(), Values(), Effect(kind, source, None, True)) == []
    assert switch_line(Writer(), Effect("set_requires_grad", source, None, True)).endswith(".requires_grad_(True)")
    assert switch_line(Writer(), Effect("detach", source)).endswith(".detach_()")


def test_consecutive_gradients_of_held_tensors_are_set_by_one_call():
    writer, results = Writer(), [torch.full((2,), float(i)) for i in range(6)]
    held = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    passed = torch.zeros(2, requires_grad=True)
    of_subclass = torch.zeros(2).as_subclass(type("Own", (torch.Tensor,), {}))
    owners = [writer.constant(each) for each in held]

    def line(owner, position):
        return GradientLine(owner, f"o[{position}]", position)

    lines = [
        line(owners[0], 0),
        line(owners[1], 3),
        "seen.append(p.grad)",
        line(owners[2], 1),
        line("passed", 2),
        line(writer.constant(of_subclass), 4),
        GradientLine(owners[3], "None", None),
        line(owners[3], 5),
    ]
    made = gradients_at_once(writer, lines)
    calls = [each for each in made if "(" in each and each[0] != "#"]
    assert len(calls) == 2 and calls[1] == lines[2], "only the first two are set at once"
    assert [each for each in made if each not in calls] == [f"# {lines[0]}", f"# {lines[1]}", *lines[3:]]
    names = {**writer.names, "o": results, "passed": passed, "seen": [], "p": held[1]}
    exec("\n".join(made), names)
    tensors = [held[0], held[1], held[2], passed, of_subclass, held[3]]
    assert all(each.grad is results[i] for each, i in zip(tensors, (0, 3, 1, 2, 4, 5), strict=True))
    assert names["seen"][0] is results[3], "a line after the gradients reads them"
