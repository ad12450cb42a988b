"""Tensor values that exist only when the graph runs: kept symbolic, deferred, or refused; never a wrong constant."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from tests.support.parity import Program, batches, mlp, parity
from tests.support.training_steps import refused, trained


def plain(step, *watch) -> Program:
    return Program(step, batches((5, 6), classes=3), watch)


# ---------------------------------------------------------------------- captured
CAPTURED = {
    "item": lambda x, y: x.sum().item(),
    "item_arithmetic": lambda x, y: x.sum().item() * 2 + 1,
    "item_of_ints": lambda x, y: y.sum().item() + 3,
    "item_into_a_tensor": lambda x, y: x * x.mean().item(),
    "item_as_a_size": lambda x, y: torch.ones(y[0].item() + 1),
    "int": lambda x, y: int(y.sum()) + int((x > 0).sum()),
    "float": lambda x, y: float(x.sum()),
    "tolist": lambda x, y: (x.mean(0).tolist(), x[:2, :2].tolist(), x.sum().tolist(), x[:0].tolist()),
    "tolist_into_a_tensor": lambda x, y: x * x.mean(0).tolist()[1] + sum(x[0].tolist()),
    "round": lambda x, y: round(x.sum().item(), 2),
    "nonzero": lambda x, y: (x > 0).nonzero(),
    "where": lambda x, y: torch.where(x > 0),
    "mask": lambda x, y: x[x > 0].sum(),
    "masked_select": lambda x, y: torch.masked_select(x, x > 0),
    "unique": lambda x, y: torch.unique(y, return_counts=True),
    "bincount": lambda x, y: torch.bincount(y, minlength=3),
    "repeat_interleave": lambda x, y: torch.repeat_interleave(x[:, 0], y),
    "equal": lambda x, y: (torch.equal(x, x + 0), x.equal(x.abs())),
    "allclose": lambda x, y: (torch.allclose(x, x + 1, atol=2.0), x.allclose(-x)),
    "rows": lambda x, y: [row.sum() for row in x],
}


@pytest.mark.parametrize("name", CAPTURED)
def test_value_or_shape_from_data(name):
    parity(lambda: plain(CAPTURED[name]), steps=5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_queue_with_its_position_in_a_tensor(backend):
    """A memory bank: rows are written at an index that a one-element tensor holds."""

    def make() -> Program:
        queue, place = torch.zeros(20, 6), torch.zeros(1, dtype=torch.long)

        def step(x, y):
            p = int(place)
            queue[p : p + len(x)] = x
            place[0] = (p + len(x)) % 20
            return p, queue.sum(0)

        return Program(step, batches((5, 6), classes=3), (queue, place))

    parity(make, steps=9, backend=backend, captures=2)  # Inductor compiles only for index 0


def test_other_elements_of_the_memory_of_a_counter():
    def make() -> Program:
        counts = torch.zeros(3, dtype=torch.long)
        first = counts[0]

        def step(x, y):
            counts[1] += 2
            return first.item(), int(first) + 1, counts * 1

        return Program(step, batches((5, 6), classes=3), (counts, first))

    parity(make, steps=4, captures=None)


def test_packed_sequences():
    """The sizes of sequences packed by C code are in a tensor: it runs natively, between two parts."""

    def make() -> Program:
        layer, head = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 3)
        optimizer = torch.optim.SGD([*layer.parameters(), *head.parameters()], lr=0.1)
        pack = nn.utils.rnn.pack_padded_sequence

        def step(x, y):
            packed = pack(x, torch.tensor([5, 3, 2, 1]), batch_first=True)
            hidden = layer(packed)[1][0][-1]
            loss = F.cross_entropy(head(hidden), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Program(step, batches((4, 5, 6), classes=3), (layer, head, optimizer))

    report = parity(make, steps=4, whole=False, captures=None)
    assert not report.fallbacks, f"ran eagerly:\n{report}"


def mask_assignment(x, y):
    x = x.clone()
    negative = x < 0
    x[negative] = x[negative] * 2
    x[x > 1] = 0.5
    return x


def test_mask_assignment():
    parity(lambda: plain(mask_assignment), steps=4)


@pytest.mark.slow
def test_mask_inductor():
    def step(x, y):
        return mask_assignment(x, y), x[x > 0].sum()

    parity(lambda: plain(step), steps=4, backend="inductor")


def test_loss_history():
    def make() -> Program:
        history, state = [], {"average": 0.0}

        def loss_of(model, x, y):
            loss = F.cross_entropy(model(x), y)
            history.append(float(loss))
            state["average"] = 0.9 * state["average"] + 0.1 * loss.item()
            print(f"{loss.item():.3f} {loss:.2f}")
            return loss

        return trained(loss_of, None, history, state)

    parity(make, steps=4, captures=2)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_list_of_a_number_that_the_prologue_knows(shape, dtype):
    """Regression: the number itself, not in lists."""
    parity(
        lambda: Program(
            lambda x, n: (x * 2, n.tolist(), (n + 1).tolist()),
            lambda i: (torch.ones(3), torch.full(shape, 2 + i, dtype=dtype)),
        ),
        steps=4,
    )


def test_a_list_of_floats_that_decides():
    def step(x, y):
        chances = x.mean(0).tolist()
        return x * (2 if chances[0] > chances[1] else 3), sorted(chances)

    report = parity(lambda: plain(step), steps=4, captures=None, whole=False)
    assert {found.code for found in report.breaks} >= {"SFX106"} and not report.fallbacks


def test_listing_a_tensor_with_a_history_makes_no_node():
    def listing(model, x, y):
        out = model(x)
        kept.append(out.mean(0).tolist())
        return F.cross_entropy(out, y)

    kept = []

    def make():
        kept.clear()
        return trained(listing, None, kept)

    parity(make, steps=4)


# ---------------------------------------------------------------------- decided by the prologue
def test_scalar_arguments_decide():
    """A 0-dim CPU tensor from outside has its value before the graph runs: the step may branch on it."""

    def step(x, scale, flag):
        x = x * 2 if scale.item() > 1 else x
        return -x if flag else x

    program = Program(step, lambda i: (torch.ones(3), torch.tensor(float(i % 3)), torch.tensor(i % 2 == 0)))
    parity(lambda: program, steps=12, captures=4)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        before = self.count.item()
        self.count += 1
        return self.layer(x) * (2 if before > 1 else 1) * (1 + self.count.item())


def test_counter_in_a_buffer():
    def make() -> Program:
        return trained(lambda model, x, y: F.cross_entropy(model(x), y), Counting())

    def between(program, index):
        if index == 5:
            program.watch[0].count.zero_()

    parity(make, steps=8, captures=2, between=between)


@pytest.mark.parametrize("write", ["mul_", "view", "foreach"])
def test_counter_written_in_other_ways(write):
    """A value that the step has changed before it reads it differs from the value at entry."""

    class Written(Counting):
        def forward(self, x):
            if write == "mul_":
                self.count.mul_(2).add_(1)
            elif write == "view":
                self.count.view(1).add_(1)
            else:
                torch._foreach_add_([self.count], [torch.tensor(1)])
            return self.layer(x) * (2 if self.count.item() > 2 else 1)

    def make() -> Program:
        return trained(lambda model, x, y: F.cross_entropy(model(x), y), Written())

    report = parity(make, steps=5, captures=None, whole=False)
    if write == "mul_":
        assert {found.code for found in report.breaks} == {"SFX101"}


def test_shown_before_a_multi_tensor_update():
    """Multi-tensor operations do not change versions of fake tensors; the printed value is the current one."""

    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            print(model[0].bias, model[0].bias.detach())
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Program(step, batches((5, 6), classes=3), (model, optimizer))

    parity(make, steps=4)


# ---------------------------------------------------------------------- refused
def branch_on_loss(model, x, y):
    loss = F.cross_entropy(model(x), y)
    return loss * 2 if loss > 1.2 else loss


def branch_on_item(model, x, y):
    loss = F.cross_entropy(model(x), y)
    return loss * 2 if loss.item() > 1.2 else loss


def compare_tensors(model, x, y):
    return F.cross_entropy(model(x if torch.equal(model(x), x[:, :3]) else -x), y)


def look_inside(model, x, y):
    return F.cross_entropy(model(x if 1 in model(x) else -x), y)


def as_keys(model, x, y):
    return F.cross_entropy(model(x), y) * len(set(model(x).argmax(1).tolist()))


def as_array(model, x, y):
    return F.cross_entropy(model(x), y) * float(x.numpy().sum())


VALUE = "branches on a tensor's value, which exists only when the graph runs"
LATER = "needs a value that exists only when the graph runs"
REFUSED = [
    (branch_on_loss, "SFX101", VALUE),
    (branch_on_item, "SFX101", VALUE),
    (compare_tensors, "SFX101", VALUE),
    (look_inside, "SFX101", f"_operator.contains {LATER}"),
    (as_keys, "SFX106", "Tensor.tolist needs values that exist only when the graph runs"),
    (as_array, "SFX106", "computes mul of a value that is known only after the step"),
]


@pytest.mark.parametrize(("loss_of", "code", "words"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_refused(loss_of, code, words):
    refused(loss_of, code, words)


def test_where_the_memory_of_a_tensor_is():
    def moved(x: torch.Tensor) -> tuple[bool, bool, torch.Tensor]:
        y = x + 1
        before = y.is_shared()
        y.share_memory_()
        return before, y.is_shared(), y

    def kind(x: torch.Tensor) -> type:
        return (x + 1).storage_type()

    compiled = sidefx_train.compile(moved, backend="eager")
    other = sidefx_train.compile(kind, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            before, after, y = compiled(torch.ones(2))
            assert (before, after, y.is_shared(), y.tolist()) == (False, True, True, [2.0, 2.0])
            assert other(torch.ones(2)) is torch.FloatStorage


def test_an_operator_without_a_rule_for_shapes_raises_nothing_that_the_step_handles(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(torch.arange(4.0).numpy().tobytes())

    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * torch.from_file(str(path), size=4, dtype=torch.float32)
        except NotImplementedError:
            return x

    compiled = sidefx_train.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            assert compiled(torch.full((4,), 2.0)).tolist() == [0.0, 2.0, 4.0, 6.0]
