"""The variants in which one operator is run: alone, differentiated outside and inside, in place, with ``out=``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

import sidefx_train
from tests.opinfo.compare import Differs, compare

CALLS = 2
SEED = 7


@dataclass(frozen=True)
class Variant:
    """A program over an operator's sample.

    Attributes:
        name: shown in the table.
        step: the function to compile; takes (inputs, positional, keyword arguments, extras).
        requires_grad: inputs require gradients.
        backward: differentiate the step's result outside of it.
        extras: makes further arguments from eager's result.
    """

    name: str
    step: Callable[..., Any]
    requires_grad: bool = False
    backward: bool = False
    extras: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Result:
    """Result of one variant.

    Attributes:
        variant: its name.
        state: ``"captured"`` (also if it raised eager's error), ``"left"`` (some of it ran eagerly, with equal results)
            or ``"differs"``.
        why: reasons.
    """

    variant: str
    state: str
    why: str = ""


def fresh(value: Any) -> Any:
    """Copies nested arguments with new leaves; a tensor that occurs twice is copied once."""
    made: dict[int, torch.Tensor] = {}

    def copied(t: Any) -> Any:
        if isinstance(t, torch.Generator):
            return t.clone_state()
        if not isinstance(t, torch.Tensor):
            return t
        if id(t) not in made:
            if t._is_zerotensor():
                made[id(t)] = torch._efficientzerotensor(t.shape, dtype=t.dtype).requires_grad_(t.requires_grad)
            else:
                held = copy.deepcopy(t.detach()) if t.layout is torch.strided else t.detach().clone()
                made[id(t)] = held.requires_grad_(t.requires_grad)
        return made[id(t)]

    return pytree.tree_map(copied, value)


def leaves(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested arguments that require gradients."""
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.requires_grad]


def tangents(outs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns gradients for outputs; equal layouts get equal gradients."""
    made = []
    for out in outs:
        kind = out.dtype if out.dtype.is_floating_point or out.is_complex() else torch.float32
        values = (
            torch.ones_like(out.detach(), dtype=torch.float32).reshape(-1).cumsum(0).sin().to(kind).reshape(out.shape)
        )
        laid_out = torch.empty_like(out.detach())
        made.append(laid_out.copy_(values) if out.layout is torch.strided else values.to_sparse())
    return made


def gradients(out: Any, of: list[torch.Tensor]) -> list[Any]:
    """Returns the gradients of everything differentiable in ``out``."""
    outs = leaves(out)
    return list(torch.autograd.grad(outs, of, tangents(outs), allow_unused=True)) if outs and of else []


def run(variant: Variant, sample: tuple[Any, ...], process: Callable[[Any], Any], contents: bool = True) -> Result:
    """Runs a variant eagerly and captured, and compares.

    Args:
        variant: the program.
        sample: (input, args, kwargs); not changed.
        process: applied to the result before it is differentiated.
        contents: compare the contents of tensors.
    """
    compiled = sidefx_train.compile(variant.step, backend="aot_eager")
    raised = False
    for index in range(CALLS):
        outcomes = []
        for step in (variant.step, compiled):
            given = fresh(sample)
            extra = fresh(variant.extras(sample)) if variant.extras is not None else None
            torch.manual_seed(SEED)
            try:
                out = step(*given, extra)
                found = gradients(process(out), leaves(given)) if variant.backward else []
            except Exception as error:
                out, found = error, []
            outcomes.append((out, (given, extra), found, torch.get_rng_state()))
        eager, captured = outcomes
        if isinstance(eager[0], Exception) and isinstance(captured[0], Exception):
            raised = True
            eager, captured = (eager[0],), (captured[0],)  # side effects of a failed operator are not compared
        elif isinstance(eager[0], Exception) or isinstance(captured[0], Exception):
            text = f"call {index}: {short(captured[0])}, eager: {short(eager[0])}"
            return Result(variant.name, "differs", text)
        try:
            for what, want, have in zip(
                ("result", "arguments", "gradient", "random state"), eager, captured, strict=False
            ):
                compare(want, have, f"call {index}: {what}", contents or what == "random state")
            if len(eager) > 1:
                compare((eager[0], eager[1]), (captured[0], captured[1]), f"call {index}: result and arguments", False)
        except Differs as error:
            return Result(variant.name, "differs", str(error))
    left = reasons(compiled)
    return Result(variant.name, "left", left) if left and not raised else Result(variant.name, "captured")


def reasons(compiled: Any) -> str:
    """Returns why a step was not captured whole; empty if it was."""
    report = compiled.report()
    return "; ".join(dict.fromkeys(f"{item.code} {item.reason}" for item in report.breaks + report.fallbacks))


def short(value: Any) -> str:
    text = f"{type(value).__name__}: {value}" if isinstance(value, Exception) else type(value).__name__
    return " ".join(text.split())[:300]


def variants(op: Any, sample: Any, differentiable: bool) -> Iterator[Variant]:
    """Yields the programs to run for an operator.

    Args:
        op: the ``OpInfo``.
        sample: the sample they will be run on.
        differentiable: its inputs can require gradients.
    """
    function, process = op.op, sample.output_process_fn_grad

    def plain(x: Any, args: Any, kwargs: Any, extra: Any) -> Any:
        return function(x, *args, **kwargs)

    yield Variant("value", plain)
    if differentiable:
        yield Variant("gradient", plain, requires_grad=True, backward=True)

        def inside(x: Any, args: Any, kwargs: Any, extra: Any) -> Any:
            given = leaves((x, args, kwargs))
            return gradients(process(function(x, *args, **kwargs)), given)

        yield Variant("step", inside, requires_grad=True)
    changing = op.inplace_variant
    if changing is not None and isinstance(sample.input, torch.Tensor):

        def in_place(x: Any, args: Any, kwargs: Any, extra: Any) -> Any:
            return changing(x, *args, **kwargs)

        yield Variant("in place", in_place)
        if differentiable and op.supports_inplace_autograd:

            def in_place_on_copy(x: Any, args: Any, kwargs: Any, extra: Any) -> Any:
                return changing(x.clone(), *args, **kwargs)

            yield Variant("in place gradient", in_place_on_copy, requires_grad=True, backward=True)
    if op.supports_out and "out" not in sample.kwargs:

        def into(x: Any, args: Any, kwargs: Any, extra: Any) -> Any:
            return function(x, *args, **kwargs, out=extra)

        def outputs(given: tuple[Any, ...]) -> Any:
            x, args, kwargs = fresh(given)
            torch.manual_seed(SEED)
            return pytree.tree_map_only(torch.Tensor, torch.zeros_like, function(x, *args, **kwargs))

        yield Variant("out=", into, extras=outputs)
