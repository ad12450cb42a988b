"""Checks a graph's invariants after every pass, if ``SIDEFX_CHECK_GRAPHS`` is set, as in some tests.

- Placeholders have unique names, precede all operations, and are the inputs that the pass was given.
- Nothing is read before it is computed; every tensor has metadata, on the capture's fake mode.
- Running the graph again on fake tensors gives each operation the metadata that the pass left on it.
- No constant is a fake tensor.
- A functional graph writes nothing, except by ``copy_`` into a placeholder at its end, once for each.

A failure shows the nodes around the error.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.common.thread_warnings import no_warnings
from sidefx_train.compile.graph.artifacts import FunctionalGraph, TracedGraph
from sidefx_train.compile.graph.fx_utils import written_args
from sidefx_train.compile.graph.kernel_strides import lay_out, lay_out_filled, unfilled
from sidefx_train.compile.graph.number_arguments import takes_double
from sidefx_train.errors import BackendError

_ZEROS = torch.ops.aten._efficientzerotensor.default
"""Creates a tensor without storage, with which some of functorch's derivatives begin."""


def enabled() -> bool:
    """Returns True if graphs are checked after every pass."""
    return os.environ.get("SIDEFX_CHECK_GRAPHS", "") not in ("", "0")


def check_traced(stage: str, *graphs: TracedGraph) -> None:
    """Checks traced graphs as :func:`check_graph` does, with the names and values of their inputs.

    Raises:
        BackendError: an invariant does not hold.
    """
    for traced in graphs:
        names = [given.name for given in traced.inputs]
        check_graph(stage, traced.module, traced.fake_mode, names, [given.example for given in traced.inputs])


def check_graph(
    stage: str,
    module: fx.GraphModule,
    fake_mode: Any,
    names: Sequence[str] | None = None,
    entry: Iterable[Any] | None = None,
    functional: bool = False,
) -> None:
    """Checks a graph if checks are on.

    Args:
        stage: the pass that produced the graph, for the message.
        module: the graph.
        fake_mode: fake mode of its tensors.
        names: expected names of its placeholders.
        entry: initial values of its placeholders; by default their metadata.
        functional: it must not write.

    Raises:
        BackendError: an invariant does not hold.
    """
    if enabled():
        with compat.autocast_off():
            _Check(stage, module, fake_mode).run(names, list(entry) if entry is not None else None, functional)


def around(nodes: list[fx.Node], index: int) -> str:
    """Formats the nodes around one, for messages."""
    lines = []
    for i in range(max(0, index - 3), min(len(nodes), index + 3)):
        lines.append(f"{'>' if i == index else ' '} {nodes[i].format_node()}")
    return "\n".join(lines)


class _Check:
    def __init__(self, stage: str, module: fx.GraphModule, fake_mode: Any) -> None:
        self.stage, self.module, self.fake_mode = stage, module, fake_mode
        self.nodes = list(module.graph.nodes)
        self.functional = False

    def fail(self, node: fx.Node, reason: str) -> None:
        text = f"after {self.stage}: {node.name} {reason}\n{around(self.nodes, self.nodes.index(node))}"
        raise BackendError("SFX204", text)

    def run(self, names: Sequence[str] | None, entry: list[Any] | None, functional: bool) -> None:
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        if names is not None and [str(node.target) for node in placeholders] != list(names):
            raise BackendError("SFX204", f"after {self.stage}: placeholders {placeholders}, expected {list(names)}")
        self._order(placeholders)
        self.functional = functional
        if functional:
            self._writes()
        if entry is not None and len(entry) != len(placeholders):
            raise BackendError("SFX204", f"after {self.stage}: {len(placeholders)} placeholders, {len(entry)} inputs")
        held = entry if entry is not None else [node.meta.get("val") for node in placeholders]
        with compat.without_recording(self.fake_mode):
            self._propagate(dict(zip(placeholders, held, strict=True)))

    def _order(self, placeholders: list[fx.Node]) -> None:
        seen: set[fx.Node] = set()
        targets: set[str] = set()
        for i, node in enumerate(self.nodes):
            if node.op == "placeholder":
                if i >= len(placeholders):
                    self.fail(node, "is a placeholder after an operation")
                if str(node.target) in targets:
                    self.fail(node, f"is a second placeholder named {node.target}")
                targets.add(str(node.target))
            missing = [used for used in node.all_input_nodes if used not in seen]
            if missing:
                self.fail(node, f"reads {missing} before it is computed")
            seen.add(node)

    def _writes(self) -> None:
        written: set[fx.Node] = set()
        for node in self.nodes:
            targets = written_args(node)
            if not targets:
                if written and node.op == "call_function":
                    self.fail(node, "follows an update of an input")
                continue
            if str(node.target) != "aten.copy_.default" or targets[0].op != "placeholder":
                self.fail(node, "writes, in a graph that must not")
            if targets[0] in written:
                self.fail(node, f"updates {targets[0]} a second time")
            written.add(targets[0])

    def _propagate(self, held: dict[fx.Node, Any]) -> None:
        values: dict[fx.Node, Any] = {
            node: value.detach() if isinstance(value, torch.Tensor) else value for node, value in held.items()
        }
        for node in self.nodes:
            if node.op == "get_attr":
                constant = getattr(self.module, str(node.target))
                if compat.mode_of(constant) is not None:
                    self.fail(node, "is a constant, but holds a fake tensor")
                values[node] = compat.fake_constant(self.fake_mode, constant)
            elif node.op == "call_function":
                values[node] = self._value(node, values)

    def _value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        known = node.meta.get("val")
        if not isinstance(node.target, compat.OpOverload) and not isinstance(known, torch.Tensor):
            if known is not None and not isinstance(known, (list, tuple)):
                return known  # a number
            if isinstance(node.target, compat.HigherOrderOperator):
                return known
        if known is None and _makes_tensors(node):
            self.fail(node, "has no metadata")
        item = node.target is operator.getitem  # of a list, perhaps with many items
        inputs = () if item else tuple(map(values.get, node.all_input_nodes))
        if isinstance(known, compat.NUMBERS) or any(map(compat.has_unbacked_sizes, (known, *inputs))):
            return known  # running it would create another symbol
        takes = isinstance(node.target, compat.OpOverload) and takes_double(node.target)
        if takes and any(map(_is_unknown_float, inputs)):
            return known  # it reads the number
        if any(used.target is _ZEROS for used in node.all_input_nodes):
            return known  # their strides depend on the user
        if item and not node.users:
            return known  # unrequested results may be empty
        args = fx.map_arg(node.args, lambda used: values[used])
        kwargs = fx.map_arg(dict(node.kwargs), lambda used: values[used])
        recorded = not self.functional and isinstance(node.target, compat.OpOverload)
        empty = unfilled(node.target, kwargs) if recorded else []

        def run() -> Any:
            with no_warnings():
                made = node.target(*args, **kwargs)  # type: ignore[operator]
            if recorded:
                lay_out(node.target, args, kwargs, made)
                lay_out_filled(node.target, args, kwargs, empty)
            return made

        made = run()
        tensors = isinstance(known, torch.Tensor) and isinstance(made, torch.Tensor)
        if recorded and tensors and not _same_strides(known, made):
            # Functionalization runs operators by the Python dispatcher, whose strides of dimensions of size 1 may be
            # others, and the fake mode keeps them for all.
            with compat.uncached(self.fake_mode):
                made = run()
        self._compare(node, known, made)
        return made

    def _compare(self, node: fx.Node, known: Any, made: Any) -> None:
        if isinstance(known, (list, tuple)) and isinstance(made, (list, tuple)):
            if len(known) != len(made):
                self.fail(node, f"has {len(known)} items by its metadata, and makes {len(made)}")
            unread = {n.args[1] for n in node.users if n.target is operator.getitem and not n.users}
            for i, (a, b) in enumerate(zip(known, made, strict=True)):
                if i not in unread:
                    self._compare(node, a, b)
        elif isinstance(known, torch.Tensor) and isinstance(made, torch.Tensor):
            if compat.mode_of(known) is not self.fake_mode:
                self.fail(node, "has metadata of another capture")
            for name, fact in (_FUNCTIONAL_FACTS if self.functional else _FACTS).items():
                if not _agree(fact(known), fact(made)):
                    self.fail(node, f"has {name} {fact(known)} by its metadata, and makes {fact(made)}")
        elif known is not None and type(known) is not type(made):
            self.fail(node, f"is a {type(known).__name__} by its metadata, and makes a {type(made).__name__}")


def _is_unknown_float(value: Any) -> bool:
    return isinstance(value, torch.SymFloat) and compat.is_unbacked(value)


def _makes_tensors(node: fx.Node) -> bool:
    """Returns True for an operator called for its first result, a tensor, not for what it writes."""
    if not isinstance(node.target, compat.OpOverload) or written_args(node):
        return False
    return any(isinstance(each.type, torch.TensorType) for each in node.target._schema.returns)


def _read_strides(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or 0 in tensor.shape:
        return ()
    return tuple(
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if type(size) is not int or size != 1
    )


_FACTS: dict[str, Any] = {
    "shape": lambda t: tuple(t.shape),
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device,
    "layout": lambda t: t.layout,
    "stride": lambda t: tuple(t.stride()) if t.layout is torch.strided and 0 not in t.shape else (),
}
_FUNCTIONAL_FACTS = _FACTS | {"stride": _read_strides}
"""In a functional graph, strides of dimensions of size 1 select nothing."""


def _agree(a: Any, b: Any) -> bool:
    """Returns True if equal; symbols are compared by expression."""
    return str(a) == str(b)


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return _agree(_FACTS["stride"](a), _FACTS["stride"](b))


def check_functional(graph: FunctionalGraph) -> None:
    """Every placeholder is fed, nothing is written except by trailing ``copy_`` into placeholders.

    Raises:
        BackendError: the graph breaks an invariant; the nodes around the offender are in the message.
    """
    nodes = list(graph.module.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    if [str(n.target) for n in placeholders] != list(graph.feeds):
        raise BackendError("SFX204", f"placeholders {placeholders} are not the feeds {graph.feeds}")
    trailing = False
    for i, node in enumerate(nodes):
        written = written_args(node)
        if not written:
            if trailing and node.op == "call_function" and isinstance(node.target, compat.OpOverload):
                raise BackendError("SFX204", f"an operation follows the input updates:\n{around(nodes, i)}")
            continue
        name = str(node.target)
        if name != "aten.copy_.default" or written[0].op != "placeholder":
            raise BackendError("SFX204", f"{name} is left in the functional graph:\n{around(nodes, i)}")
        trailing = True
