"""Caches lowered graphs on disk, so that a later process needs neither functionalization nor Inductor.

Every process captures the step again; the *captured graph* is the cache key. A changed line in inlined code gives
another graph, or the same one if the change does not matter. The key covers all that lowering reads: every node with
its arguments and metadata, storage sharing of inputs, conditions on symbols, this library's own source, torch, Python,
the CPU, threads, and Inductor's settings. Graphs with contents that have no text form (constants, subgraphs, operators
of other libraries, symbolic sizes) are not cached.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import fx

from sidefx_train import disk_cache
from sidefx_train import torch_compat as compat
from sidefx_train.compile.graph.artifacts import (
    OWN,
    FunctionalGraph,
    IndexCheck,
    Name,
    Output,
    RunnerPlan,
    SyntheticBase,
    TailCall,
    TracedGraph,
)
from sidefx_train.compile.graph.collectives import communicates
from sidefx_train.compile.graph.devices import accelerator_of
from sidefx_train.compile.native import cpu_description
from sidefx_train.config import CompileConfig
from sidefx_train.report import ChoiceRecord
from sidefx_train.switches import switched_off

_NAMESPACES = ("aten", "prims", "sidefx")
"""Namespaces of operators whose meaning is fixed by the version of torch or of this library."""

_PLAIN = (bool, int, float, str, type(None))
_NAMED = (torch.dtype, torch.device, torch.memory_format, torch.layout)
_CLASSES = {cls.__name__: cls for cls in (TailCall, Output, IndexCheck, SyntheticBase)}
_KEPT = tuple(field.name for field in fields(RunnerPlan) if field.name != "inputs")


class CannotKeep(Exception):
    """The graph contains something without a text form."""


@dataclass(frozen=True)
class Lowered:
    """A compiled graph and the runner's plan.

    Attributes:
        plan: plan for the runner.
        call: the compiled graph, called with one list.
        serial: it runs on one thread.
        sources: generated code by name.
        notes: choices worth reporting.
        choices: choices made by autotuning.
        library: name of the library with ``call``, if that is complete.
        functional: the graph before lowering, if it is needed for a comparison; not cached on disk.
        graph: the functional graph, if it was lowered in this process.
    """

    plan: RunnerPlan
    call: Callable[[list[Any]], Any]
    serial: bool
    sources: dict[str, str]
    notes: tuple[str, ...]
    choices: tuple[ChoiceRecord, ...]
    library: str | None = None
    functional: FunctionalGraph | None = None
    graph: fx.Graph | None = None


def key_of(traced: TracedGraph, config: CompileConfig) -> str | None:
    """Returns the cache key of a lowered graph; ``None`` for a graph that is not cached."""
    return identity_of(traced, config) if has_library(traced) else None


def has_library(traced: TracedGraph) -> bool:
    """Returns False for a graph that becomes no single library: Inductor's own cache keeps its kernels."""
    graph = traced.module.graph
    return accelerator_of(graph) is None and (compat.calls_collectives() or not communicates(graph))


def identity_of(traced: TracedGraph, config: CompileConfig) -> str | None:
    """Returns a hash of a graph and all else that lowering reads, the same in every process; ``None`` without one."""
    try:
        flags = f"random {traced.uses_rng} gradients {traced.gradients}"
        text = [_settings(config), flags, *_inputs(traced), *_nodes(traced.module.graph)]
    except CannotKeep:
        return None
    text += sorted(str(condition) for condition in compat.recorded_conditions(traced.fake_mode.shape_env))
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:40]


def is_kept(key: str) -> bool:
    """Returns True if the cache contains a lowered graph with this key, and its library."""
    value = disk_cache.load("graph", key)
    return value is not None and disk_cache.library(value["library"]) is not None


def keep(key: str, lowered: Lowered) -> None:
    """Writes a lowered graph to the cache, if possible."""
    if lowered.library is None:
        return
    try:
        plan = {name: _encoded(getattr(lowered.plan, name)) for name in _KEPT}
    except CannotKeep:
        return
    value = {"plan": plan, "serial": lowered.serial, "library": lowered.library}
    value |= {"sources": lowered.sources, "notes": list(lowered.notes)}
    value["choices"] = [asdict(choice) for choice in lowered.choices]
    nodes = lowered.sources.get("graph", "").count(" = torch.ops.")
    disk_cache.store("graph", key, value, f"{nodes} operations, {len(lowered.plan.inputs)} inputs")


def find(key: str, traced: TracedGraph, load: Callable[[str], Any]) -> Lowered | None:
    """Returns a lowered graph from the cache.

    Args:
        key: from :func:`key_of`.
        traced: the captured graph, whose inputs it takes.
        load: returns the function in a library, ``None`` if there is no such library.
    """
    value = disk_cache.load("graph", key)
    entry = load(value["library"]) if value is not None else None
    if value is None or entry is None:
        return None
    with traced.fake_mode, compat.no_recording():
        plan = RunnerPlan(inputs=traced.inputs, **{name: _decoded(value["plan"][name]) for name in _KEPT})
    numbers = [i for i, feed in enumerate(plan.feeds) if _is_number(feed, plan)]
    call = compat.call_aoti(entry, numbers)
    choices = tuple(ChoiceRecord(**choice) for choice in value["choices"])
    return Lowered(plan, call, value["serial"], value["sources"], tuple(value["notes"]), choices, value["library"])


def _is_number(feed: str, plan: RunnerPlan) -> bool:
    return feed.startswith("s") or (feed.startswith("a") and plan.inputs[int(feed[1:])].kind == "scalar")


# --- the key -----------------------------------------------------------------------------------------------------


def _settings(config: CompileConfig) -> str:
    environment = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(("TORCHINDUCTOR_", "ATEN_CPU")))
    ignored = ("TORCHINDUCTOR_CACHE_DIR",)
    passes = compat.users_passes()
    if passes is None:
        raise CannotKeep("a pass of the user's own in Inductor, without uuid")
    return repr(
        (
            disk_cache.package_hash(),
            sorted(switched_off()),
            compat.torch_build(),
            platform.python_version(),
            cpu_description(),
            config.rng,
            config.autotune,
            config.autotune_seconds,
            config.deterministic,
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
            compat.inductor_settings(),
            passes,
            [text for text in environment if not text.startswith(ignored)],
        )
    )


def cache_tag() -> str:
    """Returns what Inductor's own cache key lacks: this library's sources, and its disabled switches."""
    return ":".join([disk_cache.package_hash(), *sorted(switched_off())])


def _inputs(traced: TracedGraph) -> list[str]:
    memory: dict[int, int] = {}
    lines = []
    for item in traced.inputs:
        shared = -1
        if isinstance(item.example, torch.Tensor):
            shared = memory.setdefault(compat.storage_id(item.example), len(memory))
        lines.append(f"input {item.kind} {_value(item.example)} memory {shared} writes {item.writes} {item.counter}")
    return lines


def _nodes(graph: fx.Graph) -> list[str]:
    order = {node: index for index, node in enumerate(graph.nodes)}
    return [
        f"{index} {node.op} {_target(node)} {_argument(node.args, order)} {_argument(node.kwargs, order)} "
        f"{_value(node.meta.get('val'))} {node.meta.get(OWN)}"
        for node, index in order.items()
    ]


def _target(node: fx.Node) -> str:
    target: Any = node.target
    if node.op in ("placeholder", "output"):
        return ""
    if node.op == "get_attr":
        return _constant(getattr(node.graph.owning_module, str(target), None))
    if node.op != "call_function":
        raise CannotKeep(node.op)
    if isinstance(target, compat.OpOverload):
        if target.namespace not in _NAMESPACES and not compat.is_collective(target):
            raise CannotKeep(str(target))
        return str(target)
    module = getattr(target, "__module__", None) or ""
    if module.partition(".")[0] not in ("torch", "operator", "_operator", "math", "builtins"):
        on_numbers = compat.host_functions().get(target)
        if on_numbers is None:
            raise CannotKeep(str(target))
        return f"{module}.{target.__qualname__} {on_numbers}"
    if isinstance(target, compat.HigherOrderOperator):
        raise CannotKeep(str(target))
    return f"{module}.{target.__qualname__}"


def _constant(value: Any) -> str:
    """Returns the text of a constant of one number, which becomes part of the code."""
    if type(value) is not torch.Tensor or value.dim() or value.device.type != "cpu" or value.requires_grad:
        raise CannotKeep("a constant tensor")
    return f"constant {value.dtype} {value.item()!r}"


def _argument(value: Any, order: dict[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{order[value]}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({','.join(_argument(item, order) for item in value)})"
    if isinstance(value, dict):
        return f"dict({','.join(f'{key!r}:{_argument(item, order)}' for key, item in value.items())})"
    if isinstance(value, slice):
        return f"slice{_argument((value.start, value.stop, value.step), order)}"
    if type(value) in _PLAIN or isinstance(value, _NAMED):
        return repr(value)
    raise CannotKeep(type(value).__name__)


def _value(value: Any) -> str:
    """Returns the metadata of a node's value."""
    if isinstance(value, torch.Tensor):
        layout = (*value.shape, *value.stride(), value.storage_offset())
        if type(value) is not compat.FakeTensor or not all(type(n) is int for n in layout):
            raise CannotKeep("a symbolic size")
        flags = (value.requires_grad, value.is_conj(), value.is_neg())
        return f"{value.dtype} {value.device} {tuple(value.shape)} {layout} {flags}"
    if isinstance(value, compat.SYMBOLS):
        return f"{type(value).__name__} {compat.symbol_of(value)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_value(item) for item in value)})"
    if type(value) in _PLAIN:
        return repr(value)
    raise CannotKeep(type(value).__name__)


# --- values as JSON ----------------------------------------------------------------------------------------------


def _encoded(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Name):
        return {"name": value.text}
    if type(value) in _CLASSES.values():
        inside = {field.name: _encoded(getattr(value, field.name)) for field in fields(value)}
        return {"object": type(value).__name__, "fields": inside}
    if isinstance(value, torch.Tensor):
        layout = [list(value.shape), list(value.stride())]
        if not all(type(n) is int for n in (*layout[0], *layout[1])):
            raise CannotKeep("a symbolic size")
        return {"tensor": layout, "dtype": str(value.dtype), "device": str(value.device)}
    if isinstance(value, (list, tuple)):  # sizes are tuples too
        return {"list" if isinstance(value, list) else "tuple": [_encoded(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key), _encoded(item)] for key, item in value.items()]}
    if isinstance(value, torch.device):
        return {"device_of": str(value)}
    if isinstance(value, _NAMED):
        return {"torch": str(value)}
    if isinstance(value, compat.OpOverload) and value.namespace in _NAMESPACES:
        return {"operator": str(value)}
    raise CannotKeep(type(value).__name__)


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kind, inside = next(iter(value.items()))
    if kind == "name":
        return Name(inside)
    if kind == "object":
        return _CLASSES[inside](**{name: _decoded(item) for name, item in value["fields"].items()})
    if kind == "tensor":
        return torch.empty_strided(*inside, dtype=_of_torch(value["dtype"]), device=value["device"])
    if kind in ("list", "tuple"):
        items = [_decoded(item) for item in inside]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {_decoded(key): _decoded(item) for key, item in inside}
    if kind == "device_of":
        return torch.device(inside)
    if kind == "torch":
        return _of_torch(inside)
    namespace, name, overload = inside.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _of_torch(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))
