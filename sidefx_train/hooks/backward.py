"""Backward passes run on fake tensors with the real autograd engine, which calls hooks where eager would.

The compiler needs two facts: which graphs a backward pass has freed (a tensor that leaves the step afterwards gets a
node that says so), and which hooks an outside parameter had when the step began.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.interpreter.object_model.function_calls import ANSWERED
from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.capture.side_effects.left_hooks import unregister
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld


_GRAPH_FILE = torch.autograd.graph.__file__

ANSWERED.add(compat.asks_for_execution)
registry.COUNTERS[torch.utils.hooks.RemovableHandle, "next_id"] = 1 << 40


@registry.intercept(torch.Tensor.backward)
def _tensor_backward(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    keep = _argument(args, kwargs, 2, "retain_graph"), _argument(args, kwargs, 3, "create_graph")
    return _run(world, torch.Tensor.backward, args[0], keep, args, kwargs, accumulates=True)


@registry.intercept(torch.autograd.backward)
def _autograd_backward(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    keep = _argument(args, kwargs, 2, "retain_graph"), _argument(args, kwargs, 3, "create_graph")
    roots = _argument(args, kwargs, 0, "tensors")
    return _run(world, torch.autograd.backward, roots, keep, args, kwargs, accumulates=True)


@registry.intercept(torch.autograd.grad)
def _autograd_grad(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    keep = _argument(args, kwargs, 3, "retain_graph"), _argument(args, kwargs, 4, "create_graph")
    roots = _argument(args, kwargs, 0, "outputs")
    return _run(world, torch.autograd.grad, roots, keep, args, kwargs, accumulates=False)


@registry.intercept(torch.Tensor.register_hook)
def _register_hook(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Registers a hook on a tensor with outside history: the engine runs it there, in a backward after the graph."""
    record = world.heap.record_of(args[0]) if args else None
    if not safe_isinstance(record, TensorRecord) or record.edge is None:
        if args and safe_isinstance(args[0], torch.Tensor):
            world.left_hooks.note(args[0])
        return ABSENT
    return world.defer_for_result(torch.Tensor.register_hook, args, kwargs)


@registry.intercept(torch.Tensor.register_post_accumulate_grad_hook)
def _register_late_hook(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and safe_isinstance(args[0], torch.Tensor):
        world.left_hooks.note(args[0])
    return ABSENT


@registry.intercept(compat.asks_for_execution)
def _will_execute(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replaces an outside ``AccumulateGrad`` node by the one of the shadow, which the running backward knows."""
    (node,) = args
    leaf = getattr(node, "variable", None)
    if leaf is None or world.tracer.has_node(leaf):
        return ABSENT
    record = world.heap.by_real.get(id(leaf))
    if record is None:  # it takes no part in the step
        return False
    return compat.asks_for_execution(compat.accumulator_of(record.shadow))


@registry.intercept(compat.number_of_backward)
def _number_of_backward(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses hooks with ``mode="any"``, which remember the number of every backward that they have seen."""
    frame = world.interp.current_frame
    if frame is not None and frame.code.co_name == "wrapped_fn" and frame.code.co_filename == _GRAPH_FILE:
        world.heap.refuse("SFX111", 'reads which backward is running, as a hook registered with mode="any" does')
    return ABSENT


@registry.intercept(torch.no_grad.__enter__)
def _enter_no_grad(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tells the observer of a recorded backward that the program itself switches autograd off."""
    observer = _observer(world)
    if observer is not None:
        observer.switched_off += 1
    return ABSENT


@registry.intercept(torch.no_grad.__exit__)
def _exit_no_grad(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = _observer(world)
    if observer is not None:
        observer.switched_off = max(0, observer.switched_off - 1)
        observer.may_ask = True
    return ABSENT


@registry.intercept(torch.enable_grad.__enter__)
def _enter_enable_grad(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = _observer(world)
    if observer is not None:
        observer.may_ask = True
    return ABSENT


@registry.intercept(torch.is_grad_enabled)
def _is_grad_enabled(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    observer = _observer(world)
    if observer is not None:
        if not observer.switched_off and not observer.may_ask:
            observer.problem = "Python code in its backward reads whether autograd is on (as once_differentiable does)"
        observer.may_ask = False
    return ABSENT


def _observer(world: TraceWorld) -> Any:
    """Returns the observer of a recorded backward, if autograd is off in it."""
    return None if torch.is_grad_enabled() else world.tracer.proxy_mode.observer


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _run(
    world: TraceWorld, fn: Any, roots: Any, keep: tuple[Any, Any], args: Any, kwargs: Any, accumulates: bool
) -> Any:
    for value in (*args, *kwargs.values()):
        world.touch(value)
    tensors = [roots] if safe_isinstance(roots, torch.Tensor) else list(roots)
    nodes = graph_nodes([t.grad_fn for t in tensors if safe_isinstance(t, torch.Tensor) and t.grad_fn is not None])
    if any(record.edge.node in nodes for record in world.heap.outside_nodes.values()):
        world.heap.refuse("SFX112", "runs backward through an autograd graph from before the step")
    if accumulates:
        leaves = _leaves(tensors, nodes)
        if compat.GRAD_LAYOUT is not None:
            world.queries.note(compat.GRAD_LAYOUT, (), {}, compat.GRAD_LAYOUT())
        for shadow in [record.shadow for record in world.heap.by_shadow.values() if id(record.shadow) in leaves]:
            world.heap.read_grad(shadow)
    unregister(world)
    retained = keep[0] if keep[0] is not None else keep[1]
    mode = world.tracer.proxy_mode
    mode.transformed, before = compat.inside_transform(), mode.transformed
    try:
        result = world.guarded(fn, args, kwargs)
    finally:
        mode.transformed = before
    if not retained:
        world.freed |= nodes
    return result


def _leaves(roots: list[Any], nodes: set[Any]) -> set[int]:
    """Returns ids of the leaf tensors whose ``.grad`` a backward pass from ``roots`` accumulates into."""
    found = [root for root in roots if safe_isinstance(root, torch.Tensor) and root.grad_fn is None]
    return {id(leaf) for leaf in (*found, *(node.variable for node in nodes if hasattr(node, "variable")))}


def graph_nodes(roots: list[Any]) -> set[Any]:
    """Returns all autograd nodes reachable from ``roots``."""
    seen: set[Any] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo.extend(following for following, _ in node.next_functions)
    return seen
