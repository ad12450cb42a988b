"""Runs C code on shadows, with probes for symbolic numbers; errors that are the capture's own stop it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.eager_parity import batched_products
from sidefx_train.compile.capture.shadows.deferred_values import message_of
from sidefx_train.compile.capture.shadows.objects.numpy_arrays import says_read_only
from sidefx_train.compile.capture.world.deferred import deferred_warnings
from sidefx_train.compile.capture.world.interfaces import CaptureWorldAPI
from sidefx_train.compile.capture.world.native_call_facts import (
    DEFERRED_ARGUMENT,
    first_line,
    inside,
    is_fake_tensor_error,
    known_late,
)
from sidefx_train.compile.capture.world.native_calls import cpp_warnings
from sidefx_train.compile.common import trace_rules
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.derived_numbers import as_single
from sidefx_train.errors import Unsupported

_BOUND = frozenset({types.BuiltinMethodType, types.MethodWrapperType})
_CHANGING = (torch.SymInt, torch.SymFloat)


def owner_of(fn: Any) -> Any:
    """Returns the object that a method in C is bound to, ``None`` for other callables."""
    return fn.__self__ if type(fn) in _BOUND else None


class GuardedCalls:
    """Calls of C code whose errors may be the capture's own.

    Args:
        world: the capturing world.
    """

    def __init__(self, world: CaptureWorldAPI) -> None:
        self.world = world
        self.heap, self.interp, self.tracer = world.heap, world.interp, world.tracer

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs C code; torch's errors about unknown values stop the capture."""
        if self.world.modes.entered and not self.world.modes.in_program:
            with self.world.modes.running(program=True):
                return self.run(fn, args, kwargs)
        functions = self.world.functions
        asks = functions.wanted((owner_of(fn), *args), kwargs, trace_rules.is_torch_callable(fn))
        if asks and not functions.in_program:
            with self.world.functions.running(program=True):
                return self.run(fn, args, kwargs)
        try:
            if not asks and any(type(value) in _CHANGING for value in (*args, *kwargs.values())):
                with functions.running(program=False) if functions.in_program else nullcontext():
                    fn, args, kwargs = self.tracer.proxy_mode.probes.given_to(
                        fn, args, kwargs, self._single, self.world
                    )
            fn, args = batched_products.expanded(fn, args)
            if type(fn) is types.FunctionType:
                made = deferred_warnings.call_watched(self.world, fn, args, kwargs)
                if fn.__code__.co_flags & inspect.CO_GENERATOR:
                    self.world.native_generators.append(made)
                return made
            return cpp_warnings.call(self.world, fn, args, kwargs)
        except compat.data_dependent_errors() as error:
            self.world.random_draws.of_torch.want(inside((args, kwargs)))
            self.world.host_reads.want(inside((args, kwargs)))
            reason = f"{trace_rules.describe(fn)} needs a value that exists only when the graph runs"
            raise Unsupported("SFX101", reason, self.world.locate()) from error
        except compat.unsupported_fake_errors() as error:
            raise Unsupported("SFX102", first_line(error), self.world.locate()) from error
        except Exception as error:
            if safe_isinstance(error, TypeError) and error.args == compat.UNHASHABLE_NUMBER:
                reason = "hashes a number that may change from call to call"
                raise Unsupported("SFX111", reason, self.world.locate()) from error
            if says_read_only(error, inside((owner_of(fn), args, kwargs))):
                reason = f"{trace_rules.describe(fn)} writes into a NumPy array"
                raise Unsupported("SFX104", reason, self.world.locate()) from error
            noted = safe_isinstance(error, TypeError) and DEFERRED_ARGUMENT in message_of(error)  # made by a callback
            if noted or any(known_late(value, error) for value in inside((args, kwargs))):
                self.world.host_reads.want(inside((args, kwargs)))
                reason = (
                    f"{trace_rules.describe(fn)} of a value that exists only when the graph runs: {first_line(error)}"
                )
                raise Unsupported("SFX106", reason, self.world.locate()) from error
            if compat.reads_missing_memory(error):
                self.world.host_reads.want(inside((args, kwargs)))
                reason = (
                    f"{trace_rules.describe(fn)} reads the memory of a tensor, which exists only when the graph runs"
                )
                raise Unsupported("SFX106", reason, self.world.locate()) from error
            if compat.has_no_meta_kernel(error):
                reason = f"{trace_rules.describe(fn)} has no rule for shapes alone: {first_line(error)}"
                raise Unsupported("SFX102", reason, self.world.locate()) from error
            if compat.needs_plain_sizes(error):
                self.world.host_reads.want(())
                reason = f"{trace_rules.describe(fn)} of a tensor whose sizes exist only when the graph runs"
                raise Unsupported("SFX102", reason, self.world.locate()) from error
            if is_fake_tensor_error(error) and self._is_handled():
                reason = f"{trace_rules.describe(fn)} raises with another message than eager: {first_line(error)}"
                raise Unsupported("SFX102", reason, self.world.locate()) from error
            self.world.last_error = (error, fn, self.world.locate())
            raise

    def _single(self, number: torch.SymFloat) -> Any:
        """Returns a symbolic number rounded to float32; ``None`` if neither prologue nor graph can compute it."""
        if compat.is_unbacked(number):
            return torch.scalar_tensor(number, dtype=torch.float32).item()
        found = self.world.computed_numbers.call(as_single, (number,), {})
        return None if found is ABSENT else found

    def _is_handled(self) -> bool:
        """Returns True if the program may catch an exception raised now."""
        frame = self.interp.current_frame
        while frame is not None:
            if frame.instructions[frame.pc - 1].handler is not None:
                return True
            frame = frame.back
        return False
