"""Effects as lines of an epilogue, on objects of Python's classes and of the program's own."""

from __future__ import annotations

from collections import OrderedDict, deque

import pytest

from sidefx_train.compile.capture.guards.source import SourceTable
from sidefx_train.compile.capture.guards.source_writer import Writer
from sidefx_train.compile.capture.side_effects.effect import Effect
from sidefx_train.compile.residual.effect_lines import effect_lines, switch_line


class Values:
    """Writes plain values in place of values of the trace."""

    def expression(self, value):
        return repr(value)


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
