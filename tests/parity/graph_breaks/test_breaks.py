"""Steps that are captured in parts: the instruction that cannot be captured runs natively, once, in its own frame."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sidefx_train
from sidefx_train.errors import GraphBreakError
from tests.support.parity import Program, batches, mlp, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


def outside(value: object) -> float:
    """A call that cannot be captured: it reads the clock and numbers."""
    assert time.perf_counter_ns() > 0
    return round(float(value), 6)


def failing(value: object) -> float:
    if outside(value) > 0:
        raise ValueError("outside failed")
    return 0.0


def trained(after, extra=None):
    """Returns a factory of steps that train and then do ``after(loss, log)`` with the detached loss."""

    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        log: list[object] = []
        state = {"calls": 0} if extra is None else extra()

        def step(x, y):
            state["calls"] += 1
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return after(loss.detach(), log, state)

        return Program(step, batches((5, 6), classes=3), (model, optimizer, log, state))

    return make


def in_parts(make, **options):
    report = parity(make, whole=False, captures=None, **options)
    assert report.breaks, f"no break:\n{report}"
    assert not report.fallbacks, f"ran eagerly:\n{report}"
    assert report.parts, f"no parts:\n{report}"
    for part in report.parts:
        assert not part.fallbacks, f"a part ran eagerly:\n{part}"
    return report


def test_data_dependent_branch():
    def after(loss, log, state):
        log.append("before")
        if loss > 1.05:
            log.append("high")
            loss = loss * 2
        log.append(loss)
        return loss

    report = in_parts(trained(after))
    assert report.breaks[0].code == "SFX101"
    inner = [part for part in report.parts if "after after" in part.name]
    assert sum(part.replays for part in inner) == 10
    # Python 3.13 computes the truth value before it jumps: the sides are then two captures of one part.
    captures = [len(part.captures) for part in inner]
    assert captures == ([2] if sys.version_info >= (3, 13) else [1, 1]), "each side of the branch is captured"


def test_call_with_values_on_the_stack():
    def after(loss, log, state):
        return max(1.0, outside(loss)) + len(log), loss * 3

    in_parts(trained(after))


def test_break_in_an_inlined_call():
    def innermost(loss, log):
        log.append("in")
        value = outside(loss)
        log.append(("out", value))
        return value * 2

    def middle(loss, log, *, scale):
        doubled = loss * 2
        result = scale * innermost(doubled, log) + 1
        log.append(result)
        return result, doubled

    def after(loss, log, state):
        first, second = middle(loss, log, scale=3)
        state["last"] = second
        return first, second + 1

    report = in_parts(trained(after))
    names = {part.name.split(" after")[0].rpartition(".")[2] for part in report.parts}
    assert names >= {"innermost", "middle", "after"}, names


def test_several_breaks():
    def after(loss, log, state):
        a = outside(loss)
        loss = loss + a
        log.append(a)
        b = outside(loss)
        if loss > 0:
            log.append(b)
        return loss, b

    in_parts(trained(after))


@contextlib.contextmanager
def noted(log, name):
    log.append(f"enter {name}")
    try:
        yield name
    finally:
        log.append(f"leave {name}")


class Noted:
    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("enter")
        return self

    def __exit__(self, kind, value, trace):
        self.log.append(("leave", None if kind is None else kind.__name__))
        return kind is ValueError


def test_break_inside_with():
    def after(loss, log, state):
        with Noted(log) as manager:
            manager.seen = outside(loss)
            loss = loss * 2
        return loss, manager.seen

    in_parts(trained(after))


def test_break_inside_with_that_swallows_what_the_instruction_raises():
    def after(loss, log, state):
        with Noted(log):
            failing(loss)
            log.append("not reached")
        log.append("after")
        return loss * 2

    report = parity(trained(after), whole=False, captures=None)
    assert report.breaks and not report.fallbacks


def test_break_inside_no_grad():
    def after(loss, log, state):
        with torch.no_grad():
            value = outside(loss)
            doubled = loss * value
            log.append(torch.is_grad_enabled())
        log.append(torch.is_grad_enabled())
        return doubled

    in_parts(trained(after))


@pytest.mark.parametrize("call", [outside, failing])
def test_break_inside_try(call):
    def after(loss, log, state):
        try:
            log.append("try")
            value = call(loss)
            log.append("no error")
        except ValueError as error:
            log.append(str(error))
            value = -1.0
        else:
            log.append("else")
        finally:
            log.append("finally")
        return loss * value

    report = parity(trained(after), whole=False, captures=None)
    assert report.breaks and not report.fallbacks


def test_an_error_passes_through_the_callers_handlers():
    def inner(loss, log):
        try:
            return failing(loss)
        finally:
            log.append("inner finally")

    def after(loss, log, state):
        try:
            inner(loss, log)
        except ValueError as error:
            log.append(repr(error))
        return loss + 1

    report = parity(trained(after), whole=False, captures=None)
    assert report.breaks and not report.fallbacks


def test_an_error_that_nobody_handles():
    def after(loss, log, state):
        log.append("before")
        failing(loss)
        log.append("not reached")

    parity(trained(after), whole=False, captures=None)


def test_an_unset_variable_of_the_enclosing_function():
    def step(x, seen):
        def walk():
            os.getpid()
            yield 1
            try:
                yield late
            except NameError as error:
                yield type(error).__name__, str(error)

        seen.append(list(walk()))
        late = x * 2
        return late

    compiled = sidefx_train.compile(step, backend="eager")
    wanted, found = [], []
    for _ in range(3):
        step(torch.ones(1), wanted)
        compiled(torch.ones(1), found)
    assert found == wanted and wanted[0][1][0] == "NameError"


@pytest.mark.parametrize("iterable", ["range", "list", "enumerate", "zip", "dict"])
def test_break_inside_for(iterable):
    def items(state):
        names = state["names"]
        if iterable == "range":
            return range(3)
        if iterable == "list":
            return names
        if iterable == "enumerate":
            return enumerate(names)
        if iterable == "zip":
            return zip(names, range(3), strict=True)
        return {name: 1 for name in names}.items()

    def after(loss, log, state):
        total = 0.0
        for item in items(state):
            total += outside(loss)
            log.append((item, total))
        else:
            log.append("end")
        return loss * total

    in_parts(trained(after, lambda: {"calls": 0, "names": ["a", "b", "c"]}))


def test_break_in_a_loop_over_an_iterator_that_is_held():
    def after(loss, log, state):
        items = iter(state["names"])
        log.append(next(items))
        for item in items:
            for i in range(2):
                log.append((item, i, outside(loss)))
            if item == "b":
                break
        log.append(list(items))
        return loss

    in_parts(trained(after, lambda: {"calls": 0, "names": ["a", "b", "c", "d"]}))


@pytest.mark.parametrize("rounds", ["range", "enumerate", "tensors"])
def test_a_long_loop_with_a_break_shares_its_parts(rounds):
    def after(loss, log, state):
        total = loss
        for item in {"range": range(40), "enumerate": enumerate("x" * 40), "tensors": list(loss * torch.ones(40))}[
            rounds
        ]:
            total = total + (item if rounds == "tensors" else 1)
            log.append((item, outside(total)))
            total = total * 0.5
        return total

    report = in_parts(trained(after))
    assert sum(part.graph_count for part in report.parts) <= 8, [(p.name, p.graph_count) for p in report.parts]
    assert any(b.code == "SFX113" for part in report.parts for b in part.breaks)


def test_a_loop_over_modules_with_a_break():
    def make():
        layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(20))
        seen = []

        def step(x, y):
            with torch.no_grad():
                for layer in layers:
                    x = layer(x).relu()
                    seen.append(outside(x.sum()))
            return x

        return Program(step, batches((5, 6), classes=3), (layers, seen))

    in_parts(make)


def test_a_list_changed_while_it_is_walked_over():
    def after(loss, log, state):
        names = ["a", "b"]
        for name in names:
            log.append((name, outside(loss)))
            if len(names) < 4:
                names.append(name * 2)
        return loss

    in_parts(trained(after))


def test_break_inside_a_generator():
    def after(loss, log, state):
        def values():
            for i in range(2):
                yield outside(loss) + i

        for value in values():
            log.append(value)
        return loss

    in_parts(trained(after))


def test_break_between_the_items_of_a_generator():
    def after(loss, log, state):
        def values(scale):
            count = 0
            try:
                while count < 3:
                    got = yield loss * scale + count
                    log.append(("got", got))
                    count += 1
            finally:
                log.append(("left", count))

        items = values(2)
        for item in items:
            log.append(outside(item))
        more = values(3)
        log.append(next(more))
        log.append(outside(loss))
        log.append(more.send("x"))
        more.close()
        return list(values(outside(loss)))

    in_parts(trained(after))


def test_break_inside_a_context_manager_made_by_a_generator():
    @contextlib.contextmanager
    def scaled(state, log, by):
        state["scale"] = state.get("scale", 1.0) * by
        log.append(("enter", state["scale"]))
        try:
            with torch.no_grad():
                yield state["scale"]
        except ValueError as error:
            log.append(str(error))
        finally:
            state["scale"] /= by
            log.append(("leave", state["scale"]))

    def after(loss, log, state):
        with scaled(state, log, 2.0) as outer, scaled(state, log, 4.0):
            log.append(outside(loss) * outer)
            y = loss * state["scale"]
        log.append(y.requires_grad)
        return y

    def swallowed(loss, log, state):
        with scaled(state, log, 2.0):
            failing(loss)
        return loss

    in_parts(trained(after))
    parity(trained(swallowed), whole=False, captures=None)


def test_break_inside_except():
    def after(loss, log, state):
        try:
            raise KeyError("k")
        except KeyError as error:
            log.append(outside(loss))
            log.append((str(error), repr(sys.exc_info()[1]), error.__traceback__ is not None))
            loss = loss * 2
        log.append(sys.exc_info()[1])
        return loss

    in_parts(trained(after))


def test_break_inside_finally():
    def after(loss, log, state):
        try:
            try:
                {}["k"]
            finally:
                log.append((outside(loss), repr(sys.exc_info()[1])))
        except KeyError as error:
            loss = loss * 3
            log.append(repr(error))
        return loss

    in_parts(trained(after))


def test_a_callee_breaks_while_its_caller_handles():
    def inner(loss, log):
        log.append(repr(sys.exc_info()[1]))
        try:
            raise ValueError(outside(loss))
        except ValueError as error:
            log.append(repr(error.__context__))
        value = outside(loss * 2)
        log.append(repr(sys.exc_info()[1]))
        return value

    def after(loss, log, state):
        for i in range(2):
            try:
                [][i]
            except IndexError as error:
                log.append(inner(loss, log))
                log.append((error.args, repr(sys.exc_info()[1])))
        return loss

    in_parts(trained(after))


def test_what_is_handled_is_raised_again_behind_a_break():
    def after(loss, log, state):
        try:
            try:
                raise KeyError("k")
            except KeyError:
                log.append(outside(loss))
                if state["calls"] % 2:
                    raise
                raise ValueError("v")
        except (KeyError, ValueError) as error:
            log.append((repr(error), repr(error.__context__)))
        return loss

    in_parts(trained(after))


def test_an_error_out_of_a_handler_behind_a_break():
    def after(loss, log, state):
        try:
            raise KeyError("k")
        except KeyError:
            log.append(outside(loss))
            raise

    parity(trained(after), whole=False, captures=None)


def test_an_object_of_c_that_cannot_be_made_again():
    """The encoder of ``json`` is alive at the break: the step runs eagerly, and reports it."""

    def after(loss, log, state):
        log.append(json.dumps({"loss": round(loss.item(), 4), "calls": state["calls"]}))
        return loss

    parity(trained(after), whole=False, captures=None)


def test_a_closure_made_before_the_break():
    def after(loss, log, state):
        count = 0

        def add(n):
            nonlocal count
            count += n
            return count

        add(1)
        value = outside(loss)
        add(2)
        log.append((count, value))
        return loss * count

    parity(trained(after), whole=False, captures=None)


def test_identity_across_a_break():
    def after(loss, log, state):
        shared: list[object] = [loss]
        pair = (shared, shared)
        state["kept"] = shared
        value = outside(loss)
        shared.append(value)
        log.append(pair[0] is pair[1])
        log.append(state["kept"] is shared)
        return pair

    in_parts(trained(after))


def test_nothing_is_done_twice():
    calls = []

    def counted(value):
        calls.append(time.perf_counter_ns() > 0)
        return outside(value)

    def after(loss, log, state):
        log.append(1)
        counted(loss)
        log.append(2)
        return loss

    in_parts(trained(after), steps=5)
    assert len(calls) == 10, "five eager calls and five in parts"


def test_frames_and_tracebacks():
    """The instruction runs in a frame of the user's function: right name, file, line and variables."""
    seen = []

    def look(value):
        frame = sys._getframe(1)
        seen.append((frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno, frame.f_locals.get("kept")))
        return outside(value)

    def inner(loss):
        kept = 7
        value = look(loss)
        return value + kept

    def after(loss, log, state):
        return inner(loss) + 1

    in_parts(trained(after), steps=2)
    assert seen[:2] == seen[2:], seen

    def broken(loss, log, state):
        return failing(loss)

    def run(compiled):
        program = trained(broken)()
        step = sidefx_train.compile(program.step, backend="eager") if compiled else program.step
        try:
            step(*program.batch(0))
        except ValueError as error:
            return [
                (f.name, f.lineno)
                for f in traceback.extract_tb(error.__traceback__)
                if f.filename == __file__ and f.name != "run"
            ]
        raise AssertionError("it raises")

    assert run(True) == run(False)


def test_world_changes_between_calls():
    def make():
        program = trained(lambda loss, log, state: (outside(loss), log.append(state.get("flag")), loss * 2))()
        return program

    def between(program, index):
        program.watch[3]["flag"] = index // 3
        program.watch[0].train(index % 2 == 0)

    parity(make, whole=False, captures=None, between=between)


def test_shapes_change_between_calls():
    def make():
        program = trained(lambda loss, log, state: (outside(loss), loss * 2))()
        full = program.batch

        def batch(index):
            x, y = full(index)
            return (x[:3], y[:3]) if index % 4 == 3 else (x, y)

        return Program(program.step, batch, program.watch)

    parity(make, whole=False, captures=None, steps=8)


def test_under_inductor():
    def after(loss, log, state):
        if loss > 1.05:
            loss = loss * 2
        log.append(outside(loss) > 0)
        return loss

    in_parts(trained(after), backend="inductor", steps=4)


def test_fullgraph_names_line_and_reason():
    program = trained(lambda loss, log, state: outside(loss))()
    step = sidefx_train.compile(program.step, backend="eager", fullgraph=True)
    with pytest.raises(GraphBreakError, match=r"SFX10[36].*test_breaks"):
        step(*program.batch(0))


def test_warned_once_and_reported():
    def after(loss, log, state):
        if loss > 1e9:
            log.append("never")
        return loss

    program = trained(after)()
    step = sidefx_train.compile(program.step, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(4):
            step(*program.batch(i))
    ours = [str(w.message) for w in caught if "in parts" in str(w.message)]
    assert len(ours) == 1 and "test_breaks.py" in ours[0], ours
    report = sidefx_train.explain(step)
    assert (report.calls, report.replays, report.fallback_count) == (4, 4, 0)
    assert report.graph_count == 1, "nothing behind the break touches a tensor"
    assert [part.calls for part in report.parts] == [4, 4], "the rest of after(), then the rest of step()"
    assert "captured after a graph break" in str(report)
    assert report.to_dict()["parts"][0]["calls"] == 4


def test_a_module_with_a_break_in_forward_without_grad():
    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 3)
            self.seen = []

        def forward(self, x):
            y = self.inner(x)
            self.seen.append(outside(y.sum()))
            return y.relu()

    def make():
        model = Probe()

        def step(x, y):
            with torch.no_grad():
                return model(x).sum()

        return Program(step, batches((5, 6), classes=3), (model,))

    in_parts(make)


def test_a_break_in_a_method_that_calls_super():
    class Noting(nn.Linear):
        def forward(self, x):
            self.seen = [*self.seen, outside(x.sum())]
            y = super().forward(x)
            self.seen.append(outside(y.sum()))
            return super().forward(y)

    def make():
        model = Noting(6, 6)
        model.seen = []

        def step(x, y):
            with torch.no_grad():
                return model(x).sum()

        return Program(step, batches((5, 6), classes=3), (model,))

    in_parts(make)


def test_a_comparison_of_a_moving_number_leaves_the_step_as_bool():
    def make():
        state = {"n": 0, "seen": []}

        def step(x, y):
            state["n"] += 1
            state["seen"].append(state["n"] > 2)
            return (x * 2).sum()

        return Program(step, batches((5, 6), classes=3), (state,))

    parity(make, captures=None)


def natively(value):
    os.getpid()
    return value


def test_a_break_inside_a_generator_that_another_delegates_to():
    def inner(log):
        try:
            log.append((yield 1))
            log.append(natively(2))
            return (yield 3)
        finally:
            log.append("left")

    def outer(log):
        log.append((yield from inner(log)))
        yield 9

    def make() -> Program:
        log: list[object] = []

        def step(x):
            held = outer(log)
            next(held)
            x = x * held.send(4)
            natively(1)
            for value in held:
                x = x + value
                natively(value)
            return x

        return Program(step, lambda index: (torch.ones(2),), (log,))

    report = parity(make, steps=3, captures=None, whole=False)
    assert report.replays == report.calls and not report.fallbacks, report


def test_a_tensor_of_inference_mode_comes_from_outside():
    class Owner:
        pass

    def make() -> Program:
        owner = Owner()
        owner.weight = torch.ones(3)

        def step(x):
            with torch.inference_mode():
                owner.made = owner.weight * 2
            vars(owner).update(count=natively(1))
            return x + 1

        return Program(step, lambda index: (torch.ones(2),), (owner.weight,))

    report = parity(make, steps=3, captures=None, whole=False)
    assert not [item for item in report.fallbacks if item.code == "SFX204"], report


def test_what_is_noted_of_a_tensor_does_not_keep_the_rest_from_its_graph():
    def pairs(embedded, labels):
        first, second = torch.where(labels[:, None] == labels[None])
        similar = (embedded[first] * embedded[second]).sum(1)
        if similar.sum() > 1e9:
            similar = similar * 2
        return similar.exp().mean() + (similar * embedded[second].sum(1)).mean()

    model = torch.nn.Linear(4, 4)

    def step(x, labels):
        loss = pairs(model(x), labels)
        loss.backward()
        return loss.detach()

    compiled = sidefx_train.compile(step, backend="eager")
    labels = torch.tensor([0, 1, 0, 2])
    for _ in range(3):
        compiled(torch.randn(4, 4), labels)
    report = compiled.report()
    assert [record.code for record in report.breaks] == ["SFX101"], str(report)
