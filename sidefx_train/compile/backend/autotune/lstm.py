"""Autotunes LSTM layers: oneDNN or the native module.

oneDNN runs the time steps with all threads, which synchronize at each of them, and computes all gradients. In the
native module (``native/lstm_kernel.py``) a thread has its own rows of the batch, and only gradients that are used are
computed. Both are timed once per size and number of threads; times are cached on disk with those of matrix products.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.autotune.timing import MEASURES, Task, fastest, measured, timings
from sidefx_train.compile.graph.fx_utils import emit, erase_unused, static_cpu_shape
from sidefx_train.compile.native import lstm_module
from sidefx_train.compile.ops.registration import define_operator
from sidefx_train.report import ChoiceRecord

aten = torch.ops.aten

_LSTM = 2
"""torch's code for an LSTM layer in oneDNN calls."""

_WIDEST = 16
"""Numbers per largest vector register: the native module pads what it stores to whole ones."""

_LARGEST = 2e8
"""Floating-point operations above which fewer time steps are timed."""

_FEWEST = 8
"""Minimum of timed time steps."""

INPUT, WEIGHTS, STATES = 1, 2, 4
"""Bits of the requested gradients: of the input, of weights and bias, of the initial states."""

_FORWARD = (
    "lstm(Tensor x, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? hx, Tensor? cx, bool reverse,"
    " bool keep) -> (Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "lstm_backward(Tensor x, Tensor w_ih, Tensor w_hh, Tensor? hx, Tensor? cx, Tensor output, Tensor kept,"
    " Tensor? grad, Tensor? grad_hy, Tensor? grad_cy, bool reverse, int wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _forward_fake(x: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, hx: Any, cx: Any, reverse: Any, keep: Any) -> Any:
    length, rows, units = x.shape[0], x.shape[1], w_hh.shape[1]
    kept = length * rows * 5 * _WIDEST * -(-units // _WIDEST)  # four gates and the cell
    states = (x.new_empty(rows, units), x.new_empty(rows, units))
    return (x.new_empty(length, rows, units), *states, x.new_empty(kept if keep else 0))


def _backward_fake(*args: Any) -> Any:
    x, w_ih, w_hh, wanted = *args[:3], args[-1]
    state, bias = (x.shape[1], w_hh.shape[1]), (w_ih.shape[0],)
    sizes = zip((x.shape, w_ih.shape, w_hh.shape, bias, bias, state, state), (1, 2, 2, 2, 2, 4, 4), strict=True)
    return tuple(x.new_empty(size if wanted & flag else [0] * len(size)) for size, flag in sizes)


def _forward(*args: Any) -> Any:
    x, *others = args[:7]
    made = _forward_fake(*args)
    _call(0, x, args[7], others[1].shape[1], [*_strided(x, 3)], others, made)
    return made


def _backward(*args: Any) -> Any:
    x, w_ih, w_hh, hx, cx, output, kept, grad, grad_hy, grad_cy, reverse, _ = args
    made = _backward_fake(*args)
    sequences = [*_strided(x, 3), *_strided(grad, 3), *_strided(grad_hy, 2), *_strided(grad_cy, 2)]
    _call(1, x, reverse, w_hh.shape[1], sequences, (w_ih, w_hh, hx, cx, output, kept), made)
    return made


def _call(which: int, x: Any, reverse: bool, units: int, sequences: list[int], others: Any, made: Any) -> None:
    native = lstm_module()
    assert native is not None, "graphs with this operator need the native module"
    plain = [None if tensor is None else tensor.contiguous() for tensor in others]
    results = [tensor if tensor.numel() else None for tensor in made]
    places = [0 if tensor is None else tensor.data_ptr() for tensor in (*plain, *results)]
    native.layer(which, *x.shape, units, int(reverse), *sequences, *places)


def _strided(tensor: torch.Tensor | None, dims: int) -> list[int]:
    """Returns the address of a sequence or one step of it, and its three strides."""
    return [0] * 4 if tensor is None else [tensor.data_ptr(), *([0] * (3 - dims)), *tensor.stride()]


define_operator(_FORWARD, _forward, _forward_fake)
define_operator(_BACKWARD, _backward, _backward_fake)


# --- timing ------------------------------------------------------------------------------------------------------


def _operations(length: int, rows: int, inputs: int, units: int) -> float:
    """Returns the floating-point operations of forward and backward."""
    return 24.0 * length * rows * units * (inputs + units)


def _part(length: int, rows: int, inputs: int, units: int) -> int:
    """Returns the number of time steps to time: all take equally long."""
    while length > _FEWEST and _operations(length, rows, inputs, units) > _LARGEST:
        length = max(_FEWEST, length // 2)
    return length


def _measure(length: int, rows: int, inputs: int, units: int, wanted: int, threads: int) -> dict[str, float]:
    """Times each candidate in seconds, on a part of a long sequence; forward only if no gradient is requested."""
    length = _part(length, rows, inputs, units)

    def candidates() -> dict[str, Callable[[], Any]]:
        x, grad = torch.randn(length, rows, inputs), torch.randn(length, rows, units)
        weights = [torch.empty(4 * units, *width).uniform_(-0.1, 0.1) for width in ((inputs,), (units,), (), ())]
        state = torch.zeros(rows, units)
        settings = (_LSTM, units, 1, True)

        def onednn() -> None:
            with compat.training_kernels():
                made = aten.mkldnn_rnn_layer(x, *weights, state, state, False, [], *settings, False, False, True)
            if wanted:
                grads = (*made[:3], grad, None, None)
                given = (x, *weights, state, state, *grads, False, *settings, True, False, [], False, made[3])
                aten.mkldnn_rnn_layer_backward(*given)

        def native() -> None:
            out, _, _, kept = _forward(x, *weights, None, None, False, bool(wanted))
            if wanted:
                _backward(x, *weights[:2], None, None, out, kept, grad, None, None, False, wanted)

        return {"onednn": onednn, "native": native} if lstm_module() is not None else {"onednn": onednn}

    return measured(candidates, _operations(length, rows, inputs, units), threads)


MEASURES["lstm"] = _measure


# --- rewriting ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """An LSTM layer in one direction.

    Attributes:
        forward: oneDNN's call.
        backward: oneDNN's call of its derivative; ``None`` if it is not needed.
        sizes: time steps, rows, inputs, units.
        wanted: the requested gradients.
    """

    forward: fx.Node
    backward: fx.Node | None
    sizes: tuple[int, int, int, int]
    wanted: int


def has_layers(graph: fx.Graph) -> bool:
    """Returns True if a captured graph may contain layers for :func:`choose_layers`."""
    return any(node.target is aten.mkldnn_rnn_layer.default for node in graph.nodes)


def choose_layers(module: fx.GraphModule, fake_mode: Any, threads: int) -> tuple[str, list[ChoiceRecord]]:
    """Rewrites layers that the native module computes faster with ``threads`` threads.

    Returns:
        A note for the report, and the measurements of each distinct layer.
    """
    found = [node for node in module.graph.nodes if node.target is torch.ops.sidefx.rnn_layer.default]
    layers = {layer: _task(layer, threads) for node in found if (layer := _layer(node)) is not None}
    tasks: dict[str, Task] = dict(layers.values())
    known = timings(tasks)
    candidates = {key: fastest(known.get(key, {}), "onednn") for key in tasks}
    chosen = [layer for layer, (key, _) in layers.items() if candidates[key] == "native"]
    for layer in chosen:
        _rewrite(module.graph, layer, fake_mode)
    if chosen:
        module.graph.lint()
        module.recompile()
    note = f"{len(chosen)} of {len(found)} recurrent layers by the native module" if chosen else ""
    counts = Counter(key for key, _ in layers.values())
    return note, [
        ChoiceRecord(key.partition(": ")[2], counts[key], threads, way, known.get(key, {}))
        for key, way in candidates.items()
    ]


def _task(layer: _Layer, threads: int) -> tuple[str, Task]:
    length, rows, inputs, units = layer.sizes
    part = " (a part of it)" * (_part(*layer.sizes) != length)
    key = f"{threads}: lstm {length} steps {rows} rows {inputs} to {units}, gradients {layer.wanted}{part}"
    return key, ("lstm", [*layer.sizes, layer.wanted, threads])


def _layer(node: fx.Node) -> _Layer | None:
    """Returns a layer that the native module supports: float32, static sizes, its saved values used only here."""
    x, *others = node.args[:7]
    shape, kept = _shape(x), _result(node, 3)
    if node.args[8] != _LSTM or shape is None or len(shape) != 3 or 0 in shape:
        return None
    units, (length, rows, inputs) = int(node.args[9]), shape  # type: ignore[arg-type]
    sizes = [[4 * units, inputs], [4 * units, units], [4 * units], [4 * units], [rows, units], [rows, units]]
    has_biases = node.args[11]
    if any(
        _shape(other) != size
        for i, (other, size) in enumerate(zip(others, sizes, strict=True))
        if _is_taken(i, has_biases)
    ):
        return None
    backward = next(iter(kept.users)) if kept is not None and kept.users else None
    if backward is None:
        return _Layer(node, None, (length, rows, inputs, units), 0)
    if len(kept.users) > 1 or backward.target is not torch.ops.sidefx.rnn_layer_backward.default:  # type: ignore[union-attr]
        return None
    given = [node for node in (*backward.args[:3], *backward.args[5:8], *backward.args[10:13]) if node is not None]
    if backward.args[-1] is not kept or any(_shape(each) is None for each in given):
        return None
    flags = {0: INPUT, 1: WEIGHTS, 2: WEIGHTS, 3: WEIGHTS, 4: WEIGHTS, 5: STATES, 6: STATES}
    wanted = {flags[get.args[1]] for get in backward.users if get.users}  # type: ignore[index]
    return _Layer(node, backward, (length, rows, inputs, units), sum(wanted))


def _is_taken(position: int, has_biases: Any) -> bool:
    return has_biases or position not in (2, 3)  # without biases, other arguments take their positions


def _shape(given: Any) -> list[int] | None:
    """Returns the static sizes of a float32 CPU tensor."""
    return static_cpu_shape(given, torch.float32)


def _result(node: fx.Node, index: int) -> fx.Node | None:
    return next((get for get in node.users if get.target is operator.getitem and get.args[1] == index), None)


def _rewrite(graph: fx.Graph, layer: _Layer, fake_mode: Any) -> None:
    call = partial(emit, graph, fake_mode)
    x, w_ih, w_hh, b_ih, b_hh, hx, cx, reverse = layer.forward.args[:8]
    biases = (b_ih, b_hh) if layer.forward.args[11] else (None, None)
    with graph.inserting_before(layer.forward):
        keep = layer.backward is not None
        made = call(
            torch.ops.sidefx.lstm.default, _as_it_was(x), w_ih, w_hh, *biases, *map(_state, (hx, cx)), reverse, keep
        )
        _replace(layer.forward, {i: call(operator.getitem, made, i) for i in range(4)})
    if layer.backward is None:
        return
    x, w_ih, w_hh, _, _, hx, cx, output, _, _, *grads = layer.backward.args[:13]
    with graph.inserting_before(layer.backward):
        kept = layer.backward.args[-1]
        given = (_as_it_was(x), w_ih, w_hh, *map(_state, (hx, cx)), output, kept, *grads, reverse, layer.wanted)
        made = call(torch.ops.sidefx.lstm_backward.default, *given)
        _replace(layer.backward, {i: call(operator.getitem, made, i) for i in range(7)})
    for node in dict.fromkeys((x, hx, cx)):
        erase_unused(node)


def _replace(node: fx.Node, results: dict[int, fx.Node]) -> None:
    """Replaces the results of a node, and erases it with its unused results."""
    for get in list(node.users):
        get.replace_all_uses_with(results[get.args[1]])  # type: ignore[index]
        node.graph.erase_node(get)
    node.graph.erase_node(node)
    for made in reversed(results.values()):
        if not made.users:
            node.graph.erase_node(made)


def _as_it_was(x: Any) -> Any:
    """Returns the input of a contiguous copy, which the native module does not need."""
    return x.args[0] if x.target is aten.clone.default and _shape(x.args[0]) is not None else x


def _state(given: Any) -> Any:
    """Returns an initial state, ``None`` for zeros."""
    node = given
    while node.target in (aten.select.int, aten.slice.Tensor, aten.view.default, aten.expand.default):
        node = node.args[0]
    return None if node.target is aten.full.default and node.args[1] == 0 else given
