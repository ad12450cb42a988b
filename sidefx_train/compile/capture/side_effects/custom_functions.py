"""Calls of custom autograd functions whose backward runs natively, in a backward outside.

A capture runs their forward. Their node in the autograd graph outside has the same context: attributes, saved tensors
and marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.deferred_values import DeferredCall, DeferredResult
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.graph.view_chains import gradient_edges_behind

if TYPE_CHECKING:
    from sidefx_train.compile.capture.shadows.capture_context import CaptureContext
    from sidefx_train.errors import Location


@dataclass
class Context:
    """What the forward of a function told its context.

    Attributes:
        saved: tensors passed to ``save_for_backward``.
        versions: their version counters then.
        materializes: undefined gradients become zeros.
        without_gradient: outputs that are not differentiable.
        writes: it changes an input in place, or saves tensors for forward-mode differentiation.
    """

    saved: tuple[Any, ...] = ()
    versions: tuple[int, ...] = ()
    materializes: bool = True
    without_gradient: tuple[Any, ...] = ()
    writes: bool = False


@dataclass(frozen=True)
class FunctionCall:
    """One call of a custom function.

    Attributes:
        cls: the class.
        node: its node during the capture, which is also its context.
        args: the arguments.
        outputs: the results.
        single: the function returned one result, not a tuple.
        context: what its forward told the context.
        location: the user's line.
    """

    cls: type
    node: Any
    args: tuple[Any, ...]
    outputs: tuple[Any, ...]
    single: bool
    context: Context
    location: Location | None

    def returned_input(self, output: Any) -> int | None:
        """Returns the position of the argument that the function returned as an output; ``None`` for a new value."""
        for i, arg in enumerate(self.args):
            if safe_isinstance(arg, torch.Tensor) and compat.storage_id(arg) == compat.storage_id(output):
                layouts = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (arg, output)]
                return i if layouts[0] == layouts[1] else -1
        return None


@dataclass
class _NodeHook:
    node: Any
    name: str
    hook: Any
    handle: Any
    location: Location | None


@dataclass
class CustomFunctions:
    """Calls of custom functions in a step, and hooks on their nodes.

    Attributes:
        world: the capture.
        native: the calls whose backward runs natively.
        recording: a backward that runs outside is being recorded: those are left out.
        live: gradient edges behind the results.
        kept_changes: attributes that a recorded backward reads and leaves changed in its context.
    """

    world: CaptureContext
    native: list[FunctionCall] = field(default_factory=list)
    recording: bool = False
    live: set[Any] = field(default_factory=set)
    kept_changes: list[str] = field(default_factory=list)
    _calls: list[FunctionCall] = field(default_factory=list)
    _contexts: dict[Any, Context] = field(default_factory=dict)
    _hooks: list[_NodeHook] = field(default_factory=list)

    def context(self, node: Any) -> Context:
        """Returns what is known of the context of a call."""
        return self._contexts.setdefault(node, Context())

    def note(self, cls: type, args: tuple[Any, ...], made: Any) -> None:
        """Records a call."""
        outputs = made if type(made) is tuple else (made,)
        nodes = [each.grad_fn for each in outputs if safe_isinstance(each, torch.Tensor) and each.grad_fn is not None]
        own = next((node for node in nodes if node in self._contexts or _is_of(node, cls)), None)
        if own is not None:
            where = self.world.locate()
            call = FunctionCall(cls, own, args, outputs, type(made) is not tuple, self.context(own), where)
            self._calls.append(call)

    def hook(self, node: Any, name: str, hook: Any, handle: Any) -> None:
        """Records a hook on a node."""
        self._hooks.append(_NodeHook(node, name, hook, handle, self.world.locate()))

    def leaves_out(self, node: Any) -> bool:
        """Returns True for a node whose backward must not run now: it runs outside."""
        return self.recording and any(call.node is node for call in self.native)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Context in which a backward is recorded that runs outside."""
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    @contextmanager
    def context_kept(self, node: Any) -> Iterator[None]:
        """Context of a backward that is recorded: it may be recorded again, and each time begins with the attributes
        of the forward.

        An attribute that the backward deletes is none for a second backward, which eager refuses with an error.
        """
        attributes = vars(node)
        before = dict(attributes)
        try:
            yield
        finally:
            changed = [name for name, value in attributes.items() if value is not before.get(name, ABSENT)]
            attributes.clear()
            attributes.update(before)
            read = self.world.reads.names_of(node)
            self.kept_changes += [f"{node.name()}.{name}" for name in changed if name in read]

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Context in which the hooks on nodes that run natively are not called."""
        natives = {call.node for call in self.native}
        dicts = [d for each in self._hooks if each.node in natives and (d := each.handle.hooks_dict_ref()) is not None]
        held = [(hooks, dict(hooks)) for hooks in {id(hooks): hooks for hooks in dicts}.values()]
        for hooks, _ in held:
            hooks.clear()
        try:
            yield
        finally:
            for hooks, before in held:
                hooks.update(before)

    def of(self, value: Any) -> FunctionCall | None:
        """Returns the native call that made a tensor."""
        node = value.grad_fn
        return None if node is None else next((call for call in self.native if call.node is node), None)

    def choose(self, results: Iterable[torch.Tensor]) -> list[DeferredCall]:
        """Makes the calls native from which ``results`` were computed; returns the registrations of hooks on their
        nodes."""
        results = tuple(results)
        edges = {(result.grad_fn, result.output_nr) for result in results} | gradient_edges_behind(*results)
        reached = {node for node, _ in edges}
        self.native = [call for call in self._calls if call.node in reached]
        for call in self.native:
            self._check(call)
        self.live = edges
        found: list[DeferredCall] = []
        natives = {call.node for call in self.native}
        for each in self._hooks:
            number = each.handle.id
            if each.node in reached and number in (each.handle.hooks_dict_ref() or ()):
                if each.node not in natives:
                    reason = "a hook on an autograd node has effects, or reads what may change, in a backward outside"
                    self.world.heap.refuse("SFX107", reason)
                result = self.world.left_hooks.handles.setdefault(number, DeferredResult())
                args = (each.node, each.name, each.hook)
                found.append(
                    DeferredCall(compat.node_hooks.register_on_function, args, {}, each.location, result=result)
                )
        return found

    def live_outputs(self, call: FunctionCall) -> list[int]:
        """Returns the positions of the outputs from which the results were computed, and of those that are saved."""
        saved = {id(each) for each in call.context.saved}
        tensors = [(i, each) for i, each in enumerate(call.outputs) if safe_isinstance(each, torch.Tensor)]
        own = [(i, each) for i, each in tensors if each.grad_fn is call.node]
        return [i for i, each in own if (call.node, each.output_nr) in self.live or id(each) in saved]

    def _check(self, call: FunctionCall) -> None:
        def refuse(what: str) -> None:
            reason = f"{call.cls.__name__}, whose backward must run natively outside of the step, {what}"
            self.world.heap.refuse("SFX107", reason)

        context = call.context
        if context.writes:
            refuse("changes an input in place, or saves tensors for forward mode")
        for output in call.outputs:
            if safe_isinstance(output, torch.Tensor) and output.grad_fn is not None:
                if output.grad_fn is not call.node:
                    refuse("has an output that is changed in place later")
                if output._is_view() and call.returned_input(output) in (None, -1):
                    refuse("returns a view")
        for saved, version in zip(context.saved, context.versions, strict=True):
            if safe_isinstance(saved, torch.Tensor) and saved._version != version:
                refuse("saves a tensor that is changed in place later")


def _is_of(node: Any, cls: type) -> bool:
    forward = getattr(type(node), "_forward_cls", None)
    return forward is not None and issubclass(forward, cls)
