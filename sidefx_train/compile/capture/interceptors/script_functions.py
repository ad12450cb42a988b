"""Functions of TorchScript: their C++ interpreter runs them on fake tensors, and their operations are recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.world.native_call_facts import inside
from sidefx_train.compile.capture.world.symbolic_numbers.concrete_numbers import concrete_within
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


@registry.intercept(torch.jit.ScriptFunction)
def _call(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a script function. It changes none of its arguments but tensors: its lists and dicts are copies."""
    fn, *given = args
    if not safe_isinstance(fn, torch.jit.ScriptFunction):
        return ABSENT
    name = f"{fn.name}, a script function"
    effect = compat.effect_of_script(fn)
    if effect is not None:
        world.heap.refuse("SFX103", f"calls {name} with {effect}, an effect outside the step")
    given, kwargs = concrete_within((tuple(given), kwargs))
    for value in (*given, *kwargs.values()):
        world.touch(value)
    with compat.unoptimized_scripts():
        try:
            return world.guarded(fn, given, kwargs)
        except RuntimeError as error:  # of any kind: TorchScript keeps only its text
            text = str(error)
    if "DataDependent" in text:
        world.host_reads.want(inside((given, kwargs)))
        world.heap.refuse("SFX101", f"calls {name}, which needs a value that exists only when the graph runs")
    first = next((line for line in reversed(text.splitlines()) if line.strip()), text)
    world.heap.refuse("SFX102", f"calls {name}, which cannot be recorded: {first}")
