"""Derivatives of a captured backward: the tape of a stage, run operation by operation under autograd.

With ``create_graph=True`` the gradients of a captured part need a history of their own. The operations of its backward
are then called like in eager, on the saved tensors. Inputs and outputs of the part already have a history; values saved
between its autograd nodes get one from :class:`_SavedHistory`, a node whose backward runs the same tape, starting where
those tensors are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.autograd.node_tape import NodeBackward
from sidefx_train.compile.graph.artifacts import ORIGIN
from sidefx_train.errors import SideFXError

if TYPE_CHECKING:
    from sidefx_train.compile.autograd.joint_graph import Stage

aten = torch.ops.aten

_COPIES = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
"""View operators whose results on gradients are copies if the layout requires it, as in eager."""


class _Link(torch.autograd.Function):
    """Leads to a tensor without keeping its storage: its gradients are passed separately from those of the link."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.handed_over = {}
        return torch.empty(0, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        found = ctx.handed_over.get(compat.running_backward())
        ctx.handed_over.clear()  # including leftovers of an interrupted backward
        return found


def link_to(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor that leads to ``tensor`` in the autograd graph."""
    with torch.enable_grad():
        return _Link.apply(tensor)  # type: ignore[no-any-return]


def _hand_over(link: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    handed_over = link.grad_fn.handed_over  # type: ignore[union-attr]
    run = compat.running_backward()
    handed_over[run] = handed_over[run] + grad if run in handed_over else grad
    return torch.zeros_like(link)


class _SavedHistory(torch.autograd.Function):
    """Gives saved tensors their history: called with ``(surroundings, edges, values, *grad_inputs)``."""

    @staticmethod
    def forward(
        ctx: Any,
        around: _AmbientModes,
        edges: list[int],
        values: list[torch.Tensor],
        *grad_inputs: torch.Tensor | None,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.around, ctx.edges = around.without_tensors(), edges
        ctx.leads_to = [i for i, grad_input in enumerate(grad_inputs) if grad_input is not None]
        ctx.save_for_backward(*around.tensors())
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        around: _AmbientModes = ctx.around.with_tensors(ctx.saved_tensors)
        begun = [(edge, grad) for edge, grad in zip(ctx.edges, grads, strict=True) if grad is not None]
        asked = [False] * len(around.grad_inputs)
        for i, (node, _) in zip(ctx.leads_to, ctx.next_functions, strict=True):
            asked[i] = node is not None and compat.is_asked_for(node)
        found = around.run(begun, asked) if begun else [None] * len(asked)
        found = [grad if i in ctx.leads_to else None for i, grad in enumerate(found)]
        for i, link in around.links.items():
            grad = found[i]
            found[i] = None if grad is None else _hand_over(link, grad)
        return (None, None, None, *found)


class _NotDifferentiable(torch.autograd.Function):
    """Passes gradients on; differentiating them raises."""

    @staticmethod
    def forward(ctx: Any, reason: str, grads: list[torch.Tensor], *behind: torch.Tensor) -> Any:
        ctx.reason = reason
        return tuple(grads)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        reason = (
            "a gradient that went through a captured function is differentiated once more (create_graph=True), but "
            f"{ctx.reason}. Capture the function that asks for the gradient, torch.autograd.grad included, or leave "
            "this function uncaptured"
        )
        raise SideFXError("SFX107", reason)


def refuse_derivative(
    reason: str, saved: Sequence[Any], grad_inputs: Sequence[torch.Tensor | None], grads: list[Any]
) -> list[Any]:
    """Returns gradients that raise an error with the reason if they are differentiated.

    Args:
        reason: why they cannot be differentiated.
        saved: tensors that they depend on.
        grad_inputs: targets of the gradients, which the engine must reach through the raising node.
        grads: the gradients.
    """
    held = {
        i: grad if compat.is_wrapper(grad) else grad.detach()  # wrappers were just made
        for i, grad in enumerate(grads)
        if isinstance(grad, torch.Tensor)
    }
    if not held:
        return grads
    behind = [each for each in (*grad_inputs, *saved) if isinstance(each, torch.Tensor) and each.requires_grad]
    made = iter(_NotDifferentiable.apply(reason, list(held.values()), *behind))
    return [next(made) if i in held else grad for i, grad in enumerate(grads)]


class TapeRunner:
    """Runs the tape of a stage.

    Args:
        stage: the stage whose backward it runs.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.tape = stage.tape
        self.graph = stage.backward.module.graph
        self.origins: dict[str, fx.Node] = {}
        for node in self.graph.nodes:
            if ORIGIN in node.meta:
                self.origins.setdefault(node.meta[ORIGIN], node)
        self.feeds = [node for node in self.graph.nodes if node.op == "placeholder"]

        self.steps = self.tape.steps
        given = {
            edge for step in self.steps for edge, node in zip(step.inputs, step.given, strict=True) if node is not None
        }
        self.begins = given | set(self.tape.exits)
        self.reach = self._reach()

    def _reach(self) -> dict[int, frozenset[int]]:
        """Returns, for each edge, the gradients of the stage to which it leads."""
        found: dict[int, frozenset[int]] = {edge: frozenset() for edge in self.tape.sources.values()}
        for position, edge in enumerate(self.tape.exits):
            found[edge] = found.get(edge, frozenset()) | {position}
        for step in reversed(self.steps):
            leads = frozenset[int]().union(*(found.get(edge, frozenset()) for edge, _ in step.results))
            for edge in step.inputs:
                found[edge] = found.get(edge, frozenset()) | leads
        return found


@dataclass(frozen=True)
class _AmbientModes:
    """Inputs of a tape's run, except the initial gradients.

    Attributes:
        runner: runner of the stage.
        saved: saved tensors with their history.
        outputs: results of the stage that were saved too, by index of their tangent.
        links: links that replace targets of gradients, by index.
        grad_inputs: targets of the gradients.
    """

    runner: TapeRunner
    saved: Sequence[Any]
    outputs: dict[int, torch.Tensor]
    links: dict[int, torch.Tensor]
    grad_inputs: Sequence[torch.Tensor | None]

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors that must not change before a derivative is computed."""
        return [value for value in self.saved if isinstance(value, torch.Tensor)] + list(self.outputs.values())

    def without_tensors(self) -> _AmbientModes:
        kept = [None if isinstance(value, torch.Tensor) else value for value in self.saved]
        where = [i for i, value in enumerate(self.saved) if isinstance(value, torch.Tensor)]
        return replace(self, saved=(kept, where), outputs=dict.fromkeys(self.outputs))  # type: ignore[arg-type]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> _AmbientModes:
        kept, where = self.saved
        saved = list(kept)
        for i, tensor in zip(where, tensors, strict=False):
            saved[i] = tensor
        return replace(self, saved=saved, outputs=dict(zip(self.outputs, tensors[len(where) :], strict=True)))

    def run(self, begun: list[tuple[int, torch.Tensor]], asked: Sequence[bool]) -> list[torch.Tensor | None]:
        """Returns the requested gradients, with a history of their own if autograd is on.

        Args:
            begun: (number of an edge, gradient that arrives there).
            asked: which of the gradients are needed.
        """
        running = _Running(self.runner, self.saved, self.outputs)
        if torch.is_grad_enabled():
            self._give_history(running)
        with compat.no_autocast_cache() if compat.autocast_enabled() else nullcontext():
            return running.run(begun, asked)

    def _give_history(self, running: _Running) -> None:
        groups: dict[frozenset[int], list[fx.Node]] = {}
        for node in running.without_history():
            groups.setdefault(self.runner.reach[self.runner.tape.sources[node]], []).append(node)
        for reach, sources in groups.items():  # the engine visits every node reachable, with or without a gradient
            values = [running.constant(node) for node in sources]
            edges = [self.runner.tape.sources[node] for node in sources]
            behind = [each if i in reach or not reach else None for i, each in enumerate(self.grad_inputs)]
            running.values |= dict(zip(sources, _SavedHistory.apply(self, edges, values, *behind), strict=True))


def differentiated(
    runner: TapeRunner,
    saved: Sequence[Any],
    outputs: dict[int, torch.Tensor],
    links: dict[int, torch.Tensor],
    grad_inputs: Sequence[torch.Tensor | None],
    tangents: Sequence[torch.Tensor | None],
    asked: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Returns the gradients of a stage with a history of their own.

    Args:
        runner: runner of the stage.
        saved: saved tensors with their history.
        outputs: results of the stage that were saved too, by index of their tangent.
        links: links that replace targets of gradients, by index.
        grad_inputs: targets of the gradients.
        tangents: gradients of the results.
        asked: which of the gradients are needed.
    """
    begun = [(edge, grad) for edge, grad in zip(runner.tape.roots, tangents, strict=True) if grad is not None]
    return _AmbientModes(runner, saved, outputs, links, grad_inputs).run(begun, asked)


class _Running:
    """One run of a tape.

    Attributes:
        values: values of graph nodes as they are read.
        sums: accumulated gradient at each edge.
    """

    def __init__(self, runner: TapeRunner, saved: Sequence[Any], outputs: dict[int, torch.Tensor]) -> None:
        self.runner, self.tape = runner, runner.tape
        self.outputs = outputs
        self.saved = dict(zip(runner.feeds, saved, strict=False))
        self.raw: dict[fx.Node, Any] = {}
        self.values: dict[fx.Node, Any] = {}
        self.sums: dict[int, torch.Tensor] = {}
        self.parts: dict[int, list[torch.Tensor | None]] = {}
        exits = runner.tape.exits
        self.split = {edge for edge in exits if exits.count(edge) > 1}

    def without_history(self) -> list[fx.Node]:
        """Returns graph nodes of saved tensors whose history lies between the autograd nodes of the stage."""
        return [node for node in self.tape.sources if node not in self.tape.direct and self._output(node) is None]

    def _output(self, node: fx.Node) -> torch.Tensor | None:
        """Returns the result of the stage that a saved tensor is, or ``None``."""
        edge = self.tape.sources[node]
        made = self.outputs.get(edge) if edge in self.tape.roots else None
        if made is None:
            return None
        value = self.constant(node)
        same = (made.shape, made.stride(), made.data_ptr()) == (value.shape, value.stride(), value.data_ptr())
        return made if same else None

    def constant(self, node: fx.Node) -> torch.Tensor:
        """Returns the value of a saved tensor."""
        if node not in self.raw:
            with torch.no_grad():
                if node.op == "placeholder" or node.meta.get(ORIGIN, "") in self.runner.origins:
                    value = self._saved(node)
                else:
                    args, kwargs = fx.map_arg((node.args, node.kwargs), self.constant)
                    value = self._apply(node, args, kwargs)
                self.raw[node] = value.detach() if isinstance(value, torch.Tensor) else value
        return self.raw[node]

    def run(self, begun: list[tuple[int, torch.Tensor]], asked: Sequence[bool]) -> list[torch.Tensor | None]:
        """Returns the requested gradients, starting from gradients at some edges."""
        tape = self.tape
        for edge, grad in begun:
            if edge not in self.runner.begins:
                reason = "cannot differentiate a captured backward with respect to a tensor that it does not reach"
                raise SideFXError("SFX107", reason)
            self._add(edge, grad)
        needed = tape.leading_to({edge for edge, wanted in zip(tape.exits, asked, strict=True) if wanted})
        for step, wanted in zip(tape.steps, needed, strict=True):
            self._step(step, wanted)
        found: list[torch.Tensor | None] = []
        for edge in tape.exits:
            if edge not in self.split:
                found.append(self.sums.get(edge))
                continue
            parts = self.parts.get(edge, [])
            whole = self.sums.pop(edge, None)  # started here, in a second backward
            now = parts.pop(0) if parts else None
            found.append(whole if now is None else now if whole is None else whole + now)
        return found

    def _add(self, edge: int, grad: torch.Tensor | None) -> None:
        if grad is not None:
            before = self.sums.get(edge)
            self.sums[edge] = grad if before is None else before + grad

    def _step(self, step: NodeBackward, wanted: bool) -> None:
        grads = [self.sums.get(edge) for edge in step.inputs]
        if not wanted or all(grad is None for grad in grads):
            for edge, _ in step.results:
                if edge in self.split and not step.unused:
                    self.parts.setdefault(edge, []).append(None)
            return
        for given, grad in zip(step.given, grads, strict=True):
            if given is not None:
                self.values[given] = _zeros(given) if grad is None else grad
        for node in step.nodes:
            self.values[node] = self._made(node)
        for edge, node in step.results:
            grad = self._value(node)
            if edge in self.split and not step.unused:
                self.parts.setdefault(edge, []).append(grad)
            else:
                self._add(edge, grad)

    def _made(self, node: fx.Node) -> Any:
        """Returns the value of an operation; a recomputed saved tensor gets the history of the first one."""
        if node in self.values and node in self.tape.sources:
            return self.values[node]
        if node in self.tape.sources:
            return self._source(node)
        if node in self.tape.inner:
            with torch.no_grad():
                return self._call(node)
        return self._call(node)

    def _source(self, node: fx.Node) -> Any:
        if node in self.tape.direct:
            return self._saved(self.tape.direct[node])
        made = self._output(node)
        return self.constant(node) if made is None else made

    def _call(self, node: fx.Node) -> Any:
        return self._apply(node, *fx.map_arg((node.args, node.kwargs), self._value))

    def _apply(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "get_attr":
            return getattr(self.tape.root, str(node.target))
        target: Any = _COPIES.get(node.target, node.target)
        made = target(*args, **kwargs)
        first = made[0] if isinstance(made, tuple) and made else made
        if isinstance(first, torch.Tensor) and first.grad_fn is not None and compat.has_no_derivative(first.grad_fn):
            made = compat.decomposition_of(target)(*args, **kwargs)
        return _typed(made, node.meta.get("val"), compat.autocast_enabled())

    def _value(self, node: fx.Node) -> Any:
        if node not in self.values:
            if node.op == "get_attr":
                self.values[node] = getattr(self.tape.root, str(node.target))
            elif node in self.tape.sources:
                self.values[node] = self._source(node)
            else:
                saved = self._saved(node)
                constant = isinstance(saved, torch.Tensor) and saved.requires_grad
                self.values[node] = saved.detach() if constant else saved
        return self.values[node]

    def _saved(self, node: fx.Node) -> Any:
        """Returns a saved tensor, or recomputes it from saved tensors."""
        here = self.runner.origins.get(node.meta.get(ORIGIN, ""))
        if here is None:
            raise SideFXError("SFX107", f"cannot differentiate a captured backward that needs the unsaved {node.name}")
        return self._made_again(here)

    def _made_again(self, node: fx.Node) -> Any:
        if node in self.saved:
            return self.saved[node]
        if node not in self.raw:
            if node.op == "get_attr":
                self.raw[node] = getattr(self.runner.stage.backward.module, str(node.target))
            else:
                with torch.no_grad():
                    args, kwargs = fx.map_arg((node.args, node.kwargs), self._made_again)
                    self.raw[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self.raw[node]


def _zeros(node: fx.Node) -> torch.Tensor:
    """Returns zeros as the gradient of an unused output whose sibling has a gradient."""
    like = node.meta["val"]
    if not all(isinstance(size, int) for size in like.shape):
        raise SideFXError("SFX107", "cannot differentiate a captured backward that needs zeros of a symbolic size")
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def _typed(made: Any, captured: Any, cast: bool) -> Any:
    """Returns the result in its dtype during the capture, which autocast may have changed."""
    if not cast or not isinstance(made, torch.Tensor) or not isinstance(captured, torch.Tensor):
        return made
    return made.to(captured.dtype) if made.dtype != captured.dtype else made
