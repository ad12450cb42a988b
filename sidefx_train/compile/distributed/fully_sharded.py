"""``fully_shard`` in a step: the modules' own hooks are interpreted, what they gather and reduce is recorded.

Torch's Python decides when parameters are gathered, freed and reduced; the capture interprets it. Three functions that
fill and read communication buffers are replaced, so that their collectives are operators of the graph. The gathered
parameter is a tensor of the graph, which both gathers of a step write to: its memory outside stays empty.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.shadows.records import LeafRecord, Record
from sidefx_train.compile.common import interceptor_registry as registry
from sidefx_train.compile.common.distributed_models import CODE, refuse_whole
from sidefx_train.compile.common.sentinels import ABSENT

if TYPE_CHECKING:
    from sidefx_train.compile.capture.world.trace_world import TraceWorld

NOT_FINAL = "SFX212"
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_METHODS = (
    "unshard",
    "wait_for_unshard",
    "reshard",
    "pre_forward",
    "post_forward",
    "pre_backward",
    "post_backward",
    "_prefetch_unshard",
)
"""Methods of a group at which the capture may meet it first."""
_FILLING = ("init_unsharded_param", "alloc_all_gather_outputs", "free_unsharded_param")
"""Methods of a parameter that create, fill and free its gathered form."""


class _Group:
    """A group of sharded parameters in one capture.

    Args:
        world: the capturing world.
        names: private names of torch.
        shadow: the group's shadow.
    """

    def __init__(self, world: TraceWorld, names: compat.FullyShardedNames, shadow: Any) -> None:
        record = world.heap.record_of(shadow)
        self.world, self.names, self.shadow = world, names, shadow
        self.label = "a module"
        if record is None:
            self.refuse("was sharded in the step")
        self.real = record.real
        self.label = self.real._module_fqn or "the root module"
        self._check()

    def refuse(self, why: str, code: str = CODE) -> NoReturn:
        """Stops the capture, and any in parts."""
        reason = f"{self.label} is fully sharded: its gradients are reduced between processes; {why}"
        refuse_whole(code, reason, self.world.locate())

    def get(self, name: str, owner: Any = None) -> Any:
        """Returns an attribute of the group or of another object, which is guarded."""
        return self.world.interp.getattr(self.shadow if owner is None else owner, name)

    def _check(self) -> None:
        """Refuses what torch does and this module does not record, and groups that are not ready."""
        names, get = self.names, self.get
        if not names.known:
            self.refuse("this release of torch gathers parameters in another way")
        if get("device").type != "cpu":
            self.refuse("its parameters are not on the CPU")
        mesh = get("mesh_info")
        if type(mesh) not in names.meshes or get("shard_mesh_size", mesh) == 1:
            self.refuse("its mesh only replicates parameters, or has one process")
        resharded = get("post_forward_mesh_info")
        if resharded is not None and resharded is not mesh:
            self.refuse("reshard_after_forward is a number of processes")
        if type(get("offload_policy")) is not names.OffloadPolicy:
            self.refuse("its parameters are offloaded")
        if type(get("_all_gather_comm")) is not names.AllGather:
            self.refuse("it has its own all-gather")
        if type(get("_reduce_scatter_comm")) is not names.ReduceScatter:
            self.refuse("it has its own reduce-scatter")
        if get("_all_reduce_hook") is not None:
            self.refuse("it has an all-reduce hook")
        if get("unshard_async_op"):
            self.refuse("it gathers asynchronously")
        params = list(self.world.interp.iterate(get("fsdp_params")))
        for param in params:
            self._check_param(param)
        self.context = get("comm_ctx")
        first = all(other.context is not self.context for other in self.world.sharded_groups.values())
        if self._is_open() or (first and self._has_forwards()):
            self.refuse("an evaluation before the step has left its parameters gathered", NOT_FINAL)
        for param in params:
            self._gather_in_graph(param)

    def _check_param(self, param: Any) -> None:
        record = self._record(param)
        real = record.real
        if self.get("fsdp_placement", param).dim != 0:
            self.refuse("a parameter is not sharded along its first dimension")
        self._guard_tensor(record, "_sharded_param_data")
        sharded = compat.local_of(real.sharded_param)
        self.get("sharded_param", param)
        if hasattr(sharded, "fsdp_pre_all_gather") or type(real._sharded_param_data) is not torch.Tensor:
            self.refuse("a parameter has its own all-gather")
        shared = compat.storage_address(real._sharded_param_data) == compat.storage_address(sharded)
        if sharded.numel() and not shared:
            self.refuse("a parameter has been replaced since the last step", NOT_FINAL)
        gathered = self._guard_tensor(record, "_unsharded_param")
        if gathered is None:
            self.refuse("it has not been used yet; until then steps run eagerly", NOT_FINAL)
        heap = self.world.heap
        if hasattr(real._unsharded_param, "grad_dtype"):
            heap.guard("equal", heap.sources.slot(gathered, "grad_dtype"), real._unsharded_param.grad_dtype)
        for name in _HOOKS:
            heap.guard("is", heap.sources.slot(gathered, name), getattr(real._unsharded_param, name))
            if getattr(real._unsharded_param, name):
                self.refuse("a gathered parameter has a hook")
        trains = real._unsharded_param.requires_grad
        heap.guard("equal", heap.sources.slot(gathered, "requires_grad"), trains)
        if trains is not real.sharded_param.requires_grad:
            self.refuse("a parameter has been frozen, or trains again, since the last step", NOT_FINAL)

    def _record(self, param: Any) -> Record:
        record = self.world.heap.record_of(param)
        if record is None:
            self.refuse("a parameter was sharded in the step")
        return record

    def _guard_tensor(self, record: Any, name: str) -> Any:
        """Guards which tensor an attribute is; returns its source, ``None`` if there is none."""
        heap = self.world.heap
        if name not in vars(record.real):
            heap.guard("absent", record.base, name)
            return None
        source = heap.sources.attr(record.base, name)
        heap.guard("is", source, vars(record.real)[name])
        return heap.sources.const(vars(record.real)[name], source.label)

    def _gather_in_graph(self, param: Any) -> None:
        """Makes the gathered parameter a tensor of the graph, without contents."""
        heap = self.world.heap
        record = self._record(param)
        real, place = record.real._unsharded_param, self._guard_tensor(record, "_unsharded_param")
        with torch.no_grad():
            shadow: Any = torch.empty(_local(real).shape, dtype=real.dtype)
        if compat.is_dtensor(real):  # of tensor parallelism
            spec = compat.spec_of(real)
            heap.guard("is", heap.sources.slot(place, "_spec"), spec)
            with compat.no_recording():
                shadow = compat.make_dtensor(shadow, spec)
        shadow.requires_grad_(real.requires_grad)
        compat.copy_gradient_dtype(real, shadow)
        shadow._is_param = True
        heap.register(LeafRecord(heap, real, shadow, place))

    def _is_open(self) -> bool:
        """Returns True while the parameters are gathered, or between a forward and the end of its backward."""
        get = self.get
        sharded = get("_sharded_state") is self.names.SHARDED and get("_all_gather_result") is None
        return not sharded or get("_training_state") is not self.names.IDLE

    def _has_forwards(self) -> bool:
        """Returns True if a group of the same model has had a forward that no backward has followed."""
        forwards = self.get("post_forward_order", self.context)
        return bool(self.world.interp.call(len, (forwards,), {}) != 0)

    def check_end(self) -> None:
        """Refuses a step that leaves the group between a forward and the end of its backward."""
        if self._is_open() or self._has_forwards():
            self.refuse("the step ends between a forward and the end of its backward")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that this process has."""
    return compat.local_of(tensor) if compat.is_dtensor(tensor) else tensor


def _flat(world: TraceWorld, param: Any) -> torch.Tensor:
    """Returns what a process sends of a parameter: its rows, as many as the first process has."""
    get = world.interp.getattr
    local = compat.local_of(get(param, "sharded_param")).detach().reshape(-1)
    missing = get(param, "padded_sharded_param_size").numel() - local.numel()
    padded = torch.cat([local, local.new_zeros(missing)]) if missing else local
    dtype = get(param, "param_dtype")
    return padded if dtype is None else padded.to(dtype)


def _size(group: Any) -> int:
    with compat.real_world():
        return int(group.size())


# --- interceptors: (names, world, args, kwargs) -> result or ABSENT


def _known(names: compat.FullyShardedNames, world: TraceWorld, args: Any, kwargs: Any) -> Any:
    """Checks a group before the capture interprets its method."""
    if id(args[0]) not in world.sharded_groups:
        world.sharded_groups[id(args[0])] = _Group(world, names, args[0])
    return ABSENT


def _prepare_module(names: compat.FullyShardedNames, world: TraceWorld, args: Any, kwargs: Any) -> None:
    if world.interp.getattr(args[0], "_is_root") is None:
        reason = "a fully sharded module is prepared in its first forward; until then steps run eagerly"
        refuse_whole(NOT_FINAL, reason, world.locate())
    record = world.heap.record_of(args[0])
    if record is not None and any(len(state._modules) > 1 for state in record.real._state_ctx.all_states):
        # Before their hooks run, which read a set of them: its order may be unknown, and that would be the reason.
        refuse_whole(CODE, "several modules are sharded together: fully_shard reduces their gradients", world.locate())


def _prepare_group(names: compat.FullyShardedNames, world: TraceWorld, args: Any, kwargs: Any) -> NoReturn:
    refuse_whole(CODE, "calls unshard() of a fully sharded module", world.locate())


def _no_other_mesh(names: compat.FullyShardedNames, world: TraceWorld, args: Any, kwargs: Any) -> bool:
    return False  # a group with another mesh is refused


def _nothing(names: compat.FullyShardedNames, world: TraceWorld, args: Any, kwargs: Any) -> None:
    """Does nothing: the memory of a gathered parameter belongs to the graph."""


def _message(names: compat.FullyShardedNames, world: TraceWorld, args: Any, kwargs: Any) -> Any:
    """Skips torch's messages on what its hooks do, unless somebody listens."""
    record = world.heap.record_of(args[0])
    if record is None or record.real is not names.logger:
        return ABSENT
    source = world.heap.sources.const(names.is_logged, "the log level of fully_shard")
    logged = names.is_logged()
    world.heap.guard("equal", world.heap.sources.call(source), logged)
    return ABSENT if logged else None


def _at_end_of_backward(names: compat.FullyShardedNames, world: TraceWorld, args: Any, kwargs: Any) -> Any:
    """Has the callback of torch's hooks interpreted at the end of the running backward."""
    frame = world.interp.current_frame
    if frame is None or not str(frame.globals.get("__name__")).startswith(names.package):
        return ABSENT
    compat.after_backward(world.heap.reenter(args[1]))
    return None


def _start_all_gather(names: compat.FullyShardedNames, world: TraceWorld, args: Any, kwargs: Any) -> Any:
    """Starts to gather a group's parameters; they are sent one after another."""
    params, group, asynchronous = list(world.interp.iterate(args[0])), args[1], args[2]
    if asynchronous:
        refuse_whole(CODE, "gathers parameters of a fully sharded module asynchronously", world.locate())
    with torch.no_grad():
        pieces = [_flat(world, param) for param in params]
        if len({piece.dtype for piece in pieces}) != 1:
            refuse_whole(CODE, "parameters of several dtypes are gathered together", world.locate())
        ops = compat.functional_collectives()
        started = ops.all_gather_into_tensor(torch.cat(pieces), _size(group), group.group_name)
    sizes, dtypes = [piece.numel() for piece in pieces], [[piece.dtype] for piece in pieces]
    return names.AllGatherResult(started, None, None, dtypes, [[size] for size in sizes], sizes)


def _finish_all_gather(names: compat.FullyShardedNames, world: TraceWorld, args: Any, kwargs: Any) -> None:
    """Waits for gathered parameters and writes them to the tensors that the modules use."""
    if any(value is not names.default_copy_out for value in kwargs.values()):
        refuse_whole(CODE, "parameters of a fully sharded module are gathered in a way of its own", world.locate())
    result, params, group = args[0], list(world.interp.iterate(args[1])), args[2]
    with torch.no_grad():
        table = compat.functional_collectives().wait_tensor(result.all_gather_output).view(_size(group), -1)
        for param, piece in zip(params, table.split(result.all_gather_input_split_sizes, 1), strict=True):
            whole = _local(world.interp.getattr(param, "_unsharded_param"))
            rows = piece.reshape(-1)[: whole.numel()].view(whole.shape)
            world.tracer.data_of(whole).copy_(rows)


def _drop_all_gather(names: compat.FullyShardedNames, world: TraceWorld, args: Any, kwargs: Any) -> Any:
    """Waits for parameters that were gathered in vain, as those of a frozen module, before torch forgets them."""
    result = world.interp.getattr(args[0], "_all_gather_result")
    if result is not None:
        with torch.no_grad():
            compat.functional_collectives().wait_tensor(result.all_gather_output)
    return ABSENT


def _fill_reduce_scatter(names: compat.FullyShardedNames, world: TraceWorld, args: Any, kwargs: Any) -> None:
    """Writes gradients to the buffer that is reduced: for each process, its rows of every gradient."""
    gradients, buffer, size = args
    with torch.no_grad():
        buffer.view(size, -1).copy_(compat.chunk_cat(list(world.interp.iterate(gradients)), size))


def _to_sharded_dtensor(names: compat.FullyShardedNames, world: TraceWorld, args: Any, kwargs: Any) -> Any:
    param, tensor = args
    spec = compat.spec_of(world.interp.getattr(param, "sharded_param"))
    if spec.tensor_meta.dtype is not tensor.dtype:
        refuse_whole(CODE, "gradients of a fully sharded module have another dtype", world.locate())
    return compat.make_dtensor(tensor, spec, tensor.requires_grad)


@registry.late
def _with_fully_shard() -> bool:
    """Registers the interceptors once the program has imported ``fully_shard``."""
    names = compat.fully_sharded_names()
    if names is None:
        return False
    handlers = {
        names.State._lazy_init: _prepare_module,
        names.Group.lazy_init: _prepare_group,
        names.Group._use_post_forward_mesh.fget: _no_other_mesh,
        names.Param.to_sharded_dtensor: _to_sharded_dtensor,
        names.start_all_gather: _start_all_gather,
        names.finish_all_gather: _finish_all_gather,
        names.fill_reduce_scatter: _fill_reduce_scatter,
        names.Group.finalize_backward: _drop_all_gather,
        logging.Logger.debug: _message,
        compat.ENGINE.queue_callback: _at_end_of_backward,
        **{getattr(names.Group, name): _known for name in _METHODS},
        **{getattr(names.Param, name): _nothing for name in _FILLING},
    }
    for target, handler in handlers.items():
        registry.intercept(target)(functools.partial(handler, names))
    return True


@registry.AT_END.append
def _check_groups(world: TraceWorld) -> None:
    for group in world.sharded_groups.values():
        group.check_end()
