"""Process groups and functional collectives."""

from __future__ import annotations

import itertools
import re
import sys
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
_OTHER_NAMESPACES = ("c10d", "_dtensor")
_WAIT = "wait_tensor"
_BARRIER = "sidefx::barrier"
_STARTS = frozenset({"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all_single"})
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count(1)


def _constants() -> tuple[type, ...]:
    found = torch.distributed if torch.distributed.is_available() else None
    if found is None:
        return ()
    placement = getattr(getattr(torch._C, "_distributed", None), "Placement", None)  # a class of C++ since torch 2.10
    kinds = (found.ProcessGroup, found.ReduceOp, type(found.ReduceOp.SUM), found.device_mesh.DeviceMesh)
    return kinds if placement is None else (*kinds, placement)


DISTRIBUTED_CONSTANTS = _constants()
"""Classes of process groups, reductions, placements and meshes, whose instances are constants of a step."""

_QUERIES = frozenset({"group_name", "name", "rank", "size"})


def communicates_in_cpp(fn: Any) -> bool:
    """Returns True for C++ functions of torch's distributed package that may involve other processes."""
    if not str(getattr(fn, "__module__", "")).startswith("torch._C._distributed"):
        return False
    name = fn.__name__
    return not isinstance(fn, type) and name not in _QUERIES and not name.startswith("__")


def is_collective(target: Any) -> bool:
    """Returns True for a functional collective and for the operator that waits for one."""
    return isinstance(target, torch._ops.OpOverload) and (target.namespace in _NAMESPACES or _is_barrier(target))


def _is_barrier(target: Any) -> bool:
    return bool(target._name == _BARRIER)


def communicates_otherwise(target: Any) -> bool:
    """Returns True for operators that communicate, of other kinds than functional collectives."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace in _OTHER_NAMESPACES


def is_known_collective(target: Any) -> bool:
    """Returns True for collectives whose result a process without others can stand in for, and for the wait."""
    known = target.namespace == _NAMESPACES[0] and target._opname in (*_STARTS, _WAIT)
    return known or _is_barrier(target)


def collective_name(target: Any) -> str:
    """Returns the name of a functional collective, the same for its in-place variant; "" for a wait."""
    name = target._opname.removesuffix("_")
    return "" if name == _WAIT else str(name)


def functional_collectives() -> Any:
    """Returns the operators; importing their module registers the kernels for fake tensors."""
    import torch.distributed._functional_collectives

    return torch.ops._c10d_functional


def collectives_by_group_name() -> list[tuple[str, Any]]:
    """Returns schemas and kernels of collectives whose group is a string, as torch's own are until 2.12.

    From 2.13 on, a group may be an object, too, and torch's C interface has no arguments of several types. Generated
    C++ calls these operators in the namespace ``sidefx`` instead: see :func:`called_by_cpp`.
    """
    if not torch.distributed.is_available():
        return []
    names = [each for name in _STARTS for each in (name, f"{name}_") if hasattr(torch.ops._c10d_functional, each)]
    collectives = [getattr(torch.ops._c10d_functional, name).default for name in sorted(names)]
    schemas = [str(each._schema).partition("::")[2] for each in collectives]
    return [(re.sub(r"\bAny\b", "str", schema), each) for schema, each in zip(schemas, collectives, strict=True)]


def called_by_cpp(target: Any) -> str:
    """Returns the name of the operator that generated C++ calls for an operator."""
    takes_object = target.namespace == _NAMESPACES[0] and any(str(a.type) == "Any" for a in target._schema.arguments)
    return f"sidefx::{target._opname}" if takes_object else str(target._schema.name)


def _called_by(target: Any) -> Any:
    """Returns the collective behind an operator that generated C++ calls."""
    if target.namespace == "sidefx" and target._opname.removesuffix("_") in _STARTS:
        return getattr(torch.ops._c10d_functional, target._opname).default
    return target


def default_group() -> Any:
    """Returns the default process group, ``None`` before it is initialized."""
    return torch.distributed.group.WORLD if torch.distributed.is_available() else None


def is_coalescing(group: Any) -> bool:
    """Returns True inside ``_coalescing_manager``, which collects collectives to issue them together."""
    return group in torch.distributed.distributed_c10d._world.pg_coalesce_state


def own_process() -> str:
    """Returns which of all processes this one is, in words."""
    group = default_group()
    return "this process" if group is None else f"process {group.rank()} of {group.size()}"


def group_number(group: Any) -> int:
    """Returns a number that no other process group of this process has had; it does not keep the group alive."""
    number = _numbers.get(group)
    if number is None:
        number = _numbers[group] = next(_next_number)
    return number


def default_group_number() -> int | None:
    """Returns the number of the default process group, ``None`` before it is initialized."""
    group = default_group()
    return None if group is None else group_number(group)


def group_number_of_name(name: str) -> int:
    """Returns the number of the process group of a name, 0 if there is none."""
    try:
        return group_number(group_of_name(name))
    except (RuntimeError, ValueError):
        return 0


def group_of_name(name: str) -> Any:
    """Returns the process group of a name."""
    return torch._C._distributed_c10d._resolve_process_group(name)


def size_of_group(name: str) -> int:
    """Returns the number of processes of the group of a name, 0 if there is none."""
    try:
        return int(group_of_name(name).size())
    except (RuntimeError, ValueError):
        return 0


def size_of_named_group() -> Any:
    """Returns torch's function that returns the size of a process group by its name."""
    return torch.distributed.distributed_c10d._get_group_size_by_name


def asks_whether_traced() -> Any:
    """Returns the function by which functional collectives ask whether a compiler traces them."""
    import torch.distributed._functional_collectives as functional

    return functional._are_we_tracing


def group_resolver() -> Any:
    """Returns torch's function that finds what functional collectives use for a group, a mesh or ranks.

    Returns:
        ``None`` while nobody has imported its module.
    """
    module = sys.modules.get("torch.distributed._functional_collectives")
    if module is None:
        return None
    return getattr(module, "_resolve_group", None) or module._resolve_group_name  # torch 2.11 has names only


def coalescing_manager() -> Any:
    """Returns the context manager that collects collectives."""
    return torch.distributed.distributed_c10d._coalescing_manager


class OneProcess(TorchDispatchMode):
    """Mode in which collectives stay in this process, as if the others sent the same: for comparisons.

    A graph may run a second time in it: other processes are not involved.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = _called_by(func)
        if not is_collective(func):
            return func(*args, **(kwargs or {}))
        if _is_barrier(func):
            return torch.empty(0)
        name, tensor = func._opname, args[0]
        if name in ("all_reduce", "broadcast"):
            name, tensor = f"{name}_", tensor.clone(memory_format=torch.contiguous_format)
        if name == "all_reduce_" and args[1] == "sum" and tensor.dtype is not torch.bool:
            return tensor.mul_(size_of_group(args[2]) or 1)  # another value: writing to a wrong tensor shows
        if name in (_WAIT, "all_reduce_", "broadcast_"):
            return tensor
        if name == "all_gather_into_tensor":
            return torch.cat([tensor] * args[1])
        if name == "reduce_scatter_tensor":
            return tensor[: len(tensor) // args[2]].clone(memory_format=torch.contiguous_format)
        if name == "all_to_all_single":
            return tensor.new_zeros((sum(args[1]), *tensor.shape[1:]))
        raise NotImplementedError(f"{func} in one process")
