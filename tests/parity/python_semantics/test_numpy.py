"""NumPy arrays and scalars in a step: new contents give eager's result, as an input or by a recapture."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, mlp, parity


def trained(loss_of, batch, *watch) -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(*args):
        loss = loss_of(model, *args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(step, batch, ([*model.parameters()], optimizer, *watch))


def arrays(index: int) -> tuple:
    random = np.random.default_rng(index)
    return random.normal(size=(5, 6)).astype("float32"), random.integers(0, 3, 5)


WAYS = {
    "from_numpy": (torch.from_numpy, torch.from_numpy),
    "as_tensor": (lambda a: torch.as_tensor(a, dtype=torch.float32), torch.as_tensor),
    "tensor": (torch.tensor, lambda a: torch.tensor(a, dtype=torch.int64)),
}


@pytest.mark.parametrize("way", WAYS)
def test_batches_of_arrays(way):
    """Arrays that become tensors are inputs: one graph for all contents; shapes are read without a recapture."""
    x_of, y_of = WAYS[way]

    def loss(model, x, y):
        assert isinstance(x, np.ndarray) and x.ndim == 2
        return F.cross_entropy(model(x_of(x)), y_of(y)) * len(y) / x.shape[0]

    parity(lambda: trained(loss, arrays), steps=5)


def test_array_in_a_dict():
    def batch(index):
        x, y = arrays(index)
        return ({"x": torch.from_numpy(x), "y": y, "w": np.full(3, 1.0 + index, "float32")},)

    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]), torch.from_numpy(batch["y"]), weight=torch.tensor(batch["w"]))

    parity(lambda: trained(loss, batch), steps=4)


def test_array_from_outside_changes():
    """An array in a closure is read at every call: written in place and replaced between calls."""

    def make() -> Program:
        state = {"weight": np.ones(3, "float32")}
        loss = lambda model, x, y: F.cross_entropy(
            model(torch.from_numpy(x)), torch.from_numpy(y), weight=torch.from_numpy(state["weight"])
        )
        program = trained(loss, arrays)
        program.state = state
        return program

    def between(program, index):
        program.state["weight"][0] += 1
        if index == 3:
            program.state["weight"] = np.full(3, 5.0, "float32")

    parity(make, steps=6, between=between)


def test_contents_read_by_numpy_are_guarded():
    """A value that NumPy computes from an array is a constant of the graph: other contents are captured again."""

    def make() -> Program:
        limits = np.array([1.0, 2.0])
        loss = lambda model, x, y: (
            F.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y)) * float(limits.mean())
            + limits[0] * (limits.T > 1).sum()
        )
        program = trained(loss, arrays)
        program.limits = limits
        return program

    def between(program, index):
        if index == 2:
            program.limits[1] = 7.0

    parity(make, steps=4, between=between, captures=2)


def test_scalars():
    def make() -> Program:
        scale = np.float64(0.25)
        batch = lambda index: (*arrays(index), np.float32(0.5 + index // 2))

        def loss(model, x, y, s):
            return F.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y)) * s * float(scale)

        return trained(loss, batch)

    parity(make, steps=4, captures=2)


def test_learning_rate_from_numpy():
    """A schedule computed with NumPy leaves ``np.float64`` in param_groups: an input like any other rate."""

    def make() -> Program:
        return trained(lambda model, x, y: F.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y)), arrays)

    def between(program, index):
        program.watch[1].param_groups[0]["lr"] = np.float64(0.05) * np.cos(index / 10)

    parity(make, steps=5, between=between)


def test_write_through_a_tensor():
    """``from_numpy`` shares memory: the array contains the step's writes."""

    def make() -> Program:
        running = np.zeros(3, "float32")

        def loss(model, x, y):
            out = model(torch.from_numpy(x))
            torch.from_numpy(running).mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
            return F.cross_entropy(out, torch.from_numpy(y))

        program = trained(loss, arrays)
        program.watch = (*program.watch, torch.from_numpy(running))
        return program

    parity(make, steps=4)


@pytest.mark.parametrize("how", ["setitem", "inplace", "both"])
def test_writes_in_numpy_are_refused(how):
    def make() -> Program:
        counts = np.zeros(3)

        def loss(model, x, y):
            if how == "setitem":
                counts[0] = 1.0
            elif how == "inplace":
                view = counts
                view += 1
            else:
                torch.from_numpy(counts).add_(float(counts.sum()) + 1)
            return F.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))

        return trained(loss, arrays, torch.from_numpy(counts))

    report = parity(make, steps=3, captures=None, whole=False)
    what = "reads counts and writes to it through a tensor" if how == "both" else "writes into counts, a NumPy array"
    assert ("SFX104", what) in {(found.code, found.reason) for found in report.breaks}


def _handled(counts):
    try:
        np.put(counts, [0, 1], 5.0)
    except ValueError:
        counts.fill(-1.0)


@pytest.mark.parametrize(
    "write",
    [
        lambda counts: np.add.at(counts, [0, 0, 2], 1.0),
        lambda counts: np.ufunc.at(np.add, counts, [1], 2.0),
        lambda counts: np.negative.at(counts[1:], [0]),
        lambda counts: list(map(np.add.at, [counts], [[0]], [2.0])),
        lambda counts: counts.resize((3, 1)),
        lambda counts: np.add.accumulate(counts + 1, out=counts),
        _handled,
    ],
    ids=["at", "unbound at", "at of a view", "called in C", "resize", "out", "handled"],
)
def test_c_code_that_writes_to_an_outside_array(write):
    """Regression: some C code does not ask whether it may write to an array; other code raised, and eager does not."""

    def make() -> Program:
        counts = np.arange(3.0)
        seen = []

        def step(x):
            y = x * 2
            write(counts)
            seen.append(counts.tolist())
            return y + 1

        return Program(step, lambda index: (torch.full((2,), float(index)),), seen)

    report = parity(make, steps=3, captures=None, whole=False)
    assert "SFX104" in {found.code for found in [*report.breaks, *report.fallbacks]}


def test_indices_from_outside_into_a_new_array():
    outside = np.array([0, 0, 2])

    def make() -> Program:
        def step(x):
            counts = np.zeros(3)
            np.add.at(counts, outside, 1.0)
            return x * counts.tolist()[0]

        return Program(step, lambda index: (torch.full((2,), float(index)),))

    parity(make, steps=3)


def test_printed_array():
    def loss(model, x, y):
        print("labels", y)
        return F.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))

    parity(lambda: trained(loss, arrays), steps=3)


def test_large_arrays_read_by_numpy_are_not_compared():
    """A replay buffer: rows of a large array, picked in the step, are not part of the program."""
    buffer = np.random.default_rng(0).standard_normal((20_000, 3)).astype(np.float32)
    weight = torch.ones(3, requires_grad=True)

    def step(rows, label):
        picked = torch.from_numpy(buffer[rows])
        loss = (picked * weight).sum() * len(label)
        loss.backward()
        return loss.detach()

    compiled = sidefx_train.compile(step, backend="eager")
    generator = np.random.default_rng(1)
    for call in range(6):
        rows, label = generator.integers(0, 20_000, 4), "long " * 100
        buffer[rows] += call
        found = [compiled(rows, label), weight.grad.clone()]
        weight.grad = None
        wanted = [step(rows, label), weight.grad.clone()]
        weight.grad = None
        assert all(map(torch.equal, found, wanted))
    report = compiled.report()
    assert report.replays == 6 and not report.recaptures, str(report)
    assert not report.breaks and len(report.captures) == 1
    assert all(len(source) < 20_000 for source in report.sources().values())
    assert "long long" not in report.sources()["residual"]


def test_a_metric_in_the_middle_of_the_step():
    """Contents that keep changing are read natively, after three captures for other contents."""

    def make() -> Program:
        history = []

        def loss(model, x, y):
            scores = model(torch.from_numpy(x))
            history.append(float(np.abs(scores.detach().numpy()).mean()))
            history.append(statistics.fmean(x[0]))
            return F.cross_entropy(scores, torch.from_numpy(y))

        return trained(loss, arrays, history)

    report = parity(make, steps=24, whole=False, captures=None)
    assert not report.fallbacks and report.graph_count <= 20, f"{report}"


def test_a_number_that_keeps_changing():
    """It passes through: its class is known, its value is not."""

    def make() -> Program:
        seen = []

        def loss(model, x, y, number):
            seen.append((number, type(number), isinstance(number, np.floating), f"{number:.2f}"))
            return F.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))

        return trained(loss, lambda index: (*arrays(index), np.float32(index / 2)), seen)

    parity(make, steps=8, captures=4)


def test_a_branch_on_a_number_that_keeps_changing():
    def make() -> Program:
        def loss(model, x, y, number):
            value = F.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
            return value * number if number > 2 else value

        return trained(loss, lambda index: (*arrays(index), np.float32(index / 2)))

    parity(make, steps=8, captures=3)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.filterwarnings("ignore::sidefx_train.SideFXWarning")
def test_an_array_whose_memory_is_that_of_a_written_tensor(first):
    """Regression: the array had its contents from before the step."""

    def step(array, tensor, seen):
        tensor.add_(1)
        seen.append(array.tolist())
        return tensor * 2

    def apart():
        return np.arange(3.0), torch.zeros(3)

    def of_a_tensor():
        tensor = torch.arange(3.0)
        return tensor.numpy(), tensor

    def under_a_tensor():
        array = np.arange(6.0)[::-2]
        return array, torch.from_numpy(array[::-1]).view(3)

    compiled = sidefx_train.compile(step, backend="eager")
    for make in (of_a_tensor, under_a_tensor, apart, apart) if first else (apart, of_a_tensor, under_a_tensor):
        outcomes = []
        for run in (step, compiled):
            seen: list[list[float]] = []
            outcomes.append((run(*make(), seen).tolist(), seen))
        assert outcomes[0] == outcomes[1]
    assert compiled.report().replays


def test_array_made_in_the_step():
    """It is a copy at every call, in eager's memory order."""
    given = np.arange(6.0).reshape(2, 3)
    compiled = sidefx_train.compile(lambda a: (np.asfortranarray(a + 1), a.sum()), backend="eager", fullgraph=True)
    first = compiled(given)[0]
    first[:] = 0
    again, total = compiled(given)
    assert np.array_equal(again, given + 1)
    assert again.strides == np.asfortranarray(given).strides
    assert total == 15 and type(total) is np.float64


def test_array_made_in_the_step_follows_its_argument():
    compiled = sidefx_train.compile(lambda a, x: (a * 2, x + 1), backend="eager", on_failure="eager")
    for call in range(6):
        found, _ = compiled(np.full(3, float(call)), torch.ones(2))
        assert np.array_equal(found, np.full(3, 2.0 * call))


def test_view_of_an_array_shares_its_memory():
    given = np.zeros(4)
    compiled = sidefx_train.compile(lambda a: a[1:], backend="eager", fullgraph=True, on_failure="raise")
    for value in (5, 6):
        compiled(given)[0] = value
        assert given[1] == value


def test_array_of_objects_is_not_rebuilt():
    compiled = sidefx_train.compile(lambda a: np.array([None, "a"]), backend="eager", on_failure="eager")
    assert compiled(torch.ones(2)).tolist() == [None, "a"]
    (found,) = compiled.report().fallbacks
    assert "of objects" in found.reason


@pytest.mark.parametrize("function", [np.sin, np.asarray, lambda x: x * np.ones(3)])
def test_numpy_function_of_a_tensor(function):
    """That line runs natively, between two graphs: NumPy rounds in another way than torch."""
    compiled = sidefx_train.compile(lambda x: torch.as_tensor(function(x * 2)) + 1, backend="eager")
    for call in range(2):
        x = torch.arange(3.0) + call
        assert torch.equal(compiled(x), torch.as_tensor(function(x * 2)) + 1)
    assert {each.code for each in compiled.report().breaks} == {"SFX106"}
    assert not compiled.report().fallbacks


MEMORY = {
    "flags": lambda a, b: (a.flags.writeable, a.flags.owndata, a[1:].flags.writeable, b.T.flags.writeable),
    "base": lambda a, b: (a.base is None, b.base is a),
    "interface": lambda a, b: a.__array_interface__["data"][1],
    "data": lambda a, b: (a.data.readonly, memoryview(b).readonly),
    "shared": lambda a, b: (np.shares_memory(a, b), np.may_share_memory(b, a)),
    "require": lambda a, b: np.require(a, None, "W") is a,
}


@pytest.mark.parametrize("ask", MEMORY)
def test_the_memory_of_an_array_is_that_of_the_program(ask):
    """Regression: what the capture reads is a read-only copy, and said so."""

    def step(x, a, b):
        return x + 1, MEMORY[ask](a, b)

    compiled = sidefx_train.compile(step, backend="eager", warmup="now")
    for call in range(4):
        a = np.ones(4)
        a.flags.writeable = call != 2
        assert compiled(torch.ones(2), a, a[1:])[1] == step(torch.ones(2), a, a[1:])[1]


CLASSES: dict[str, Any] = {
    "FloatTensor": (np.float32, torch.FloatTensor),
    "Tensor": (np.float32, torch.Tensor),
    "DoubleTensor": (np.float64, torch.DoubleTensor),
    "IntTensor": (np.int32, torch.IntTensor),
    "new": (np.float32, lambda array: torch.ones(1).new(array)),
    "other dtype": (np.float64, torch.FloatTensor),
    "copied": (np.float32, lambda array: torch.ones(1).new_tensor(array)),
}


@pytest.mark.parametrize("how", list(CLASSES))
def test_a_tensor_class_called_with_an_array_of_the_program(how):
    """It shares the memory of the array where the types agree, so a write to the tensor is one to the array."""
    kind, make = CLASSES[how]

    def run(wrap: Any) -> list[Any]:
        array, found = np.arange(6).astype(kind).reshape(2, 3), []

        def step(x):
            tensor = make(array)
            tensor.mul_(2)
            return x * tensor

        wrapped = wrap(step)
        for i in range(4):
            array += 1
            found += [wrapped(torch.full((2, 3), 1.0 + i)), torch.from_numpy(array.copy())]
        return [*found, wrapped]

    *want, _ = run(lambda step: step)
    *have, compiled = run(lambda step: sidefx_train.compile(step, backend="eager", fullgraph=True))
    assert all(map(torch.equal, have, want)) and [each.dtype for each in have] == [each.dtype for each in want]
    assert len(compiled.report().captures) == 1


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_tensor_class_called_with_a_drawn_array(backend):
    def run(wrap: Any) -> list[Any]:
        np.random.seed(0)
        step = wrap(lambda x: x * torch.FloatTensor(np.random.normal(0, 1, (2, 3))) + x.new(np.random.random((2, 1))))
        return [step(torch.full((2, 3), 1.0 + i)) for i in range(4)] + [torch.tensor(np.random.random())]

    want = run(lambda step: step)
    have = run(lambda step: sidefx_train.compile(step, backend=backend, fullgraph=True, keep_slower=True))
    torch.testing.assert_close(have, want)
    if backend == "eager":
        assert all(map(torch.equal, have, want))


PARTS: dict[str, Any] = {
    "rows": lambda data: torch.from_numpy(data[2:4]),
    "columns": lambda data: torch.from_numpy(data.T[:3, 2:4].T),
    "every second": lambda data: torch.as_tensor(data[1:5:2]),
    "reshaped": lambda data: torch.from_numpy(data.reshape(-1)[3:9]).view(2, 3),
    "one row": lambda data: torch.Tensor(data[5]).expand(2, 3),
    "cast": lambda data: torch.as_tensor(data[3:5], dtype=torch.float64),
    "two": lambda data: torch.from_numpy(data[1:3]) + torch.from_numpy(data)[2:4],
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("how", list(PARTS))
def test_a_tensor_over_part_of_an_array_of_the_program(how, backend):
    """The part that leaves the step shares the array's memory, as in eager."""
    data = np.arange(24, dtype=np.float32).reshape(8, 3)
    part, kept = PARTS[how], []

    def step(x):
        tensor = part(data)
        kept.append(tensor)
        return x * tensor

    compiled = sidefx_train.compile(step, backend=backend, fullgraph=True, keep_slower=True)
    for i in range(3):
        x = torch.full((2, 3), 1.0 + i)
        torch.testing.assert_close(compiled(x), x * part(data), rtol=0, atol=0)
    assert len(compiled.report().captures) == 1
    want = part(data)
    for tensor in kept:
        assert torch.equal(tensor, want) and tensor.stride() == want.stride()
        assert np.shares_memory(tensor.numpy(), data) == np.shares_memory(want.numpy(), data)


def test_a_tensor_over_a_part_that_the_step_chooses_by_a_counter():
    data, state = np.arange(24, dtype=np.float32).reshape(8, 3), {"step": 0}

    def step(x):
        state["step"] += 1
        return x * torch.from_numpy(data[state["step"] : state["step"] + 2])

    compiled = sidefx_train.compile(step, backend="eager", on_failure="raise")
    for i in range(1, 5):
        assert torch.equal(compiled(torch.ones(2, 3)), torch.from_numpy(data[i : i + 2]))


def test_a_write_through_a_tensor_over_part_of_an_array_reaches_the_array():
    data = np.zeros((4, 3), dtype=np.float32)

    def step(x):
        torch.from_numpy(data[1:3]).add_(1)
        return x * 2

    compiled = sidefx_train.compile(step, backend="eager")
    for i in range(1, 4):
        compiled(torch.ones(2))
        assert data[1:3].tolist() == [[float(i)] * 3] * 2 and not data[0].any() and not data[3].any()


@pytest.mark.parametrize("form", ["statements", "loop"])
def test_writes_into_several_arrays_of_one_object_are_one_break(form):
    class Buffer:
        def __init__(self):
            self.states, self.rewards = np.zeros((5, 1, 3), np.float32), np.zeros((5, 1), np.float32)
            self.place = 0

        def add(self, state, reward):
            if form == "statements":
                self.states[self.place] = np.array(state)
                self.rewards[self.place] = np.array(reward, dtype=np.float32).reshape(1)
            else:
                for array, value in ((self.states, state), (self.rewards, reward)):
                    array[self.place] = value
            self.place = (self.place + 1) % 5

    def make():
        torch.manual_seed(0)
        model, buffer = nn.Linear(3, 1), Buffer()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(state, reward):
            buffer.add(state, reward)
            loss = model(torch.as_tensor(state)).square().mean() * float(reward)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        def batch(call):
            return np.full((1, 3), call, np.float32), np.float64(call)

        return Program(step, batch, (model, optimizer, buffer))

    report = parity(make, steps=12, captures=None, whole=False)
    assert report.replays == 12 and not any(part.fallbacks for part in report.parts)
    assert len(report.breaks) == 1 and not any(part.breaks for part in report.parts)
    assert all(part.replays <= 12 for part in report.parts)
