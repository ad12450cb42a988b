"""Views of dicts and mapping proxies from outside: transient objects, guarded by what they show."""

from __future__ import annotations

import collections
import types

import pytest
import torch

import sidefx_train
from tests.support.parity import Program, parity

MAKERS = {
    "values": dict.values,
    "items": dict.items,
    "keys": dict.keys,
    "proxy": types.MappingProxyType,
}


def read(view):
    """Returns a number for all that a view shows."""
    if isinstance(view, types.MappingProxyType):
        return sum(view.values()) + len(view) + view.get("missing", 1)
    if isinstance(view, type({}.items())):
        return sum(value * len(name) for name, value in view)
    if isinstance(view, type({}.keys())):
        return sum(map(len, view)) + ("x" in view)
    first, *rest = view
    return first + sum(rest) + len(view)


@pytest.mark.parametrize("name", MAKERS)
def test_as_an_argument(name):
    def make() -> Program:
        def step(view, x):
            return read(view) * x, view

        def batch(index):
            held = {"x": torch.randn(2), "yy": torch.randn(2)}
            if index >= 6:
                held["zzz"] = torch.randn(2)
            return MAKERS[name](held), torch.randn(2)

        return Program(step, batch)

    parity(make, captures=2)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "kind", [collections.OrderedDict, collections.Counter, lambda held: collections.defaultdict(int, held)]
)
def test_of_other_dicts(name, kind):
    def make() -> Program:
        def batch(index):
            held = kind({"x": float(index), "yy": 2.0 * index})
            return (getattr(held, name)() if hasattr(held, name) else MAKERS[name](held),)

        return Program(lambda view: torch.ones(2) * read(view), batch)

    parity(make, captures=2)


@pytest.mark.parametrize("name", MAKERS)
def test_over_a_break(name):
    def step(x, y):
        held = {"x": x, "yy": y}
        view = MAKERS[name](held)
        if x.dot(torch.ones(2)) > 0:
            held["x"] = x * 2
        return read(view) * x

    compiled = sidefx_train.compile(step, backend="eager", keep_slower=True)
    for index in range(8):
        x, y = torch.full((2,), -1.0 if index % 2 else 1.0), torch.randn(2)
        torch.testing.assert_close(compiled(x, y), step(x, y), rtol=0, atol=0)
    report = compiled.report()
    assert not report.fallbacks and max(len(part.captures) for part in report.parts) <= 2, str(report)


@pytest.mark.parametrize("name", MAKERS)
def test_the_step_writes_to_the_dict(name):
    """The dict and the view of it, or of another: what the step writes shows in its own views only."""

    def step(held, view, x):
        before = read(view)
        held["new"] = x * 3
        del held["x"]
        held["again"] = before
        return before + read(view)

    compiled = sidefx_train.compile(step, backend="eager", keep_slower=True)
    for index, own in enumerate([True, True, False, False, True, False]):
        outcomes = []
        for run in (step, compiled):
            held = {"x": torch.full((2,), index + 1.0), "yy": torch.ones(2)}
            other = {"x": torch.full((2,), index + 7.0), "yy": torch.ones(2)}
            outcomes.append((run(held, MAKERS[name](held if own else other), torch.ones(2)), held, other))
        torch.testing.assert_close(*outcomes, rtol=0, atol=0)


@pytest.mark.parametrize("name", MAKERS)
def test_kept_by_an_object(name):
    """One that is replaced, and whose dict is changed between the calls."""

    def make() -> Program:
        held = {"x": 1.0, "yy": 2.0}
        state = types.SimpleNamespace(held=held, view=MAKERS[name](held))

        def step(x):
            return read(state.view) * x

        return Program(step, lambda index: (torch.ones(2),), (state.held,))

    def between(program, index):
        state = program.step.__closure__[0].cell_contents
        state.held["x"] = float(index)
        if index in (3, 5):
            state.held = {"x": index * 2.0, "yy": 3.0, "zzz": 1.0}
            state.view = MAKERS[name](state.held)

    parity(make, captures=None, between=between)


def test_a_proxy_of_a_class_is_left_to_python():
    class Settings:
        scale = 3.0

    def step(view, x):
        return x * view["scale"]

    compiled = sidefx_train.compile(step, backend="eager")
    with pytest.warns(sidefx_train.errors.SideFXWarning, match="SFX104"):
        assert compiled(vars(Settings), torch.ones(1)).item() == 3.0
    Settings.scale = 4.0
    assert compiled(vars(Settings), torch.ones(1)).item() == 4.0


@pytest.mark.parametrize("name", MAKERS)
def test_a_dict_that_holds_its_view(name):
    def make() -> Program:
        kept = types.SimpleNamespace(held={"x": 1.0})
        kept.held["view"] = MAKERS[name](kept.held)

        def step(x):
            kept.held["n"] = kept.held.get("n", 0) + 1
            return len(kept.held["view"]) * x

        return Program(step, lambda index: (torch.ones(2),), ())

    parity(make, captures=3)
