"""Loop deduplication: loops that differ only in the names of their buffers are generated once.

The layers of a network repeat each other, and so do Inductor's loops: the same operations on the same indices. Inductor
decides some things for every loop (in-place writes, local buffers, names of arguments); this module repeats these
decisions from the loop's reads and writes. If the result is the same as for an earlier loop, that loop's code is reused
with other names.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sidefx_train import torch_compat as compat

_ELSEWHERE = frozenset(
    (
        "load_seed",
        "rand",
        "randn",
        "randint64",
        "bucketize",
        "scan",
        "sort",
        "device_assert_async",
        "partial_accumulate",
    )
)
"""Operations that read more than their operands."""

_ACCESSES = ("load", "store", "store_reduction")

_SMALL = (torch.bfloat16, torch.float16)
"""dtypes for which Inductor changes the operations before it generates code."""

_OUTSIDE = ("args", "kernel_group")
"""Attributes of the loop generator that it shares with others."""


@dataclass(frozen=True)
class _Generated:
    """Code generated for a loop.

    Attributes:
        state: state of the generator.
        names: its buffers, in order of use in the loop.
    """

    state: dict[str, Any]
    names: tuple[str, ...]


class LoopDedup:
    """Deduplicates loops of Inductor's C++ generator during one lowering."""

    def __init__(self) -> None:
        self._parts = compat.codegen_parts()
        self._known: dict[Any, _Generated] = {}
        self.reused = 0

    def generating(self, before: Callable[..., None]) -> Callable[..., None]:
        """Wraps Inductor's method that generates the loop of some nodes."""

        def codegen_nodes(proxy: Any, nodes: Sequence[Any]) -> None:
            graph = self._parts.V.graph
            if type(proxy) is not self._parts.Proxy or not all(_is_plain(node, graph) for node in nodes):
                before(proxy, nodes)
                return
            use = _Use(self._parts, proxy, nodes)
            known = self._known.get(use.key)
            if known is not None:
                vars(proxy).update(self._copied(known.state, known.names, tuple(use.names), proxy))
                self.reused += 1
                return
            with self._parts.patch(inplace_buffers=False):  # already decided, as in each of Inductor's later passes
                before(proxy, nodes)
            state = {name: value for name, value in vars(proxy).items() if name not in _OUTSIDE}
            names = tuple(use.names)
            if use.still_holds() and self._may_be_reused(state, names):
                self._known[use.key] = _Generated(self._copied(state, names, names, None), names)

        return codegen_nodes

    def _may_be_reused(self, state: dict[str, Any], names: Sequence[str]) -> bool:
        """Returns True if code names buffers only in conditions of lines."""
        named = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
        deferred, lines = self._parts.DeferredLine, self._lines(state)
        return all(
            not named.search(line.line) and line.name in names if type(line) is deferred else _is_text(line, named)
            for line in lines
        )

    def _lines(self, state: dict[str, Any]) -> Iterator[Any]:
        for value in (*state.values(), *(v for kernel in state["kernels"] for v in vars(kernel).values())):
            if isinstance(value, self._parts.Buffer):
                yield from value._lines

    def _copied(self, state: dict[str, Any], old: Sequence[str], new: Sequence[str], proxy: Any) -> dict[str, Any]:
        """Copies the state of a generator, for other buffers."""
        names = dict(zip(old, new, strict=True))
        made: dict[str, Any] = {name: self._renamed(value, names) for name, value in state.items()}
        kernels: dict[int, Any] = {}
        for kernel in state["kernels"]:
            if id(kernel) not in kernels:
                kernels[id(kernel)] = renamed = copy.copy(kernel)
                for name, value in vars(kernel).items():
                    if isinstance(value, self._parts.Buffer):
                        setattr(renamed, name, self._renamed(value, names))
                renamed.args = getattr(proxy, "args", None)
        made["kernels"] = [kernels[id(kernel)] for kernel in state["kernels"]]
        made["loop_nest"] = nest = copy.copy(state["loop_nest"])
        nest.loops = None if nest.loops is None else [copy.copy(loop) for loop in nest.loops]
        nest.kernel = proxy
        return made

    def _renamed(self, value: Any, names: dict[str, str]) -> Any:
        if not isinstance(value, self._parts.Buffer):
            return value
        deferred, renamed = self._parts.DeferredLine, copy.copy(value)
        renamed._lines = [
            deferred(names[line.name], line.line) if type(line) is deferred else line for line in value._lines
        ]
        return renamed


def _is_text(line: Any, named: re.Pattern[str]) -> bool:
    return isinstance(line, str) and named.search(line) is None


def _is_plain(node: Any, graph: Any) -> bool:
    """Returns True if a node's code depends only on its operations, their indices, and its reads and writes."""
    body = getattr(node, "_body", None)
    if body is None or getattr(body, "has_partial_accumulate", False):
        return False
    known = {*body.var_ranges, *body.indirect_vars}
    if not all(number.is_Integer for number in body.var_ranges.values()):
        return False
    if not all(expression.free_symbols <= known for expression in body.indexing_exprs.values()):
        return False
    for name, submodule in body.submodules.items():
        if name != "get_index" and not hasattr(getattr(submodule, "clone", None), "keywords"):
            return False
    for block in (body.root_block, *body.subblocks.values()):
        for each in block.graph.nodes:
            if each.op == "call_method" and each.target in _ELSEWHERE:
                return False
            if each.op == "call_module" and str(each.target).startswith("scan"):
                return False
            if each.op not in ("call_method", "call_module", "placeholder", "output", "call_function"):
                return False
            if each.op == "call_method" and each.target in _ACCESSES and graph.get_dtype(each.args[1]) in _SMALL:
                return False
    return True


class _Use:
    """Traverses the reads and writes of nodes like a kernel, with the same effects on the surrounding state.

    Attributes:
        names: buffers in order of use.
        key: determines the code generated for the nodes.
    """

    def __init__(self, parts: Any, proxy: Any, nodes: Sequence[Any]) -> None:
        self._graph, context = parts.V.graph, parts.V.local_buffer_context
        self._local = getattr(context, "global_to_local", None) or {}
        self.names: dict[str, int] = {}
        self._stored: set[str] = set()
        self._args = proxy.kernel_group.args
        with proxy.kernel_group.new_kernel(proxy.kernel_cls) as self._kernel:
            parts.metrics.generated_kernel_count -= 1
            visited = []
            for node in nodes:
                node.decide_inplace_update()
                node.mark_run()
                self._node = node
                visited.append((node.group[1], self._body(node._body)))
        self._graph.removed_buffers |= self._kernel.removed_buffers
        self._graph.inplaced_to_remove |= self._kernel.inplaced_to_remove
        buffers = tuple((self._graph.get_dtype(name), self._status(name)) for name in self.names)
        local = tuple(sorted({(each.get_name(), str(each.get_layout())) for each in self._local.values()}))
        self.key = (tuple(visited), buffers, local, proxy.num_threads)
        self._left = self._arguments()

    def still_holds(self) -> bool:
        """Returns True if the generator has requested no other arguments."""
        return self._left == self._arguments()

    def _arguments(self) -> Any:
        args = self._args
        return [dict(table) for table in (args.input_buffers, args.output_buffers, args.inplace_buffers, args.sizevars)]

    def _status(self, name: str) -> Any:
        removed = name in self._graph.removed_buffers or name in self._graph.inplaced_to_remove
        local = self._local.get(name)
        real = self._graph.scheduler.mutation_real_name.get(name, name)
        return removed, None if local is None else local.get_name(), str(self._args.arg_name(real))

    def _number(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def _body(self, body: Any) -> Any:
        bound = tuple(
            (name, _as_key(submodule.clone.keywords))
            for name, submodule in body.submodules.items()
            if name != "get_index"
        )
        ranges = (tuple(body.var_ranges.items()), tuple(body.iter_vars), tuple(body.reduce_vars))
        indirect = (tuple(body.indirect_vars), tuple(body.indirect_var_ranges.items()))
        return ranges, indirect, tuple(body.indexing_exprs.items()), bound, self._block(body, body.root_block)

    def _block(self, body: Any, block: Any) -> Any:
        order: dict[Any, int] = {}
        lines = []
        for each in block.graph.nodes:
            order[each] = len(order)
            args, inside = list(each.args), None
            if each.op == "call_method" and each.target in _ACCESSES:
                args[1] = getattr(self, f"_{each.target}")(*each.args[1:], **each.kwargs)
            elif each.op == "call_module" and each.target in body.subblocks:
                inside = self._block(body, body.subblocks[each.target])
            lines.append((each.op, str(each.target), _as_key(args, order), _as_key(each.kwargs, order), inside))
        return tuple(lines)

    def _load(self, name: str, *_: Any) -> Any:
        number, local = self._number(name), self._localized(name)
        if local in self._stored:
            return number, None
        if local != name:
            return number, local
        return number, self._args.input(name)

    def _store(self, name: str, index: Any, value: Any, mode: Any = None) -> Any:
        return self._write(name, mode != "atomic_add")

    def _store_reduction(self, name: str, *_: Any) -> Any:
        return self._write(name, True)

    def _write(self, name: str, plain: bool) -> Any:
        number, local = self._number(name), self._localized(name)
        if local != name:
            self._stored.add(local)
            return number, local
        self._kernel.store_buffer_names.add(name)
        mutated: list[int] = []
        if plain:
            self._stored.add(name)
            if name in self._graph.name_to_buffer:
                others = self._node.get_output(name).get_mutations()
                self._stored.update(others)
                mutated = [self._number(other) for other in others]
        written = self._args.output(name) if name not in self._graph.removed_buffers else None
        return number, written, tuple(mutated)

    def _localized(self, name: str) -> str:
        return self._local[name].get_name() if name in self._local else name


def _as_key(value: Any, order: dict[Any, int] | None = None) -> Any:
    """Converts a value to a key that distinguishes what Python's equality does not."""
    if isinstance(value, torch.fx.Node):
        return "%", (order or {})[value]
    if isinstance(value, (list, tuple)):
        return tuple([_as_key(item, order) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _as_key(item, order)) for name, item in value.items()])
    return type(value), repr(value) if isinstance(value, float) else value
