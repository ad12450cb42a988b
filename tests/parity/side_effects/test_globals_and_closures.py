"""Closure cells and globals that a step writes, and functions and exceptions that it makes, reproduced exactly."""

from __future__ import annotations

from torch.nn import functional as F

from tests.support.parity import Program, batches, mlp, parity
from tests.support.side_effects import check

TOTAL = 0


SEEN: list[object] = []


def test_closure_cell():
    def make() -> Program:
        calls, best = 0, None
        model = mlp()

        def step(x, y):
            nonlocal calls, best
            calls += 1
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            best = loss.detach()
            return best, calls

        def peek():
            return calls, best

        made = Program(step, batches((5, 6), classes=3), (model,))
        made.between = lambda: made.__setattr__("watch", (model, peek()))  # type: ignore[attr-defined]
        return made

    parity(make, captures=2, between=lambda made, index: made.between())


def test_two_functions_share_a_cell():
    def make() -> Program:
        count = 0
        model = mlp()

        def bump():
            nonlocal count
            count += 1

        def step(x, y):
            bump()
            before = count
            bump()
            return model(x).detach().sum() * before, count

        return Program(step, batches((5, 6), classes=3), (model,))

    parity(make)


def test_module_global():
    def make() -> Program:
        global TOTAL
        TOTAL = 0
        SEEN.clear()
        model = mlp()

        def step(x, y):
            global TOTAL
            TOTAL += x.shape[0]
            SEEN.append(model(x).detach().mean())
            return TOTAL

        return Program(step, batches((5, 6), classes=3), (model, SEEN))

    parity(make)


def test_function_created_in_the_step_escapes():
    """A closure created by the step works outside, over real cells."""
    made = []

    def make() -> Program:
        model = mlp()
        results: list[object] = []
        made.clear()

        def step(x, y):
            scale = model(x).detach().mean()
            count = 0

            def later(amount):
                nonlocal count
                count += amount
                return scale * count

            made.append(later)
            return scale

        program = Program(step, batches((5, 6), classes=3), (results,))
        program.results = results  # type: ignore[attr-defined]
        return program

    def between(program, index):
        if made:
            program.results.extend([made[-1](2), made[-1](3)])

    parity(make, between=between)


def test_generators_and_context_managers():
    class Timer:
        def __init__(self, log):
            self.log = log

        def __enter__(self):
            self.log.append("enter")
            return self

        def __exit__(self, *exc):
            self.log.append("exit" if exc[0] is None else exc[0].__name__)
            return True

    def body(self, loss, x):
        def numbers():
            for n in range(3):
                self.log.append(n)
                yield n

        with Timer(self.log):
            self.total = sum(n * n for n in numbers())
            raise KeyError("swallowed")

    check(body, fields=lambda: {"log": [], "total": 0}, captures=2)


def test_exceptions_inside_the_step():
    def body(self, loss, x):
        try:
            self.log.append("try")
            {}["missing"]
        except KeyError as error:
            self.log.append(str(error))
        finally:
            self.log.append("finally")

    check(body, fields=lambda: {"log": []})
