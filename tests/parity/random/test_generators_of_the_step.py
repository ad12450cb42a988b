"""Python's and NumPy's generators that a step creates, seeds, restores or gets as an argument."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sidefx_train

X = torch.arange(6.0).view(2, 3)


def state_of(value):
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return repr(value.get_state(legacy=False))


def shown(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, (tuple, list)):
        return [shown(item) for item in value]
    if isinstance(value, SimpleNamespace):
        return {name: shown(item) for name, item in vars(value).items()}
    return state_of(value) if isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)) else value


def both(step, calls=5, arguments=lambda index: (X + index,)):
    """Runs a step eagerly and captured; results, arguments and the states of the global generators must agree."""

    def run(fn):
        random.seed(3)
        np.random.seed(3)
        kept = SimpleNamespace(n=0, rng=None, items=[])
        found = []
        for index in range(calls):
            given = arguments(index)
            found.append(shown([fn(kept, *given), given, kept]))
            found.append([random.getstate(), repr(np.random.get_state())])
        return found

    compiled = sidefx_train.compile(step, backend="eager", rng="eager")
    assert run(compiled) == run(step)
    return compiled.report()


def counted(kept):
    kept.n += 1
    return kept.n


def saved_and_restored(kept, x):
    state = random.getstate()
    first = random.random()
    random.setstate(state)
    return x * first + random.random()


def numpy_saved_and_restored(kept, x):
    state = np.random.get_state()
    first = np.random.rand()
    np.random.set_state(state)
    return x * first + np.random.rand()


def copied_state(kept, x):
    one, other = random.Random(4), random.Random(5)
    one.setstate(other.getstate())
    random.setstate(one.getstate())
    return x * one.random() + random.random(), one, other


def kept_on_an_object(kept, x):
    kept.rng = random.Random(counted(kept))
    kept.items.append(kept.rng.random())
    return x * kept.rng.uniform(0, 1)


STEPS = {
    "created": lambda kept, x: (x + (rng := random.Random(42)).random() + rng.randint(1, 9), rng),
    "created_from_a_counter": lambda kept, x: x * random.Random(counted(kept)).random(),
    "created_from_a_draw": lambda kept, x: x * random.Random(random.random()).random(),
    "created_from_a_string": lambda kept, x: x * random.Random("fold 3").random(),
    "numpy": lambda kept, x: (x * (rng := np.random.default_rng(3)).random(), rng),
    "numpy_from_a_counter": lambda kept, x: x * torch.from_numpy(np.random.default_rng(counted(kept)).random(3)),
    "legacy": lambda kept, x: (x * (rng := np.random.RandomState(counted(kept))).rand(), rng),
    "of_bits": lambda kept, x: x * np.random.Generator(np.random.PCG64(counted(kept))).random(),
    "seeded": lambda kept, x: (random.seed(3), x * random.random())[1],
    "seeded_from_a_counter": lambda kept, x: (random.seed(counted(kept)), x * random.random())[1],
    "numpy_seeded": lambda kept, x: (np.random.seed(counted(kept)), x * torch.tensor(np.random.rand(3)))[1],
    "ranges": lambda kept, x: x * random.uniform(0, counted(kept)) + np.random.normal(0, 1 / kept.n),
    "shuffled": lambda kept, x: (random.Random(kept.n).shuffle(items := [1.0, 2.0, 3.0]), x * items[0])[1],
    "one_of_floats": lambda kept, x: x * random.choice([0.5, 0.75, 1.0]),
    "bits": lambda kept, x: x * random.getrandbits(8),
    "sizes": lambda kept, x: x * torch.from_numpy(np.random.default_rng([7, counted(kept)]).standard_normal(x.shape)),
    "sizes_of_all": lambda kept, x: x + torch.from_numpy(np.random.normal(0, 0.1, x.shape)).to(x.dtype),
    "saved_and_restored": saved_and_restored,
    "numpy_saved_and_restored": numpy_saved_and_restored,
    "copied_state": copied_state,
    "kept_on_an_object": kept_on_an_object,
}


@pytest.mark.parametrize("name", STEPS)
def test_one_graph_for_all_values(name):
    report = both(STEPS[name])
    assert len(report.captures) == 1 and not report.breaks and not report.fallbacks


def test_a_state_kept_for_the_next_step():
    def step(kept, x):
        if kept.rng is not None:
            random.setstate(kept.rng)
        y = x * random.random()
        kept.rng = random.getstate()
        random.random()
        return y

    report = both(step, 6)
    assert len(report.captures) == 2 and not report.breaks


def test_a_draw_below_a_length_that_grows():
    def step(kept, x):
        kept.items.append(1.0)
        return x * random.randrange(len(kept.items)) + random.uniform(0, len(kept.items))

    report = both(step, 8)
    assert len(report.captures) <= 3 and not report.breaks


MADE = {"python": random.Random, "numpy": np.random.default_rng, "legacy": np.random.RandomState}


@pytest.mark.parametrize("name", MADE)
def test_another_generator_at_every_call(name):
    def step(kept, x, rng):
        return x * rng.uniform(0, 1) + rng.normal() if name != "python" else x * rng.uniform(0, 1) + rng.gauss(0, 1)

    report = both(step, arguments=lambda index: (X, MADE[name](index)))
    assert len(report.captures) == 1 and not report.breaks


def test_generators_of_arguments_are_seeded_and_restored():
    def step(kept, x, one, other):
        one.seed(42)
        other.setstate(random.Random(9).getstate())
        return x + one.random() + other.randint(1, 10)

    report = both(step, arguments=lambda index: (X, random.Random(index), random.Random(index + 1)))
    assert len(report.captures) == 1 and not report.breaks


def test_the_same_generator_twice():
    def step(kept, x, one, other):
        return x * one.random() + other.random()

    def arguments(index):
        one = random.Random(index)
        return X, one, one if index % 2 else random.Random(7)

    both(step, arguments=arguments)


def test_a_generator_with_methods_of_its_own():
    def step(kept, x, rng):
        return x * rng.random() + rng.uniform(1, 2)

    def arguments(index):
        rng = random.Random(index)
        if index in (2, 3):
            rng.random = lambda: 0.25
        return X, rng

    both(step, arguments=arguments)


def test_other_types_in_place_of_what_a_draw_uses():
    def step(kept, x, rng, high):
        return x * rng.random() + random.uniform(0, high)

    class Own(random.Random):
        def random(self):
            return 0.5

    makers = [random.Random, random.Random, Own, random.Random, Own]
    both(step, arguments=lambda index: (X, makers[index](index), 2 if index == 3 else 2.0 + index))


def test_numbers_that_a_method_rejects_raise_as_in_eager():
    def step(x, high):
        return x * random.randint(0, high)

    compiled = sidefx_train.compile(step, backend="eager")
    for high in (5, 4, 3):
        random.seed(high)
        expected = step(X, high).tolist()
        random.seed(high)
        assert compiled(X, high).tolist() == expected
    before = random.getstate()
    with pytest.raises(ValueError, match="empty range"):
        compiled(X, -3)
    assert random.getstate() == before


def test_a_failing_guard_takes_seeds_and_states_back():
    def step(kept, x, rng):
        random.seed(counted(kept))
        np.random.set_state(np.random.RandomState(kept.n).get_state())
        y = x * random.random() + np.random.rand() + rng.random()
        return y * 2 if random.random() < 0.5 else y

    both(step, 8, arguments=lambda index: (X[: 1 + index % 2], random.Random(index)))


def test_a_state_that_the_step_looks_into_is_read_natively():
    def step(kept, x):
        random.seed(counted(kept))
        return x * random.getstate()[1][0] + random.random()

    report = both(step)
    assert {found.code for found in report.breaks} <= {"SFX103", "SFX106"} and report.breaks
