"""Batches in which some tensors are ``None``, or that have another length at every call: the statements that read them
run natively, the rest is captured."""

from __future__ import annotations

import random
import sys
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.parity import Program, parity

Transition = namedtuple("Transition", ["state", "following", "reward"])

FORMS: list[Callable[[Any, Any, list[Any]], torch.Tensor]] = []


def form(fn: Callable[[Any, Any, list[Any]], torch.Tensor]) -> Callable[[Any, Any, list[Any]], torch.Tensor]:
    FORMS.append(fn)
    return fn


def states(batch: Any) -> torch.Tensor:
    return torch.cat([each.state for each in batch])


@form
def columns(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
    columns = Transition(*zip(*batch))
    mask = torch.tensor(tuple(map(lambda s: s is not None, columns.following)), dtype=torch.bool)
    known = torch.cat([s for s in columns.following if s is not None])
    value = torch.zeros(len(batch))
    with torch.no_grad():
        value[mask] = net(known).max(1).values
    return ((net(torch.cat(columns.state)).sum(1) - value - torch.cat(columns.reward)) ** 2).mean()


@form
def loop(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
    kept = []
    for each in batch:
        if each.following is not None:
            kept.append(each.following)
    return net(torch.cat(kept)).mean() + net(states(batch)).mean()


@form
def sum_in_a_loop(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
    total = torch.zeros(1)
    for each in batch:
        if each.following is None:
            continue
        total = total + each.following.sum() * 2
    return (net(states(batch)).mean() * total).sum()


@form
def condition(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
    if any(each.following is None for each in batch):
        log.append("some")
    return net(states(batch)).mean()


@form
def other_tensor_for_none(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
    return net(torch.cat([t.following if t.following is not None else torch.zeros(1, 3) for t in batch])).mean()


@form
def classes(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
    log.append([type(each.following).__name__ for each in batch])
    log.append([isinstance(each.following, torch.Tensor) for each in batch])
    return net(states(batch)).mean()


@form
def text(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
    following = [each.following for each in batch]
    log.append(f"{following}")
    print(following[1])
    return net(states(batch)).mean()


@form
def passed_on(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
    log.append([each.following for each in batch])
    log.append(batch[2].following)
    return net(states(batch)).mean()


@form
def written_after(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
    kept = [each.following for each in batch]
    batch[0].following.mul_(2)
    log.append(kept[0])
    loss = net(states(batch)).mean()
    for each in kept:
        if each is not None:
            each.add_(1)
    return loss


@form
def same_object(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
    first = batch[0].following
    log.append([each.following is first for each in batch])
    return net(states(batch)).mean()


@form
def caught(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
    try:
        known = torch.cat([each.following for each in batch])
    except TypeError as error:
        log.append(str(error))
        known = torch.cat([each.following for each in batch if each.following is not None])
    return net(known).mean()


@form
def within_no_grad(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
    with torch.no_grad():
        known = torch.cat([each.following for each in batch if each.following is not None])
        target = net(known).mean()
    return net(states(batch)).mean() * target


@form
def loop_that_stops(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
    i = 0
    while i < len(batch):
        if batch[i].following is None:
            break
        i += 1
    log.append(i)
    return net(states(batch)).mean()


@form
def matched(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
    for each in batch:
        match each.following:
            case None:
                log.append("none")
            case torch.Tensor():
                log.append("tensor")
    return net(states(batch)).mean()


def batch_of(call: int, missing: float = 0.4) -> list[Transition]:
    """Returns six transitions; from the second on, what follows may be missing."""
    drawn, generator = random.Random(call), torch.Generator().manual_seed(call)

    def row(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    return [
        Transition(row(1, 3), None if i and drawn.random() < missing else row(1, 3), row(1)) for i in range(6)
    ]  # fmt: skip


def trained(fn: Callable[[Any, Any, list[Any]], torch.Tensor], batch: Callable[[int], Any]) -> Callable[[], Program]:
    """Returns a factory of a training step with the loss ``fn(net, batch, log)``."""

    def make() -> Program:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        log: list[Any] = []

        def step(batch: Any) -> torch.Tensor:
            optimizer.zero_grad()
            loss = fn(net, batch, log)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, lambda call: (batch(call),), (net, optimizer, log))

    return make


IN_PARTS = [matched, loop_that_stops]
"""What is captured in parts, which a loop may run many times."""
if sys.version_info >= (3, 14):  # comprehensions that are inlined share a variable, and ``any`` is inlined
    IN_PARTS += [other_tensor_for_none, classes, within_no_grad, condition]


@pytest.mark.parametrize("fn", FORMS, ids=[fn.__name__ for fn in FORMS])
@pytest.mark.every(2)
def test_missing_items_differ_at_every_call(fn: Callable[..., torch.Tensor]) -> None:
    report = parity(trained(fn, batch_of), steps=20, captures=14, whole=False)
    assert report.replays == 20 and len(report.captures) <= 5
    assert not any(part.fallbacks for part in report.parts), "no part gives up"
    assert not report.parts or fn in IN_PARTS or max(part.replays for part in report.parts) <= 20


@pytest.mark.parametrize("kind", ["dicts", "objects", "lists"])
def test_items_of_other_containers(kind: str) -> None:
    class Sample:
        def __init__(self, transition: Transition) -> None:
            self.state, self.following, self.reward = transition

    make: dict[str, Callable[[Transition], Any]] = {"dicts": lambda t: t._asdict(), "objects": Sample, "lists": list}

    def loss(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
        if kind == "dicts":
            known = [each["following"] for each in batch if each["following"] is not None]
            reward = [each["reward"] for each in batch]
        elif kind == "objects":
            known = [each.following for each in batch if each.following is not None]
            reward = [each.reward for each in batch]
        else:
            _, following, reward = zip(*batch)
            known = [each for each in following if each is not None]
        known = torch.cat(known)
        return net(known).mean() * torch.cat(tuple(reward)).sum()

    report = parity(
        trained(loss, lambda call: [make[kind](t) for t in batch_of(call)]), steps=20, captures=14, whole=False
    )
    assert report.replays == 20 and not any(part.fallbacks for part in report.parts)


def test_an_attribute_that_is_gone_is_no_item() -> None:
    """The path to an item that is passed on is tested: a sample without the attribute is another case."""

    class Sample:
        def __init__(self, transition: Transition) -> None:
            self.state, self.following, self.reward = transition

    def samples(call: int) -> list[Sample]:
        made = [*map(Sample, batch_of(call))]
        if call == 15:
            del made[4].following
        if call == 17:
            made[3].following = "text"  # type: ignore[assignment]
        return made

    def loss(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
        log.append([each.following for each in batch])
        return net(states(batch)).mean()

    parity(trained(loss, samples), steps=20, captures=None, whole=False)


@pytest.mark.parametrize("where", ["before", "after"])
def test_what_gathers_parameters_belongs_to_the_graph(where: str) -> None:
    """Statements next to the one that runs natively do so only if they gather the batch."""

    def loss(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
        weights = [*net.parameters()]
        hidden = net(states(batch))
        if where == "before":
            flat = torch.stack([each.view(-1)[0] for each in weights])
        known = torch.cat([each.following for each in batch if each.following is not None])
        if where == "after":
            flat = torch.stack([hidden, hidden * 2])
        return flat.square().mean() + hidden.mean() + net(known).mean()

    report = parity(trained(loss, batch_of), steps=16, captures=20, whole=False)
    assert report.replays == 16 and not any(part.fallbacks for part in report.parts)


READS_ALL = {
    "cat": lambda batch, log: torch.cat(batch),
    "items first": lambda batch, log: torch.stack([each.squeeze(0) for each in batch]),
    "pad_sequence": lambda batch, log: nn.utils.rnn.pad_sequence(batch),
}


@pytest.mark.parametrize("how", READS_ALL)
@pytest.mark.every(2)
def test_lists_of_other_lengths(how: str) -> None:
    def batch(call: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(call)
        return [torch.randn(1, 3, generator=generator) for _ in range(random.Random(call).randint(2, 40))]

    def loss(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
        gathered = READS_ALL[how](batch, log)
        log.append(len(batch))
        return net(gathered).square().mean()

    report = parity(trained(loss, batch), steps=60, captures=30, whole=False)
    assert report.replays == 60 and not any(part.fallbacks for part in report.parts)
    assert all(part.replays <= 60 for part in report.parts), "no part for each item"


def test_few_patterns_are_captured_whole() -> None:
    """Two optional items have four patterns, each of which is one graph without a break."""

    def batch(call: int) -> list[torch.Tensor | None]:
        return [torch.ones(2, 3), torch.ones(2, 3) if call & 1 else None, torch.ones(2, 3) * 2 if call & 2 else None]

    def loss(net: Any, batch: Any, log: list[Any]) -> torch.Tensor:
        return torch.stack([net(each).mean() for each in batch if each is not None]).sum()

    report = parity(trained(loss, batch), steps=20, captures=4)
    assert not report.parts


def test_under_inductor() -> None:
    report = parity(trained(columns, batch_of), steps=20, captures=14, whole=False, backend="inductor")
    assert report.replays == 20
