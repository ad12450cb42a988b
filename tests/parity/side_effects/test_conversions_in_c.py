"""Methods in Python that C code calls to convert an object: their effects and values are those of each call."""

from __future__ import annotations

import collections
import os
import pathlib
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import sidefx_train
from sidefx_train.errors import SideFXWarning


class Counted:
    """Converts itself to another value each time, and says so."""

    def __init__(self, log: list[Any]) -> None:
        self.log, self.turn = log, 0

    def _next(self, name: str) -> int:
        self.turn += 1
        self.log.append((name, self.turn))
        return self.turn % 3

    def __index__(self) -> int:
        return self._next("index")

    def __float__(self) -> float:
        return self._next("float") + 0.5

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array([self._next("array") + 0.25])


class Interface:
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    @property
    def __array_interface__(self) -> Any:
        self.log.append("interface")
        return np.array([float(len(self.log)), 2.0]).__array_interface__


class Ufuncs:
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> float:
        self.log.append((ufunc.__name__, method))
        return float(len(self.log))


class Pages:
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __len__(self) -> int:
        self.log.append("len")
        return 2

    def __getitem__(self, index: int) -> float:
        if index > 1:
            raise IndexError(index)
        self.log.append(("item", index))
        return float(len(self.log))


class Named(np.ndarray):
    finalized: list[Any] = []

    def __array_finalize__(self, made_from: Any) -> None:
        Named.finalized.append(type(made_from).__name__)


def assigned(o: Any, values: Any) -> Any:
    values[o] = 7.0
    return values


def inserted(o: Any) -> Any:
    values = [1.0, 2.0, 3.0]
    values.insert(o, 9.0)
    values.pop(o)
    values.__setitem__(o, 5.0)
    del values[o]
    return sum(values) + len("a" * o)


CASES: dict[str, tuple[type, Any]] = {
    "list": (Counted, lambda o: [1.0, 2.0, 3.0][o] + sum([1.0, 2.0, 3.0][:o])),
    "methods": (Counted, inserted),
    "array": (Counted, lambda o: np.arange(4.0)[o] + np.arange(4.0)[o : len("abc")].sum()),
    "dimensions": (Counted, lambda o: np.arange(9.0).reshape(3, 3)[o, o]),
    "written array": (Counted, lambda o: assigned(o, np.zeros(4)) @ np.arange(4.0)),
    "written list": (Counted, lambda o: assigned(o, [0.0, 1.0, 2.0])[2]),
    "made array": (Counted, lambda o: float(np.asarray(o).sum() + np.array(o).sum())),
    "operators": (Counted, lambda o: float((np.ones(1) + o)[0] + np.add(o, 1)[0])),
    "compared": (Counted, lambda o: float((np.ones(1) < o)[0])),
    "contained": (Counted, lambda o: float(o in np.ones(2))),
    "functions": (Counted, lambda o: float(np.sum(o) + np.mean(o))),
    "bytes": (Counted, lambda o: len(bytes(o)) + len(bytearray(o))),
    "tensor": (Counted, lambda o: torch.arange(4.0)[o] + torch.arange(4.0)[:o].sum()),
    "written tensor": (Counted, lambda o: assigned(o, torch.zeros(4)) @ torch.arange(4.0)),
    "sizes": (Counted, lambda o: torch.ones(o).sum() + torch.ones(6).view(o, -1).shape[1]),
    "interface": (Interface, lambda o: float(np.asarray(o).sum())),
    "ufuncs": (Ufuncs, lambda o: np.add(o, 1) + (np.ones(1) * o)),
    "sequence": (Pages, lambda o: float(np.array(o).sum()) + torch.tensor(o).sum()),
    "kind of array": (Pages, lambda o: float(np.ones(2).view(Named).sum()) * len(o)),
}


@pytest.mark.parametrize("name", CASES)
def test_they_run_at_each_call(name):
    kind, use = CASES[name]

    def run(captured: bool) -> Any:
        log: list[Any] = []
        Named.finalized = []
        converted = kind(log)

        def step(x):
            return x * use(converted)

        fn = sidefx_train.compile(step, backend="eager") if captured else step
        results = []
        for _ in range(5):
            try:
                results.append(fn(torch.ones(2)).tolist())
            except RuntimeError as error:  # a view of no elements
                results.append(str(error))
        return results, log, Named.finalized

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SideFXWarning)
        assert run(captured=True) == run(captured=False)


OF_LIBRARIES: dict[str, tuple[Any, Any]] = {
    "path": (lambda: pathlib.Path("/runs") / "best", os.fspath),
    "joined path": (lambda: pathlib.Path("/runs") / "best", lambda o: os.path.join(o, "x.pt")),
    "paths in a list": (lambda: [pathlib.Path("/a") / "b", pathlib.Path("/a") / "c"], os.path.commonpath),
    "sequence": (lambda: collections.UserList([1, 2]), lambda o: torch.tensor(o).sum().item()),
    "sequence of sequences": (
        lambda: collections.UserList([[1, 2], collections.UserList([3, 4])]),
        lambda o: np.array(o).tolist(),
    ),
}


class Holder:
    value: Any


@pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")
@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_methods_of_libraries_see_what_their_objects_hold(name):
    """They run past the interpreter: all that they may read is read before."""
    make, use = OF_LIBRARIES[name]
    held = Holder()

    @sidefx_train.compile(backend="eager")
    def step(x):
        return x * 2, use(held.value)

    for _ in range(3):
        held.value = make()  # a path remembers its text once it is asked
        found = step(torch.ones(2))[1]
        assert found == use(make())
