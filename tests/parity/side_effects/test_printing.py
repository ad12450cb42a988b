"""Text that a step prints, in order and as of the line that printed it."""

from __future__ import annotations

import pytest

from tests.support.side_effects import check


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_print_in_order(backend):
    def body(self, loss, x):
        print("call", self.calls)
        self.calls += 1
        print("rows", x.shape[0], sep="=", end=";\n")
        print(f"still {self.calls}")

    check(body, fields=lambda: {"calls": 0}, backend=backend)


def test_print_of_tensors():
    def body(self, loss, x):
        print("loss", loss.detach())
        print(x.sum())

    check(body)


def test_print_of_an_object_the_step_has_changed():
    """The printed text shows the object with the step's changes before the print."""

    class Meter:
        def __init__(self):
            self.n = 0

        def __repr__(self):
            return f"Meter({self.n})"

    def body(self, loss, x):
        self.meter.n += x.shape[0]
        print(self.meter, "after", self.calls)
        self.calls += 1

    check(body, fields=lambda: {"meter": Meter(), "calls": 0})
