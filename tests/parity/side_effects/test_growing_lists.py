"""Lists that a step appends to and reads: their ends and lengths are read without the other items."""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np
import pytest
import torch

from tests.support.parity import Program, batches, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


def program(step, start=()):
    def make() -> Program:
        log = list(start)
        return Program(lambda x: step(x, log), batches((3,)), (log,))

    return make


def last_item(x, log):
    log.append(x.sum().item())
    log.append(x)
    return log[-2], log[-1] * 2


def item_of_an_earlier_call(x, log):
    before = log[-1]
    log.append(x.mean())
    return x + before, log[-1] - log[-2]


def length(x, log):
    log.append(x)
    return x * len(log), len(log) % 7 == 0, bool(log)


def moving_window(x, log):
    log.append(x.sum())
    if len(log) > 4:
        del log[0]
    return torch.stack(log).mean(), len(log)


def added(x, log):
    log += [x.sum().item(), x]
    log += (x.mean().item(),)
    return log[-1] + x


@pytest.mark.parametrize("step", [last_item, item_of_an_earlier_call, length, added], ids=lambda f: f.__name__)
def test_end_and_length_cost_no_capture(step):
    report = parity(program(step, start=[torch.ones(3)]), steps=30, captures=None)
    assert report.graph_count <= 3, [r.source for r in report.recaptures]


def test_sliding_window():
    report = parity(program(moving_window), steps=20, captures=None)
    assert report.graph_count <= 7, [r.source for r in report.recaptures]


def test_an_empty_list_raises_like_eager():
    def step(x, log):
        try:
            return log[-1]
        except IndexError as error:
            log.append(x)
            return str(error)

    parity(program(step), steps=3, captures=None)


def test_length_and_end_see_what_others_do():
    def make() -> Program:
        log: list = [1.0]

        def step(x):
            log.append(x.sum().item())
            return len(log), log[-1], log[-2], x * len(log)

        return Program(step, batches((3,)), (log,))

    def between(program, index):
        if index % 3 == 0:
            program.watch[0].clear()
            program.watch[0].append(float(index))
        elif index % 3 == 1:
            program.watch[0].insert(0, 7.0)
        else:
            program.watch[0].append(index * 0.5)

    parity(make, steps=12, captures=None, between=between)


def test_read_after_append_then_whole():
    def step(x, log):
        log.append(x.sum().item())
        end = log[-1] + log[-2]
        log.reverse()
        return end, log[0], list(log)

    parity(program(step, start=[1.0, 2.0]), steps=3, captures=None)


def test_a_bounded_deque_becomes_steady():
    def make() -> Program:
        recent: deque = deque(maxlen=8)

        def step(x):
            recent.append(x.sum().item())
            return sum(recent) / len(recent)

        return Program(step, batches((3,)), (recent,))

    report = parity(make, steps=20, captures=None)
    assert report.graph_count <= 11 and not report.breaks


def test_a_growing_list_is_read_natively_as_a_whole():
    def step(x, log):
        loss = (x * 2).sum()
        log.append(loss.item())
        mean = sum(log) / len(log)
        return mean, loss * mean

    report = parity(program(step), steps=25, captures=None, whole=False)
    assert [b.code for b in report.breaks] == ["SFX114"]
    assert not report.fallbacks and report.graph_count <= 8


def test_another_bound_of_a_deque():
    def make() -> Program:
        owner = type("Owner", (), {})()
        owner.recent = deque([1, 2], maxlen=4)

        def step(x):
            owner.recent.appendleft(7)
            return x * 2

        return Program(step, batches((3,)), (owner,))

    def between(program, index):
        if index == 2:
            program.watch[0].recent = deque([2], maxlen=2)

    parity(make, steps=5, captures=None, between=between)


@pytest.mark.parametrize("limit", [None, 6])
def test_statistics_of_a_history(limit):
    """The functions of ``statistics`` run natively as a whole: interpreted, they would break inside."""

    def make() -> Program:
        history: deque = deque(maxlen=limit)

        def step(x):
            history.append(x.sum().item())
            return x * statistics.fmean(history), statistics.median([*history][-5:])

        return Program(step, batches((3,)), (history,))

    report = parity(make, steps=25, captures=None, whole=False)
    assert report.graph_count <= 12 and not report.fallbacks, f"{report}"


def test_first_item_of_a_growing_list():
    def step(x, log):
        log.append(x.sum())
        return x + log[0], log[1] - log[-1]

    report = parity(program(step, start=[torch.ones(()), torch.zeros(())]), steps=20, captures=None)
    assert len(report.captures) <= 2, f"{report}"


def _scaled(x, log):
    return x * float(np.mean(log)) / (np.std(log) + 1.0)


def _average(x, log):
    return x * (sum(log) / len(log)) + max(log) - min(log)


def _after_append(x, log):
    log.append(x.shape[0] * 0.5)
    return x * float(np.median(log)) + statistics.mean(log)


def _as_tensors(x, log):
    return x + torch.tensor(log).mean() + torch.from_numpy(np.array(log)).sum()


def _prioritized(x, log):
    chances = np.array(log) ** 0.6
    chances /= chances.sum()
    places = np.random.RandomState(0).choice(len(log), 2, p=chances)
    return x * torch.as_tensor((len(log) * chances[places]) ** -0.4)[:1]


def _decides(x, log):
    return x * 2 if np.mean(log) > 12 else x * 3


@pytest.mark.parametrize("bound", [None, 7])
@pytest.mark.parametrize("use", [_scaled, _average, _after_append, _as_tensors, _prioritized, _decides])
@pytest.mark.every(2)
def test_functions_of_a_history_are_computed_before_the_graph(use, bound):
    """What they return is an input, however long the list is and whatever it holds; nothing of it is guarded."""

    def make() -> Program:
        log = [1.0] if bound is None else deque([1.0], maxlen=bound)

        def step(x):
            found = use(x, log)
            log.append(x.sum().item())
            return found

        return Program(step, lambda i: (torch.rand(3, generator=torch.Generator().manual_seed(i)) + i,), (log,))

    def between(program, index):
        if index == 14:
            program.watch[0].append(7)
        if index == 15:
            program.watch[0].pop()

    report = parity(make, steps=25, captures=None, between=between, whole=False)
    assert len(report.captures) <= 5 and not report.breaks, f"{report}"


@pytest.mark.parametrize("read", [slice(-4, None), slice(None, 4), slice(-6, None)])
def test_part_of_a_growing_list(read):
    def step(x, log):
        recent = log[read]
        log.append(x * 2)
        return torch.stack([*recent, x]).mean(0), sum(log[read])

    report = parity(program(step), steps=20, captures=None)
    assert len(report.captures) <= 9, f"{report}"


def test_shape_of_an_array_of_a_growing_list():
    def step(x, log):
        found = np.array(log)
        log.append(x.sum().item())
        return x * found.shape[0] + len(found)

    report = parity(program(step, start=[1.0]), steps=20, captures=None, whole=False)
    assert len(report.captures) <= 9, f"{report}"


class Adds:
    """An object whose own method is asked before a list's."""

    def __radd__(self, other):
        return "added"


@pytest.mark.parametrize(
    "other", [lambda log: log, lambda log: Adds(), lambda log: torch.ones(2)], ids=["itself", "an object", "a tensor"]
)
def test_what_else_is_added_to_a_list(other):
    def step(x, log):
        kept = log
        kept += other(log)
        return x * 2, kept if type(kept) is not list else len(kept)

    parity(program(step, start=(1.0, 2.0)), steps=3, captures=None)
