"""Operations that raise because of values: what the step wrote before is written once, what comes after it is not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

import sidefx_train
from sidefx_train.compile.functionalization import error_hazards, functionalize

GOOD, BAD = torch.tensor([0, 1, 1]), torch.tensor([9, 2, 2])

LIVE = {
    "index_fill": lambda x, i: x.index_fill(0, i * 3, 1.0),
    "integer division": lambda x, i: 10 // (i - 9),
    "index_reduce": lambda x, i: x.index_reduce(0, i * 3, x[:3], "prod"),
    "poisson": lambda x, i: torch.poisson(x * 0 + 5 - i[0]) * 0 + 1,
    "svd": lambda x, i: torch.linalg.svdvals(torch.eye(2) / (9 - i[0]).float() * 0),
    "normal": lambda x, i: torch.normal(x, 5.0 - i[0].float() + x * 0) * 0 + 1,
    "take": lambda x, i: torch.take(x, i * 3),
    "remainder": lambda x, i: torch.fmod(torch.tensor(10), i - 9),
    "histc": lambda x, i: torch.histc(x / (9 - i[0]), 4),
    "segment_reduce": lambda x, i: torch.segment_reduce(x[:3], "sum", lengths=i + torch.tensor([1, 0, 0])),
    "cholesky_inverse": lambda x, i: torch.cholesky_inverse(torch.eye(2) * (9 - i[0])),
    "pinv": lambda x, i: torch.linalg.pinv(torch.eye(2) / (9 - i[0]).float() * 0),
    "max_unpool2d": lambda x, i: F.max_unpool2d(x[:3].view(1, 1, 1, 3), (i * 3).view(1, 1, 1, 3), (1, 2)),
}
DEAD = {
    "embedding of an input": lambda x, i: F.embedding(i, x.view(6, 1)),
    "embedding of a result": lambda x, i: F.embedding(i + 1, x.view(6, 1)).sum(),
    "index": lambda x, i: torch.ones(3)[i % 5],
    "cross_entropy": lambda x, i: F.cross_entropy(x.view(2, 3), i[:2] * 2),
    "take": lambda x, i: torch.take(x, i * 3),
    "scatter_": lambda x, i: x.clone().scatter_(0, i * 2, 1.0),
}


def outcomes(operation, result_used, backend):
    found = []
    for captured in (False, True):
        before, after, outcome = torch.zeros(2), torch.zeros(2), []

        def step(x, i, before=before, after=after):
            before.add_(1)
            made = operation(x, i)
            after.add_(1)
            return made if result_used else x * 2

        call = sidefx_train.compile(step, backend=backend, warmup="now", keep_slower=True) if captured else step
        for i in (GOOD, GOOD, BAD, GOOD, BAD + 0, BAD + 1):
            x = torch.arange(1.0, 7.0) / 7
            try:
                outcome.append([f"{value:.4f}" for value in call(x, i).flatten().tolist()])
            except (RuntimeError, IndexError) as error:
                outcome.append((type(error), str(error)))
            outcome.append(f"{before.tolist()} {after.tolist()}")
        if captured:
            assert call.report().replays > 2 and not call.report().breaks
        found.append(outcome)
    return found


@pytest.mark.parametrize("operation", LIVE)
@pytest.mark.every(3)
def test_writes_around_an_operation_that_raises(operation):
    """Regression: under Inductor, what was written before was written twice, and ``index_fill`` wrote anywhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # index_reduce is new
        eager, captured = outcomes(LIVE[operation], True, "inductor")
    assert captured == eager


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("operation", DEAD)
@pytest.mark.every(3)
def test_an_index_out_of_range_whose_result_is_not_used(operation, backend):
    """Regression: such an operation was dropped, and did not raise."""
    eager, captured = outcomes(DEAD[operation], False, backend)
    assert captured == eager


TABLE = torch.arange(6.0).view(3, 2) + 10


def written_places(places):
    made = places.clone()
    made[0] *= 3
    return made


def written_range(places):
    made = torch.arange(3)
    made[0] = places[0] * 3
    return made


PLACES = {
    "argmax": lambda x, places: TABLE[x.argmax(1)],
    "a written copy": lambda x, places: F.embedding(written_places(places), TABLE),
    "written to": lambda x, places: TABLE.clone().index_add_(0, x.argmax(1), torch.ones(4, 2)),
    "a written range": lambda x, places: TABLE[written_range(places)],
    "topk": lambda x, places: TABLE.gather(0, x.topk(1, 1)[1].expand(-1, 2)),
    "sort": lambda x, places: TABLE[x.sort(1)[1][:, -1]],
    "nonzero": lambda x, places: TABLE[(x > 0.5).nonzero()[:, 1]],
    "max": lambda x, places: TABLE.index_fill(0, x.max(1)[1], 1.0),
    "values of max": lambda x, places: TABLE[(places * 3).view(2, 2).max(1)[0]],
    "values of sort": lambda x, places: TABLE[(places * 3).sort()[0]],
    "scatter_": lambda x, places: torch.zeros(3, 2).scatter_(0, x.argmax(1)[:, None], 1.0),
    "labels": lambda x, places: F.nll_loss(torch.log_softmax(x[:, :3], 1), x.argmax(1)),
    "written labels": lambda x, places: F.nll_loss(torch.log_softmax(x[:, :3], 1), written_places(places)),
    "repeated": lambda x, places: TABLE[written_places(places.repeat(2))],
}


@pytest.mark.parametrize("operation", PLACES)
@pytest.mark.every(4)
def test_places_in_another_tensor(operation):
    """Regression: places of a maximum in a longer tensor, and indices that are written to, were not checked: generated
    code read, or wrote, memory of others."""
    compiled = sidefx_train.compile(PLACES[operation], warmup="now", keep_slower=True)
    outcomes = []
    for call in (PLACES[operation], compiled):
        found = []
        for best, place in ((1, 0), (2, 0), (9, 2), (0, 0), (5, 2)):
            x = torch.arange(40.0).view(4, 10) / 1000
            x[:, best] = 0.9
            try:
                made = call(x, torch.tensor([place, 0, min(place, 1), 0]))
                found.append([f"{value:.4f}" for value in made.flatten().tolist()])
            except (RuntimeError, IndexError) as error:
                found.append((type(error), str(error)))
        outcomes.append(found)
    assert outcomes[0] == outcomes[1] and compiled.report().replays == 3


SAFE = {
    "range": lambda x: x[torch.arange(len(x)), 0],
    "argsort": lambda x: x[x[:, 0].argsort()],
    "argmax": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "permuted": lambda x: x[torch.randperm(len(x))],
    "drawn": lambda x: x[torch.randint(0, len(x), (3,))],
}
CHECKED = {
    "a range from the end": lambda x: x[torch.arange(len(x)) - 1],
    "drawn from below": lambda x: x[torch.randint(-1, 3, (3,))],
    "drawn from more": lambda x: x[:3][torch.randint(0, 3 + len(x[:1]), (3,)) % 3],
}


@pytest.mark.parametrize("name", SAFE | CHECKED)
def test_which_places_are_checked(name, monkeypatch):
    """Those of as many elements cannot be out of range, whatever the length."""
    found = []

    def find(graph, aliases):
        found.append(error_hazards.find_raising_ops(graph, aliases))
        return found[-1]

    monkeypatch.setattr(functionalize, "find_raising_ops", find)
    takes = (SAFE | CHECKED)[name]
    compiled = sidefx_train.compile(takes, backend="aot_eager", rng="eager")
    for n in (4, 5, 6):
        x = torch.randn(n, 3)
        torch.manual_seed(n)
        wanted = takes(x)
        torch.manual_seed(n)
        assert compiled(x).equal(wanted)
    assert len(found) == 2
    assert all(bool(each.unchecked) == (name in CHECKED) and not each.checks for each in found)


def test_a_range_downwards_includes_its_start():
    """Regression: five elements were taken for enough."""
    compiled = sidefx_train.compile(lambda x: x[torch.arange(5, 0, -1)], verify=0)
    with pytest.raises(IndexError, match="index 5 is out of bounds"):
        compiled(torch.arange(5.0))
    assert compiled(torch.arange(6.0)).tolist() == [5, 4, 3, 2, 1]
