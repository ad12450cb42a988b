"""Calls of ``torch.distributed``'s collectives become functional collectives of the graph.

A collective writes to its argument without autograd's knowledge; in the graph it is a functional collective, a wait,
and a ``copy_`` through ``Tensor.data``. What goes over the wire is the same: the same kind of collective, of the same
group, with the same bytes. So a process that replays works together with one that runs the step eagerly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.distributed.process_groups import group_of, guard_named
from sidefx_train.compile.graph.collectives import communicates
from sidefx_train.compile.ops.collectives import BARRIER

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

CODE = "SFX103"
_OPERATIONS = frozenset({"sum", "product", "min", "max"})
_BITWISE = frozenset({"band", "bor", "bxor"})


def _is_defined(reduction: Any, dtype: torch.dtype) -> bool:
    """Returns True unless a reduction raises for a dtype."""
    if reduction == "avg":
        return dtype.is_floating_point or dtype.is_complex
    if reduction in _BITWISE:
        return not (dtype.is_floating_point or dtype.is_complex)
    return reduction in _OPERATIONS


class PendingCollective:
    """Result of a collective with ``async_op=True`` during a capture: its results are written by :meth:`wait`.

    Attributes:
        name: name of the collective.
        finish: waits and writes the results; ``None`` when that is done.
    """

    __slots__ = ("finish", "name")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __init__(self, name: str, finish: Callable[[], None]) -> None:
        self.name = name
        self.finish: Callable[[], None] | None = finish

    def wait(self, timeout: Any = None) -> bool:
        """Waits for the results, once."""
        if self.finish is not None:
            self.finish()
            self.finish = None
        return True


class _Call:
    """One call of a collective.

    Args:
        world: the capturing world.
        name: the function's name.
        given: its arguments by name, with defaults.
    """

    def __init__(self, world: TraceWorld, name: str, given: dict[str, Any]) -> None:
        self.world, self.name, self.given = world, name, given
        self.group = group_of(world, given["group"])
        if world.branching:
            self.refuse("in a branch of torch.cond")
        if self.group is None:
            self.refuse("for a group that this process is not a member of, or without a process group")
        if compat.is_coalescing(self.group):
            self.refuse("while collectives are being coalesced")
        with compat.real_world():
            self.size = self.group.size()
            self.ops = compat.functional_collectives()

    def refuse(self, why: str) -> NoReturn:
        """Stops the capture in front of the call."""
        self.world.heap.refuse(CODE, f"calls torch.distributed.{self.name} {why}")

    def tensor(self, argument: str) -> torch.Tensor:
        """Returns a tensor argument."""
        return self.checked(self.given[argument])

    def checked(self, value: Any) -> torch.Tensor:
        """Returns a tensor whose memory holds its elements in order, so that the bytes sent are eager's."""
        if type(value) is not compat.FakeTensor or value.layout is not torch.strided:
            self.refuse("with something else than a plain tensor")
        if value.device.type != "cpu":
            self.refuse(f"with a tensor on {value.device}")
        if value.is_complex() or value.is_conj() or value.is_neg() or not value.is_contiguous():
            self.refuse("with a complex or non-contiguous tensor")
        return value

    def reduction(self, dtype: torch.dtype) -> str:
        """Returns the name of the reduction, which must be defined for a dtype."""
        name = getattr(self.given["op"], "name", "")
        name = name.lower() if safe_isinstance(name, str) else ""
        if not _is_defined(name, dtype):
            self.refuse(f"with the operation {self.given['op']} and {dtype}")
        return name

    def check_joined(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Checks that one tensor has the size of the concatenated parts of all processes."""
        shape = (self.size * part.shape[0], *part.shape[1:]) if part.dim() else (self.size,)
        if tuple(whole.shape) != shape or whole.dtype != part.dtype:
            self.refuse("with a result of another size or dtype")

    def issue(self, made: torch.Tensor, into: Callable[[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]) -> Any:
        """Returns the call's result; the tensors of a collective that has been started are written now or by a wait.

        Args:
            made: result of the functional collective.
            into: returns (argument, new value) pairs for the awaited result.
        """

        def finish() -> None:
            waited = self.ops.wait_tensor(made)
            for argument, value in into(waited):
                self.world.tracer.data_of(argument).copy_(value.view(argument.shape))

        if not self.given["async_op"]:
            with torch.no_grad():
                finish()
            return None
        pending = PendingCollective(self.name, finish)
        self.world.pending_collectives.append(pending)
        return pending


def _collective(fn: Any) -> Callable[[Callable[[_Call], Any]], Callable[[_Call], Any]]:
    """Registers the capture of a collective."""

    def register(handler: Callable[[_Call], Any]) -> Callable[[_Call], Any]:
        signature, name = inspect.signature(fn), fn.__name__

        @registry.intercept(fn)
        def called(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = registry.bound_arguments(signature, args, kwargs)
            if given is None:
                return ABSENT
            with torch.no_grad():
                return handler(_Call(world, name, given))

        return handler

    return register


def _all_reduce(call: _Call) -> Any:
    tensor = call.tensor("tensor")
    made = call.ops.all_reduce(tensor.detach(), call.reduction(tensor.dtype), call.group.group_name)
    return call.issue(made, lambda waited: [(tensor, waited)])


def _broadcast(call: _Call) -> Any:
    tensor = call.tensor("tensor")
    src, group_src = call.given["src"], call.given["group_src"]
    if (src is None) == (group_src is None):
        call.refuse("with both or none of src and group_src")
    with compat.real_world():
        rank = group_src if src is None else dist.get_group_rank(call.group, src)
    made = call.ops.broadcast(tensor.detach(), rank, call.group.group_name)
    return call.issue(made, lambda waited: [(tensor, waited)])


def _gather(call: _Call, source: str, outputs: list[torch.Tensor]) -> Any:
    given = call.tensor(source)
    made = call.ops.all_gather_into_tensor(given.detach().view(-1), call.size, call.group.group_name)
    return call.issue(made, lambda waited: list(zip(outputs, waited.chunk(len(outputs)), strict=True)))


def _all_gather_single(call: _Call) -> Any:
    output = call.tensor("output_tensor")
    call.check_joined(output, call.tensor("input_tensor"))
    return _gather(call, "input_tensor", [output])


def _all_gather(call: _Call) -> Any:
    tensors = call.given["tensor_list"]
    call.world.touch(tensors)
    if not safe_isinstance(tensors, (list, tuple)) or len(tensors) != call.size:
        call.refuse("with another number of results than processes")
    outputs = [call.checked(each) for each in tensors]
    given = call.tensor("tensor")
    if any(output.shape != given.shape or output.dtype != given.dtype for output in outputs):
        call.refuse("with results of another size or dtype")
    return _gather(call, "tensor", outputs)


def _reduce_scatter(call: _Call) -> Any:
    output, given = call.tensor("output"), call.tensor("input")
    call.check_joined(given, output)
    flat = given.detach().view(-1)
    made = call.ops.reduce_scatter_tensor(flat, call.reduction(given.dtype), call.size, call.group.group_name)
    return call.issue(made, lambda waited: [(output, waited)])


def _all_to_all_single(call: _Call) -> Any:
    output, given = call.tensor("output"), call.tensor("input")
    splits = []
    for tensor, name in ((output, "output_split_sizes"), (given, "input_split_sizes")):
        wanted = call.given[name]
        if not wanted and (tensor.dim() == 0 or len(tensor) % call.size):
            call.refuse("with a tensor that cannot be split equally")
        splits.append(list(wanted) if wanted else [len(tensor) // call.size] * call.size)
        if not all(type(size) is int for size in splits[-1]) or sum(splits[-1]) != len(tensor):
            call.refuse("with split sizes that are not known, or not those of the tensor")
    if output.dtype != given.dtype or output.shape[1:] != given.shape[1:]:
        call.refuse("with a result of another size or dtype")
    made = call.ops.all_to_all_single(given.detach(), *splits, call.group.group_name)
    return call.issue(made, lambda waited: [(output, waited)])


def _barrier(call: _Call) -> None:
    with compat.real_world():
        on_cpu = dist.get_backend(call.group) == "gloo"
    if not on_cpu or any(call.given[name] is not None for name in ("device_ids", "timeout")) or call.given["async_op"]:
        call.refuse("of another backend than gloo, or with options")
    BARRIER(call.group.group_name)


_HANDLERS = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "reduce_scatter_single": _reduce_scatter,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
}


@registry.intercept(PendingCollective.wait)
def _wait(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    with torch.no_grad():
        return args[0].wait()  # type: ignore[no-any-return]


@registry.intercept(PendingCollective.__getattr__)
def _other_attribute(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    world.heap.refuse(CODE, f"reads .{args[1]} of the Work of torch.distributed.{args[0].name}")


_BEFORE_2_13 = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
"""Names under which earlier releases define what is a deprecated wrapper later."""

if dist.is_available():
    for _name, _handler in _HANDLERS.items():
        _defined = _name if hasattr(dist, _name) else _BEFORE_2_13[_name]
        _collective(getattr(dist, _defined))(_handler)


def _raises(name: str, args: tuple[Any, ...]) -> bool:
    """Returns True for arguments of a functional collective that it refuses when it runs.

    A graph that has communicated does not run again, so that the error would not be eager's.
    """
    sent = args[0].meta["val"]
    if name in ("all_reduce", "reduce_scatter_tensor"):
        return not _is_defined(args[1], sent.dtype) or (name != "all_reduce" and len(sent) % args[2] != 0)
    return name == "all_to_all_single" and sum(args[2]) != len(sent)


@registry.AT_END.append
def _check_collectives(world: TraceWorld) -> None:
    """Guards the groups of the graph; refuses a step that ends while a collective runs, or with an unknown one."""
    for pending in world.pending_collectives:
        if pending.finish is not None:
            world.heap.refuse(CODE, f"ends before it has waited for torch.distributed.{pending.name}")
    names: dict[Any, None] = {}
    subgraphs = [part.graph for part in vars(world.tracer.tracer.root).values() if isinstance(part, fx.GraphModule)]
    if any(map(communicates, subgraphs)):
        world.heap.refuse(CODE, "calls collectives in a branch or a loop of the graph")
    for node in world.tracer.graph.nodes:
        if compat.communicates_otherwise(node.target):
            world.heap.refuse(CODE, f"calls {node.target}")
        if not compat.is_collective(node.target):
            continue
        if not compat.is_known_collective(node.target):
            world.heap.refuse(CODE, f"calls {node.target}")
        name = compat.collective_name(node.target)
        if name and node.target is not BARRIER and _raises(name, node.args):
            world.heap.refuse(CODE, f"calls {node.target} with arguments for which it raises")
        if name:
            names[node.args[-1]] = None
            if node.target is not BARRIER and not any(compat.is_collective(user.target) for user in node.users):
                world.heap.refuse(CODE, f"ends before it has waited for a collective ({name})")
    for name in names:
        guard_named(world, name)
