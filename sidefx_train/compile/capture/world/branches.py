"""Branches on values that only the graph knows: decided, assumed, or refused."""

from __future__ import annotations

import functools
from collections import Counter, deque
from typing import Any

import numpy as np
import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.frame import Frame
from sidefx_train.compile.capture.interpreter.generators import InterpretedGenerator
from sidefx_train.compile.capture.recording import float_comparisons, runtime_asserts
from sidefx_train.compile.capture.recording.constant_folding import constant_value
from sidefx_train.compile.capture.recording.finiteness_tests import if_finite
from sidefx_train.compile.capture.recording.float_comparisons import decided_by_algebra
from sidefx_train.compile.capture.resume.branch_history import Branch
from sidefx_train.compile.capture.resume.resume_function import original
from sidefx_train.compile.capture.shadows.containers.lists_and_dicts import DictRecord, ListRecord
from sidefx_train.compile.capture.shadows.deferred_values import DeferredValue
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.capture.world.symbolic_numbers import concrete_numbers
from sidefx_train.compile.capture.world.symbolic_numbers.scalar_tensors import host_value
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.errors import Unsupported

_COUNTED = frozenset((list, tuple, dict, set, frozenset, deque, functools.partial))
"""Classes whose truth does not depend on what is in their items."""
_MOST_ASSUMED = 128
"""Limit of times that one branch is assumed in a capture: a loop that it ends may have no other end."""
_MOST_IN_LOOPS = 4096
"""That limit inside a loop over a container, which has another end."""
_ITERATORS = (*map(type, map(iter, ([], (), {}, {}.values(), {}.items(), set(), range(0)))), zip, enumerate)


class Branches:
    """Decides what ``bool(value)`` is during a capture.

    Attributes:
        endless: branches, and calls that test a number, that were assumed too often.
    """

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self.heap, self.interp, self.tracer = world.heap, world.interp, world.tracer
        self.endless: set[Branch] = set()
        self._assumed: Counter[tuple[Branch, Branch | None]] = Counter()

    def truth(self, value: Any) -> Any:
        record = self.heap.record_of(value)
        if safe_isinstance(record, DictRecord):
            length = record.length()
            if length is not None:
                return length > 0
        if safe_isinstance(record, ListRecord) and record.shadow is value:
            length = record.length()
            if length is not None:
                return bool(record.appended) or bool(length > 0)
        if safe_isinstance(value, DeferredValue):
            condition = self.world.deferred_arrays.as_condition(value)
            if condition is not None:
                return self.truth(condition)
            self.heap.refuse("SFX106", "branches on a value that is known only after the step")
        if type(value) is np.ndarray and self.world.random_draws.is_drawn(value):
            decided = self.world.random_draws.derive(bool, (value,), {}, "bool")
            if decided is not ABSENT:
                return decided
        if type(value) is compat.FakeTensor:
            if self.world.functions.wanted((value,), {}):
                return self.world.guarded(bool, (value,), {})
            known = constant_value(self.tracer, value)
            if known is not None:
                return bool(known)
            number = host_value(self.world, value)
            if number is not None:
                value = number  # a comparison: sympy may decide it, except for NaN and infinity
        value = _asked(value)
        decided = decided_by_algebra(self.tracer, value)
        if decided is not None:
            return self._by_algebra(value, *decided)
        finite = if_finite(runtime_asserts.asked_of(self.tracer, value))
        if finite is not None and self.grant(value, finite):
            return finite
        if id(value) in self.world.module_namespaces:
            return True  # it contains at least __name__
        self.world.touch(value, deep=type(value) not in _COUNTED, asked="contains")
        try:
            return self.world.guarded(bool, (value,), {})
        except Unsupported as stop:
            if stop.code != "SFX101":
                raise
            reason = "branches on a tensor's value, which exists only when the graph runs"
            raise Unsupported("SFX101", reason, stop.location) from stop

    def _by_algebra(self, condition: torch.SymBool, holds: bool, floats: list[Any]) -> bool:
        """Returns the algebraic truth of a comparison of floats if arithmetic gives the same; else evaluates or assumes
        it."""
        if not float_comparisons.known_before(floats):
            if self.grant(condition, holds):
                return holds
            self.world.host_reads.want(())
            raise Unsupported("SFX101", "compares a number, which exists only when the graph runs", self.world.locate())
        if not float_comparisons.of_one_number(self.tracer, condition) or not float_comparisons.rely_on_finite(floats):
            concrete_numbers.concrete_within(floats)  # the result depends on their current values
            return float_comparisons.worked_out(self.tracer, condition)
        return holds

    def usual_truth(self, frame: Frame) -> bool | None:
        """Returns the truth that the condition of the running jump had in all of the last calls, if that is known."""
        known = self.world.specialization.usual_truths
        if not known:
            return None
        place = _place(frame)
        return next((truth for branch, truth in known if branch == place), None)

    def grant(self, condition: Any, holds: bool) -> bool:
        """Assumes a condition that only the graph knows and adds a runtime assert; returns False if that is not
        possible."""
        may = self._may_assume()
        if safe_isinstance(condition, DeferredValue):
            condition = self.world.deferred_arrays.as_condition(condition)
            may = may and condition is not None
        return may and self._noted(runtime_asserts.grant(self.tracer, _asked(condition), holds))

    def grant_finite(self, number: Any, *, infinite: bool, nan: bool) -> bool:
        """Assumes in the same way that a number is not infinite, or not NaN."""
        may = self._may_assume()
        return may and self._noted(runtime_asserts.grant_finite(self.tracer, number, infinite=infinite, nan=nan))

    def grant_first(self, condition: fx.Node, count: int) -> bool:
        """Assumes in the same way that the first elements of a vector of the graph are true, and no others."""
        if not self._may_assume():
            return False
        runtime_asserts.grant_first(self.tracer, condition, count)
        return self._noted(True)

    def _may_assume(self) -> bool:
        """Returns False if nothing is assumed, or what is running was assumed so often that it may have no end."""
        specialization, frame = self.world.specialization, self.interp.current_frame
        if self.world.branching or specialization.assumes_nothing:
            return False
        if frame is None:
            return True
        place, caller = _places(frame)
        if place in specialization.endless_branches:
            return False
        assumed = self._assumed[place, caller]
        if assumed >= (_MOST_IN_LOOPS if _ends_otherwise(frame) else _MOST_ASSUMED):
            self.endless.add(place)
            return False
        return True

    def _noted(self, assumptions: bool) -> bool:
        location, frame = self.world.locate(), self.interp.current_frame
        if assumptions and location is not None:
            self.world.assumptions.setdefault(location)
        if assumptions and frame is not None:
            self._assumed[_places(frame)] += 1
        return assumptions


def _places(frame: Frame) -> tuple[Branch, Branch | None]:
    """Returns the instruction that runs in a frame, and the one that has called it."""
    return _place(frame), None if frame.back is None else _place(frame.back)


def _place(frame: Frame) -> Branch:
    return original(frame.info.code, frame.pc - 1)


def _ends_otherwise(frame: Frame | None) -> bool:
    """Returns True inside a loop over a container, also one that a generator of the program goes over."""
    while frame is not None:
        if any(map(_has_end, frame.stack)):
            return True
        frame = frame.back
    return False


def _has_end(iterator: Any) -> bool:
    if type(iterator) is InterpretedGenerator:
        return any(map(_has_end, iterator.frame.stack))
    return type(iterator) in _ITERATORS


def _asked(value: Any) -> Any:
    """Returns the comparison with zero that the truth of a symbolic number is; ``bool`` of a float reads its value."""
    return value != 0 if type(value) in (torch.SymFloat, torch.SymInt) else value
