"""Records operations in an FX graph: proxy tracer, dispatch mode, subgraphs of higher-order operators."""

from __future__ import annotations

import linecache
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx import traceback as fx_traceback
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode as ProxyTorchDispatchMode
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    _enable_thunkify,
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_slot,
    snapshot_fake,
    track_tensor_tree,
)
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sidefx_train.torch_compat.op_overloads import READS, HigherOrderOperator
from sidefx_train.torch_compat.tensors import storage_id

_SOURCES_KEPT = 128


def forget_old_sources() -> None:
    """Drops the source of old graphs: ``torch.fx`` keeps that of each forever, for tracebacks."""
    sources = fx.graph_module._loader.eval_cache
    for key in list(sources)[: max(0, len(sources) - _SOURCES_KEPT)]:
        del sources[key]
        linecache.cache.pop(key, None)


def new_proxy_tracer() -> PythonKeyTracer:
    """Returns a tracer with an empty graph, to be driven by a proxy mode."""
    tracer = PythonKeyTracer()  # not a subclass: higher-order operators check for this very class
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
"""Types of arguments that a graph contains unchanged."""

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
    """Returns True for an operator for which torch's recorder only makes a node, whatever the arguments."""
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    return (
        isinstance(op, torch._ops.OpOverload)
        and op.namespace in ("aten", "prims")
        and op not in _NOT_PLAIN
        and _TAGS.isdisjoint(op.tags)
        and not op._schema.is_mutable
        and implicit not in op.py_kernels
        and torch._C._dispatch_has_kernel(op.name())  # not one of TorchScript's, such as ``aten::size``
        and not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), implicit)
    )


class _OtherValue(Exception):
    """An argument is not a plain value."""


def _known_values_of(mode: FakeTensorMode) -> dict[Any, Any]:
    """Returns the results of operators by their arguments' metadata; they live as long as the mode."""
    return vars(mode).setdefault("_sidefx_known", {})  # type: ignore[no-any-return]


def _has_numbers(fake: FakeTensor) -> bool:
    """Returns True for a strided fake tensor whose sizes, strides and offset are plain numbers."""
    if fake.layout is not torch.strided:
        return False
    return all(type(n) is int for n in (*fake.shape, *fake.stride(), fake.storage_offset()))


def _metadata_key(value: Any) -> Any:
    """Returns a key that is equal for values from which an operator makes results with the same metadata."""
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


def _is_transient(made: Any, mode: FakeTensorMode) -> bool:
    """Returns True for a fake determined by sizes, strides, dtype and device, with storage of its own."""
    if type(made) is not FakeTensor or made.fake_mode is not mode or not _has_numbers(made):
        return False
    if made.constant is not None or made.requires_grad or made.is_conj() or made.is_neg() or made.storage_offset():
        return False
    again = _new_fake(mode, made.shape, made.stride(), made.dtype, made.fake_device)
    same_memory = again.untyped_storage().nbytes() == made.untyped_storage().nbytes()
    return same_memory and torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(made)


def _new_fake(mode: FakeTensorMode, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> FakeTensor:
    with in_kernel_invocation_manager(mode):
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, empty, device)


class RecordingMode(ProxyTorchDispatchMode):
    """Records operations like torch's own mode, without per-call checks that rarely apply.

    A call of a plain operator on fake tensors is a node; its result is reused if one with the same metadata was made
    before and is not a view. torch handles all other calls.
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
        if plain and func not in self._constant_parts() and not self._notes_more():
            try:
                nodes = tuple(map(self._node_of, args))
                named = {name: self._node_of(value) for name, value in (kwargs or {}).items()}
            except _OtherValue:
                pass
            else:
                return self._record(func, nodes, named, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _constant_parts(self) -> Any:
        """Operators with a decomposition: the mode's own table, before torch 2.12 the module's."""
        own = getattr(self, "decomposition_table", None)
        return getattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", ()) if own is None else own

    def _notes_more(self) -> bool:
        """True if nodes need more metadata than a call."""
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
            return _new_fake(mode, *known[key])
        with _enable_thunkify(self.tracer):
            made = func(*args, **kwargs)
        if (
            key is not None
            and not func.is_view
            and _is_transient(made, mode)
            and not _shares_memory(made, args, kwargs)
        ):
            known[key] = (made.shape, made.stride(), made.dtype, made.fake_device)
        return made


def _call_key(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Returns a key that is equal for calls whose results have the same metadata; ``None`` if that is unknown."""
    if type(mode) is not FakeTensorMode or not mode.cache_enabled or mode.cache_crosscheck_enabled:
        return None
    around = func, torch.get_default_dtype(), torch.is_inference_mode_enabled()
    try:
        named = tuple((name, _metadata_key(value)) for name, value in kwargs.items())
        return *around, tuple(map(_metadata_key, args)), named
    except _OtherValue:
        return None


def _shares_memory(made: Any, args: Any, kwargs: Any) -> bool:
    """Returns True for an alias of an argument, and for a value that is not a tensor."""
    if not isinstance(made, torch.Tensor):
        return True
    given = (value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor))
    return any(storage_id(value) == storage_id(made) for value in given)


@contextmanager
def no_recording() -> Iterator[None]:
    """Context whose tensor operations are not recorded."""
    with disable_proxy_modes_tracing():
        yield


def track(value: Any, proxy: fx.Proxy, tracer: PythonKeyTracer) -> None:
    """Sets the proxy that computes ``value`` (a fake tensor or a symbolic number)."""
    track_tensor_tree(value, proxy, constant=None, tracer=tracer)


def record_higher_order(mode: ProxyTorchDispatchMode, op: Any, args: Any, kwargs: Any) -> Any:
    """Records a higher-order operator (``cond``) by its own proxy rule."""
    return op.python_key_table[ProxyTorchDispatchMode](mode, *args, **kwargs)


@contextmanager
def tracing_subgraphs(fake_mode: FakeTensorMode, tracer: PythonKeyTracer, decompositions: Any = None) -> Iterator[None]:
    """Context in which higher-order operators (``cond``) trace their functions for the graph of ``tracer``."""
    from torch.fx.experimental.proxy_tensor import _MakefxTracer, _set_make_fx_tracer

    maker = _MakefxTracer(decompositions, "symbolic", True, False, False, False, True)
    maker.fake_tensor_mode, maker.fx_tracer = fake_mode, tracer
    with _set_make_fx_tracer(maker):
        yield


def tracked_tensors(tracer: PythonKeyTracer) -> dict[fx.Node, torch.Tensor]:
    """Returns the fake tensors by the node that computes them."""
    return {held.proxy.node: fake for fake, held in tracer.tensor_tracker.items()}


def tracked_pairs(tracer: PythonKeyTracer) -> list[tuple[fx.Node, torch.Tensor]]:
    """Returns the live fake tensors with the node that computes each; several may have one node."""
    return [(held.proxy.node, fake) for fake, held in tracer.tensor_tracker.items()]


class _WrittenComplex(complex):
    """A complex argument whose Python literal has another value: ``-0j``, ``nan+0j``."""

    def __repr__(self) -> str:
        return f"complex(float('{self.real}'), float('{self.imag}'))"


class _WrittenInt(int):
    """A negative base of a power: ``-7 ** x`` is ``-(7 ** x)``."""

    def __repr__(self) -> str:
        return f"({int(self)})"


class _WrittenFloat(float):
    """The same."""

    def __repr__(self) -> str:
        return f"({float(self)})"


def _as_written(value: Any) -> Any:
    if type(value) is int or type(value) is float:
        return value if value > 0 else _WrittenInt(value) if type(value) is int else _WrittenFloat(value)
    if type(value) is not complex:
        return value
    exact = all(math.isfinite(part) and (part or math.copysign(1, part) > 0) for part in (value.real, value.imag))
    return value if exact else _WrittenComplex(value)


def _inexact_nodes(nodes: Any) -> list[fx.Node]:
    """Returns the nodes with a complex number among their arguments, and powers of negative numbers."""
    found = []
    for node in nodes:
        given: list[Any] = []
        fx.node.map_aggregate((node.args, node.kwargs), given.append)
        is_power = node.target is operator.pow and type(node.args[0]) in (int, float)
        if is_power or complex in map(type, given):
            found.append(node)
    return found


class _ExactCode(fx.CodeGen):
    """Writes arguments so that their code has their value.

    Upstream: arguments are written by ``repr``. A complex literal has no negative zero part and no infinity, and a
    minus binds less tightly than a power. Seen in torch 2.13.
    """

    def _gen_python_code(self, nodes: Any, *args: Any, **kwargs: Any) -> Any:
        before = {node: (node.args, node.kwargs) for node in _inexact_nodes(nodes)}
        for node in before:
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _as_written)
        try:
            return super()._gen_python_code(nodes, *args, **kwargs)
        finally:
            for node, (given, named) in before.items():
                node.args, node.kwargs = given, named


def late_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """Returns a module whose code is generated only when it is read or run."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, _with_exact_code(graph))


def graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """Returns a module whose code is generated now."""
    return fx.GraphModule(root, _with_exact_code(graph))


def _with_exact_code(graph: fx.Graph) -> fx.Graph:
    if _inexact_nodes(graph.nodes):
        graph.set_codegen(_ExactCode())
    return graph


class Watch(TorchDispatchMode):
    """Notices operations that are not in :data:`READS`, between :meth:`begin` and :meth:`end`.

    Args:
        on_computing: called by :meth:`end` if there was one.
    """

    def __init__(self, on_computing: Callable[[], None]) -> None:
        super().__init__()
        self._on_computing, self._computes = on_computing, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in READS:
            self._computes = True
        return func(*args, **(kwargs or {}))

    def begin(self) -> None:
        torch._C._push_on_torch_dispatch_stack(self)

    def end(self) -> None:
        """Ends the watch; modes that the program has entered since stay."""
        above = []
        while (mode := torch._C._pop_torch_dispatch_stack(None)) is not self:
            above.append(mode)
        for mode in reversed(above):
            torch._C._push_on_torch_dispatch_stack(mode)
        if self._computes:
            self._on_computing()


def watched(fn: Callable[[], Any], on_computing: Callable[[], None]) -> Any:
    """Returns ``fn()``; calls ``on_computing`` after it if it ran an operation that is not in :data:`READS`."""
    watch = Watch(on_computing)
    watch.begin()
    try:
        return fn()
    finally:
        watch.end()
