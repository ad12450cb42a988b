"""Joins a compiled forward and a compiled backward under one autograd function."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from sidefx_train import _torch_compat as compat
from sidefx_train.compile.artifacts import Executable
from sidefx_train.compile.joint.trace import JointGraph
from sidefx_train.errors import SideFXError


class _CapturedPart(torch.autograd.Function):
    """The node in the user's autograd graph. Called with ``(joined, args, results, *leaves)``."""

    @staticmethod
    def forward(ctx: Any, joined: Joined, args: list[Any], results: list[Any], *leaves: torch.Tensor) -> Any:
        graph = joined.graph
        taken = list(args)
        results += joined.forward(args)
        for i in graph.differentiable:
            results[i] = compat.without_view_relation(results[i])
        for i, output in graph.aliases:  # one version counter for what shares memory: in-place changes are noticed
            like = results[i]
            results[i] = results[output].detach().as_strided(like.size(), like.stride(), like.storage_offset())
        saved = [taken[i] if kind == "input" else results[i] for kind, i in graph.feeds if kind != "tangent"]
        ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in saved))
        ctx.numbers = {i: value for i, value in enumerate(saved) if not isinstance(value, torch.Tensor)}
        ctx.outputs = [_Layout(results[i]) for i in graph.differentiable]
        ctx.passed = [weakref.ref(results[graph.differentiable[i]]) for i in graph.passed]
        ctx.set_materialize_grads(False)
        ctx.joined = joined
        return tuple(results[i] for i in graph.differentiable)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        joined: Joined = ctx.joined
        _check_passed(ctx.passed)
        given = [ctx.numbers.get(i, tensor) for i, tensor in enumerate(ctx.saved_tensors)]
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: the list alone keeps them, and is emptied
        missing = {i for i, tangent in enumerate(tangents) if tangent is None}
        with torch.no_grad():
            given += [layout.fit(tangent) for tangent, layout in zip(tangents, ctx.outputs, strict=True)]
            grads = joined.gradients(given)
        for i, made_of in enumerate(joined.graph.depends):
            if made_of <= missing:  # of outputs that nothing was computed from: eager leaves the leaf alone
                grads[i] = None
        return (None, None, None, *(_once(grads) if torch.is_grad_enabled() else grads))


class _FirstOrderOnly(torch.autograd.Function):
    """Passes gradients on; differentiating them is an error."""

    @staticmethod
    def forward(ctx: Any, *grads: torch.Tensor) -> Any:
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        reason = (
            "a gradient that went through a captured function is differentiated once more (create_graph=True): the "
            "captured backward has no backward of its own. Capture the function that asks for the gradient, "
            "torch.autograd.grad included, or leave this function uncaptured"
        )
        raise SideFXError("SFX107", reason)


def _once(grads: list[Any]) -> list[Any]:
    """Gradients made with ``create_graph``: whatever they are used for, they must not pass for constants."""
    held = {i: grad.detach().requires_grad_() for i, grad in enumerate(grads) if isinstance(grad, torch.Tensor)}
    made = iter(_FirstOrderOnly.apply(*held.values()) if held else ())
    return [next(made) if i in held else grad for i, grad in enumerate(grads)]


def _check_passed(passed: list[weakref.ref[torch.Tensor]]) -> None:
    """Refuses to leave out a hook: gradients between two outputs of one node go past it."""
    for found in passed:
        tensor = found()
        if tensor is not None and (tensor._backward_hooks or tensor.retains_grad):
            reason = (
                "somebody watches the gradient of a tensor (hook, retain_grad) that left a captured part together with "
                "what was computed from it; register it in front of the line that breaks the capture"
            )
            raise SideFXError("SFX107", reason)


class Joined:
    """A forward and its backward.

    Args:
        graph: how they belong together.
        forward: the compiled forward.
        backward: the compiled backward.
    """

    def __init__(self, graph: JointGraph, forward: Executable, backward: Executable) -> None:
        self.graph = graph
        self.forward = forward.run
        self._backward = backward.run

    def run(self, args: list[Any]) -> list[Any]:
        """The step's outputs; those that need autograd are results of one node over the leaves."""
        leaves = [args[i] for i in self.graph.leaves]
        results: list[Any] = []
        made = _CapturedPart.apply(self, args, results, *leaves)
        outputs = results[: self.graph.outputs]
        for position, tensor in zip(self.graph.differentiable, made, strict=True):
            outputs[position] = tensor
        return outputs

    def gradients(self, inputs: list[Any]) -> list[Any]:
        """Gradients of the leaves, in their order, from what was saved and the tangents; the list may be emptied."""
        return list(self._backward(inputs))


class _Layout:
    """What a tangent must look like: the backward was compiled for the layout of the output."""

    def __init__(self, output: torch.Tensor) -> None:
        self.size, self.stride = output.size(), output.stride()
        self.dtype, self.device = output.dtype, output.device

    def fit(self, tangent: torch.Tensor | None) -> torch.Tensor:
        """The tangent in that layout; zeros for one that is undefined."""
        if tangent is not None and (tangent.stride() == self.stride or tangent.numel() == 0):
            return tangent
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        return made.zero_() if tangent is None else made.copy_(tangent)


def join(graph: JointGraph, forward: Executable, backward: Executable) -> Executable:
    """One executable of both."""
    joined = Joined(graph, forward, backward)
    sources = {**forward.sources, **{f"backward {key}": text for key, text in backward.sources.items()}}
    seconds = {**forward.seconds, **{f"backward {key}": value for key, value in backward.seconds.items()}}
    notes = (*forward.notes, "joined with its backward for autograd outside", *backward.notes)
    return Executable(joined.run, forward.atomic, sources, seconds, notes)
