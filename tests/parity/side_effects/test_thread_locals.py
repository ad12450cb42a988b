"""``threading.local`` in a step: each thread has its own attributes, read, guarded and written back."""

from __future__ import annotations

import threading

import pytest
import torch

import sidefx_train


class Counting(threading.local):
    scale = 2

    def __init__(self):
        self.count, self.log = 0, []

    @property
    def doubled(self):
        return self.count * 2

    def advance(self):
        self.count += 1
        return self.count


COUNTING, PLAIN = Counting(), threading.local()


def counted(x):
    COUNTING.count += 1
    COUNTING.log.append(COUNTING.count)
    return x * COUNTING.count


def by_a_method(x):
    return x * COUNTING.advance() + COUNTING.doubled + COUNTING.scale


def plain(x):
    PLAIN.value += 1
    PLAIN.seen = x * PLAIN.value
    return PLAIN.seen + 1


def missing(x):
    return x * getattr(PLAIN, "late", 2)


def asked(x):
    return x * (2 if hasattr(PLAIN, "late") else 1)


def by_dict(x):
    return x * PLAIN.__dict__.get("late", 7) + len(vars(COUNTING))


def deleted(x):
    if hasattr(PLAIN, "late"):
        del PLAIN.late
    for held in (PLAIN, COUNTING):
        try:
            del held.absent
        except AttributeError as error:
            COUNTING.log.append(str(error))
        try:
            held.absent
        except AttributeError as error:
            COUNTING.log.append(str(error))
    return x


STEPS = (counted, by_a_method, plain, missing, asked, by_dict, deleted)


def _shown(value):
    return value.tolist() if isinstance(value, torch.Tensor) else list(value) if isinstance(value, list) else value


def _history(run):
    history = []

    def go():
        COUNTING.__init__()
        PLAIN.__dict__.clear()
        PLAIN.value = 3
        for call in range(5):
            result = run(torch.ones(2))
            state = {name: _shown(value) for name, value in (*vars(COUNTING).items(), *vars(PLAIN).items())}
            history.append((_shown(result), state))
            if call in (1, 3):
                PLAIN.late = 5

    go()
    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    go()
    return history


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_thread_locals_are_left_as_in_eager(step):
    compiled = sidefx_train.compile(step, backend="eager")
    assert _history(compiled) == _history(step)
    report = compiled.report()
    assert report.replays == 15 and not report.fallbacks and not report.breaks, str(report)
