"""Records tensor operations: fake tensors, proxies and symbolic numbers over one FX graph.

While :meth:`GraphTracer.active` is entered, every aten operation on this tracer's fake tensors becomes a node. The real
autograd engine runs on the fake tensors, in this thread, so backward passes, hooks and optimizer updates are recorded
where eager would run them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording.dispatch_mode import RepeatingMode
from sidefx_train.compile.capture.recording.eager_parity.linalg_values_only import drop_unused_vectors
from sidefx_train.compile.capture.recording.write_log import WriteLog
from sidefx_train.compile.graph.artifacts import COUNTER, DATA, GraphInput, InputKind, TracedGraph
from sidefx_train.compile.graph.fx_utils import written_args
from sidefx_train.errors import Location, Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.interfaces import StorageHandler


def _nowhere() -> None:
    return None


def _declined(*args: Any) -> Any:
    return NotImplemented


class GraphTracer:
    """One FX graph under construction, with its fake mode.

    Attributes:
        writes: operations recorded so far that write to tensors.
        views: views made while autograd was on, by node.
        memory: handles storage replacement and resize; ``None`` without a shadow table.
        locate: returns the program's current line.
        touches: called for each operation that does more than read a tensor.
        wrapper_dispatch: runs an operator of wrapper subclasses: its function, their classes, and its arguments.
        read_by_code: returns what C++ code reads in a tensor, an integer or a truth value, if the prologue knows it;
            else ``None``.
        count_before: returns the number of elements of a result whose size depends on contents, in the same cases.
    """

    def __init__(self) -> None:
        self.shape_env = compat.new_shape_env()
        self.fake_mode = compat.new_fake_mode(self.shape_env)
        self.tracer = compat.new_proxy_tracer()
        self.proxy_mode = RepeatingMode(self)
        self.graph: fx.Graph = self.tracer.graph
        self.writes = WriteLog(self.graph)
        self.inputs: list[GraphInput] = []
        self.real_inputs: list[Any] = []
        self.placeholders: list[fx.Node] = []
        self.views: dict[fx.Node, torch.Tensor] = {}
        self.memory: StorageHandler | None = None
        self.locate: Callable[[], Location | None] = _nowhere
        self.touches: Callable[[], None] = _nowhere
        self.wrapper_dispatch: Callable[..., Any] = _declined
        self.read_by_code: Callable[[torch.Tensor], Any] = lambda _: None
        self.count_before: Callable[[Any], Any] = lambda _: None
        self.stop: Unsupported | None = None
        """Error that makes the recording unusable, found where it could not be raised."""
        self._alias_fakes: list[torch.Tensor | None] = []
        self._sharing: dict[int, list[tuple[torch.Tensor, fx.Node]]] = {}
        self._writes_before_read = WeakIdKeyDictionary()
        self._names: dict[str, int] = {}  # base name -> number of uses
        self._last_placeholder: fx.Node | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Records every tensor operation of this thread within the context."""
        subgraphs = compat.tracing_subgraphs(self.fake_mode, self.tracer)
        with torch.autograd.set_multithreading_enabled(False), compat.quiet_fakes(), subgraphs:
            with compat.without_torch_compile(), compat.numbers_as_in_python(), self.fake_mode, self.proxy_mode:
                yield

    def forget_overwritten(self, values: Iterable[Any]) -> None:
        """Invalidates what fake tensors remember of their contents (the number in them, how many are not zero) if
        their memory has been written since.

        They compare version counters, of which ``x.data`` has one of its own.
        """
        for value in values:
            if type(value) is compat.FakeTensor:
                count = len(self.writes.to(value))
                if self._writes_before_read.get(value, 0) != count:
                    compat.forget_numbers(value)
                    self._writes_before_read[value] = count

    def add_tensor(
        self,
        real: torch.Tensor,
        kind: InputKind,
        source: str,
        dynamic: frozenset[int] = frozenset(),
        shares_version_with: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Makes ``real`` an input of the graph and returns its fake tensor (same storage for aliases).

        Sizes of the dimensions in ``dynamic`` are symbolic. ``shares_version_with`` is (``real`` or its base, the fake
        of another tensor that shares its version counter).
        """
        with compat.outside_transforms():
            return self._add_tensor(real, kind, source, dynamic, shares_version_with)

    def _add_tensor(
        self,
        real: torch.Tensor,
        kind: InputKind,
        source: str,
        dynamic: frozenset[int],
        shares_version_with: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        with compat.no_recording():
            if shares_version_with is not None:
                self._alias_fakes.append(
                    compat.alias_fake(self.fake_mode, *shares_version_with)
                )  # the only reference to that of a base
            fake = compat.fake_of(self.fake_mode, real, dynamic, source)
            fake.grad = None
        proxy = self._placeholder(self._fresh(source))
        compat.track(fake, proxy, self.tracer)
        self._note_counter(real, proxy.node)
        self.placeholders.append(proxy.node)
        self.inputs.append(GraphInput(proxy.node.name, kind, proxy.node.meta["val"], source))
        self.real_inputs.append(real)
        return fake

    def _note_counter(self, real: torch.Tensor, node: fx.Node) -> None:
        others = self._sharing.setdefault(compat.storage_id(real), [])
        same = next((n for t, n in others if compat.share_version_counter(t, real)), None)
        counter = same.meta.get(COUNTER) if same is not None else node if others else None
        if counter is not None:
            node.meta[COUNTER] = counter
        others.append((real, node))

    def add_tangent(self, output: torch.Tensor, index: int) -> torch.Tensor:
        """Makes the gradient of an output an input of the graph: a fake tensor with the output's layout."""
        with compat.no_recording(), torch.no_grad():
            fake = torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device=output.device)
        compat.track(fake, self._placeholder(self._fresh(f"tangent_{index}")), self.tracer)
        return fake

    def add_scalar(self, value: int | float, source: str) -> Any:
        """Makes a Python number an input of the graph and returns its symbolic number."""
        number = compat.new_symbolic_number(self.shape_env, value, source)
        proxy = self._placeholder(self._fresh(source))
        compat.track(number, proxy, self.tracer)
        self.placeholders.append(proxy.node)
        self.inputs.append(GraphInput(proxy.node.name, "scalar", number, source, hint=value))
        self.real_inputs.append(value)
        return number

    def node_of(self, value: Any) -> fx.Node:
        """Returns the node that computes a fake tensor or symbolic number of this trace."""
        proxy = self.tracer.unwrap_proxy(value)
        if not isinstance(proxy, fx.Proxy):
            raise KeyError(f"{type(value).__name__} is not a value of this trace")
        return proxy.node

    def has_node(self, value: Any) -> bool:
        return isinstance(self.tracer.unwrap_proxy(value), fx.Proxy)

    def last_node(self) -> fx.Node:
        """Returns the last recorded node."""
        return next(iter(reversed(self.graph.nodes)))

    def data_of(self, value: torch.Tensor) -> torch.Tensor:
        """``Tensor.data``: an alias without history and with a version counter of its own."""
        data = compat.alias_hidden_from_autograd(value)
        if not value.is_sparse:
            self.last_node().meta[DATA] = True
        return data

    def keep_views(self, made: Any) -> None:
        """Keeps views recorded with autograd on: they may be bases of views that leave the step."""
        for value in made if isinstance(made, (list, tuple)) else (made,):
            if isinstance(value, torch.Tensor) and self.has_node(value):
                self.views[self.node_of(value)] = value

    def clone_after(self, value: torch.Tensor, node: fx.Node, at: fx.Node) -> fx.Node:
        """Returns a copy of the value that ``node`` had right after ``at`` was recorded."""
        with self.graph.inserting_after(at if at.op != "placeholder" else self._last_placeholder):
            copy = self.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta["val"] = compat.fake_snapshot(value)
        return copy

    def check(self) -> None:
        """Checks that all later stages can represent the graph.

        Raises:
            Unsupported: they cannot; the message names the operation.
        """
        if self.proxy_mode.cursors:
            raise Unsupported("SFX110", "leaves the random state set back to an earlier one")
        for node in self.graph.nodes:
            layout = getattr(node.meta.get("val"), "layout", torch.strided)
            if layout is not torch.strided:
                raise Unsupported("SFX109", f"{node.target} makes a tensor of layout {layout}")

    def finish(self, outputs: list[fx.Node]) -> TracedGraph:
        """Closes the graph with a flat tuple of outputs.

        Raises:
            Unsupported: a later stage cannot represent the graph.
        """
        self.check()
        self.graph.output(tuple(outputs))
        drop_profiler_nodes(self.graph)
        replace_inplace_views(self.graph)
        drop_unused_vectors(self.graph)
        module = compat.late_module(self.tracer.root, self.graph)
        uses_rng = any(compat.is_random(node.target) for node in self.graph.nodes if node.op == "call_function")
        return TracedGraph(module, tuple(self.inputs), self.fake_mode, uses_rng)

    def _placeholder(self, name: str) -> fx.Proxy:
        with self.graph.inserting_after(self._last_placeholder) if self._last_placeholder else self._at_start():
            proxy = self.tracer.create_proxy("placeholder", name, (), {})
        proxy.node.target = proxy.node.name  # FX renames names that Python or the graph's code uses itself
        self._last_placeholder = proxy.node
        return proxy

    def _at_start(self) -> Any:
        return self.graph.inserting_before(next(iter(self.graph.nodes), None))

    def _fresh(self, source: str) -> str:
        base = re.sub(r"\W+", "_", source).strip("_").lower()[-60:].strip("_") or "input"
        if not base[0].isalpha():
            base = f"in_{base}"
        name, count = base, self._names.get(base, 0) + 1
        while count > 1 and (name := f"{base}_{count}") in self._names:
            count += 1
        self._names[base] = count
        self._names.setdefault(name, 1)
        return name


def drop_profiler_nodes(graph: fx.Graph) -> None:
    """Removes the record-function markers that ``Optimizer.step`` adds to a trace."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and str(node.target).startswith("profiler."):
            graph.erase_node(node)


def replace_inplace_views(graph: fx.Graph) -> None:
    """Replaces in-place metadata mutations (``t_``) of the trace's own tensors by views; later uses refer to the new
    node.

    Earlier nodes keep their layout: they may be bases of views that leave the step.
    """
    given = {node for node in graph.nodes if node.op == "placeholder"}
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, compat.OpOverload):
            returns = node.target._schema.returns
            written = written_args(node)
            same = len(written) == len(returns) == 1 and returns[0].alias_info is not None
            if same and written[0] in given:
                given.add(node)
            elif same:
                node.target = _OUT_OF_PLACE_VIEW.get(node.target, node.target)


def _overloads(name: str, *overloads: str) -> dict[Any, Any]:
    """Maps in-place operators to view operators, for each pair of overloads."""
    turning, viewing = getattr(torch.ops.aten, f"{name}_"), getattr(torch.ops.aten, name)
    return {getattr(turning, a): getattr(viewing, b) for a, b in (pair.split(">") for pair in overloads)}


_OUT_OF_PLACE_VIEW = {
    **_overloads("t", "default>default"),
    **_overloads("transpose", "default>int"),
    **_overloads("squeeze", "default>default", "dim>dim", "dims>dims"),
    **_overloads("unsqueeze", "default>default"),
    **_overloads("as_strided", "default>default"),
}
