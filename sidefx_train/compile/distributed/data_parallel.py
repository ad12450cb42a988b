"""``DistributedDataParallel`` in a step: its forward and its reduction of gradients become part of the graph.

The rule by which all ranks agree: a captured step issues what the real wrapper issues in an eager step: the same
collectives, of the same group and sizes, in the same order. The real reducer rebuilds its buckets in the second
iteration, so that a step runs eagerly until then. What is not reproduced here runs eagerly as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.records import TensorRecord
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.distributed_models import CODE, refuse_whole
from sidefx_train.compile.common.trace_rules import describe
from sidefx_train.compile.common.type_checks import safe_isinstance
from sidefx_train.compile.distributed.bucket_memory import BucketMemory, Variable, found_views
from sidefx_train.compile.distributed.gradient_buckets import Communication, Reduction

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

NOT_FINAL = "SFX212"
_PLAIN: dict[str, Any] = {
    "mixed_precision": None,
    "device_ids": None,
    "_delay_all_reduce_all_params": False,
    "_use_python_reducer": False,
}
"""Attributes of a wrapper whose steps are captured."""


class _Wrapper:
    """A wrapper in one capture.

    Args:
        world: the capturing world.
        shadow: the wrapper's shadow.
    """

    def __init__(self, world: TraceWorld, shadow: Any) -> None:
        record = world.heap.record_of(shadow)
        self.world, self.shadow = world, shadow
        label = "" if record is None else record.source.label
        self.label = "a wrapper" if not label or label.startswith("stack[") else label
        if record is None or type(shadow) is not DistributedDataParallel:
            self.refuse("was created in the step, or is of a subclass")
        self.real: DistributedDataParallel = record.real
        self.reduction: Reduction | None = None
        self._memory: BucketMemory | None = None
        self._variables: dict[int, Variable] = {}
        self._entered_synchronized = bool(self.get("require_forward_param_sync"))

    @property
    def finds_unused(self) -> bool:
        """Returns True if every forward finds the parameters that take no part."""
        return bool(self.get("find_unused_parameters")) and not self.get("static_graph")

    def refuse(self, why: str) -> NoReturn:
        """Stops the capture, and any in parts."""
        reason = f"{self.label} is a DistributedDataParallel, whose gradients are reduced between processes; {why}"
        refuse_whole(CODE, reason, self.world.locate())

    def get(self, name: str) -> Any:
        """Returns an attribute, which is guarded."""
        return self.world.interp.getattr(self.shadow, name)

    def check(self) -> None:
        """Refuses what the real wrapper does and this module does not."""
        for name, value in _PLAIN.items():
            if name in vars(self.real) and self.get(name) != value:
                self.refuse(f"{name} is {self.get(name)!r}")
        self.world.touch(self.get("_comm_hooks"))
        if "buffer_hook" in vars(self.real):
            self.refuse("a hook communicates its buffers")
        if self.world.interp.getattr(self.get("_join_config"), "enable"):
            self.refuse("it is used with join()")
        for parameter in self.real.parameters():
            if parameter.device.type != "cpu" or parameter.layout is not torch.strided or parameter.is_complex():
                self.refuse("a parameter is not on the CPU, sparse, or complex")
            if hasattr(parameter, "_in_backward_optimizers"):
                self.refuse("an optimizer runs in its backward")
        if vars(self.real).get("_delay_grad_buffer") is not None:
            self.refuse("it reduces some gradients with a delay")
        if not torch.is_grad_enabled() and self.get("_lazy_init_ran"):
            return
        self._check_reducer()

    def _check_reducer(self) -> None:
        """Refuses a reducer whose buckets are not final, or that waits for the rest of a backward."""
        final = self.get("_lazy_init_ran")
        if final and not self.finds_unused:
            # A copy of a wrapper has the flag of the original, and a reducer of its own.
            final = self.get("_has_rebuilt_buckets") and self._ask(compat.has_final_buckets, "its buckets are final")
        if not final:
            iteration = "first" if self.finds_unused else "second"
            reason = f"{self.label} chooses its gradient buckets in the {iteration} iteration"
            refuse_whole(NOT_FINAL, f"{reason}; until then steps run eagerly", self.world.locate())
        if not self._ask(compat.is_finalized, "its last backward has reduced all gradients", always=True):
            self.refuse("an earlier backward has not reduced all of its gradients")

    def _ask(self, question: Callable[[Any], Any], label: str, always: bool = False) -> Any:
        """Returns what a question about the wrapper is answered; guarded if the answer is no, or always."""
        heap, ask = self.world.heap, functools.partial(question, self.real)
        with compat.real_world():
            found = ask()
        if always or not found:
            source = heap.sources.call(heap.sources.const(ask, f"{self.label}: {label}"))
            heap.guard("equal", source, found)
        return found

    def communication(self) -> Communication:
        """Returns how gradients are reduced."""
        group, hooks = self.get("process_group"), list(self.get("_comm_hooks"))
        builtin = self._ask(compat.builtin_hook, "its communication hook", always=True)
        options = {"finds_unused": self.finds_unused, "as_views": bool(self.get("gradient_as_bucket_view"))}
        if not hooks:
            if builtin:
                self.refuse(f"it has the communication hook {builtin}")
            return Communication(group, _size(group), **options)
        hook, state = hooks[0]
        sent = compat.sent_by_hook(hook)
        if len(hooks) != 1 or sent is None or not (state is None or state is group):
            self.refuse(f"it has the communication hook {describe(hook)}")
        group = compat.default_group() if state is None else group
        return Communication(group, _size(group), True, None if sent == "unchanged" else sent, **options)

    def close(self) -> None:
        """Removes the hooks of the capture."""
        if self.reduction is not None:
            self.reduction.close()

    def before_backward(self, outputs: Any) -> None:
        """Decides whether the next backward reduces gradients, and prepares that.

        Args:
            outputs: results of the forward.
        """
        reduces = torch.is_grad_enabled() and bool(self.get("require_backward_grad_sync"))
        if self.get("require_forward_param_sync") is not reduces:
            self.world.interp.setattr(self.shadow, "require_forward_param_sync", reduces)
        if not reduces and not (torch.is_grad_enabled() and self.finds_unused):
            return
        if self.reduction is None:
            self.reduction = self._new_reduction()
        if reduces:
            self.reduction.prepare(self._unused(outputs))

    def leave_to_reducer(self, reduction: Reduction) -> None:
        """Prepares the real reducer after the graph: the backward runs outside, and its hooks reduce the gradients."""
        if reduction.has_begun:
            self.refuse("the step ends before all of its gradients are ready")
        if self.finds_unused or self.get("static_graph"):
            self.refuse("the step ends before its backward, whose parameters the reducer counts")
        reduction.leave()
        self.world.defer(compat.prepare_reducer, (self.get("reducer"),), {})

    def _new_reduction(self) -> Reduction:
        with compat.real_world():
            buckets = compat.gradient_buckets(self.real.reducer)
        reduced = {id(parameter) for bucket in buckets for parameter in bucket}
        order = [parameter for parameter in self.real.module.parameters() if id(parameter) in reduced]
        shadows = self._shadows()
        for index, parameter in enumerate(order):
            shadow = shadows.get(id(parameter))
            if shadow is not None and shadow.requires_grad:
                self._variables[id(parameter)] = Variable(index, shadow)
            elif shadow is not None or not self.world.heap.is_part:
                self.refuse("a parameter takes no part in its forward")
        if len(order) != len(reduced):
            self.refuse("a parameter was replaced since it was created")
        how = self.communication()
        if len(self._variables) < len(order):  # the step is divided in the forward: an earlier part used the others
            some, how = list(self._variables.values()), replace(how, outside=True)
            return Reduction(self.world, self.refuse, [some], how, None, self.get("reducer"))
        variables = [[self._variables[id(parameter)] for parameter in bucket] for bucket in buckets]
        if how.as_views:
            found = [self._found_views(bucket) for bucket in buckets]
            known = list(zip(variables, found, strict=True))
            self._memory = BucketMemory(known, self.refuse, self.world.private_memory)
        return Reduction(self.world, self.refuse, variables, how, self._memory, self.get("reducer"))

    def _shadows(self) -> dict[int, torch.Tensor]:
        """Returns the shadows of parameters, also of those that the step has not used if the wrapper allows that."""
        if self.finds_unused or self.get("static_graph"):
            self.world.interp.call(list, (self.world.interp.call(self._attribute("module", "parameters"), (), {}),), {})
        records = self.world.heap.by_real
        return {key: record.shadow for key, record in records.items() if safe_isinstance(record, TensorRecord)}

    def _attribute(self, *names: str) -> Any:
        found = self.shadow
        for name in names:
            found = self.world.interp.getattr(found, name)
        return found

    def _found_views(self, bucket: list[torch.nn.Parameter]) -> list[torch.Tensor] | None:
        """Returns the gradients of a bucket at the beginning of the step if they are its views."""
        heap = self.world.heap
        ask = functools.partial(found_views, tuple(bucket))
        with compat.real_world():
            found = ask()
        heap.guard("equal", heap.sources.call(heap.sources.const(ask, "gradients are views of their bucket")), found)
        return [heap.entry_grad(self._variables[id(parameter)].parameter) for parameter in bucket] if found else None

    def _unused(self, outputs: Any) -> list[Variable]:
        """Returns the parameters that take no part in the next backward, as the reducer finds them."""
        variables = list(self._variables.values())
        if self.finds_unused:
            self.world.touch(outputs)
            reached = compat.leaves_behind(compat.tensors_in(outputs))
            unused = [variable for variable in variables if id(variable.parameter) not in reached]
            if unused and not self._entered_synchronized:
                self.refuse("a parameter takes no part in a forward after one without reduction of gradients")
            return unused
        if not self.get("static_graph"):
            return []
        with compat.real_world():
            counts = compat.used_counts(self.real.reducer)
        size = _size(self.get("process_group"))
        if any(0 < count < size for count in counts):
            self.refuse("static_graph is True and a parameter was used by some of the processes only")
        return [variable for variable in variables if not counts[variable.index]]

    def through_sink(self, outputs: Any) -> Any:
        """Passes results of the forward through the node by which the real wrapper learns of undefined gradients."""
        if not self.finds_unused:
            return outputs
        read = SimpleNamespace(static_graph=False, reducer=None, _ddp_sink_clone=bool(self.get("_ddp_sink_clone")))
        return self.world.interp.call(_through_sink, (*compat.gradient_sink(), lambda: read, outputs), {})

    def synchronize_buffers(self) -> None:
        """Broadcasts the buffers of the first rank."""
        named = self.world.interp.call(self.world.interp.getattr(self.get("module"), "named_buffers"), (), {})
        ignored = self.real.parameters_to_ignore
        buffers = [buffer for name, buffer in self.world.interp.call(list, (named,), {}) if name not in ignored]
        records = [self.world.heap.record_of(buffer) for buffer in buffers]
        known = [None if record is None else id(record.real) for record in records]
        if known != [id(buffer) for buffer in self.real.modules_buffers]:
            self.refuse("its buffers are others than those it last sent")
        with compat.real_world():
            together = compat.coalesced(self.real.modules_buffers, self.real.broadcast_bucket_size)
        ops, name = compat.functional_collectives(), self.get("process_group").group_name
        with torch.no_grad():
            chunks = [[buffers[i] for i in positions] for positions in together]
            sent = [
                ops.broadcast(torch.cat([each.detach().reshape(-1) for each in chunk]), 0, name) for chunk in chunks
            ]
            for chunk, started in zip(chunks, sent, strict=True):
                pieces = ops.wait_tensor(started).split([each.numel() for each in chunk])
                for buffer, piece in zip(chunk, pieces, strict=True):
                    self.world.tracer.data_of(buffer).copy_(piece.view(buffer.shape))


def _size(group: Any) -> int:
    with compat.real_world():
        return int(group.size())


def _through_sink(flatten: Any, unflatten: Any, sink: Any, wrapper: Callable[[], Any], outputs: Any) -> Any:
    """Returns outputs whose differentiable tensors have passed the sink; interpreted by the capture."""
    tensors, structure, is_reference = flatten(outputs)
    passed = sink(wrapper, *tensors)
    kept = [
        before if isinstance(before, torch.Tensor) and before.grad_fn is None else after
        for before, after in zip(tensors, passed, strict=True)
    ]
    return unflatten(kept, structure, is_reference)


def wrapper_of(world: TraceWorld, shadow: Any) -> _Wrapper:
    """Returns what the capture knows of a wrapper, which it checks."""
    wrapper = world.wrappers.get(id(shadow))
    if wrapper is None:
        wrapper = world.wrappers[id(shadow)] = _Wrapper(world, shadow)
    wrapper.check()
    return wrapper  # type: ignore[no-any-return]


@registry.intercept(DistributedDataParallel.__init__)
def _create(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    refuse_whole(CODE, "creates a DistributedDataParallel, which sends its parameters", world.locate())


def _whole_forward(wrapper: Any, *inputs: Any, **kwargs: Any) -> Any:
    """The wrapper's forward; interpreted by the capture. Behind a graph break it goes on natively."""
    inputs, kwargs = wrapper._pre_forward(*inputs, **kwargs)
    return wrapper._post_forward(wrapper.module(*inputs, **kwargs))


registry.interpret_instead(DistributedDataParallel.forward, _whole_forward)


@registry.intercept(compat.BEGIN_FORWARD)
def _begin_forward(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wrapper = wrapper_of(world, args[0])
    synchronizes = "forward_sync_buffers" if hasattr(wrapper.real, "forward_sync_buffers") else "broadcast_buffers"
    if wrapper.get("require_forward_param_sync") and wrapper.get(synchronizes) and wrapper.real.modules_buffers:
        wrapper.synchronize_buffers()
    return args[1:], kwargs


@registry.intercept(compat.END_FORWARD)
def _end_forward(world: TraceWorld, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wrapper = wrapper_of(world, args[0])
    wrapper.before_backward(args[1])
    return wrapper.through_sink(args[1])


@registry.AT_END.append
def _check_reductions(world: TraceWorld) -> None:
    """Leaves the gradients of a forward to the real reducer if the step, or a part of it, ends before its backward."""
    for wrapper in world.wrappers.values():
        if wrapper.reduction is None:
            continue
        if wrapper.reduction.expecting:
            wrapper.leave_to_reducer(wrapper.reduction)
        wrapper.reduction.end()
