"""Items of outside lists at an index that the step computes from a counter: they are looked up at every call."""

from __future__ import annotations

import collections
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sidefx_train
from tests.support.parity import Program, batches, mlp, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


class Buffered(torch.optim.Optimizer):
    """The update of RAdam with a ring buffer of step sizes, as in many repositories."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "buffer": [[None, None, None] for _ in range(10)]})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["square"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                state["mean"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["step"] += 1
                buffered = group["buffer"][int(state["step"] % 10)]
                if state["step"] == buffered[0]:
                    length, size = buffered[1], buffered[2]
                else:
                    buffered[0] = state["step"]
                    power = beta2 ** state["step"]
                    longest = 2 / (1 - beta2) - 1
                    buffered[1] = length = longest - 2 * state["step"] * power / (1 - power)
                    if length >= 5:
                        size = math.sqrt((1 - power) * (length - 4) / (longest - 4) * (length - 2) / length)
                    else:
                        size = 1.0
                    buffered[2] = size = size * group["lr"] / (1 - beta1 ** state["step"])
                if length >= 5:
                    p.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-8), value=-size)
                else:
                    p.add_(state["mean"], alpha=-size)


def test_ring_buffer_of_an_optimizer():
    def make() -> Program:
        model = mlp()
        optimizer = Buffered(model.parameters())

        def step(x, y):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model, optimizer, optimizer.param_groups[0]["buffer"]))

    report = parity(make, steps=24, captures=None)
    assert len(report.captures) <= 6 and not report.fallbacks


class Counter:
    def __init__(self, items):
        self.calls, self.items = 0, items


def adds(state, x):
    """Changes the item that it finds."""
    state.calls += 1
    item = state.items[state.calls % len(state.items)]
    item.append(state.calls)
    return x * len(item)


def of_dicts(state, x):
    state.calls += 1
    item = state.items[state.calls % 4]
    item["seen"] = item.get("seen", 0) + state.calls
    return x + item["seen"]


def of_floats(state, x):
    state.calls += 1
    return x * state.items[-(state.calls % 4)]


def twice(state, x):
    """Two items, which may be one."""
    state.calls += 1
    one, other = state.items[state.calls % 4], state.items[state.calls * 3 % 4]
    one.append(1)
    other.append(2)
    return x * len(one) + len(other), one is other


def with_all(state, x):
    state.calls += 1
    state.items[state.calls % 4].append(state.calls)
    return x * sum(map(len, state.items))


def first_too(state, x):
    state.calls += 1
    picked = state.items[state.calls % 4]
    picked.append(3)
    state.items[1].append(4)
    return x * len(picked), picked is state.items[1]


def stores(state, x):
    state.calls += 1
    found = state.items[state.calls % 4]
    state.items[(state.calls + 1) % 4] = [*found, state.calls]
    return x * len(found)


def by_a_fraction(state, x):
    state.calls += 1
    return x * len(state.items[int(state.calls * 0.3)])


def out_of_range(state, x):
    state.calls += 1
    try:
        return x * len(state.items[state.calls * 3])
    except IndexError as error:
        return x, str(error)


def lists():
    return [[0], [1], [2, 2], [3]]


def one_list_twice():
    item = [0]
    return [item, [1], item, [2]]


PROGRAMS = [
    (adds, lists), (adds, one_list_twice), (of_dicts, lambda: [{}, {"seen": 3}, {}, {}]),
    (of_floats, lambda: [0.5, 1.5, 2.5, 0.1]), (twice, lists), (twice, one_list_twice), (with_all, lists),
    (first_too, lists), (stores, lists), (by_a_fraction, lists), (out_of_range, lists),
]  # fmt: skip


@pytest.mark.parametrize(("program", "items"), PROGRAMS, ids=lambda value: value.__name__)
def test_an_item(program, items):
    def outcome(run, state):
        told = []
        for _ in range(12 if program is not by_a_fraction else 9):
            made = run(state, torch.ones(2))
            told.append([each.tolist() if isinstance(each, torch.Tensor) else each for each in
                         (made if isinstance(made, tuple) else (made,))])  # fmt: skip
        return told, state.items, state.calls, [[a is b for a in state.items] for b in state.items]

    step = sidefx_train.compile(program, backend="eager")
    assert outcome(step, Counter(items())) == outcome(program, Counter(items()))
    if program in (of_dicts, of_floats):
        assert len(step.report().captures) <= 5


def test_the_list_changes_between_calls():
    def program(state, x):
        state.calls += 1
        item = state.items[state.calls % 3]
        return x * (item[0] if type(item) is list else 7)

    def outcome(run):
        state, told = Counter([[1], [2], [3], [4]]), []
        changes = [
            lambda: None,
            lambda: state.items.pop(),
            lambda: state.items.__setitem__(slice(None), [5, [6], "text"]),
            lambda: setattr(state, "items", [[8], [9], [10]]),
            lambda: setattr(state, "items", ([8], [9], [10])),
            lambda: setattr(state, "calls", 40.0),
            lambda: setattr(state, "items", [[8], [9]]),
        ]
        for change in changes:
            for _ in range(3):
                try:
                    told.append(run(state, torch.ones(2)).tolist())
                except (TypeError, IndexError) as error:
                    told.append(str(error))
            change()
        return told

    assert outcome(sidefx_train.compile(program, backend="eager")) == outcome(program)


def test_an_index_from_the_arguments():
    items = [[1], [2], [3]]
    step = sidefx_train.compile(lambda x, i: x * items[i % 3][0], backend="eager")
    for number in (0, 4, 2, 7, 9):
        assert torch.equal(step(torch.ones(2), number), torch.ones(2) * items[number % 3][0])


CHOICES = {
    "list": lambda space, k: space.layers[k],
    "from the end": lambda space, k: space.layers[-1 - k],
    "dict": lambda space, k: space.named[f"layer{k}"],
    "children": lambda space, k: dict(space.layers.named_children())[str(k)],
    "attribute": lambda space, k: getattr(space, f"layer{k}"),
    "submodule": lambda space, k: getattr(space.named, "layer" + str(k)),
    "with a default": lambda space, k: getattr(space, f"layer{k}", None) if hasattr(space, f"layer{k}") else None,
}


INDICES = {
    "int": lambda array, place: int(array[place]),
    "item": lambda array, place: array[place].item(),
    "list": lambda array, place: array.tolist()[place],
    "absolute": lambda array, place: int(np.abs(array[place] - 2)),
}


@pytest.mark.parametrize("index", INDICES)
def test_indices_that_are_computed_by_the_same_functions(index):
    """Each is another index, whatever its name in messages is."""

    def make() -> Program:
        items = [torch.full((2,), float(number)) for number in range(5)]
        tables = [{"rate": float(number), "kept": torch.full((2,), -float(number))} for number in range(5)]

        def step():
            drawn = np.random.randint(5, size=4)
            first, second, third, fourth = (INDICES[index](drawn, place) for place in range(4))
            return items[first] * 10 + items[second], tables[third]["rate"], tables[fourth]["kept"] + 1

        np.random.seed(3)
        return Program(step, lambda call: (), [items])

    parity(make, steps=24, captures=None)


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_a_module_is_captured_once(choose, drawn):
    def make():
        layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))
        named = torch.nn.ModuleDict({f"layer{place}": layer for place, layer in enumerate(layers)})
        space = SimpleNamespace(layers=layers, named=named, step=0)
        random.seed(0)

        def step(x):
            space.step += 1
            number = random.randrange(3) if drawn else (space.step // 5) % 3
            loss = choose(space, number)(x).square().mean()
            loss.backward()
            return loss.detach()

        space.layer0, space.layer1, space.layer2 = layers
        return Program(step, lambda index: (torch.randn(4, 3),), (layers, vars(space)))

    report = parity(make, steps=40, captures=6)
    assert not report.breaks


def test_one_of_many_modules_is_looked_up_natively():
    def make():
        layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(20))
        space = SimpleNamespace(step=0)

        def step(x):
            space.step += 1
            return layers[space.step % 20](x).sum()

        return Program(step, lambda index: (torch.randn(4, 3),), (layers, vars(space)))

    report = parity(make, steps=30, captures=None, whole=False)
    assert report.breaks and not report.fallbacks


def test_attributes_of_changing_names():
    """What is set and removed under such a name is eager's; a name that does not exist yet is none of a few."""

    class Log:
        kept_0, kept_1, kept_2 = 0.0, 1.0, 2.0

        def weight_0(self, x):
            return x * 2

        def weight_1(self, x):
            return x + self.kept_1

    def make():
        log = Log()

        def step(x, k):
            y = getattr(log, f"weight_{k % 2}")(x)
            setattr(log, f"kept_{k % 3}", getattr(log, f"kept_{k % 3}") + 1)
            if hasattr(log, f"missing_{k}"):
                delattr(log, f"missing_{k}")
            return y.sum(), getattr(log, f"missing_{k}", k)

        def between(program, i):
            if i in (11, 20):
                setattr(log, f"missing_{i}", i)
                log.weight_0 = lambda x: x - 1

        made = Program(step, lambda i: (torch.ones(3), i), vars(log))
        made.between = between
        return made

    parity(make, steps=40, captures=None, whole=False, between=lambda program, i: program.between(program, i))


def test_one_of_many_attributes_breaks():
    def make():
        model = torch.nn.Module()
        for place in range(20):
            setattr(model, f"layer{place}", torch.nn.Linear(3, 3))

        def step(x, k):
            return getattr(model, f"layer{k % 20}")(x).sum()

        return Program(step, lambda index: (torch.randn(4, 3), index), model)

    report = parity(make, steps=30, captures=None, whole=False)
    assert report.breaks and not report.fallbacks


@pytest.mark.parametrize("limit", [None, 2, 3])
def test_an_index_from_the_end_of_a_deque_that_the_step_appends_to(limit):
    """Regression: a full deque was indexed as if the step had not appended."""

    def make() -> Program:
        queue = collections.deque([1, 2], maxlen=limit)

        def step(x, k, n):
            queue.append({"n": n})
            queue.append(n)
            try:
                found = queue[-k]
            except IndexError as error:
                found = str(error)
            queue[n % 2] = x.sum().item()
            return found

        return Program(step, lambda i: (torch.ones(2) * i, (3, 2, 1, 2, 4, 0, 2, 1)[i], i), watch=(queue,))

    parity(make, steps=8, captures=None)
