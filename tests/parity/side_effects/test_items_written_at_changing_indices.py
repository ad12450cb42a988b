"""Items that a step writes to outside lists at an index that changes, or removes: other items are not read."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import sidefx_train
from tests.support.parity import Program, parity

ROWS, WIDTH, PLACES = 4, 4, 8


class Transition(NamedTuple):
    x: torch.Tensor
    reward: int
    last: bool


class Freed:
    """Counts what is freed."""

    count = 0

    def __del__(self):
        Freed.count += 1


class ImagePool:
    """Past images, as GANs keep them for their discriminators."""

    def __init__(self, size):
        self.size, self.count, self.images = size, 0, []

    def query(self, images):
        returned = []
        for image in images:
            image = torch.unsqueeze(image.data, 0)
            if self.count < self.size:
                self.count += 1
                self.images.append(image)
                returned.append(image)
            elif random.uniform(0, 1) > 0.5:
                place = random.randint(0, self.size - 1)
                kept = self.images[place].clone()
                self.images[place] = image
                returned.append(kept)
            else:
                returned.append(image)
        return torch.cat(returned, 0)


class Net:
    def __init__(self, kept) -> None:
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.05)
        self.kept = kept


def pools(net, x):
    return sum(net.layer(pool.query(net.layer(x[:1]))).square().mean() for pool in net.kept)


def batch_of_two(net, x):
    return net.layer(net.kept[0].query(net.layer(x[:2]))).square().mean()


def moving_average(net, x):
    place = random.randint(0, PLACES - 1)
    net.kept[place] = net.kept[place] * 0.9 + x * 0.1
    net.kept[place] = net.kept[place] + 1
    return net.layer(net.kept[place]).square().mean()


def two_places(net, x):
    a, b = random.randint(0, PLACES - 1), random.randint(0, PLACES - 1)
    net.kept[a] = x
    y = net.kept[b]
    net.kept[b] = x + 1
    return net.layer(y + net.kept[a]).square().mean()


def from_the_end(net, x):
    place = random.randint(0, PLACES - 1)
    net.kept[place] = x
    return net.layer(net.kept[place - PLACES]).square().mean() * len(net.kept)


def outside_of_it(net, x):
    try:
        net.kept[random.randint(0, PLACES)] = x
    except IndexError:
        return net.layer(x).mean() * 2
    return net.layer(x).mean()


def all_read_after(net, x):
    net.kept[random.randint(0, 3)] = x
    return net.layer(torch.stack(net.kept)).square().mean()


def ring(net, x):
    memory = net.kept[0]
    memory.items[memory.place] = (x, x.sum())
    memory.place = (memory.place + 1) % PLACES
    memory.count = min(memory.count + 1, PLACES)
    drawn = [memory.items[random.randrange(memory.count)] for _ in range(2)]
    return net.layer(torch.stack([a for a, _ in drawn])).square().mean() + sum(b for _, b in drawn) * 0.1


def ring_of_transitions(net, x):
    memory = net.kept[0]
    if len(memory.items) < PLACES:
        memory.items.append(None)
    memory.items[memory.place] = Transition(x, memory.place % 3, memory.place % 2 == 0)
    memory.place = (memory.place + 1) % PLACES
    drawn = memory.items[random.randrange(len(memory.items))]
    return net.layer(drawn.x * (1 - drawn.last)).square().mean() + drawn.reward


def window_of_transitions(net, x):
    net.kept.append(Transition(x, len(net.kept), x is None))
    if len(net.kept) > PLACES:
        del net.kept[0]
    return net.layer(net.kept[-1].x).square().mean()


def written_and_popped(net, x):
    a, b = random.randint(0, PLACES - 1), random.randint(0, PLACES - 1)
    net.kept[a] = x
    y = net.kept[b]
    net.kept[b] = x + 1
    net.kept.append(x * 2)
    last, count = net.kept[-1], len(net.kept)
    net.kept.pop()
    return net.layer(y).mean() * count + net.layer(last).mean()


def mixed_places(net, x):
    place = random.randint(0, PLACES - 1)
    net.kept[place] = net.kept[PLACES - 1 - place]
    net.kept[0] = x
    return net.layer(net.kept[3]).mean()


def window(net, x):
    net.kept.append(x)
    if len(net.kept) > PLACES + 4:
        net.kept.pop(0)
    return net.layer(net.kept[random.randrange(len(net.kept))]).square().mean()


def window_of_a_deque(net, x):
    net.kept.append(x)
    if len(net.kept) > PLACES + 4:
        net.kept.popleft()
    return net.layer(net.kept[random.randrange(len(net.kept))]).square().mean()


def taken_at_random(net, x):
    y = net.kept.pop(random.randrange(len(net.kept)))
    net.kept.append(x)
    return net.layer(y).square().mean()


def stack(net, x):
    net.kept.append(x)
    y, z = net.kept.pop(), net.kept.pop()
    net.kept.append(y)
    return net.layer(y + z + net.kept[-1]).mean()


def deleted(net, x):
    if len(net.kept) > 3:
        del net.kept[0]
        del net.kept[-1]
        net.kept[0] = x
    else:
        net.kept.append(x)
    return net.layer(net.kept[0]).mean() + net.layer(net.kept[-1]).mean()


def deleted_at_random(net, x):
    a = random.randrange(len(net.kept))
    del net.kept[a]
    b = random.randrange(len(net.kept))
    y = net.kept[b]
    net.kept[b] = x
    net.kept.append(y)
    net.kept.append(x + 1)
    z = x
    if len(net.kept) > PLACES + 2:
        net.kept.pop()
        z = net.kept.pop(b)
    return net.layer(y + z).mean()


def popped_until_empty(net, x):
    try:
        for _ in range(3):
            net.kept.pop(0)
    except IndexError:
        net.kept.extend([x, x + 1, x + 2, x])
    return net.layer(x).mean()


def read_after_removals(net, x):
    net.kept.pop(0)
    net.kept.append(x)
    return net.layer(torch.stack(net.kept)).mean()


def mean_of_a_window(net, x):
    net.kept.append(random.random())
    if len(net.kept) > 5:
        net.kept.pop(0)
    return net.layer(x).square().mean() * (sum(net.kept) / len(net.kept)) + max(net.kept)


def mean_of_a_deque(net, x):
    net.kept.append(random.random())
    if len(net.kept) > 5:
        net.kept.popleft()
    return net.layer(x).square().mean() * (sum(net.kept) / len(net.kept))


def tensors():
    return [torch.full((ROWS, WIDTH), float(place)) for place in range(PLACES)]


STEPS = {
    pools: (lambda: [ImagePool(PLACES), ImagePool(PLACES)], 7),
    batch_of_two: (lambda: [ImagePool(PLACES)], 9),
    moving_average: (tensors, 1),
    two_places: (tensors, 4),
    from_the_end: (tensors, 1),
    outside_of_it: (tensors, 3),
    all_read_after: (tensors, 5),
    ring: (lambda: [SimpleNamespace(items=[None] * PLACES, place=0, count=0)], 7),
    ring_of_transitions: (lambda: [SimpleNamespace(items=[], place=0)], 7),
    window_of_transitions: (list, 3),
    written_and_popped: (tensors, 2),
    mixed_places: (tensors, 4),
    window: (tensors, 4),
    window_of_a_deque: (lambda: deque(tensors()), 4),
    taken_at_random: (tensors, 1),
    stack: (tensors, 1),
    deleted: (tensors, 3),
    deleted_at_random: (tensors, 5),
    popped_until_empty: (tensors, 3),
    read_after_removals: (tensors, 1),
    mean_of_a_window: (list, 4),
    mean_of_a_deque: (deque, 4),
}


@pytest.mark.parametrize("body", STEPS, ids=lambda body: body.__name__)
def test_written_items(body):
    make_kept, captures = STEPS[body]

    def make() -> Program:
        net = Net(make_kept())
        random.seed(3)

        def step(x):
            loss = body(net, x)
            loss.backward()
            net.optimizer.step()
            net.optimizer.zero_grad()
            return loss.detach()

        held = [vars(each) if hasattr(each, "__dict__") else each for each in net.kept]
        return Program(step, lambda index: (torch.randn(ROWS, WIDTH),), (net.layer, net.optimizer, net.kept, held))

    report = parity(make, steps=60, captures=captures)
    assert not report.breaks


def test_an_item_is_not_written_if_the_step_fails():
    kept = [torch.zeros(2) for _ in range(4)]

    def step(x, place):
        kept[place] = x
        return torch.nn.functional.embedding(x.long(), torch.ones(3, 2))

    run = sidefx_train.compile(step, backend="eager")
    for place in (0, 1, 2):
        run(torch.tensor([1.0, 2.0]), place)
    before = list(kept)
    with pytest.raises(IndexError):
        run(torch.tensor([1.0, 7.0]), 3)
    assert all(a is b for a, b in zip(kept[:3], before, strict=False)) and kept[3].tolist() == [
        1.0,
        7.0,
    ]  # eager writes the item before the lookup


@pytest.mark.parametrize("place", [0, -1, 2])
def test_a_deque_takes_no_index_to_pop(place):
    kept = deque(torch.zeros(2) for _ in range(4))

    def step(x):
        kept.pop()
        kept.append(x * 2)
        return kept.pop(place)

    run = sidefx_train.compile(step, backend="eager", warmup="now")
    for _ in range(3):
        with pytest.raises(TypeError, match="takes no arguments"):
            run(torch.ones(2))
        assert len(kept) == 4 and kept[-1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("change", ["written", "removed"])
def test_an_item_with_a_finalizer_takes_its_place(change):
    """Eager frees the object at once: a step that reads what its ``__del__`` counts cannot be replayed for it."""

    def make() -> Program:
        Freed.count = 0
        kept = [torch.zeros(2) for _ in range(4)]
        if change == "removed":
            kept = [*kept, *kept, *kept]

        def step(x, place):
            if change == "written":
                kept[place] = x
            else:
                kept.pop(place)
            return x + Freed.count

        def between(program, index):
            if index in (3, 5):
                kept[index % 4] = Freed()

        return Program(step, lambda index: (torch.randn(2), index % 4), (kept,)), between

    made = []

    def program() -> Program:
        built, between = make()
        made.append(between)
        return built

    parity(program, steps=8, captures=None, whole=False, between=lambda *given: made[-1](*given))
    assert Freed.count == 2
