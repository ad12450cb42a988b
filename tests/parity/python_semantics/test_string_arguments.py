"""Strings: those in a batch, new ones at every call; and strings that C objects make of their contents."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import itertools
import operator
import types
import warnings
from collections import OrderedDict, deque, namedtuple
from enum import Enum
from typing import Any

import pytest
import torch

import sidefx_train
from tests.support.parity import Program, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


def rows(index):
    return torch.full((2, 3), float(index)), [{"id": f"row {index}.{i}", "split": "train"} for i in range(2)]


def test_ids_are_handed_on():
    def make() -> Program:
        seen, last = [], {}

        def step(x, meta):
            seen.extend(row["id"] for row in meta)
            last["id"] = meta[0]["id"]
            print(f"batch of {meta[0]['id']} in {meta[0]['split']}: {x.sum():.1f}")
            return x * 2, [row["id"] for row in meta], f"{meta[1]['id']}!"

        return Program(step, rows, (seen, last))

    report = parity(make, steps=12, captures=None)
    assert report.graph_count <= 3, [r.source for r in report.recaptures]


def test_what_c_code_does_with_texts():
    """Each of these reads the strings: they are then exact, or the line runs natively."""
    uses = {
        "set": lambda names, log: len(set(names)),
        "dict": lambda names, log: {name: 1 for name in names},
        "in a list": lambda names, log: "same" in names,
        "index": lambda names, log: names.index(names[1]),
        "join": lambda names, log: "-".join(names),
        "sorted": lambda names, log: sorted(names),
        "max": lambda names, log: max(names),
        "split": lambda names, log: names[0].split(" "),
        "slice": lambda names, log: names[0][:2],
        "length": lambda names, log: len(names[0]),
        "count": lambda names, log: log.setdefault("seen", set()).update(names),
        "key": lambda names, log: log.__setitem__(names[0], log.get(names[0], 0) + 1),
        "or": lambda names, log: names[0] or "nothing",
    }
    for title, use in uses.items():

        def make(use=use) -> Program:
            log: dict = {}

            def step(x, names):
                return x * 2, use(names, log)

            def batch(index):
                return torch.ones(3), ["same", "same"] if index % 3 == 0 else [f"b {index}", f"a {index}"]

            return Program(step, batch, (log,))

        report = parity(make, steps=9, captures=None, whole=False)
        assert not any(f.code == "SFX204" for f in report.fallbacks), title


CHANGING = {
    "bytes": lambda i: f"row {i}".encode(),
    "string": lambda i: f"row {i}",
    "date": lambda i: datetime.datetime(2020, 1, 1 + i),
    "time span": lambda i: datetime.timedelta(seconds=i),
    "tuple": lambda i: (f"row {i}", f"name {i}"),
    "mixed tuple": lambda i: (f"row {i}", 7, f"{i}".encode(), None),
    "tuple of a tuple": lambda i: ((f"row {i}",), {}),
}
PASSES_ON = {
    "stored": lambda value: value,
    "in a list": lambda value: [value, value],
    "unpacked": lambda value: [*value] if type(value) is tuple else [value],
    "as arguments": lambda value: (lambda *all: list(all))(*(value if type(value) is tuple else (value,))),
    "shown": lambda value: f"{value!r} {[value]}",
}


@pytest.mark.parametrize("passed", PASSES_ON)
@pytest.mark.parametrize("kind", CHANGING)
def test_what_changes_at_every_call_is_passed_on(kind, passed):
    def make() -> Program:
        seen: list = []

        def step(x, value):
            seen.append(PASSES_ON[passed](value))
            return x * 2

        return Program(step, lambda index: (torch.ones(3) * index, CHANGING[kind](index)), (seen,))

    report = parity(make, steps=12, captures=None)
    assert report.graph_count <= 4, [recapture.source for recapture in report.recaptures]


TEXTS = {
    "upper": lambda text: text.upper() + "!",
    "stripped": lambda text: "<" + text.strip().title() + ">",
    "replaced": lambda text: text.replace("name", "id").center(20, "*"),
    "joined": lambda text: "-".join([text, "a"]) + "-".join((text, text)),
    "without": lambda text: text.removeprefix("name").zfill(6) + text.lower().ljust(12),
}


@pytest.mark.parametrize("made", TEXTS)
def test_texts_made_of_a_changing_text(made):
    def make() -> Program:
        seen: list = []

        def step(x, names):
            seen.append(TEXTS[made](names[0]))
            seen.append(TEXTS[made](f"name {x.sum().item():.1f}"))
            return x * 2

        return Program(step, lambda index: (torch.ones(3) * index, [f" name {index} "]), (seen,))

    report = parity(make, steps=12, captures=None)
    assert report.graph_count <= 3, [recapture.source for recapture in report.recaptures]


DECIDES = {
    "length": len,
    "equal": lambda text: text == "name 3",
    "key": lambda text: {text: 1},
    "split": lambda text: text.split(" "),
    "encoded": lambda text: text.encode(),
    "truth": lambda text: text or "nothing",
    "number": lambda text: int(text[5:]),
}


@pytest.mark.parametrize("decision", DECIDES)
def test_what_decides_on_a_text_that_keeps_changing_runs_between_two_parts(decision):
    def make() -> Program:
        seen: list = []

        def step(x, names):
            seen.append(DECIDES[decision](names[0]))
            return x * 2

        return Program(step, lambda index: (torch.ones(3) * index, [f"name {index}"]), (seen,))

    report = parity(make, steps=24, captures=None, whole=False)
    assert not report.fallbacks, str(report)
    assert len(report.captures) <= 12


def test_what_reads_a_date_that_keeps_changing_runs_between_two_parts():
    def make() -> Program:
        seen: list = []

        def step(x, now):
            seen.append(f"{now:%Y-%m-%d} {now.isoformat()}")
            return x * 2

        return Program(step, lambda index: (torch.ones(3), datetime.datetime(2020, 1, 1 + index)), (seen,))

    report = parity(make, steps=24, captures=None, whole=False)
    assert not report.fallbacks, str(report)


def test_a_mode_among_few_is_exact():
    def make() -> Program:
        def step(x, mode):
            return x * len(mode[0])

        return Program(step, lambda index: (torch.ones(3), [("train", "test", "evaluation")[index % 3]]))

    parity(make, steps=20, captures=8)


def test_a_text_that_is_decided_on_is_exact():
    def make() -> Program:
        seen: list = []

        def step(x, mode, name):
            seen.append(name)
            if mode == "double":
                return x * 2
            return x + len(mode)

        def batch(index):
            return torch.ones(3) * index, ("double", "half", "other")[index % 3], f"name {index}"

        return Program(step, batch, (seen,))

    parity(make, steps=12, captures=None, whole=False)


FORMATS = (
    "'{:04d} {0!s}'.format(box.n)",
    "f'{box.n:.2q}'",
    "f'{loss:d}'",
    "f'{loss.item():d}'",
    "'%d %s' % (box.n,)",
    "'%q' % box.n",
    "'{a}'.format(b=box.n)",
    "f'{x:.3f}'",
    "'%x' % loss.item()",
    "f'{box.n:s}'",
    "', '.join([box.n])",
    "f'{loss:.3f}'",
    "f'{loss!r:>30}'",
    "'{:>{w}}'.format(box.n, w=box.n + 3)",
    "f'{box.n > 1:d}'",
    "f'{[box.n, loss]}'",
    "str(box.n) + f'{loss:.1f}'",
    "'a' + f'{box.n}' + 'b'",
    "format(loss, '.2e')",
)


class Box:
    pass


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize("made", FORMATS)
def test_what_came_before_a_text_that_cannot_be_made_is_kept(made, caught):
    """The error of a string is raised at its place in the order; strings without an error are built after the graph."""
    space: dict = {}
    body = f"text = {made}"
    if caught:
        body = f"try: {body}\n    except Exception as error: text = repr(error)"
    exec(
        "def step(box, x):\n    box.log.append('before')\n    loss = (x * 2).sum()\n"
        f"    {body}\n    box.log.append(text)\n    box.n += 1\n    return loss",
        space,
    )

    def history(run):
        box, found = Box(), []
        box.n, box.log = 0, []
        for call in range(4):
            try:
                found.append(run(box, torch.ones(2) * call).item())
            except Exception as error:
                found.append(repr(error))
            found.append((box.n, list(box.log)))
        return found

    compiled = sidefx_train.compile(space["step"], backend="eager")
    assert history(compiled) == history(space["step"])
    assert not compiled.report().fallbacks, str(compiled.report())


def test_texts_are_put_together_in_one_graph():
    def step(box, x):
        text = "step " + str(box.n) + ": "
        text += f"{(x * 2).sum():.1f}"
        box.log.append("<" + text + ">")
        box.n += 1
        return x

    compiled, box = sidefx_train.compile(step, backend="eager"), Box()
    box.n, box.log = 0, []
    for call in range(3):
        compiled(box, torch.ones(2) * call)
    assert box.log == ["<step 0: 0.0>", "<step 1: 4.0>", "<step 2: 8.0>"]
    assert compiled.report().graph_count <= 2 and not compiled.report().breaks


FAILED = ValueError([1, 2], {"a": [3]})
PREPARED = functools.partial(print, [1], k={"a": [2]})
GROUP = ExceptionGroup("several", [ValueError([1]), TypeError(2)])


@dataclasses.dataclass
class Holding:
    error: Any
    prepared: Any


HOLDING = Holding(FAILED, PREPARED)


def test_texts_of_objects_of_c_show_what_they_hold():
    """Lists and dicts within an exception or a partial are read when it is printed."""

    def step(x, log):
        log.append((repr(FAILED), str(FAILED), f"{FAILED!r}", "%s" % FAILED, repr(PREPARED)))  # noqa: UP031
        log.append((repr(GROUP), repr(HOLDING)))
        FAILED.args[0].append(len(FAILED.args[0]))
        PREPARED.keywords["k"]["a"].append(0)
        return x * 2

    lines = []
    for fn in (step, sidefx_train.compile(step, backend="eager")):
        FAILED.args[0][:] = [1, 2]
        PREPARED.keywords["k"]["a"][:] = [2]
        lines.append([])
        for _ in range(3):
            fn(torch.ones(2), lines[-1])
    assert lines[0] == lines[1]


def test_a_warning_from_a_module_without_a_loader(recwarn):
    """A warning needs only the registry of a module's globals; newer Pythons refuse globals without a loader."""
    space = {"__name__": "made", "__spec__": None, "__loader__": None, "warnings": warnings}
    exec("def step(x):\n    warnings.warn(f'at {x.shape}')\n    return x + 1\n", space)
    compiled = sidefx_train.compile(space["step"], backend="eager", fullgraph=True, on_failure="raise")
    for size in (1, 2):
        compiled(torch.ones(size))
    assert [str(w.message) for w in recwarn] == ["at torch.Size([1])", "at torch.Size([2])"]
    assert {w.category for w in recwarn} == {UserWarning}


def names(i: int, count: int = 3) -> tuple[str, ...]:
    return tuple(f"file_{i}_{k}.png" for k in range(count))


LOG: list[object] = []


def unused(x, files):
    return x * 2


def returned(x, files):
    return x * 2, files


def kept(x, files):
    LOG.append(files)
    LOG.append(f"{files}")
    return x * 2


def looked_at(x, files):
    LOG.append(files[0].upper())
    return x * len(files)


@pytest.mark.parametrize("step", [unused, returned, kept, looked_at], ids=lambda step: step.__name__)
def test_names_of_a_batch(step):
    """Regression: each tuple of names was a capture of its own, until the step ran eagerly."""
    captured = sidefx_train.compile(step, backend="eager")
    for i in range(8):
        given, outcomes = names(i, 3 - (i == 5)), []
        for run in (step, captured):
            LOG.clear()
            outcomes.append((run(torch.ones(2) * i, given), list(LOG)))
        assert str(outcomes[0]) == str(outcomes[1])
        if step is returned and i > 2:
            assert outcomes[1][0][1] is given
        if step is kept and i > 2:
            assert outcomes[1][1][0] is given
    assert len(captured.report().captures) == (3 if step is looked_at else 2)  # one for each number of names
    assert captured.report().replays == 8


class Stage(str, Enum):
    """An enumeration that ignores case, like Lightning's own."""

    TRAIN = "Train"
    TEST = "Test"

    def __eq__(self, other):
        other = other.value if isinstance(other, Enum) else other
        return self.value.lower() == str(other).lower()

    def __hash__(self):
        return hash(self.value.lower())


FACTORS = {Stage.TRAIN: 2.0, Stage.TEST: 3.0}


def test_keys_whose_hash_is_written_in_python():
    class State:
        stage = Stage.TRAIN

    def step(x):
        inside = {Stage.TRAIN: 5.0, "test": 7.0}
        return x * FACTORS[State.stage] * inside[State.stage] * FACTORS.get("TRAIN".lower(), 0.5)

    captured = sidefx_train.compile(step, backend="eager")
    for stage in (Stage.TRAIN, Stage.TEST, Stage.TRAIN):
        State.stage = stage
        assert torch.equal(captured(torch.ones(2)), step(torch.ones(2)))
    report = captured.report()
    assert not report.breaks and not report.fallbacks and report.replays == 3


Named = namedtuple("Named", "x names")
PASSED_ON = {
    "partial": lambda b: functools.partial(lambda x, names: x, *b)(),
    "method": lambda b: types.MethodType(lambda batch: batch[0], b)(),
    "namespace": lambda b: types.SimpleNamespace(x=b[0], names=b[1]).x,
    "named tuple": lambda b: Named(*b).x,
    "made": lambda b: Named._make(b).x,
    "joined": lambda b: (b + (1,))[0],
    "operator.add": lambda b: operator.add(b, (1,))[0],
    "dict": lambda b: dict(x=b[0], names=b[1])["x"],  # noqa: C408
    "ordered": lambda b: OrderedDict(x=b[0], names=b[1])["x"],
    "deque": lambda b: deque(b)[0],
    "chain": lambda b: next(itertools.chain(b)),
    "map": lambda b: next(map(lambda value: value, b)),
    "filter": lambda b: next(filter(lambda value: True, b)),
    "reduce": lambda b: functools.reduce(lambda left, right: left, b),
    "copy": lambda b: copy.copy(list(b))[0],
    "condition": lambda b: b[0] if b and functools.partial(len, b) else 0,
    "length": lambda b: b[0] if len(Named(*b)) == 2 else 0,
}


@pytest.mark.parametrize("way", PASSED_ON)
def test_names_that_c_code_passes_on_are_not_read(way):
    def make() -> Program:
        def step(batch):
            return PASSED_ON[way](batch) * 2

        return Program(step, lambda index: ((torch.ones(3), [f"{index}.{i}" for i in range(4)]),))

    report = parity(make, steps=4)
    assert report.graph_count == 1, [r.source for r in report.recaptures]


def test_c_functions_called_with_the_items_read_them():
    def make() -> Program:
        def step(x, rows):
            return x * 2, list(map(str, rows)), list(filter(None, rows)), functools.reduce(operator.add, rows)

        return Program(step, lambda index: (torch.ones(3), [[index], [], [1, index]]))

    parity(make, steps=4, captures=None)
