"""Stops a body before an instruction, and continues it natively."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from sidefx_train.compile.capture.interpreter.interpreter import Interpreter, Suspended
from sidefx_train.compile.capture.interpreter.world import DirectWorld
from sidefx_train.compile.capture.resume.driver import Frames, Parts
from sidefx_train.compile.capture.resume.suspension import StopPoint, stop_points, suspend
from sidefx_train.errors import Unsupported
from tests.support.interpreter import observe


def _native(fn: Any, name: str) -> Any:
    return fn


def _without_caller(error: Any) -> Any:
    """Returns the error with its traceback starting at the body: a ``lambda`` may have called that."""
    if error is None:
        return None
    called = error[2] and error[2][0][0] == "<lambda>"
    return (*error[:2], error[2][1:] if called else error[2], *error[3:])


def continued(body: Any, at: int, point: StopPoint | None, outcome: list[str]) -> Any:
    """Runs a body up to an instruction, and the rest of it natively.

    Args:
        body: the body.
        at: number of the instruction.
        point: where it stops then; by default the instruction itself.
        outcome: gets what came of it.
    """
    interp = Interpreter(DirectWorld())
    interp.stop_at = at
    try:
        return interp.run(body)
    except Suspended as reached:
        points = (point,) if point is not None else stop_points(reached, "SFX103", "test", None)
        if not points or points[0].depth != len(reached.frames):
            outcome.append("inside C code")
            return None
        try:
            suspension, states = suspend(reached.frames, reached.handled, points[0], interp.world.watched)
        except Unsupported as why:
            outcome.append(f"refused: {why.reason}")
            return None
    outcome.append("stopped")
    return Frames(suspension, Parts(_native)).drive(states)


def check_same(found: Any, wanted: Any, where: str) -> None:
    assert found.printed == wanted.printed, f"{where}: printed {found.printed!r}, not {wanted.printed!r}"
    assert repr(found.value) == repr(wanted.value), f"{where}: {found.value!r}"
    raised, should_be = _without_caller(found.error), _without_caller(wanted.error)
    assert raised == should_be, f"{where}: raised {raised}, should be {should_be}"


def check_every_instruction(body: Any, most: int, share: float = 0.4) -> None:
    """Fails if a body that is stopped ends in another way than in CPython.

    Args:
        body: the body.
        most: number of instructions up to which it is stopped at each; at every second, third, ... of more.
        share: the least share of them at which it can be stopped: not in frames that C code calls.
    """
    file = body.__code__.co_filename
    wanted = observe(lambda: body(), file)
    counting = Interpreter(DirectWorld())
    with contextlib.suppress(Exception):
        observe(lambda: counting.run(body), file)
    assert counting.begun > 10, "the body is interpreted"
    stopped = 0
    why: dict[str, int] = {}
    places = range(1, counting.begun + 1, 1 + counting.begun // most)
    for at in places:
        outcome: list[str] = []
        found = observe(functools.partial(continued, body, at, None, outcome), file)
        if outcome != ["stopped"]:
            why[outcome[0] if outcome else "none"] = why.get(outcome[0] if outcome else "none", 0) + 1
            continue
        stopped += 1
        check_same(found, wanted, f"instruction {at}")
    print(f"{body.__name__}: {stopped} of {len(places)}; not: {why}")
    assert stopped > len(places) * share, f"{stopped} of {len(places)} stopped; not: {why}"
