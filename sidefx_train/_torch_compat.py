"""Every private torch name this library uses, in one place.

Checked against torch 2.11, 2.12 and 2.13. Nothing else in the package imports from a torch name that starts with an
underscore or from an experimental module, so a torch release is supported by reading this file.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import linecache
import logging
import math
import multiprocessing
import operator
import os
import re
import shlex
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import _lru_cache_wrapper, cache, lru_cache, partial
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch._guards import Source
from torch._higher_order_ops import utils as _operator_utils
from torch._higher_order_ops.while_loop import while_loop as while_loop
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager
from torch.autograd import forward_ad
from torch.autograd.function import _HookMixin
from torch.fx import traceback as fx_traceback
from torch.fx.experimental import proxy_tensor, sym_node
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    _enable_thunkify,
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_slot,
    handle_sym_dispatch,
    snapshot_fake,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, SLoc, StatelessSymbolicContext
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.optim import optimizer as optimizer_module
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.symbol import SymT, symbol_is_type

from sidefx_train.switches import enabled
from sidefx_train.torch_compat.inductor.checks import checked_codegen
from sidefx_train.torch_compat.inductor.correctness import recursion_limit_kept, right_results
from sidefx_train.torch_compat.inductor.patching import replaced
from sidefx_train.torch_compat.inductor.speedups import linear_step as linear_step
from sidefx_train.torch_compat.inductor.speedups import quick_codegen, without_idle_patterns

# --- recording ---------------------------------------------------------------------------------------------------


_CACHED_OF_TABLES = [(name, value) for name, value in vars(ShapeEnv).items() if type(value) is _lru_cache_wrapper]


class _QuietShapeEnv(ShapeEnv):
    """Does not look for the user's line of every symbol: the capture knows it, and to look for it imports half of
    ``torch.export``.

    What torch remembers of one table in caches for all tables, some without a limit, dies with the table.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, method in _CACHED_OF_TABLES:
            limit = method.cache_parameters()["maxsize"]
            self.__dict__[name] = lru_cache(limit)(partial(method.__wrapped__, self))

    def _get_stack_summary(self, *args: Any, **kwargs: Any) -> tuple[SLoc, str]:
        return SLoc("", None), ""


_SOURCES_KEPT = 128


def forget_old_sources() -> None:
    """Lets go of the source of graphs made long ago: ``torch.fx`` keeps that of each, for tracebacks, for ever."""
    sources = fx.graph_module._loader.eval_cache
    for key in list(sources)[: max(0, len(sources) - _SOURCES_KEPT)]:
        del sources[key]
        linecache.cache.pop(key, None)


@cache
def _load_apart(name: str) -> None:
    """Imports a module on a thread of its own: it keeps frames of its import, and with them those of all callers."""
    loading = threading.Thread(target=importlib.import_module, args=(name,), daemon=True)
    loading.start()
    loading.join()


NEEDED = "torch._dynamo"
"""Module that captures need."""


def import_what_captures_need() -> None:
    """Imports what is ``NEEDED``, which the first table of symbols does, and eager's first optimizer as well.

    Processes that this one starts, such as the workers of a data loader, import this library for its names alone.
    """
    if multiprocessing.parent_process() is None:
        _load_apart(NEEDED)


def new_shape_env() -> ShapeEnv:
    """Symbol table of one capture; a tensor's ``item()`` may become a symbol."""
    _load_apart(NEEDED)
    return _QuietShapeEnv(allow_scalar_outputs=True)


def new_fake_mode(shape_env: ShapeEnv) -> FakeTensorMode:
    return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=False)


def new_proxy_tracer() -> PythonKeyTracer:
    """A tracer with an empty graph, ready to be driven by a proxy mode."""
    tracer = PythonKeyTracer()  # no class of its own: operators over functions ask for this very one
    tracer.root = torch.nn.Module()
    tracer.tensor_attrs = {}
    tracer.graph = fx.Graph(tracer_cls=PythonKeyTracer)
    plain = tracer.create_arg

    def create_arg(a: Any) -> Any:
        """Keeps a random generator as an attribute of the graph's module, which torch before 2.12 does not."""
        if not isinstance(a, torch.Generator):
            return plain(a)
        kept = [name for name, value in vars(tracer.root).items() if value is a]
        name = kept[0] if kept else f"_generator{len(vars(tracer.root))}"
        setattr(tracer.root, name, a)
        return tracer.create_node("get_attr", name, (), {})

    tracer.create_arg = create_arg  # type: ignore[method-assign]
    return tracer


_AS_IT_IS = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
"""Types of arguments that a graph has as they are."""

_NOT_PLAIN = frozenset(
    (
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.lift.default,
        torch.ops.aten.lift_fresh.default,
        torch.ops.aten.lift_fresh_copy.default,
    )
)
_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view))


def _is_plain(op: Any) -> bool:
    """True for an operator of which torch's recorder makes a node, whatever the arguments, and nothing else."""
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    return (
        isinstance(op, torch._ops.OpOverload)
        and op.namespace in ("aten", "prims")
        and op not in _NOT_PLAIN
        and _TAGS.isdisjoint(op.tags)
        and not op._schema.is_mutable
        and implicit not in op.py_kernels
        and not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), implicit)
    )


class _OtherValue(Exception):
    """An argument that is no plain value."""


def _known_values_of(mode: FakeTensorMode) -> dict[Any, Any]:
    """What operators make of arguments, by their metadata, for as long as the mode lives."""
    return vars(mode).setdefault("_sidefx_known", {})  # type: ignore[no-any-return]


def _has_numbers(fake: FakeTensor) -> bool:
    """True for a strided stand-in of which all that says where its elements are is a plain number."""
    if fake.layout is not torch.strided:
        return False
    return all(type(n) is int for n in (*fake.shape, *fake.stride(), fake.storage_offset()))


def _metadata_key(value: Any) -> Any:
    """Equal for values of which an operator makes results that look the same."""
    kind = type(value)
    if kind is FakeTensor:
        if not _has_numbers(value) or value.constant is not None:
            raise _OtherValue
        layout = value.shape, value.stride(), value.storage_offset(), value.is_conj(), value.is_neg()
        return *layout, value.dtype, value.fake_device, value.requires_grad
    if kind is list or kind is tuple:
        return (kind, *map(_metadata_key, value))
    if kind in _AS_IT_IS:
        return kind, value
    raise _OtherValue


def _is_made_anew(made: Any, mode: FakeTensorMode) -> bool:
    """True for a stand-in that is told by sizes, strides, type and device, in memory of its own."""
    if type(made) is not FakeTensor or made.fake_mode is not mode or not _has_numbers(made):
        return False
    if made.constant is not None or made.requires_grad or made.is_conj() or made.is_neg() or made.storage_offset():
        return False
    again = _stand_in(mode, made.shape, made.stride(), made.dtype, made.fake_device)
    same_memory = again.untyped_storage().nbytes() == made.untyped_storage().nbytes()
    return same_memory and torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(made)


def _stand_in(mode: FakeTensorMode, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> FakeTensor:
    with in_kernel_invocation_manager(mode):
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, empty, device)


class RecordingMode(ProxyTorchDispatchMode):
    """Records what torch's own mode does, without asking of each call what most are not.

    A call of a plain operator on stand-ins is a node; what it makes is known where one of the same metadata was made
    before, and is not a view. All else is left to torch.
    """

    supports_higher_order_operators = True

    def __init__(self, tracer: PythonKeyTracer, decompositions: Any = None) -> None:
        given: dict[str, Any] = {} if decompositions is None else {"decomposition_table": decompositions}
        super().__init__(tracer, "symbolic", **given)
        self._plain: dict[Any, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return record_higher_order(self, func, args, kwargs or {})
        plain = self._plain.get(func)
        if plain is None:
            plain = self._plain[func] = _is_plain(func)
        if plain and func not in self._taken_apart() and not self._notes_more():
            try:
                nodes = tuple(map(self._node_of, args))
                named = {name: self._node_of(value) for name, value in (kwargs or {}).items()}
            except _OtherValue:
                pass
            else:
                return self._record(func, nodes, named, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _taken_apart(self) -> Any:
        """Operators with a decomposition: the mode's own table, before torch 2.12 the module's."""
        own = getattr(self, "decomposition_table", None)
        return getattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", ()) if own is None else own

    def _notes_more(self) -> bool:
        """True where somebody wants to find more in the nodes than a call."""
        return fx_traceback.has_preserved_node_meta() or getattr(self, "emulate_precision_casts", False)

    def _node_of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _AS_IT_IS:
            return value
        if kind is list or kind is tuple:
            return kind(map(self._node_of, value))
        if kind is FakeTensor:
            held = get_proxy_slot(value, self.tracer, None)
            if held is not None and held.constant is None:
                return held.proxy.node
        raise _OtherValue

    def _record(self, func: Any, nodes: tuple[Any, ...], named: dict[str, Any], args: Any, kwargs: Any) -> Any:
        tracer = self.tracer
        name = tracer.graph._target_to_str(func.overloadpacket.__name__)
        node = tracer.create_node("call_function", func, nodes, named, name)
        proxy = fx.Proxy(node, tracer)
        made = self._made(func, args, kwargs)
        if type(made) is FakeTensor and _has_numbers(made):
            tracer.tensor_tracker[made] = _ProxyTensor(proxy, None)
            node.meta["val"] = snapshot_fake(made)
            node.meta["tensor_meta"] = _extract_tensor_metadata(made)
        else:
            track_tensor_tree(made, proxy, constant=None, tracer=tracer)
        return made

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        key = _call_key(mode, func, args, kwargs)
        known = _known_values_of(mode) if key is not None else {}
        if key in known:
            return _stand_in(mode, *known[key])
        with _enable_thunkify(self.tracer):
            made = func(*args, **kwargs)
        if (
            key is not None
            and not func.is_view
            and _is_made_anew(made, mode)
            and not _shares_memory(made, args, kwargs)
        ):
            known[key] = (made.shape, made.stride(), made.dtype, made.fake_device)
        return made


def _call_key(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Equal for calls whose results look the same; ``None`` where that is not to be told."""
    if type(mode) is not FakeTensorMode or not mode.cache_enabled or mode.cache_crosscheck_enabled:
        return None
    around = func, torch.get_default_dtype(), torch.is_inference_mode_enabled()
    try:
        named = tuple((name, _metadata_key(value)) for name, value in kwargs.items())
        return *around, tuple(map(_metadata_key, args)), named
    except _OtherValue:
        return None


def _shares_memory(made: Any, args: Any, kwargs: Any) -> bool:
    """True for what is in the memory of an argument, and for what is no tensor."""
    if not isinstance(made, torch.Tensor):
        return True
    given = (value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor))
    return any(storage_identity(value) == storage_identity(made) for value in given)


@contextmanager
def no_recording() -> Iterator[None]:
    """Tensor operations inside are not recorded."""
    with disable_proxy_modes_tracing():
        yield


def fake_snapshot(fake: torch.Tensor) -> torch.Tensor:
    """A detached twin over the same fake storage that keeps today's sizes and strides."""
    with disable_proxy_modes_tracing(), torch.no_grad():
        return fake.detach()


def track(value: Any, proxy: fx.Proxy, tracer: PythonKeyTracer) -> None:
    """Says that ``proxy`` computes ``value`` (a fake tensor or a symbolic number)."""
    track_tensor_tree(value, proxy, constant=None, tracer=tracer)


DEVICE_OF = torch.ops.prim.device.default
"""The operator by which C++ asks for a tensor's device."""

HigherOrderOperator = torch._ops.HigherOrderOperator
run_compiled = _operator_utils._maybe_compile_and_run_fn


def record_higher_order(mode: ProxyTorchDispatchMode, op: Any, args: Any, kwargs: Any) -> Any:
    """Records an operator over functions (``cond``) by its own rule for proxies."""
    return op.python_key_table[ProxyTorchDispatchMode](mode, *args, **kwargs)


@contextmanager
def tracing_subgraphs(fake_mode: FakeTensorMode, tracer: PythonKeyTracer, decompositions: Any = None) -> Iterator[None]:
    """Operators over functions inside (``cond``) trace their functions for the graph of ``tracer``."""
    from torch.fx.experimental.proxy_tensor import _MakefxTracer, _set_make_fx_tracer

    maker = _MakefxTracer(decompositions, "symbolic", True, False, False, False, True)
    maker.fake_tensor_mode, maker.fx_tracer = fake_mode, tracer
    with _set_make_fx_tracer(maker):
        yield


def tracked_tensors(tracer: PythonKeyTracer) -> dict[fx.Node, torch.Tensor]:
    """Fake tensors by the node that computes them."""
    return {held.proxy.node: fake for fake, held in tracer.tensor_tracker.items()}


def tracked_pairs(tracer: PythonKeyTracer) -> list[tuple[fx.Node, torch.Tensor]]:
    """Fake tensors that are alive, with the node that computes each; several may have one node."""
    return [(held.proxy.node, fake) for fake, held in tracer.tensor_tracker.items()]


@dataclass(frozen=True)
class _NamedSource(Source):
    """Where a symbol comes from, by a name of ours."""

    label: str

    @property
    def _name_template(self) -> str:
        return self.label


def new_symbolic_number(shape_env: ShapeEnv, value: int | float, name: str) -> Any:
    """A symbolic int or float whose value during the capture is ``value``; 0 and 1 are not special."""
    source: Any = _NamedSource(f"{name}#{len(shape_env.var_to_range)}")
    if isinstance(value, float):
        symbol = shape_env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        return shape_env.create_symfloatnode(symbol, hint=value, source=source)
    return shape_env.create_unspecified_symint_and_symbol(value, source, DimDynamic.DYNAMIC)


def fake_of(mode: FakeTensorMode, real: torch.Tensor, dynamic: frozenset[int], name: str) -> torch.Tensor:
    """A fake stand-in; the sizes of the dimensions in ``dynamic`` are symbols."""
    if not dynamic:
        made = _complex_view(mode, real)
        return mode.from_tensor(real, static_shapes=True) if made is None else made
    sizes = [DimDynamic.DYNAMIC if i in dynamic else DimDynamic.STATIC for i in range(real.dim())]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(real, source=_NamedSource(name), symbolic_context=context)


def _complex_view(mode: FakeTensorMode, real: torch.Tensor) -> torch.Tensor | None:
    """A stand-in of a complex view of a real tensor, for which torch wants the base to be a list of pairs."""
    base = real._base
    if base is None or not real.is_complex() or base.is_complex() or base.itemsize * 2 != real.itemsize:
        return None
    if real.requires_grad or real.is_conj() or mode.fake_tensor_converter._get_memo(real) is not None:
        return None
    if base.dim() and base.shape[-1] == 2:
        return None
    whole = mode.from_tensor(base, static_shapes=True)
    pairs = (*(2 * stride for stride in real.stride()), 1)
    with mode:
        view = torch.view_as_complex(whole.as_strided((*real.shape, 2), pairs, 2 * real.storage_offset()))
    set_creation(view, creation_of(real))
    mode.fake_tensor_converter.set_tensor_memo(real, view)
    return view


def forget_reals(mode: FakeTensorMode) -> None:
    """Drops the weak references to real tensors by which stand-ins are found: torch swaps no tensors that have some."""
    converter = mode.fake_tensor_converter.meta_converter
    for known in (converter.tensor_memo, converter.storage_memo):
        known.clear()
    for known in (converter.describer.lookup_tensor, converter.describer.lookup_storage):
        known.clear()


def fake_twin(mode: FakeTensorMode, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor | None:
    """A stand-in of a tensor that shares the version counter of another, whose stand-in is ``fake``.

    That of a later tensor of which ``real`` is the base is made from it. There is none of a type that makes it a view.
    """
    version = fake._version
    with torch.no_grad():
        twin = fake.detach()
        if twin.dtype != real.dtype:
            twin = twin.as_strided_((fake.untyped_storage().nbytes() // fake.itemsize,), (1,), 0).view(real.dtype)
        twin.as_strided_(real.size(), real.stride(), real.storage_offset())
    set_version(fake, version)
    if twin._is_view():
        return None
    twin.requires_grad_(real.requires_grad)
    mode.fake_tensor_converter.set_tensor_memo(real, twin)
    return twin


def symbol_of(number: Any) -> Any:
    """The sympy expression of a symbolic number."""
    return number.node.expr


def comes_from_float(number: torch.SymInt) -> bool:
    """True for an integer that is computed from a symbolic float."""
    return any(symbol_is_type(symbol, SymT.FLOAT) for symbol in number.node.expr.free_symbols)


def is_unbacked(number: Any) -> bool:
    """True if the number is known only when the graph runs (it comes from a tensor's contents)."""
    return not number.node.has_hint()


def known_truth(condition: torch.SymBool) -> bool | None:
    """The truth of a condition that holds, or does not, whatever its numbers are; ``None`` for others."""
    expression = condition.node.expr
    if expression not in (True, False) and is_unbacked(condition):
        expression = condition.node.shape_env._maybe_evaluate_static(expression)
    return bool(expression) if expression in (True, False) else None


def recorded_conditions(shape_env: ShapeEnv) -> list[Any]:
    """Sympy conditions on input symbols that the capture relied on."""
    return [guard.expr for guard in shape_env.guards]


def is_random(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def changes_in_place(target: Any) -> bool:
    """True for an operator that writes to one of its arguments."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def without_view_relation(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that autograd does not take for a view of another."""
    return alias_unseen(tensor) if tensor._is_view() else tensor


def alias_unseen(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, with no autograd history and a version counter of its own."""
    with below_autograd():
        return torch.ops.aten.alias.default(tensor)  # type: ignore[no-any-return]


def fake_counted(fake: torch.Tensor) -> torch.Tensor:
    """A detached twin in the same memory, with the same version counter, unseen by the graph.

    A mode that calls this is below what gives it that counter.
    """
    counts = torch._C.DispatchKey.ADInplaceOrView
    with (
        no_recording(),
        torch.no_grad(),
        torch._C._IncludeDispatchKeyGuard(counts),
        torch._C._SetExcludeDispatchKeyGuard(counts, False),
    ):
        return fake.detach()


def forget_contents(fake: torch.Tensor) -> None:
    """Makes void what was noted of the contents of a stand-in."""
    for memo in ("nonzero_memo", "item_memo", "unique_memo", "unique_consecutive_memo"):
        if hasattr(type(fake), memo):
            setattr(fake, memo, None)
    fake.constant = None  # type: ignore[attr-defined]


def forget_constant(fake: torch.Tensor, tracer: Any) -> None:
    """Makes void what torch takes a stand-in's contents for; its recorder misses what is written through a view."""
    fake.constant = None  # type: ignore[attr-defined]
    slot = get_proxy_slot(fake, tracer, None)
    if slot is not None:
        slot.constant = None


@contextmanager
def below_autograd() -> Iterator[None]:
    """Operations inside are unknown to autograd, and to version counters."""
    views = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(views):
        yield


def below_autograd_only() -> Any:
    """A context in which operations are unknown to autograd; version counters go on counting."""
    return torch._C._AutoDispatchBelowAutograd()


def set_strides(fake: torch.Tensor, strides: tuple[int, ...]) -> None:
    """Gives a new stand-in other strides; nobody has seen it."""
    with below_autograd(), no_recording():
        torch.ops.aten.as_strided_.default(fake, fake.shape, strides)


def output_of(node: Any, number: int) -> tuple[tuple[Any, ...], torch.dtype, torch.device]:
    """Shape, type and device of what a node of the autograd graph has made."""
    made = node._input_metadata[number]
    return tuple(made.shape), made.dtype, made.device


def set_memory(fake: torch.Tensor, other: torch.Tensor) -> None:
    """Puts a new stand-in where another begins in memory; nobody has seen it."""
    place = (other.untyped_storage(), other.storage_offset(), fake.shape, fake.stride())
    with below_autograd(), no_recording():
        torch.ops.aten.set_.source_Storage_storage_offset(fake, *place)


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """Raised when the program asks for a value that only exists when the graph runs."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def unsupported_fake_errors() -> tuple[type[BaseException], ...]:
    """Raised when an operation has no fake implementation."""
    from torch._subclasses.fake_tensor import UnsupportedOperatorException

    return (UnsupportedOperatorException,)


# --- guards ------------------------------------------------------------------------------------------------------


def tensor_guards(tensors: list[torch.Tensor], sizes: list[list[Any]], strides: list[list[Any]]) -> Any:
    """One C++ check of type, dtype, device, sizes, strides, requires_grad and dispatch keys of all tensors.

    A size or stride given as ``None`` is not looked at.
    """
    return torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


class GlobalState:
    """Torch's thread-wide state now: grad mode, autocast, determinism, default dtype and device, threads, modes."""

    def __init__(self) -> None:
        _no_replays_under_dynamo()
        self._settings = torch._C._dynamo.guards.GlobalStateGuard()
        self._devices = _default_devices()
        self._contexts = _entered_contexts()
        self._switches = [ask() for ask, _ in _switches()]

    def same_settings(self) -> bool:
        """True if every setting is the same again and every context of torch that was entered has been left."""
        same = bool(self._settings.check()) and _default_devices() == self._devices
        same = same and self._switches == [ask() for ask, _ in _switches()]
        return same and _entered_contexts() == self._contexts

    def check(self) -> bool:
        """True if the state is the same again, and nothing of the caller's watches tensor operations."""
        return (
            self._settings.check()
            and not torch._C._len_torch_dispatch_stack()
            and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            and forward_ad._current_level < 0
            and (_default_devices() == self._devices if torch._C._len_torch_function_stack() else not self._devices)
        )


@cache
def _no_replays_under_dynamo() -> None:
    """Has torch's own compiler, where it traces a compiled step (``torch.cond`` does), find that no entry fits.

    It is told once, so that replays need not ask.
    """
    told = torch.compiler.substitute_in_graph(GlobalState.check, skip_signature_check=True)
    told(lambda self: False)


def traced_by_dynamo() -> bool:
    """True while torch's own compiler traces the caller, which takes the answer for a constant."""
    return torch.compiler.is_dynamo_compiling()


@cache
def _switches() -> tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...]:
    """Global settings of torch beside those that :class:`GlobalState` tests: how to ask for each, and how to set it."""
    pairs = [(f"_get_{name[5:]}", name) for name in dir(torch._C) if name.startswith("_set_")]
    kernels = ("cudnn", "flash", "math", "mem_efficient", "overrideable")
    pairs += [(f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in kernels]
    pairs.append(("_is_view_replay_enabled", "_set_view_replay_enabled"))
    found = [(getattr(torch._C, ask, None), getattr(torch._C, give)) for ask, give in pairs if not _KEPT.search(ask)]
    return tuple((ask, give) for ask, give in found if ask is not None and _answers(ask))


_KEPT = re.compile(
    "default|function_state|trac|dispatch|metaclass|preferred|thread|float32_matmul|metadata|deterministic_algorithms"
)
"""Settings that are kept otherwise, or that asking for may load a library."""


def _answers(ask: Callable[[], Any]) -> bool:
    try:
        return isinstance(ask(), (bool, int, str, list))
    except (RuntimeError, TypeError):  # it wants arguments, or a library that this build lacks
        return False


BINDING: type = type(torch.autograd._profiler_enabled.__self__)  # type: ignore[attr-defined]
"""What functions of torch's that are made by pybind11 are bound to."""


def answers_changed_by_captures() -> dict[Any, Any]:
    """Functions that ask for what a capture itself sets otherwise, with what they answer now, before it."""
    return {torch._C._is_multithreading_enabled: torch._C._is_multithreading_enabled()}


def settings_of(fn: Any) -> tuple[Callable[[], Any], ...]:
    """What an operation of torch asks for and decides on while it is recorded: which attention kernels may be used."""
    if getattr(fn, "__name__", "") not in ("scaled_dot_product_attention", "multi_head_attention_forward"):
        return ()
    names = ("flash", "math", "mem_efficient", "cudnn")
    return tuple(getattr(torch._C, f"_get_{name}_sdp_enabled") for name in names)


def _entered_contexts() -> tuple[Any, ...]:
    """Contexts of torch that have been entered, apart from those that set one of the common settings."""
    return (
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        forward_ad._current_level,
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        torch._C._functorch.peek_interpreter_stack() is None,
    )


def _default_devices() -> tuple[Any, ...]:
    """What stands on the stack of function modes: devices of ``torch.device`` contexts, and other modes."""
    stack = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return tuple(mode.device if type(mode) is DeviceContext else mode for mode in stack)


def default_device_cpu() -> Any:
    """A context in which new tensors are on the CPU; nothing at all, which is faster, where they are anyway."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keeps torch from printing a traceback for every error of a fake tensor: eager shows those of the step."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


_node_of_number = sym_node.to_node
_derived_known = threading.Lock(), [0]


def _node_of_derived(node: Any, number: Any) -> Any:
    """``to_node`` that knows instances of classes derived from ``int`` and ``float`` as the numbers they are."""
    own = type(number) in NUMBERS or is_numpy_scalar(number)
    return _node_of_number(node, number if own else plain_number(number))


@contextmanager
def derived_numbers() -> Iterator[None]:
    """Symbolic numbers compute with members of enumerations and the like; torch finds them unequal to all of them."""
    lock, captures = _derived_known
    with lock:
        captures[0] += 1
        sym_node.to_node = _node_of_derived
    try:
        yield
    finally:
        with lock:
            captures[0] -= 1
            if not captures[0]:
                sym_node.to_node = _node_of_number


def plain_number(value: Any) -> Any:
    """An instance of a class derived from ``int`` or ``float`` as the number it is; anything else as it is."""
    base = next((base for base in (int, float) if issubclass(type(value), base)), None)
    return value if base is None else base.__pos__(value)


def is_numpy_scalar(value: Any) -> bool:
    """True for numbers of numpy, some of which derive from ``float``."""
    return any(base.__module__ == "numpy" for base in type(value).__mro__)


@contextmanager
def restoring_state() -> Iterator[None]:
    """Gives torch's thread-wide state back as it was, whatever a capture that stopped half way left of it."""
    grad, dtype, threads = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    level = forward_ad._current_level
    casts = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")}
    cache, nesting, functions = torch.is_autocast_cache_enabled(), _autocast_nesting(), _default_devices()
    switches = [(ask, give, ask()) for ask, give in _switches()]
    disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    finally:
        while torch._C._functorch.peek_interpreter_stack() is not None:
            torch._C._functorch.pop_dynamic_layer_stack()
        while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() != disabled:
            torch._C._autograd._saved_tensors_hooks_enable()
            if disabled is not None:
                torch._C._autograd._saved_tensors_hooks_disable(disabled)
        while torch._C._len_torch_function_stack() > len(functions):
            torch._C._pop_torch_function_stack()
        while _autocast_nesting() > nesting:
            torch.autocast_decrement_nesting()
        for kind, (enabled, cast) in casts.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, cast)
        torch.set_autocast_cache_enabled(cache)
        torch.set_grad_enabled(grad)
        torch.set_anomaly_enabled(*anomaly)
        for ask, give, before in switches:
            if ask() != before:
                give(before)
        if forward_ad._current_level > level:
            forward_ad.exit_dual_level(level=forward_ad._current_level)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def inside_transform() -> bool:
    """True inside a transform of ``torch.func``: ``vmap``, ``grad``, ``functionalize``..."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_batched(value: Any) -> bool:
    """True for a batch of gradients, as ``torch.autograd.grad(..., is_grads_batched=True)`` hands over."""
    return value is not None and (
        torch._C._functorch.is_legacy_batchedtensor(value) or torch._C._functorch.is_batchedtensor(value)
    )


def outside_transforms() -> Any:
    """A context outside the transforms of ``torch.func`` that are under way: a tensor made inside would be theirs."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def loads_batching_rules() -> Any:
    """The function by which torch reads ``vmap``'s decompositions when they are first needed."""
    from torch._functorch import vmap

    return vmap.lazy_load_decompositions


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def surrounding() -> str | None:
    """What the caller has around a step that must see its operations as they happen, in words."""
    for mode in _default_devices():
        if not isinstance(mode, torch.device):
            return f"runs inside {type(mode).__qualname__}, a TorchFunctionMode"
    if torch._C._len_torch_dispatch_stack():
        return "runs inside a TorchDispatchMode"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "runs inside hooks on saved tensors"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "runs inside a transform of torch.func"
    if torch._C._get_tracing_state() is not None:
        return "is traced by torch.jit"
    if forward_ad._current_level >= 0:
        return "runs inside a level of forward-mode differentiation: dual tensors carry tangents past a graph"
    return None


def has_memory(tensor: torch.Tensor) -> bool:
    """False for a tensor whose storage has been freed (``untyped_storage().resize_(0)``), as sharding libraries do."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return True
    return tensor.untyped_storage().nbytes() > 0


# --- functionalization -------------------------------------------------------------------------------------------

OpOverload = torch._ops.OpOverload
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""Classes of what ``torch.ops`` holds."""


_OWN_OPERATORS = (
    "aten",
    "prim",
    "prims",
    "sidefx",
    "quantized",
    "mkldnn",
    "inductor",
    "_c10d_functional",
    "higher_order",
)


def python_derivative(operator: Any) -> tuple[Any, Any] | None:
    """An operator's overload and the holder of its derivative in Python; ``None`` if it has no such derivative.

    Both are ``None`` where torch puts more Python around the derivative, for lists of tensors.
    """
    if isinstance(operator, torch._ops.OpOverloadPacket):
        names = operator.overloads()
        if len(names) != 1:
            return None
        operator = getattr(operator, names[0])
    if operator.namespace in _OWN_OPERATORS:
        return None
    name = name_of_derivative(operator)
    made = [cls for cls in torch.autograd.Function.__subclasses__() if cls.__name__ == name]
    if not made:
        return None
    held = [inspect.getclosurevars(cls.backward).nonlocals for cls in made]
    registrations = [names["info"] for names in held if "info" in names]
    return (operator, registrations[-1]) if registrations else (None, None)


def name_of_derivative(overload: Any) -> str:
    """What torch calls the autograd function of an operator with a derivative in Python."""
    return f"GeneratedBackwardFor_{overload._namespace}_{overload._opname}_{overload._overloadname}"


def operator_arguments(
    overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as the dispatcher passes them: by position, keyword-only ones apart."""
    found, named = list(args), dict(kwargs)
    places = [argument for argument in overload._schema.arguments if not argument.kwarg_only][len(args) :]
    while any(argument.name in named for argument in places):
        argument = places.pop(0)
        found.append(named.pop(argument.name, argument.default_value))
    return tuple(found), named


def operator_defaults(
    overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All arguments of an operator, with those that have their default values."""
    return torch._library.utils.fill_defaults(overload._schema, args, kwargs)  # type: ignore[no-any-return]


def has_keyword_arguments(overload: Any) -> bool:
    """True if an operator has arguments by keyword only."""
    return bool(torch._library.utils.has_kwarg_only_args(overload._schema))


def _opaque(name: str) -> Callable[[Any], Any]:
    """``math.name`` as a function that keeps a symbolic float symbolic, where torch has none."""
    from torch.fx.experimental.sym_node import SymNode
    from torch.utils._sympy import functions

    function = getattr(math, name)
    expression = getattr(functions, f"OpaqueUnaryFn_{name}")

    def apply(value: Any) -> Any:
        if not isinstance(value, torch.SymFloat):
            return function(value)
        node = value.node
        hint = function(node.hint) if node.has_hint() else None
        return torch.SymFloat(SymNode(expression(node.expr), node.shape_env, float, hint))

    apply.__name__ = name
    return apply


def _traced(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Records a call on a symbolic number in the graph."""
    return lambda value: handle_sym_dispatch(function, (value,), {})


_OPAQUE = {getattr(math, name): _opaque(name) for name in ("exp", "log")}

SYMBOLIC_MATH: dict[Any, Callable[[Any], Any]] = {
    **{
        getattr(math, name): getattr(torch, f"_sym_{name}")
        for name in ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "acos", "asin", "atan", "log2")
    },
    **{function: _traced(opaque) for function, opaque in _OPAQUE.items()},
}
"""Functions of ``math`` and the form of each that takes a symbolic float."""


def host_functions() -> dict[Any, str]:
    """Functions on Python numbers that a trace may contain, with the Python expression that calls them."""
    table: dict[Any, str] = {
        torch.sym_float: "float",
        torch.sym_int: "int",
        torch.sym_max: "max",
        torch.sym_min: "min",
        torch.sym_not: "not ",
        max: "max",
        min: "min",
        abs: "abs",
        operator.abs: "abs",
        float: "float",
        int: "int",
        bool: "bool",
        round: "round",
        pow: "pow",
    }
    for name in dir(math):
        function = getattr(math, name)
        if callable(function) and not name.startswith("_"):
            table[function] = f"math.{name}"
            symbolic = getattr(torch, f"_sym_{name}", None)
            if symbolic is not None:
                table[symbolic] = f"math.{name}"
    for function, opaque in _OPAQUE.items():
        table[opaque] = f"math.{function.__name__}"
    return table


def symbolic_function(function: Any) -> Any:
    """The variant of a ``math`` function that accepts symbolic numbers, else the function itself."""
    return getattr(torch, f"_sym_{getattr(function, '__name__', '')}", function)


@contextmanager
def _decomposing(tracer: PythonKeyTracer, decompositions: Any) -> Iterator[None]:
    """Records operations, taking those of a table apart: the mode's own table, before torch 2.12 the module's."""
    if "decomposition_table" in inspect.signature(ProxyTorchDispatchMode).parameters:
        with RecordingMode(tracer, decompositions):
            yield
        return
    from torch.fx.experimental.proxy_tensor import decompose

    with decompose(decompositions), RecordingMode(tracer):
        yield


@contextmanager
def functionalizing(fake_mode: FakeTensorMode, tracer: PythonKeyTracer, decompositions: Any) -> Iterator[None]:
    """Records operations on functional tensors over fakes, without in-place operations, into ``tracer``'s graph."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx.experimental.proxy_tensor import disable_autocast_cache

    with (
        fake_mode,
        enable_python_dispatcher(),
        _decomposing(tracer, decompositions),
        disable_autocast_cache(),
        torch.no_grad(),
        torch._C._AutoDispatchBelowAutograd(),  # Python rules for Autograd would take operators apart once more
        torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)),
        tracing_subgraphs(fake_mode, tracer, decompositions),
        FunctionalTensorMode(),
    ):
        yield


@contextmanager
def below_functionalization() -> Iterator[None]:
    """Operations inside are recorded as they are (in-place ``copy_`` into an input, for one)."""
    from torch._subclasses.functional_tensor import disable_functional_mode

    with disable_functional_mode():
        yield


@contextmanager
def without_recording(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Operations inside run on fake tensors and leave no mark, neither in a graph nor among the conditions."""
    from torch.utils._python_dispatch import _disable_current_modes

    env = fake_mode.shape_env
    with _disable_current_modes(), fake_mode, torch.no_grad(), training_kernels():
        with env.suppress_guards() if env is not None else nullcontext(), torch.autocast("cpu", enabled=False):
            yield


def know_grouped_products() -> None:
    """Stand-ins of grouped products for the types that CPU kernels take: torch's own knows bfloat16 alone."""
    from torch._subclasses import fake_impls

    op = torch.ops.aten._grouped_mm.default
    if op not in fake_impls.op_implementations_dict:
        fake_impls.register_op_impl(op)(_grouped_product)


def know_ctc_loss() -> None:
    """Stand-ins of connectionist temporal classification on the CPU, which torch has none of.

    What the forward saves has the size that the longest target needs; where that is in a tensor, what the batch of
    targets has room for.
    """
    from torch._subclasses import fake_impls

    forward, backward = torch.ops.aten._ctc_loss, torch.ops.aten._ctc_loss_backward
    if getattr(fake_impls.op_implementations_dict.get(forward.default), "__module__", None) == __name__:
        return
    for op in (forward.default, forward.Tensor):
        fake_impls.op_implementations_dict[op] = _ctc_loss
    for op in (backward.default, backward.Tensor):
        fake_impls.op_implementations_dict[op] = _ctc_loss_backward


def _ctc_loss(
    mode: Any, func: Any, log_probs: Any, targets: Any, _: Any, lengths: Any, *rest: Any, **named: Any
) -> Any:
    if log_probs.device.type != "cpu":
        return NotImplemented
    time, batch = log_probs.shape[:2]
    if isinstance(lengths, torch.Tensor):
        columns = 2 * targets.shape[1] + 1 if targets.dim() == 2 else 0
    else:
        columns = 2 * max(lengths, default=0) + 1
    with mode:
        return log_probs.new_empty(batch), log_probs.new_empty(batch, time, columns)


def _ctc_loss_backward(mode: Any, func: Any, grad: Any, log_probs: Any, *rest: Any, **more: Any) -> Any:
    if log_probs.device.type != "cpu":
        return NotImplemented
    with mode:
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _grouped_product(
    mode: Any, func: Any, a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    if (
        a.device.type != "cpu"
        or a.dtype not in (torch.float32, torch.float16)
        or b.dtype != a.dtype
        or bias is not None
    ):
        return NotImplemented
    groups = (a if a.dim() == 3 else b).shape[:1] if a.dim() == 3 or b.dim() == 3 else offs.shape
    size = (*(groups if a.dim() == b.dim() else ()), a.shape[-2], b.shape[-1])
    dtype = out_dtype or a.dtype
    alignment = 16 // dtype.itemsize  # rows begin at multiples of 16 bytes
    row = (size[-1] + alignment - 1) // alignment * alignment
    with mode:
        return torch.empty_strided(size, (size[-2] * row, row, 1)[-len(size) :], dtype=dtype, device=a.device)


def fake_constant(fake_mode: FakeTensorMode, constant: Any) -> Any:
    """The fake of a constant tensor of a graph; anything else is itself."""
    return fake_mode.from_tensor(constant, static_shapes=True) if isinstance(constant, torch.Tensor) else constant


def mode_of(tensor: torch.Tensor) -> Any:
    """The fake mode that a fake tensor belongs to."""
    return getattr(tensor, "fake_mode", None)


NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def has_unbacked_sizes(value: Any) -> bool:
    """True for tensors with a size that only the running graph knows."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    return any(
        isinstance(size, torch.SymInt) and is_unbacked(size)
        for each in values
        if isinstance(each, torch.Tensor)
        for size in each.shape
    )


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Operations inside run for real, whatever is being recorded."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def to_functional(fake: torch.Tensor) -> torch.Tensor:
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FunctionalTensor.to_functional(fake)


def from_functional(value: Any) -> Any:
    """The plain (proxied, fake) tensor behind a functional one, after pending updates."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)
    return torch._from_functional_tensor(value.elem)


def has_data_mutation(value: torch.Tensor) -> bool:
    return torch._functionalize_has_data_mutation(value.elem)


def has_metadata_mutation(value: torch.Tensor) -> bool:
    """True if an operation changed a functional tensor's sizes or strides in place."""
    return torch._functionalize_has_metadata_mutation(value.elem)


def storage_replaced(value: torch.Tensor) -> bool:
    """True if ``set_`` gave a functional tensor another storage."""
    return torch._functionalize_was_storage_changed(value.elem)


# --- partition ---------------------------------------------------------------------------------------------------


def bytes_of(nodes: Iterable[fx.Node]) -> int:
    """Memory of the nodes' values, views counted once; symbolic sizes by what they are during the capture."""
    found: dict[int, int] = {}
    for value in (node.meta.get("val") for node in nodes):
        if isinstance(value, torch.Tensor):
            count: Any = value.numel()
            size = value.itemsize * ((hint_of(count) or 0) if isinstance(count, torch.SymInt) else count)
            memory = id(value) if value.layout is not torch.strided else value.untyped_storage()._cdata
            found[memory] = max(size, found.get(memory, 0))
    return sum(found.values())


def min_cut(graph: fx.Graph, forward: set[fx.Node], free: set[fx.Node]) -> list[fx.Node]:
    """What to save of a joint graph so that cheap operations make the rest of what its backward reads.

    Args:
        graph: placeholders ``primals_*`` and ``tangents_*``, then operations; nodes carry ``meta["val"]``.
        forward: nodes of the forward; the others are the backward.
        free: of its placeholders, those that cost nothing to keep.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import MinCutOptions, NodeInfo, solve_min_cut
    from torch.utils._ordered_set import OrderedSet

    nodes = [node for node in graph.nodes if node.op != "output"]
    behind = OrderedSet(node for node in nodes if node not in forward)
    order = {node: i for i, node in enumerate(node for node in nodes if node in forward)}
    for node in reversed(nodes):
        near = min((user.dist_from_bw + 1 for user in node.users if user.op != "output"), default=int(1e9))
        node.dist_from_bw = near if node in forward else 0  # type: ignore[attr-defined]
    options = MinCutOptions(
        ban_if_used_far_apart=config.ban_recompute_used_far_apart,
        ban_if_long_fusible_chains=config.ban_recompute_long_fusible_chains,
        ban_if_materialized_backward=config.ban_recompute_materialized_backward,
        ban_if_not_in_allowlist=config.ban_recompute_not_in_allowlist,
        ban_if_reduction=config.ban_recompute_reductions,
    )
    inputs = [node for node in nodes if node.op == "placeholder" and node in forward]
    info = NodeInfo(inputs, OrderedSet(order), behind, behind, OrderedSet(), order, OrderedSet(free))
    saved, _ = solve_min_cut(graph, info, options)
    return list(saved)


# --- running -----------------------------------------------------------------------------------------------------

set_grad_enabled = torch._C._set_grad_enabled
autocast_enabled = torch._C._is_any_autocast_enabled
increment_version = torch._C._increment_version


def unchecked_saved(ctx: Any) -> list[torch.Tensor | None]:
    """The tensors that a node saved, changed or not; ``None`` for what is none, or where torch does not give them."""
    return [getattr(raw, "data", None) for raw in ctx._raw_saved_tensors]


def is_asked_for(node: Any) -> bool:
    """True if the backward that is running goes on to a node of the autograd graph, or is to give its gradient."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient ``autograd.grad`` returns
        return True


VERSIONS = 1 << 32
"""A version counter is an unsigned number of 32 bits: behind the last comes 0."""


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Sets a tensor's version counter, which its views share."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def has_no_derivative(node: Any) -> bool:
    """True for the autograd node of an operator that has no derivative."""
    return str(node.name()).endswith("NotImplemented")


def decomposition_of(operator: Any) -> Callable[..., Any]:
    """A function of other operators that computes what ``operator`` does, or itself."""
    from torch._decomp import decomposition_table

    return decomposition_table.get(operator, operator)  # type: ignore[no-any-return]


def running_backward() -> int:
    """The number of the backward that is running."""
    return int(torch._C._current_graph_task_id())


def running_node() -> str:
    """The name of the node of the autograd graph whose derivative is being computed."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def running_derivative() -> tuple[str, int] | None:
    """What tells the node of the autograd graph whose derivative is being computed from others: its name and place."""
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


def last_place() -> int:
    """The place of the node of the autograd graph that was made last, in the order of the forward."""
    return int(torch.autograd._get_sequence_nr()) - 1


def neg_view(tensor: torch.Tensor) -> torch.Tensor:
    """The negative of a tensor, in its memory."""
    return torch._neg_view(tensor)


def creation_of(tensor: torch.Tensor) -> Any:
    """How a view came to be, by which autograd decides what it says of an in-place change; ``None`` for others."""
    return torch._C._autograd._get_creation_meta(tensor) if tensor._is_view() else None


def set_creation(view: torch.Tensor, creation: Any) -> None:
    torch._C._autograd._set_creation_meta(view, creation)


NODES_BY_OPERATION = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Errors of autograd name a node by its operation (``Exp``); before torch 2.13 by its class (``ExpBackward0``)."""


PLAIN_VIEW = torch._C._autograd.CreationMeta.DEFAULT
"""Of a view that was made while autograd was on."""


def one_counter(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors share their version counter: it is moved for a moment."""
    if a.is_inference() or b.is_inference() or a._version != b._version:
        return False
    before = a._version
    set_version(a, before + 1)
    shared = b._version != before
    set_version(a, before)
    return bool(shared)


def tensor_data_ptr_address() -> int | None:
    """Address of torch's ``void* data_ptr(PyObject* tensor)``, which generated code calls."""
    return getattr(torch._C._dynamo.guards, "_torchinductor_pyobject_tensor_data_ptr", None)


def c10_flags() -> list[str]:
    """Compiler and linker flags for C++ that reads ``c10::TensorImpl``."""
    root = os.path.dirname(torch.__file__)
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    return [f"-I{root}/include", abi, f"-L{root}/lib", "-lc10"]


def hooks_of(tensor: torch.Tensor) -> tuple[Any, Any]:
    """The dicts of a tensor's hooks and of its post-accumulate-grad hooks, each ``None`` if it never had one."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


asks_for_execution = torch._C._will_engine_execute_node
number_of_backward = torch._C._current_graph_task_id


def hook_numbers(tensor: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Under which numbers a tensor has hooks, of both kinds."""
    return tuple(tuple(hooks or ()) for hooks in hooks_of(tensor))


class _Asked(Exception):
    """Leaves torch's registration of a hook before it changes anything."""


class _NodeHooks:
    """Hooks that were registered on nodes of the autograd graph.

    Torch's C++ registers them by a static method of Python, with the dict that holds those a node has: it tells when
    there are new ones, and which there are.

    Attributes:
        registered: how often any were registered.
    """

    def __init__(self) -> None:
        self.registered = 0
        self._method: Any = None

    def listen(self) -> None:
        """Counts registrations from now on."""
        if self._method is None:
            method = self._method = _HookMixin._register_hook

            def register(hooks: Any, hook: Any) -> Any:
                if type(hook) is list:
                    hook.append(hooks)
                    raise _Asked
                if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:  # not on a shadow
                    self.registered += 1
                return method(hooks, hook)

            _HookMixin._register_hook = staticmethod(register)  # type: ignore[method-assign]

    def of_leaf(self, leaf: torch.Tensor) -> tuple[Any, Any]:
        """The dicts of hooks before and after the node that accumulates a leaf's gradient; ``None`` without any."""
        self.listen()
        node = accumulator_of(leaf)
        found: list[Any] = []
        for register in (node.register_prehook, node.register_hook):
            try:
                register(found)
            except _Asked:
                pass
        return found[0] or None, found[1] or None


node_hooks = _NodeHooks()


def accumulator_of(leaf: torch.Tensor) -> Any:
    """The node of the autograd graph that accumulates a leaf's gradient."""
    with disable_proxy_modes_tracing(), torch.inference_mode(False), torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(leaf).node


class AccumulationHooks:
    """Which of some leaves have hooks at the nodes that accumulate their gradients; called as a guard.

    Args:
        leaves: the leaves.
        others: there are others, of which nothing is known once hooks have been registered.
    """

    __name__ = "accumulation_hooks"

    def __init__(self, leaves: list[torch.Tensor], others: bool) -> None:
        self.leaves = leaves
        self.others = others
        self.seen = -1
        self.hooked: list[torch.Tensor] = []
        self.known: tuple[int, ...] = ()

    def __call__(self) -> tuple[int, ...]:
        """Identities of the dicts that hold the hooks."""
        if self.seen != node_hooks.registered:
            found = [(leaf, self._of(leaf)) for leaf in self.leaves]
            self.hooked = [leaf for leaf, dicts in found if dicts != (0, 0)]
            self.seen = node_hooks.registered
            registered = (self.seen,) if self.others else ()
            self.known = (*registered, *(number for _, dicts in found for number in dicts))
        elif self.hooked and not all(map(any, map(self._of, self.hooked))):  # a node has died, its hooks with it
            self.seen = -1
            return self()
        return self.known

    @staticmethod
    def _of(leaf: torch.Tensor) -> tuple[int, int]:
        if not leaf.requires_grad or leaf.grad_fn is not None:
            return 0, 0
        before, behind = node_hooks.of_leaf(leaf)
        return (0 if before is None else id(before)), (0 if behind is None else id(behind))


def tensor_impl_address(tensor: torch.Tensor) -> int:
    """Address of the C++ object behind a tensor."""
    return tensor._cdata  # type: ignore[no-any-return]


def is_plain_strided(tensor: Any) -> bool:
    """True for a ``Tensor`` or ``Parameter`` (no subclass) with plain sizes and strides."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not isinstance(tensor, torch._subclasses.FakeTensor)
    )


@contextmanager
def training_kernels() -> Iterator[None]:
    """Grad mode is on, as kernels that save for backward want it, and yet autograd records nothing."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


def autocast_off() -> AbstractContextManager[Any]:
    """Autocast is off inside, for all devices, whatever it was."""
    return torch._C._DisableAutocast()  # type: ignore[no-any-return]


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """What autocast makes of weights inside is not kept for what comes after."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def without_autocast(function: Any, *args: Any) -> Any:
    """Calls ``function`` with autocast off: casts that autocast made are in the captured graph already."""
    with torch._C._DisableAutocast():
        return function(*args)


# --- inductor ----------------------------------------------------------------------------------------------------


def known_inductor_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that this torch's Inductor knows."""
    from torch._inductor import config

    known = config.get_config_copy()
    return {name: value for name, value in options.items() if name in known}


@contextmanager
def inductor_options(options: dict[str, Any]) -> Iterator[None]:
    from torch._inductor import config

    with config.patch(options):
        yield


@contextmanager
def inductor_cache_of(maker: str) -> Iterator[None]:
    """Inductor's own cache gives what the same ``maker`` has left in it, and nothing that others have.

    It knows torch's sources, not ours, which have a part in what it keeps.
    """
    settings = torch.compiler.config
    with settings.patch(cache_key_tag=f"{settings.cache_key_tag}:{maker}"):  # type: ignore[attr-defined]
        yield


def forget_compile_threads() -> None:
    """For a forked process: Inductor's threads stayed behind, and what is given to them would be waited for forever."""
    threads = sys.modules.get("torch._inductor.async_compile")
    if threads is not None:
        threads.AsyncCompile.pool.cache_clear()


def inductor_decompositions() -> dict[Any, Any]:
    """Inductor's own table under the present options."""
    _import_lowering()  # some decompositions take it for imported
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


class _LateTemplate:
    """A template of Jinja's that is read when it is first used; those of Triton's kernels never are on a CPU."""

    def __init__(self, read: Callable[[str], Any], source: str) -> None:
        self._made = functools.cache(functools.partial(read, source))

    def __bool__(self) -> bool:
        return bool(self._made())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made(), name)


def _import_lowering() -> None:
    """Imports Inductor, which reads two dozen templates of kernels for devices other than the CPU."""
    if "torch._inductor.lowering" in sys.modules:
        return
    from torch._inductor.codegen.common import KernelTemplate

    read = vars(KernelTemplate).get("_template_from_string")
    if type(read) is not staticmethod:  # this torch reads them in another way
        importlib.import_module("torch._inductor.lowering")
        return
    late = functools.partial(_LateTemplate, KernelTemplate._template_from_string)
    KernelTemplate._template_from_string = staticmethod(late)
    try:
        with _late_import("networkx"), _listing_operators_once():
            importlib.import_module("torch._inductor.lowering")
            importlib.import_module("torch._inductor.compile_fx")
    finally:
        KernelTemplate._template_from_string = read


@contextmanager
def _listing_operators_once() -> Iterator[None]:
    """The operators of each namespace are listed once; none is defined inside."""
    from torch._export import utils

    with (
        replaced(utils, "_materialize_cpp_cia_ops", functools.cache),
        replaced(utils, "_collect_all_valid_cia_ops_for_namespace", functools.cache),
    ):
        yield


class _LateModule(types.ModuleType):
    """Stands for a module in those that import it, which comes when something of it is used after that."""

    importing = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.importing:  # for an annotation
            return Any
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def _late_import(name: str) -> Iterator[None]:
    """Modules imported inside do without a module that they import, until they use it."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = late = _LateModule(name)
    try:
        yield
    finally:
        late.importing = False
        if sys.modules.get(name) is late:
            del sys.modules[name]


def codegen_parts() -> types.SimpleNamespace:
    """What of Inductor's C++ code generation ``compile/backend/cpp_codegen/loop_dedup.py`` works with."""
    from torch._inductor import config, metrics
    from torch._inductor.codegen import common, cpp
    from torch._inductor.utils import IndentedBuffer
    from torch._inductor.virtualized import V

    return types.SimpleNamespace(
        V=V,
        Buffer=IndentedBuffer,
        DeferredLine=common.DeferredLine,
        Proxy=cpp.CppKernelProxy,
        metrics=metrics,
        patch=config.patch,
    )


def fake_transposed(fake: torch.Tensor) -> torch.Tensor:
    """The transpose of a fake matrix."""
    with disable_proxy_modes_tracing(), torch.no_grad():
        return fake.t()


KERNEL_FUNCTION = "aoti_torch_sidefx_"
"""What C++ that Inductor writes calls for ``sidefx::product``, ``product_relu``, ``products`` (behind their names
``_narrow`` for bfloat16), ``sum_rows`` and the kernels of :data:`_WHOLE` begins with this."""


def register_kernel_lowerings() -> None:
    """Teaches Inductor ``sidefx::linear``, oneDNN's product of plain operands, transposed ones included, and the native
    module's kernels."""
    from torch._inductor import ir, lowering, mkldnn_ir

    op = torch.ops.sidefx.linear.default
    if op in lowering.lowerings:
        return

    def lower_product(name: str, a: Any, b: Any, bias: Any = None) -> Any:
        inputs = [ir.ExternKernel.realize_input(t) for t in (a, b, bias) if t is not None]
        size = [*inputs[0].get_size()[:-1], inputs[1].get_size()[-1]]
        layout = ir.FixedLayout(a.get_device(), a.get_dtype(), size, ir.FlexibleLayout.contiguous_strides(size))
        narrow = "_narrow" if a.get_dtype() == torch.bfloat16 else ""
        kernel = ir.ExternKernelOut(
            layout=layout,
            inputs=inputs,
            python_kernel_name=f"torch.ops.sidefx.{name}.out",
            cpp_kernel_name=KERNEL_FUNCTION + name + narrow,
            op_overload=getattr(torch.ops.sidefx, name).out,
        )
        return ir.TensorBox.create(kernel)

    for name in ("product", "product_relu", "products"):
        target = getattr(torch.ops.sidefx, name).default
        lowering.register_lowering(target, type_promotion_kind=None)(functools.partial(lower_product, name))

    def lower_rows(index: Any, values: Any, height: int) -> Any:
        inputs = [ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(t)) for t in (index, values)]
        size = [height, values.get_size()[1]]
        layout = ir.FixedLayout(
            values.get_device(), values.get_dtype(), size, ir.FlexibleLayout.contiguous_strides(size)
        )
        kernel = ir.ExternKernelOut(
            layout=layout,
            inputs=inputs,
            python_kernel_name="torch.ops.sidefx.sum_rows.out",
            cpp_kernel_name=KERNEL_FUNCTION + "sum_rows",
            op_overload=torch.ops.sidefx.sum_rows.out,
        )
        return ir.TensorBox.create(kernel)

    lowering.register_lowering(torch.ops.sidefx.sum_rows.default, type_promotion_kind=None)(lower_rows)

    def lower_layer(target: Any, plain: Sequence[int], *given: Any) -> Any:
        args = [ir.ExternKernel.realize_input(each) if isinstance(each, ir.IRNode) else each for each in given]
        for at in plain:
            args[at] = args[at] and ir.ExternKernel.require_contiguous(args[at])
        made = ir.FallbackKernel.create(target, *args)
        return [*map(ir.TensorBox.create, made)] if isinstance(made, (list, tuple)) else ir.TensorBox.create(made)

    made_whole: list[tuple[str, Sequence[int]]] = [("lstm", range(1, 7)), ("lstm_backward", range(1, 7))]  # all but x
    made_whole += [("attention", ()), ("attention_backward", (5,)), ("attention_backward_joined", (5,))]
    for name, plain in made_whole:  # and which of their arguments are taken without gaps
        target = getattr(torch.ops.sidefx, name).default
        lowering.register_lowering(target, type_promotion_kind=None)(functools.partial(lower_layer, target, plain))

    def lower(x: Any, weight: Any, bias: Any) -> Any:
        x, weight = (ir.ExternKernel.realize_input(t) for t in (x, weight))
        inputs: list[Any] = [x, weight]
        constants: list[Any] = ["none", [-1], ""]
        if bias is None:
            constants.insert(0, None)
        else:
            inputs.append(ir.ExternKernel.realize_input(bias))
        size = [x.get_size()[0], weight.get_size()[0]]
        layout = ir.FixedLayout(x.get_device(), x.get_dtype(), size, ir.FlexibleLayout.contiguous_strides(size))
        kernel = mkldnn_ir.LinearUnary(layout=layout, inputs=inputs, constant_args=constants)
        return ir.TensorBox.create(mkldnn_ir._create_output_node(kernel))

    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def call_whole(op: Any) -> None:
    """Has Inductor call an operator that it knows as its parts alone."""
    from torch._inductor import lowering

    if op not in lowering.lowerings:
        constraint = lowering.constrain_to_fx_strides
        lowering.make_fallback(op, layout_constraint=constraint, warn=False, override_decomp=True)


def _call_unlowered(graph: fx.Graph) -> None:
    """Has Inductor call what it has no loops for and was not taken apart.

    It does so of itself, but where the environment says ``CI``, as its own tests and a user's do, it refuses those
    operators that a decomposition is written for somewhere.
    """
    from torch._decomp import get_decompositions
    from torch._inductor import lowering
    from torch._library.utils import get_layout_constraint_tag

    for op in {node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)}:
        if op not in lowering.lowerings and get_decompositions([op]):
            constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))
            lowering.make_fallback(op, layout_constraint=constraint, warn=False, override_decomp=True)


_WHOLE = {
    f"sidefx::{name}": name
    for name in ("lstm", "lstm_backward", "attention", "attention_backward", "attention_backward_joined")
}
"""Operators that make their results and are kernels of the native modules, and their functions' names."""


DISPATCH_FUNCTION = "sidefx_dispatched"
"""What C++ that Inductor writes calls around an operator of ours that is no kernel of torch's C interface."""


def multiplies_narrow() -> bool:
    """True if oneDNN has products in bfloat16 for this processor: it needs AVX-512."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def calls_dispatcher() -> bool:
    """True if C++ that Inductor writes can call operators of ours through torch's dispatcher."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    method = getattr(CppWrapperCpu, "generate_fallback_kernel_with_runtime_lookup", None)
    names = list(inspect.signature(method).parameters) if method is not None else []
    known = ["self", "buf_name", "python_kernel_name", "get_args", "op_overload", "raw_args", "outputs"]
    return names == known and all(
        any(f"{name}(" in text for text in c_interface())
        for name in ("aoti_torch_call_dispatcher", "torch_new_list_reserve_size", "torch_list_push_back")
    )


def _dispatching(before: Callable[..., None]) -> Callable[..., None]:
    """Calls through torch's dispatcher in C++ that needs none of torch's headers, which take seconds to read."""

    def generate(
        wrapper: Any, buf_name: Any, python_kernel_name: Any, get_args: Any, op: Any, raw_args: Any, outputs: Any
    ) -> None:
        kernel = _WHOLE.get(op._schema.name) if isinstance(op, OpOverload) else None
        words = _words(op, list(raw_args)) if kernel is None and isinstance(op, OpOverload) else None
        if words is None and kernel is None:
            before(wrapper, buf_name, python_kernel_name, get_args, op, raw_args, outputs)
            return
        made = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        names = [None if each is None else each.get_name() for each in made]
        lines = [f"RAIIAtenTensorHandle {name};" for name in names if name is not None]
        if words is None:
            given = ", ".join(["stack", *map(_plain_word, raw_args)])
            lines += ["{", f"    AtenTensorHandle stack[{len(op._schema.returns)}];"]
            lines.append(f"    {KERNEL_FUNCTION}{kernel}({given});")
        else:
            words += ["0"] * (len(op._schema.returns) - len(words))
            lines += ["{", f"    uint64_t stack[] = {{{', '.join(words)}}};"]
            lines.append(f'    {DISPATCH_FUNCTION}("{op._schema.name}", "{op._schema.overload_name}", stack);')
        for i, name in enumerate(names):
            taken = f"RAIIAtenTensorHandle(reinterpret_cast<AtenTensorHandle>(stack[{i}]));"
            lines.append(f"    {taken}" if name is None else f"    {name} = {taken}")
        wrapper.writelines([*lines, "}"])

    return generate


def _plain_word(value: Any) -> str:
    """A tensor, none, or a number, as a function of C++ takes it."""
    if value is None:
        return "nullptr"
    if hasattr(value, "codegen_reference"):
        return str(value.codegen_reference())
    return repr(value) if isinstance(value, float) else str(int(value))


def _words(op: Any, given: list[Any]) -> list[str] | None:
    """An operator's arguments as the dispatcher's C interface takes them; ``None`` if it does not take them.

    The dispatcher owns all that it is given: handles of tensors, lists, and the memory of what is optional.
    """
    if any(str(result.type) != "Tensor" for result in op._schema.returns):
        return None
    for argument in op._schema.arguments[len(given) :]:
        if not argument.has_default_value():
            return None
        given.append(argument.default_value)
    words = [_word(str(a.type), value) for a, value in zip(op._schema.arguments, given, strict=True)]
    return None if any(word is None for word in words) else [word for word in words if word is not None]


def _word(kind: str, value: Any) -> str | None:
    whole = re.fullmatch(r"(Optional|List)\[(.*)\]", kind)
    if whole is not None and whole[1] == "Optional":
        word = None if value is None else _word(whole[2], value)
        return "0" if value is None else word and f"sidefx_optional({word})"
    if whole is not None:
        items = [_word(whole[2], item) for item in value] if isinstance(value, (list, tuple)) else [None]
        return None if None in items else f"sidefx_list({', '.join(map(str, items))})"
    if kind == "Tensor":
        return f"sidefx_tensor({value.codegen_reference()})" if hasattr(value, "codegen_reference") else None
    if kind in ("bool", "int"):
        return f"(uint64_t){int(value)}LL" if isinstance(value, (int, sympy.Integer)) else None
    if kind == "float" and isinstance(value, (int, float)):
        return f"{int.from_bytes(struct.pack('=d', value), sys.byteorder)}ULL"  # its bits
    return None


@contextmanager
def inductor_lowering(
    fake_mode: FakeTensorMode, generating: Callable[[Callable[..., None]], Callable[..., None]] = lambda before: before
) -> Iterator[None]:
    """Around :func:`inductor_passes` and :func:`inductor_compile`.

    Args:
        fake_mode: of the graph's values.
        generating: gives what stands in for the method that generates a C++ loop.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.virtualized import V

    with (
        V.set_fake_mode(fake_mode),
        tracing(TracingContext(fake_mode)),
        torch.no_grad(),
        quick_codegen(),
        right_results(),
        checked_codegen(),
        recursion_limit_kept(),
        replaced(codegen_parts().Proxy, "codegen_nodes", generating),
    ):
        yield


def late_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A module whose code is written only if somebody reads or runs it."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def inductor_passes(module: fx.GraphModule, finds_attention: bool = True) -> fx.GraphModule:
    """A functional graph after Inductor's joint-graph passes.

    Args:
        module: the graph; it stays as it is.
        finds_attention: there may be attention in it that is written out; false saves the time to look for it.
    """
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._inductor import compile_fx

    module = late_module(module, fx_graph_cse(module.graph))
    with nullcontext() if finds_attention or not enabled("idle_patterns") else without_idle_patterns(module):
        return cast(fx.GraphModule, compile_fx._recursive_joint_graph_passes(module))


def inductor_compile(module: fx.GraphModule, example_inputs: list[Any], static: list[int]) -> tuple[Any, str]:
    """Lowers what :func:`inductor_passes` gives.

    Args:
        module: the graph.
        example_inputs: its inputs, fake ones.
        static: positions of inputs that stay where they are in memory.

    Returns:
        A callable that takes one list of real inputs, and the generated code.
    """
    from torch._inductor import compile_fx

    _call_unlowered(module.graph)
    output = next(iter(reversed(module.graph.nodes)))
    compile_fx.record_original_output_strides(module)
    output.meta["user_visible_output_idxs"] = [i for i, node in enumerate(output.args[0]) if isinstance(node, fx.Node)]
    compiled = compile_fx.compile_fx_inner(
        module,
        example_inputs,
        static_input_idxs=static,
        is_inference=True,
        cpp_wrapper=compile_fx.config.cpp_wrapper,
    )
    code = getattr(compiled, "source_code", "")
    return getattr(compiled, "current_callable", None) or compiled, code


@contextmanager
def numbering_kernels(graph: int) -> Iterator[None]:
    """Kernels of graphs that are lowered inside have different names, those of graphs of other numbers included."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    numbers = itertools.count()
    number = lambda before: lambda wrapper: f"{graph}_{next(numbers)}"  # noqa: E731
    with replaced(PythonWrapperCodegen, "next_kernel_suffix", number):
        yield


@contextmanager
def lowering_notes() -> Iterator[list[str]]:
    """What Inductor warns of while it lowers, as notes for the report, complete at the end."""
    from torch._inductor import lowering

    dispatched: dict[str, None] = {}
    complex_numbers: dict[str, None] = {}

    def keep(record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("%s is missing a c-shim implementation"):
            return True
        dispatched.update(dict.fromkeys(map(str, record.args or ())))
        return False

    def note_complex(before: Callable[[], None]) -> Callable[[], None]:
        return lambda: complex_numbers.update(
            {"complex numbers are in no loops: each operator on them is a call": None}
        )

    logger = logging.getLogger("torch._inductor.ir")
    logger.filters.insert(0, keep)  # before one that is around this
    notes: list[str] = []
    try:
        with replaced(lowering, "_warn_complex_not_supported", note_complex):
            yield notes
    finally:
        logger.removeFilter(keep)
        notes.extend(complex_numbers)
        if dispatched:
            notes.append(f"called through torch's dispatcher: {', '.join(dispatched)}")


@contextmanager
def building_cpp(
    build: Callable[[str, str, int, list[str]], Callable[[list[Any]], list[Any]]], add: Callable[[str], None]
) -> Iterator[None]:
    """What Inductor writes in C++ for a whole CPU graph is built by ``build`` instead of by its own builder.

    Args:
        build: ``build(caller, kernels, outputs, libraries)`` gets the source of ``inductor_entry_impl``, that of the
            kernels it calls (empty if it is in the first), the number of outputs, and libraries to link. It returns a
            function from the capsules of the inputs to those of the outputs.
        add: is told the source of each kernel in C++ when it has been written, before all that.
    """
    from torch._inductor.codecache import CppWrapperCodeCache
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    def telling(before: Callable[..., Any]) -> Callable[..., Any]:
        def define_kernel(wrapper: Any, name: str, body: str, *rest: Any, **more: Any) -> Any:
            add(body)
            return before(wrapper, name, body, *rest, **more)

        return define_kernel

    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    operators = "generate_fallback_kernel_with_runtime_lookup"
    calling = replaced(CppWrapperCpu, operators, _dispatching) if calls_dispatcher() else nullcontext()
    name = "load_pybinding"
    before = CppWrapperCodeCache.__dict__.get(name)
    others = CppWrapperCodeCache.load_pybinding

    def load(argtypes: Sequence[str], main_code: str, device_type: str = "cpu", **given: Any) -> Any:
        if device_type != "cpu":
            return others(argtypes, main_code, device_type, **given)
        return build(
            main_code, given.get("kernel_code") or "", given.get("num_outputs", -1), list(given.get("extra_flags", ()))
        )

    setattr(CppWrapperCodeCache, name, staticmethod(load))
    try:
        with replaced(PythonWrapperCodegen, "define_kernel", telling), calling:
            yield
    finally:
        if before is None:
            delattr(CppWrapperCodeCache, name)
        else:
            setattr(CppWrapperCodeCache, name, before)


@contextmanager
def _without_setuptools() -> Iterator[None]:
    """Where torch's headers are is known without the module that says so, which imports ``setuptools``."""
    name = "torch.utils.cpp_extension"
    if name in sys.modules:
        yield
        return
    root = os.path.dirname(torch.__file__)
    headers, libraries = os.path.join(root, "include"), os.path.join(root, "lib")
    both = [headers, os.path.join(headers, "torch", "csrc", "api", "include")]

    def include_paths(device_type: str = "cpu", torch_include_dirs: bool = True) -> list[str]:
        return list(both) if torch_include_dirs else []

    def library_paths(device_type: str = "cpu", torch_include_dirs: bool = True, **_: Any) -> list[str]:
        return [libraries] if torch_include_dirs else []

    known = types.ModuleType(name)
    vars(known).update(TORCH_LIB_PATH=libraries, include_paths=include_paths, library_paths=library_paths)
    sys.modules[name] = known
    try:
        yield
    finally:
        if sys.modules.get(name) is known:
            del sys.modules[name]


def cpp_command(quick: bool) -> list[str]:
    """The compiler and its flags for C++ that Inductor generates for the CPU, without files.

    Args:
        quick: little optimisation, for code that only calls kernels.
    """
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with _without_setuptools():
        options = CppTorchDeviceOptions(
            vec_isa=pick_vec_isa(), device_type="cpu", compile_only=True, min_optimize=quick
        )
        builder = CppBuilder(name="output", sources="source.cpp", BuildOption=options)
        words = shlex.split(builder.get_command_line())
    places = [i for i, word in enumerate(words) if word.endswith("source.cpp")]
    places += [i + j for i, word in enumerate(words) if word == "-o" for j in (0, 1)]
    places += [
        i for i, word in enumerate(words) if word in ("-c", "-Wall", "-pedantic") or word.startswith(("-l", "-g1"))
    ]
    return [word for i, word in enumerate(words) if i not in places]


def cpp_link_flags() -> list[str]:
    """Libraries that C++ generated by Inductor needs."""
    root = os.path.dirname(torch.__file__)
    return [f"-L{root}/lib", "-ltorch", "-ltorch_cpu", "-ltorch_python"]


C_INTERFACE_LIBRARY = "torch_cpu"
"""What holds torch's C interface, and the vector functions that kernels call."""


def cpp_compiler() -> str:
    """The compiler that Inductor uses."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def precompiles_headers() -> bool:
    """Whether Inductor is to precompile headers."""
    from torch._inductor import config

    return bool(config.cpp_cache_precompile_headers)


def torch_build() -> str:
    """Which torch this is, source revision included."""
    return f"{torch.__version__} {torch.version.git_version}"


def storage_identity(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, fake ones included, while both live."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


WRAPPER_HEADER = "torch/csrc/inductor/cpp_wrapper/cpu.h"
KERNEL_HEADER = "torch/csrc/inductor/cpp_prefix.h"
C_TYPES_HEADER = "torch/csrc/inductor/aoti_torch/c/macros.h"
LISTS_HEADER = "torch/csrc/stable/c/shim.h"
"""Lists for the dispatcher's C interface."""


def c_interface() -> list[str]:
    """Texts of the headers that declare what C++ generated for the CPU may call."""
    include = os.path.join(os.path.dirname(torch.__file__), "include")
    interface = "torch/csrc/inductor/aoti_torch"
    names = ("c/shim.h", "c/shim_cpu.h", "generated/c_shim_cpu.h", "generated/c_shim_aten.h")
    texts = []
    for name in (*(f"{interface}/{name}" for name in names), LISTS_HEADER):
        path = os.path.join(include, name)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                texts.append(file.read())
    return texts


_VECTOR_FLAGS = (
    *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mavx512vnni"),
    "-mavx512bf16",
)
"""Flags of the sets of instructions that Inductor asks for; a compiler is asked for all of them at once."""


@contextmanager
def quick_vector_probes(accepts: Callable[[Sequence[str]], bool]) -> Iterator[None]:
    """Which vector instructions Inductor may use is decided by the CPU's own word and the compiler's flags.

    Inductor compiles and loads a program for each set of instructions, which takes seconds; it does so only for those
    that the CPU has by its own word.

    Args:
        accepts: true if the compiler accepts flags.
    """
    from torch._inductor import cpu_vec_isa

    before = cpu_vec_isa.VecISA.check_build

    def check(isa: Any, code: str) -> bool:
        flags = tuple(isa.build_arch_flags().split())
        return (set(flags) <= set(_VECTOR_FLAGS) and accepts(_VECTOR_FLAGS)) or accepts(flags)

    cpu_vec_isa.VecISA.check_build = check
    try:
        yield
    finally:
        cpu_vec_isa.VecISA.check_build = before


def call_aoti(entry: Callable[[list[Any]], list[Any]], numbers: Sequence[int] = ()) -> Callable[[list[Any]], list[Any]]:
    """A function of one list of inputs (emptied by the call) around one over capsules of tensors.

    Args:
        entry: the function in a library.
        numbers: positions of inputs that are Python numbers.
    """
    to_handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
    from_handles = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs

    def call(args: list[Any]) -> list[Any]:
        for i in numbers:
            args[i] = torch.tensor(args[i], device="cpu")
        handles = to_handles(args)
        args.clear()
        return from_handles(entry(handles))  # type: ignore[no-any-return]

    return call


def allocations(run: Callable[[], Any]) -> list[int]:
    """Bytes of CPU tensor memory allocated (positive) and freed (negative) by a call, in order."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def inductor_settings() -> str:
    """Inductor's settings as text, those changed by the user included."""
    from torch._inductor import config

    return repr(sorted(config.save_config_portable().items(), key=lambda item: item[0]))


def rounds(relation: Any) -> bool:
    """True for a comparison of what is computed from symbolic floats."""
    sides = [side for side in relation.args if not side.is_Atom and not side.is_integer]
    return any(symbol_is_type(symbol, SymT.FLOAT) for side in sides for symbol in side.free_symbols)


def cut_off(expression: Any) -> list[Any]:
    """What is computed from symbolic floats and made an integer within a sympy expression (``int``, ``round``)."""
    made = (part for part in sympy.preorder_traversal(expression) if part.func.__name__ in _INTEGER_OF)
    inner = (part.args[0] for part in made if not part.args[0].is_Atom)
    return [part for part in inner if any(symbol_is_type(symbol, SymT.FLOAT) for symbol in part.free_symbols)]


_INTEGER_OF = frozenset({"TruncToInt", "FloorToInt", "CeilToInt", "RoundToInt"})


def terms_of(expression: Any) -> tuple[Any, ...]:
    """What is added up in a sympy expression."""
    return tuple(expression.args) if expression.is_Add else (expression,)


def python_source(expression: Any) -> str:
    """A symbolic condition as a Python expression over the names of its symbols, ``math`` and ``torch``."""
    from torch.utils._sympy.printers import PythonPrinter

    class Printer(PythonPrinter):
        def _print_OpaqueUnaryFn_exp(self, expr: Any) -> str:
            return f"math.exp({self._print(expr.args[0])})"

        def _print_OpaqueUnaryFn_log(self, expr: Any) -> str:
            return f"math.log({self._print(expr.args[0])})"

        def _print_IntInfinity(self, expr: Any) -> str:
            return "math.inf"

        def _print_NegativeIntInfinity(self, expr: Any) -> str:
            return "(-math.inf)"

        def _print_ComplexInfinity(self, expr: Any) -> str:
            return "math.nan"  # of no sign: the condition does not hold

        def _print_NumberSymbol(self, expr: Any) -> str:
            return repr(float(expr))  # pi, e

    return Printer().doprint(expression)


@contextmanager
def real_world() -> Iterator[None]:
    """Tensor operations inside run on real tensors and are not recorded, also in the middle of a capture."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with disable_proxy_modes_tracing(), unset_fake_temporarily():
        yield


def assumes_constant(fn: Any) -> bool:
    """True for what ``torch.compiler.assume_constant_result`` was called with."""
    return bool(getattr(fn, "_dynamo_marked_constant", False))


def symbol_of_input(number: Any) -> Any:
    """The symbol that a symbolic input was created with, whatever is known of it by now."""
    return number.node._expr


def hint_of(number: Any) -> Any:
    """The value that a symbolic number has during the capture; reading it adds no condition."""
    return number.node.hint


UNHASHABLE_NUMBER = ("unhashable type: non-nested SymInt",)
"""Arguments of the TypeError that hashing a symbolic integer raises."""

# --- hooks -------------------------------------------------------------------------------------------------------


def gradient_reducer() -> type | None:
    """The class in C++ that reduces gradients between processes, where this torch has it."""
    return getattr(torch.distributed, "Reducer", None)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if something is called before or after an optimizer's ``step``."""
    found = optimizer_module._global_optimizer_pre_hooks or optimizer_module._global_optimizer_post_hooks
    return bool(found or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def tensor_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """A copy of a tensor's backward hooks."""
    return dict(tensor._backward_hooks or {})


def set_tensor_hooks(tensor: torch.Tensor, hooks: dict[int, Any]) -> None:
    """Makes ``hooks`` the hooks of a tensor that has had some; their handles go on working."""
    if tensor._backward_hooks is not None:
        tensor._backward_hooks.clear()
        tensor._backward_hooks.update(hooks)


def module_tagging() -> Any:
    """What ``torch.compile``, once used, calls for every module that is made, to know new ones; ``None`` before."""
    tracker = getattr(sys.modules.get("torch._dynamo.mutation_guard"), "GenerationTracker", None)
    return None if tracker is None else tracker.tag.__func__
