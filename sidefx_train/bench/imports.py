"""Measures the time of imports before a first step."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from sidefx_train.torch_compat import NEEDED

_PROCESSES = 3

_PROGRAM = """
import json, time
began = time.perf_counter()
import torch
torch_there = time.perf_counter()
import {rest}
print(json.dumps([torch_there - began, time.perf_counter() - torch_there]))
"""


@dataclass(frozen=True)
class ImportCost:
    """Import times in seconds, the minimum of a few processes with warm files.

    Attributes:
        torch: ``import torch``.
        ours: ``import sidefx_train`` after it.
        needed: the imports after torch that ours contains and that eager's first optimizer would do otherwise.
    """

    torch: float
    ours: float
    needed: float

    def __str__(self) -> str:
        return (
            f"imports, part of no first step: torch {self.torch:.2f} s, sidefx_train {self.ours:.2f} s more, most "
            f"of it {NEEDED}, which eager's first optimizer imports in {self.needed:.2f} s"
        )


def import_cost() -> ImportCost:
    """Measures in separate processes."""
    found = [(_seconds("sidefx_train"), _seconds(NEEDED)) for _ in range(_PROCESSES)]
    return ImportCost(min(ours[0] for ours, _ in found), *(min(each[i][1] for each in found) for i in range(2)))


def _seconds(rest: str) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(rest=rest)], capture_output=True, text=True, check=True
    )
    first, second = json.loads(done.stdout)
    return first, second
