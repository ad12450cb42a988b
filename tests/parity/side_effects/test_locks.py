"""Locks, queues, events and context variables that a step uses: states it reads, and states it leaves."""

from __future__ import annotations

import contextvars
import os
import queue
import threading
import warnings

import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning

EMPTY = contextvars.ContextVar("empty")
FILLED = contextvars.ContextVar("filled", default=5)


class World:
    def __init__(self):
        self.log, self.seen = [], []
        self.lock, self.again, self.ready = threading.Lock(), threading.RLock(), threading.Condition()
        self.queue, self.event = queue.Queue(), threading.Event()


def seen_natively(lock):
    os.times()
    return lock.locked()


def taken(world, x):
    with world.lock:
        world.log.append((world.lock.locked(), world.lock.acquire(False)))
    world.log.append(world.lock.locked())
    return x


def taken_twice(world, x):
    with world.again, world.again:
        world.log.append(world.again._is_owned())
    world.log.append(world.again._is_owned())
    for lock in (world.again, world.lock):
        try:
            lock.release()
        except RuntimeError as error:
            world.log.append(str(error))
    return x


def over_a_break(world, x):
    with world.lock:
        os.times()
        world.log.append(world.lock.locked())
        world.seen.append(seen_natively(world.lock))
    world.log.append(world.lock.locked())
    return x


def left_taken(world, x):
    world.lock.acquire()
    return x


def looked_at(world, x):
    world.log.append(world.lock.locked())
    return x


def queued(world, x):
    world.queue.put(len(world.log))
    world.log += [world.queue.qsize(), world.queue.get(), world.queue.empty()]
    try:
        world.queue.get_nowait()
    except queue.Empty:
        world.log.append("empty")
    return x


def made_inside(world, x):
    lock = threading.Lock()
    lock.acquire()
    world.log.append(lock.locked())
    lock.release()
    world.event.set()
    world.log += [lock.locked(), world.event.wait(0)]
    world.event.clear()
    semaphore = threading.Semaphore(2)
    world.log.append(semaphore.acquire())
    semaphore.release()
    with world.ready:
        world.ready.notify_all()
    return x


def variables(world, x):
    world.log.append((EMPTY.get(None), EMPTY.get(1), FILLED.get(), FILLED.get(9)))
    try:
        EMPTY.get()
    except LookupError as error:
        world.log.append(type(error).__name__)
    token = EMPTY.set(len(world.log))
    world.log.append(EMPTY.get())
    EMPTY.reset(token)
    return x


STEPS = (taken, taken_twice, over_a_break, left_taken, looked_at, queued, made_inside, variables)


def _history(step, run):
    world, history = World(), []

    def call(number):
        if number == 2:  # the value of the context variables from now on
            EMPTY.set(7)
            FILLED.set(8)
        if step is looked_at and number > 2:
            world.lock.acquire()
        run(world, torch.ones(1))
        history.append((list(world.log), list(world.seen), world.lock.locked(), world.again._is_owned()))
        if world.lock.locked():
            world.lock.release()

    context = contextvars.Context()
    for number in range(5):
        context.run(call, number)
    return history


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_locks_and_variables_are_as_in_eager(step):
    compiled = sidefx_train.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        assert _history(step, compiled) == _history(step, step)
    report = compiled.report()
    assert report.replays == 5 and not report.fallbacks, str(report)
