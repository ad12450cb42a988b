"""Saved and restored random states: draws after a restore repeat the earlier numbers.

Activation checkpointing saves the random state before a segment and restores it to recompute the segment. In a graph
the second run copies the numbers that the first one drew, as eager would draw them again, whatever generator a backend
uses. A state is a position in the step's sequence of draws.
"""

from __future__ import annotations

import functools
import operator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.capture.recording import warning_watch
from sidefx_train.compile.capture.recording.constant_folding import constant_value
from sidefx_train.compile.capture.recording.counted_results import (
    constant_count,
    constant_results,
    count_of,
    with_contents,
    with_count,
)
from sidefx_train.compile.capture.recording.eager_parity.bounded_draws import BOUNDED, draw
from sidefx_train.compile.capture.recording.eager_parity.derivatives import (
    ProdDerivative,
    fill_picked,
    multiplies_picked,
)
from sidefx_train.compile.capture.recording.eager_parity.foreach import count_lists, one_after_another
from sidefx_train.compile.capture.recording.eager_parity.kernel_errors import check_kernel
from sidefx_train.compile.capture.recording.eager_parity.kernel_settings import check_settings, reads_dtype, with_dtype
from sidefx_train.compile.capture.recording.eager_parity.linalg_values_only import mark
from sidefx_train.compile.capture.recording.eager_parity.memory_overlap import check_overlap
from sidefx_train.compile.capture.recording.eager_parity.recurrent_sums import RecurrentSums
from sidefx_train.compile.capture.recording.eager_parity.resize import enlarged, resized, set_layout
from sidefx_train.compile.capture.recording.eager_parity.undefined_gradients import undefined
from sidefx_train.compile.capture.recording.eager_parity.view_history import check_strided
from sidefx_train.compile.capture.recording.eager_parity.zero_tensors import ZeroTensors
from sidefx_train.compile.capture.recording.probes.number_probes import Probes
from sidefx_train.compile.capture.recording.sparse_tensors import SparseTensors
from sidefx_train.compile.common.sentinels import ABSENT
from sidefx_train.compile.common.thread_warnings import no_warnings
from sidefx_train.compile.graph.artifacts import CALLED, DERIVED, FORWARD, HIDDEN_FROM_AUTOGRAD, LINE, NO_GRAD
from sidefx_train.compile.graph.kernel_strides import has_other_strides, lay_out, lay_out_filled, stays_empty, unfilled
from sidefx_train.errors import Location, Unsupported

if TYPE_CHECKING:
    from sidefx_train.compile.capture.recording.interfaces import GraphRecorder

aten = torch.ops.aten
_FILLS = frozenset(
    {"bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_"}
)
_SHARING = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}
"""Operators whose schemas hide from autograd that results share storage, which the graph must record."""

_MAKES = frozenset({"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli"})


_ASKS = frozenset({aten._local_scalar_dense.default, aten.equal.default})
"""Operators whose result is a Python number, which code branches on."""

_DEPENDS_ON_CONTENTS = frozenset(
    (aten._local_scalar_dense.default, aten.nonzero.default, aten.index.Tensor)
    + (aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default)
)
"""Operators whose result's value or size fake tensors remember."""


@functools.cache
def _fills_several(func: Any) -> bool:
    """Returns True for an operator overload that writes several ``out`` tensors."""
    schema = getattr(func, "_schema", None)
    return schema is not None and sum(argument.is_out for argument in schema.arguments) > 1


class RandomState:
    """Result of ``torch.get_rng_state()`` during a capture.

    Attributes:
        kind: device type of the generator.
        position: number of draws of the step before it.
    """

    __slots__ = ("kind", "position")

    def __init__(self, kind: str, position: int) -> None:
        self.kind = kind
        self.position = position


class RepeatingMode(compat.RecordingMode):
    """Records operations; while an earlier random state is set, draws become copies of the earlier draws.

    Attributes:
        grad_switched: an operation was recorded with autograd off.
        observer: called with each operation and its arguments, if set.
        probes: stand for changing numbers whose values C++ code reads.
        differentiated: name of a tensor subclass whose operators autograd has recorded; empty if there is none.
        transformed: a backward runs inside a transform of ``torch.func``.
        sparse: the sparse tensors, which have no nodes.
        recurrent_sums: gradients that recurrent layers sum over time.
        depth: how many operators are being recorded, one inside another.
        cursors: next draw to repeat, by device type; absent while new numbers are drawn.
        saved: the step has saved a random state.
    """

    def __init__(self, tracer: GraphRecorder) -> None:
        super().__init__(tracer.tracer)
        self.graph_tracer = tracer
        self.cursors: dict[str, int] = {}
        self.saved = False
        self.grad_switched = False
        self.probes = Probes(tracer)
        self._products = ProdDerivative()
        self._zeros = ZeroTensors()
        self.sparse = SparseTensors(tracer)
        self.recurrent_sums = RecurrentSums(tracer)
        self.observer: Any = None
        self.differentiated = ""
        self.transformed = False
        self.depth = 0
        self._wrapper_depth = 0
        self._settings = compat.KernelSettings()
        self._lines: dict[int, Location | None] = {}  # by sequence number of the autograd node

    def draws(self, kind: str) -> list[fx.Node]:
        """Returns the nodes that drew new numbers, in order."""
        nodes = [node for node in self.graph_tracer.graph.nodes if is_draw(node.target, node.args, node.kwargs)]
        return [node for node in nodes if _device_type(node.meta.get("val")) == kind]

    def has_drawn(self) -> bool:
        """Returns True if the graph draws numbers, on any device."""
        return any(is_draw(node.target, node.args, node.kwargs) for node in self.graph_tracer.graph.nodes)

    def save(self, kind: str) -> RandomState:
        """Returns the current state."""
        self.saved = True
        return RandomState(kind, self.cursors.get(kind, len(self.draws(kind))))

    def restore(self, state: RandomState) -> None:
        """Restores an earlier state of this step."""
        self._continue_at(state.kind, state.position)

    def _continue_at(self, kind: str, position: int) -> None:
        if position < len(self.draws(kind)):
            self.cursors[kind] = position
        else:
            self.cursors.pop(kind, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.depth += 1
        try:
            return self._dispatch(func, types, args, kwargs)
        finally:
            self.depth -= 1

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if compat.has_dtensor(types):
            return self._dispatch_dtensors(func, args, kwargs or {})
        if any(map(compat.is_wrapper_class, types)):
            return self._dispatch_wrappers(func, types, args, kwargs or {})
        if compat.among_ragged_sizes(args):
            raise Unsupported("SFX109", f"{func} gets the size of a ragged dimension, but no nested tensor")
        if func is compat.DEVICE_OF:  # C++ reads it often: autograd for every gradient
            return args[0].device
        if func not in compat.READS:
            self.graph_tracer.touches()
        watch = warning_watch.suspend(recording=True)
        try:
            return self._record_operator(func, types, args, kwargs)
        finally:
            warning_watch.resume(watch)

    def _dispatch_dtensors(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Leaves an operator of ``DTensor`` objects to torch: it calls that of local tensors, and communicates."""
        self.note_differentiated("DTensor", (args, kwargs))
        args, kwargs, given = self.probes.given_to_dtensors(args, kwargs)
        if not given:
            return NotImplemented
        with self:
            made = func(*args, **kwargs)
        self.probes.check_dtensors()
        return made

    def _dispatch_wrappers(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Has the Python of wrapper subclasses interpreted: it calls operators of inner tensors."""
        if compat.asks_layout(func) and compat.is_jagged(args[0]):
            return compat.layout_of(func, args[0])
        self._wrapper_depth += 1
        try:
            with self:
                return self.graph_tracer.wrapper_dispatch(func, types, args, kwargs)
        finally:
            self._wrapper_depth -= 1

    def note_differentiated(self, kind: str, given: Any) -> None:
        """Notes that autograd records a call with tensors of this class."""
        if torch.is_grad_enabled() and compat.needs_derivative(given):
            self.differentiated = kind

    def _record_operator(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(func, compat.HigherOrderOperator):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if not torch.is_grad_enabled():
            self.grad_switched = True
        if self.observer is not None:
            self.observer.observe(func, args, kwargs)
        named = kwargs or {}
        for replaced in (self._as_own_operator, self._in_memory, self._asked, self._one_after_another):
            answer = replaced(func, args, named)
            if answer is not ABSENT:
                return answer
        if compat.is_collective(func):  # on known contents the fake mode would run it, and other processes wait for it
            self._forget_constants((args, named))
        called, func = func, _SHARING.get(func, func)
        check_settings(self._settings, func, args, named)
        if reads_dtype(self._settings, func, args, named):
            with self:
                return with_dtype(func, args, named)
        check_overlap(func, args, named)
        check_strided(self.graph_tracer, func, args, named)
        answer = self._drawn_before(func, args, named)
        if answer is not ABSENT:
            return answer
        check_kernel(func, args, named)
        if func in _DEPENDS_ON_CONTENTS:
            self.graph_tracer.forget_overwritten(args[:1] if func is not aten.index.Tensor else args[1])
        empty = unfilled(func, named)
        made = self._trace(func, types, args, named)
        self._lay_out(func, args, named, made)
        if empty:
            if stays_empty(func, args, named, empty):
                raise Unsupported("SFX108", f"{func} resizes an empty tensor, and its fake kernel does not")
            lay_out_filled(func, args, named, empty)
        if len(empty) == 1 and isinstance(made, torch.Tensor):
            for fake_value in (made, self._node(func).meta["val"]):
                if fake_value.stride() != empty[0].stride():
                    compat.set_strides(fake_value, empty[0].stride())
        if not self._wrapper_depth:  # below autograd, nothing is counted
            count_lists(func, args)
        self._annotate(called, func, args, made)
        return made

    def _as_own_operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Records other operators for some calls: this library's, or those whose results have known sizes; or none."""
        none = undefined(func, args)
        if none is not ABSENT:
            return none
        if self.recurrent_sums.concerns(func, args):
            return self.recurrent_sums.join(*args)
        if self.sparse.concerns(func, args, kwargs):
            with self:
                return self.sparse.call(func, args, kwargs)
        if self._zeros.concerns(func, args, kwargs):
            with self:
                return self._zeros.call(func, args, kwargs)
        if not self.transformed and multiplies_picked(func, args):
            with self:
                return fill_picked(*args)
        if not self.transformed and self._products.ends(func, args):
            with self:
                return self._products.gradient(*args)
        known = constant_results(self.graph_tracer, func, args, kwargs)
        if known is not None:
            with self:
                made = tuple(map(with_contents, known))
            return made if len(func._schema.returns) > 1 else made[0]
        counted = count_of(func, args, kwargs)
        if counted is not None:
            count = constant_count(self.graph_tracer, counted)
            if count is None:
                count = self.graph_tracer.count_before(counted)
            if count is not None:
                with self:
                    return with_count(func, args, count)
        if func is BOUNDED:
            with self:
                return draw(*args, **kwargs)
        layout = resized(func, args, kwargs)
        if layout is not None:
            with self:
                return set_layout(args[0], *layout)
        return ABSENT

    def _in_memory(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Records calls that give a tensor another storage, or a larger one."""
        memory = self.graph_tracer.memory
        if memory is None:
            return ABSENT
        size = enlarged(func, args, kwargs)
        if size is not None:
            with self:
                return memory.grow(args[0], size)
        with self:
            made = memory.operator(func, args, kwargs)
        return ABSENT if made is None else made

    def _asked(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Answers C++ code that reads or compares tensors whose contents are known; calls of Python's are answered
        before."""
        if func not in _ASKS:
            return ABSENT
        known = [constant_value(self.graph_tracer, value) for value in args]
        if all(value is not None for value in known):
            with compat.real_world():
                return func(*known)
        number = self.graph_tracer.read_by_code(args[0]) if func is aten._local_scalar_dense.default else None
        if number is not None:
            return number
        for value in args:
            compat.forget_constant(value, self.tracer)
        return ABSENT

    def _one_after_another(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Records an operator of lists whose tensors share memory as one operator for each."""
        calls = one_after_another(func, args, kwargs)
        if calls is None:
            return ABSENT
        with self:
            for each, item, named in calls:
                each(*item, **named)
        if not self._wrapper_depth:  # below autograd, nothing is counted
            count_lists(func, args)
        return None

    def _drawn_before(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Repeats an earlier draw of the step after it set the random state back."""
        if not self.cursors or not is_draw(func, args, kwargs):
            return ABSENT
        kind = _device_type((args, kwargs)) or "cpu"
        if kind not in self.cursors:
            return ABSENT
        drawn = self.draws(kind)[self.cursors[kind]]
        self._continue_at(kind, self.cursors[kind] + 1)
        return self._repeat(func, drawn, args, kwargs)

    def _trace(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Records the operator; probes among its arguments become the numbers that they stand for."""
        wanted = self.probes.among(args, kwargs)
        if wanted:
            with self:  # arithmetic on the numbers is recorded
                numbers = self.probes.nodes_of(wanted)
            self._forget_constants((args, kwargs))
        since = self.graph_tracer.last_node() if wanted else None
        # Eager does not run a fake kernel: warnings of its Python code are none of the program's.
        quiet = nullcontext() if compat.is_torchs(func) else no_warnings()
        # torch's cache of fake results forgets the sizes that such an operator gives its ``out`` tensors.
        fresh = compat.uncached(self.graph_tracer.fake_mode) if _fills_several(func) else nullcontext()
        with quiet, fresh:
            made = super().__torch_dispatch__(func, types, args, kwargs)
        if since is not None:
            self.probes.replace(numbers, since)
            self._forget_constants(made)
        return made

    def _annotate(self, called: Any, func: Any, args: Any, made: Any) -> None:
        """Notes in the operator's node what later stages need: autograd's state, aliases, the line."""
        if not torch.is_grad_enabled():
            mode = "inference" if torch.is_inference_mode_enabled() else "no_grad"
            if func.is_view or torch.Tag.inplace_view in func.tags:
                self._node(func).meta[NO_GRAD] = mode
            elif func._schema.is_mutable:
                self._node(func).meta[HIDDEN_FROM_AUTOGRAD] = mode
        elif func.is_view:
            self.graph_tracer.keep_views(made)
        if called is not func:
            self._node(func).meta[CALLED] = called
        self._note_place(func)
        mark(func, args, self.graph_tracer.graph)

    def _forget_constants(self, value: Any) -> None:
        """Forgets the contents of tensors that are computed from a probe."""
        if isinstance(value, dict):
            value = tuple(value.values())
        if type(value) is compat.FakeTensor:
            compat.forget_constant(value, self.tracer)
        for each in value if isinstance(value, (list, tuple)) else ():
            self._forget_constants(each)

    def _lay_out(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        results = [each for each in (made if isinstance(made, (list, tuple)) else (made,)) if _is_strided(each)]
        before = [each.stride() for each in results]
        lay_out(func, args, kwargs, made)
        if has_other_strides(func, args, made):
            for fake_value in (made, self._node(func).meta["val"]):
                compat.set_memory(fake_value, args[0])
        if [each.stride() for each in results] == before:
            return
        value = self._node(func).meta["val"]
        recorded = filter(_is_strided, value if isinstance(value, (list, tuple)) else (value,))
        for each, known in zip(results, recorded, strict=True):
            compat.set_strides(known, each.stride())

    def _note_place(self, func: Any) -> None:
        """Records the position of the last recorded call in the autograd graph."""
        node = self.graph_tracer.last_node()
        while node.target is operator.getitem:
            node = node.prev
        if node.target is func:
            derived = compat.running_derivative()
            line = self.graph_tracer.locate()
            if derived is None:
                place = compat.last_index()
                self._lines.setdefault(place, line)
                node.meta |= {FORWARD: place, LINE: line}
            else:
                node.meta |= {DERIVED: derived, LINE: self._lines.get(derived[1], line)}

    def _node(self, func: Any) -> fx.Node:
        """Returns the node of the last recorded call of ``func``."""
        node = self.graph_tracer.last_node()
        while node.target is not func and node.op == "call_function":
            node = node.prev
        return node

    def _repeat(self, func: Any, drawn: fx.Node, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if drawn.target is not func or not _same_arguments(drawn, *self.probes.named(args, kwargs)):
            raise Unsupported("SFX110", f"draws with {name} after a random state was set, but drew otherwise before")
        if name in _FILLS:
            with self:
                return args[0].copy_(self._copy(drawn, drawn.meta["val"]))
        if name in _MAKES:
            with self:
                return self._copy(drawn, drawn.meta["val"])
        if name == "native_dropout":
            mask = next((n for n in drawn.users if n.args[1:] == (1,)), None)
            if mask is not None:
                with self:
                    kept = self._copy(mask, mask.meta["val"])
                    return args[0] * kept * (1.0 / (1.0 - args[1]) if args[1] < 1 else 0.0), kept
        raise Unsupported("SFX110", f"draws with {name} after a random state was set")

    def _copy(self, node: fx.Node, held: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a draw, taken right after it."""
        copy = self.graph_tracer.clone_after(held, node, node)
        with compat.no_recording():
            fake = held.detach().clone()
        compat.track(fake, fx.Proxy(copy, self.graph_tracer.tracer), self.graph_tracer.tracer)
        return fake


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def is_draw(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns True if a call draws random numbers; attention without dropout does not, though its operator may."""
    if not compat.is_random(func):
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool((args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) != 0.0)


def _device_type(value: Any) -> str | None:
    """Returns the device type of the first tensor or device in a nested value."""
    if isinstance(value, torch.Tensor):
        return value.device.type
    if isinstance(value, torch.device):
        return value.type
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((kind for kind in map(_device_type, items) if kind is not None), None)


def _same_arguments(drawn: fx.Node, args: Any, kwargs: Any) -> bool:
    """Returns True if a draw has the shape, dtype and distribution of the earlier one."""

    def facts(value: Any) -> Any:
        if isinstance(value, fx.Node):
            value = value.meta.get("val")
        if isinstance(value, torch.Tensor):
            return (tuple(value.shape), value.dtype, value.device)
        if isinstance(value, torch.SymFloat):
            return str(compat.symbol_of(value))
        if isinstance(value, (list, tuple)):
            return tuple(facts(item) for item in value)
        return value

    then = (tuple(map(facts, drawn.args)), {name: facts(value) for name, value in drawn.kwargs.items()})
    return then == (tuple(map(facts, args)), {name: facts(value) for name, value in kwargs.items()})
