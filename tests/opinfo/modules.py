"""Runs every module of torch's own list: forward and backward, in training and evaluation, with updated buffers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch

import sidefx_train
from tests.opinfo.compare import Differs, compare
from tests.opinfo.variants import CALLS, SEED, Result, fresh, gradients, leaves, reasons, short

INPUTS = 3
"""Number of argument sets tried per module."""


def check_module(info: Any, inputs: int = INPUTS) -> list[Result]:
    """Runs a module in training and in evaluation, on its first sets of arguments."""
    found: list[Result] = []
    for training in (True, False):
        torch.manual_seed(0)
        given = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
        for each in islice((one for one in given if one.forward_input is not None), inputs):
            constructor, forward = each.constructor_input, each.forward_input

            def build() -> torch.nn.Module:
                torch.manual_seed(SEED)
                module = info.module_cls(*fresh(constructor.args), **fresh(constructor.kwargs)).train(training)
                if info.is_lazy:  # has parameters after its first input
                    args, kwargs = fresh((forward.args, forward.kwargs))
                    module(*args, **kwargs)
                return module

            for name, run in _VARIANTS:
                title = f"{name}, {'training' if training else 'evaluation'}"
                found.append(_run(title, build, run, (forward.args, forward.kwargs)))
    return found


def _outside(module: torch.nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    out = call(*args, **kwargs)
    return out, gradients(out, leaves((args, kwargs, list(module.parameters()))))


def _inside(module: torch.nn.Module) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> Any:
        out = module(*args, **kwargs)
        return gradients(out, leaves((args, kwargs, list(module.parameters()))))

    return step


_VARIANTS: tuple[tuple[str, Callable[[Any], Any] | None], ...] = (("module", None), ("module's step", _inside))


def _run(title: str, build: Callable[[], torch.nn.Module], inside: Any, sample: tuple[Any, Any]) -> Result:
    modules = [build(), build()]
    steps = [inside(module) if inside is not None else module for module in modules]
    compiled = steps[1] = sidefx_train.compile(steps[1], backend="aot_eager")
    raised = False
    for index in range(CALLS):
        outcomes = []
        for module, step in zip(modules, steps, strict=True):
            args, kwargs = fresh(sample)
            torch.manual_seed(SEED + index)
            try:
                if inside is None:
                    out, found = _outside(module, step, args, kwargs)
                else:
                    out, found = step(*args, **kwargs), []
            except Exception as error:
                out, found = error, []
            outcomes.append((out, found, list(module.parameters()), list(module.buffers()), torch.get_rng_state()))
        eager, captured = outcomes
        if isinstance(eager[0], Exception) != isinstance(captured[0], Exception):
            text = f"call {index}: {short(captured[0])}, eager: {short(eager[0])}"
            return Result(title, "differs", text)
        raised = raised or isinstance(eager[0], Exception)
        try:
            for what, want, have in zip(_COMPARED, eager, captured, strict=True):
                compare(want, have, f"call {index}: {what}")
        except Differs as error:
            return Result(title, "differs", str(error))
    left = reasons(compiled)
    return Result(title, "left", left) if left and not raised else Result(title, "captured")


_COMPARED = ("result", "gradient", "parameters", "buffers", "random state")
