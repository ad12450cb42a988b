"""Lists, dicts, sets and arguments that a step changes, reproduced exactly."""

from __future__ import annotations

import collections
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, batches, mlp, parity
from tests.support.side_effects import check, program


def test_history_of_losses():
    def body(self, loss, x):
        self.history.append(loss.detach())

    check(body, fields=lambda: {"history": []})


def test_history_survives_later_steps():
    """A loss kept from step k is still right at step k + 10 (its memory is not reused)."""

    def body(self, loss, x):
        self.history.append(loss.detach())
        self.weights.append([p.detach().clone() for p in self.watch[0].parameters()])

    def make() -> Program:
        made = program(body, history=[], weights=[])
        made.watch[2].watch = made.watch[:1]
        return made

    parity(make, steps=12)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_dict_entry(backend):
    def body(self, loss, x):
        self.stats["n"] = self.stats.get("n", 0) + 1
        self.stats["last"] = loss.detach()

    # Only at the first call, the entries are missing.
    check(body, fields=lambda: {"stats": {}}, captures=2, backend=backend)


def test_dict_entry_present():
    def body(self, loss, x):
        self.stats["n"] = self.stats["n"] + x.shape[0]

    check(body, fields=lambda: {"stats": {"n": 0}})


def test_nested_containers():
    def body(self, loss, x):
        self.tree["a"]["b"][0].append((loss.detach(), {"rows": x.shape[0]}))
        self.tree["a"]["c"] = self.tree["a"]["b"]
        self.tree["order"] = [self.tree["order"][-1] + 1]

    check(body, fields=lambda: {"tree": {"a": {"b": [[]]}, "order": [0]}}, captures=2)


def test_shared_containers_stay_shared():
    def body(self, loss, x):
        self.one.append(loss.detach())
        self.again = self.one
        self.pair = [self.one, self.one]

    check(body, fields=lambda: {"one": [], "again": None, "pair": None}, captures=2)


@pytest.mark.parametrize(
    "change",
    [
        lambda s, v: s.append(v),
        lambda s, v: s.extend([v, v]),
        lambda s, v: s.insert(0, v),
        lambda s, v: s.__setitem__(slice(0, 1), [v]),
        lambda s, v: (s.append(v), s.pop(0)),
        lambda s, v: (s.clear(), s.append(v)),
        lambda s, v: s.reverse(),
        lambda s, v: s.__iadd__([v]),
        lambda s, v: s.__delitem__(0) if len(s) > 3 else s.append(v),
        lambda s, v: s.sort(reverse=True),
    ],
    ids=["append", "extend", "insert", "slice", "rotate", "clear", "reverse", "iadd", "delete", "sort"],
)
@pytest.mark.every(2)
def test_list_methods(change):
    def body(self, loss, x):
        change(self.items, self.n)
        self.n += 1

    check(body, fields=lambda: {"items": [5, 3, 4], "n": 10}, captures=None, steps=5)


def test_set_deque_and_ordered_dicts():
    def body(self, loss, x):
        self.names.add(self.n % 3)
        self.recent.append(loss.detach())
        self.ordered.move_to_end("a")
        self.ordered["n"] = self.n
        self.counts["rows"] += x.shape[0]
        self.counter.update(["seen"])
        self.n += 1

    def fields():
        return {
            "names": set(),
            "recent": collections.deque(maxlen=3),
            "ordered": collections.OrderedDict(a=1, n=0),
            "counts": collections.defaultdict(int),
            "counter": collections.Counter(),
            "n": 0,
        }

    check(body, fields=fields, captures=None)


def test_list_argument():
    def make() -> Program:
        model = mlp()
        data = batches((5, 6), classes=3)

        def step(x, y, out, options):
            loss = F.cross_entropy(model(x), y)
            out.append(loss.detach())
            out[0] = "seen"
            options["rows"] = x.shape[0]
            del options["drop"]
            return loss.detach()

        return Program(step, lambda i: (*data(i), [None], {"drop": 1}), (model,))

    parity(make)


def test_argument_changed_in_place():
    def make() -> Program:
        data = batches((4, 4))

        def step(x):
            x.mul_(2)
            row = x[0]
            row.add_(1)
            return row.sum()

        return Program(step, data)

    parity(make)


def _loads(model, saved, log):
    model.load_state_dict(saved)
    log.append(str(getattr(saved, "_metadata", "none")))


def _saves(model, saved, log):
    made = model.state_dict()
    made.tag = [len(made)]
    log.append(made)


def _sets(model, saved, log):
    saved.seen = getattr(saved, "seen", 0) + 1
    if hasattr(saved, "old"):
        del saved.old
    log.append(saved.seen)


@pytest.mark.parametrize("step", [_loads, _saves, _sets])
def test_attributes_of_an_ordered_dict(step):
    """Regression: a state dict had no ``_metadata`` in the step, and lost it where it left the step."""

    def course(run):
        torch.manual_seed(0)
        log: list[object] = []
        for i in range(5):
            model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            saved = model.state_dict()
            saved._metadata["1"]["version"] = i
            saved.old = i
            if i == 3:
                del saved._metadata, saved.old
            run(model, saved, log)
            log.append(vars(saved))
        return str([(each, vars(each)) if isinstance(each, OrderedDict) else each for each in log])

    assert course(sidefx_train.compile(step, backend="eager")) == course(step)


class Equal:
    """All instances are equal."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return type(other) is Equal

    def __hash__(self):
        return 1

    def __repr__(self):
        return f"Equal({self.number})"


KEYS = [(1, True), (1, 1.0), (0.0, -0.0), ((1, 2), (1.0, 2)), (Equal(1), Equal(2))]


@pytest.mark.parametrize(("old", "new"), KEYS, ids=repr)
@pytest.mark.parametrize("kind", [dict, OrderedDict, set], ids=lambda kind: kind.__name__)
def test_an_equal_key_added_in_place_of_one_that_was_removed(kind, old, new):
    def step(table, x):
        if kind is set:
            table.discard(old)
            table.add(new)
        else:
            table.pop(old)
            table.setdefault(new, None)
        return x + 1

    captured = sidefx_train.compile(step, backend="eager")
    tables = [], []
    for run, made in zip((step, captured), tables, strict=True):
        for _ in range(3):
            table = kind([(3, 4), (old, None)]) if kind is not set else {3, old}
            run(table, torch.ones(1))
            made.append([key for key in table if key != 3])
    for (expected,), (found,) in zip(*tables, strict=True):
        assert found is new if type(new) is Equal else repr(found) == repr(expected) == repr(new)
