"""Classes with their own ``__dict__`` property, like dicts with attribute access."""

from __future__ import annotations

import warnings

import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning


class Options(dict):
    __dict__ = property(
        lambda self: {key: dict(item) if isinstance(item, dict) else item for key, item in self.items()}
    )

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, value):
        self[name] = value

    def hide(self, value):
        object.__setattr__(self, "hidden", value)


class Plain:
    def __init__(self):
        self.n = 1

    @property
    def __dict__(self):
        return {"shown": 1}


class World:
    def __init__(self):
        self.options, self.plain, self.hiding = Options(a=1, b=Options(c=2)), Plain(), Options(a=1)
        self.hiding.hide(3)


def read_and_written(world, x):
    world.options.a += 1
    world.options.new = x.shape[0]
    return x * world.options.b.c * world.options.a + len(world.options.__dict__)


def plain(world, x):
    world.plain.n += 1
    return x * world.plain.n + len(world.plain.__dict__)


def hidden(world, x):
    world.hiding.a += 1
    return x * world.hiding.hidden * world.hiding.a


def made(world, x):
    options = Options(a=1, b=Options(c=3))
    options.d = 4
    return x * options.b.c * options.d + len(vars(options)), options


def plain_made(world, x):
    one = Plain()
    one.n += 1
    return x * one.n


def asked(world, x):
    world.options.b = Options(c=5)
    return x * world.options.b.c, "zz" in world.options, getattr(world.options, "zz", 7), hasattr(world.options, "a")


@pytest.mark.parametrize(
    "step", [read_and_written, plain, hidden, made, plain_made, asked], ids=lambda step: step.__name__
)
def test_what_is_shown_is_not_taken_for_what_is_there(step):
    def history(run):
        world, results = World(), []
        for call in range(4):
            result = run(world, torch.ones(2))
            results.append((repr(result), repr(world.options), world.plain.n, repr(world.hiding)))
            if call == 1:
                world.options.b.c = 9
                world.hiding.hide(5)
        return results

    compiled = sidefx_train.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        assert history(compiled) == history(step)
    if step in (read_and_written, made, asked):
        assert compiled.report().replays == 4 and not compiled.report().breaks, str(compiled.report())
