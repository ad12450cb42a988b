"""Steps that are captured in parts: the instruction that cannot be captured runs natively, once, in its own frame."""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings

import pytest
import torch

import sidefx_train
from sidefx_train.errors import GraphBreakError
from tests.support import graph_breaks
from tests.support.graph_breaks import failing, in_parts, natively, outside, trained
from tests.support.parity import Program, batches, parity

pytestmark = pytest.mark.filterwarnings("ignore::sidefx_train.errors.SideFXWarning")


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
    assert captures == ([2] if sys.version_info[:2] == (3, 13) else [1, 1]), "each side of the branch is captured"


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
                if f.filename in (__file__, graph_breaks.__file__) and f.name != "run"
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


@pytest.mark.slow  # a training step with a break under Inductor: tests/parity/autograd/test_joint_graph_breaks.py
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
    with pytest.raises(GraphBreakError, match=r"SFX10[36].*graph_breaks.py:\d+ in outside"):
        step(*program.batch(0))


def test_warned_once_and_reported():
    def after(loss, log, state):
        for _ in range(1):  # around it, so that the rest is not native
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


def test_a_comparison_of_a_symbolic_number_leaves_the_step_as_bool():
    def make():
        state = {"n": 0, "seen": []}

        def step(x, y):
            state["n"] += 1
            state["seen"].append(state["n"] > 2)
            return (x * 2).sum()

        return Program(step, batches((5, 6), classes=3), (state,))

    parity(make, captures=None)


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


def test_assumptions_about_a_tensor_leave_the_rest_in_its_graph():
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


@pytest.mark.parametrize("uses", ["stack", "eval"])
def test_variables_that_are_not_read_again_do_not_decide(uses):
    """``torch.stack`` is not ``inspect.stack``, and a module's ``eval`` not Python's: they read no variables."""

    def make() -> Program:
        net, held = torch.nn.Linear(3, 3), {}

        def stacked(x, count, done, name):
            held["last"] = (count, done, name)
            y = net(x)
            if y.sum() > 0:
                y = y + 1
            return torch.stack([y, y]).mean()

        def evaluated(x, count, done, name):
            held["last"] = (count, done, name)
            y = net(x)
            if y.sum() > 0:
                y = y + 1
            net.eval()
            return net(y).mean()

        return Program(
            stacked if uses == "stack" else evaluated,
            lambda index: (torch.randn(2, 3), index, index % 3 == 1, f"{index // 2}"),
            (net, held),
        )

    report = parity(make, steps=12, captures=None, whole=False)
    assert report.parts and all(len(part.captures) <= 1 for part in report.parts)
