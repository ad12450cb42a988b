"""The first runs of a compiled graph beside the captured graph run op by op.

A compiled graph is used once it has proved itself: both run from the same inputs and the same random state, on copies,
and all that they return and write is compared. What counts as equal is what rounding can make of it: first the plain
distance, and where that is not small, the distance between runs of the captured graph whose operations round otherwise
(``rounding_noise.py``).
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from sidefx_train import _torch_compat as compat
from sidefx_train.compile.backend.verification.reference import Reference
from sidefx_train.compile.graph.artifacts import Executable, TracedGraph
from sidefx_train.compile.graph.fx_utils import generators

RELATIVE = 1e-3
"""Largest difference, in norm, that counts as equal at once: relative to the value, or to the change of what is
written."""

NOISY_RUNS = 3
FACTOR = 8.0
"""How many times as far off as the farthest of the noisy runs the compiled graph may be."""

LATER = (3, 10, 30)
"""Runs after which a graph is compared again that had results of zeros only, in which nothing shows."""


def verified(
    executable: Executable,
    traced: TracedGraph,
    reference: Callable[[], Reference | None],
    runs: int | None,
    report: Callable[[str], None],
    done: Callable[[str], None] = lambda text: None,
) -> Executable:
    """Compares the first runs with the graph run op by op.

    If a run differs, ``report`` is told and the compiled graph is never used again: the reference is.

    Args:
        executable: the compiled graph.
        traced: the captured graph.
        reference: makes what it is compared with; ``None`` if there is nothing to compare with.
        runs: how many runs to compare; ``None``: the first, and a few later ones while results are zeros only.
        report: told in words what differs; it may raise, since nothing has been changed by then.
        done: told in words what a comparison came to and what it cost.
    """
    return replace(executable, run=Proving(executable, traced, reference, runs, report, done))


class Proving:
    """A compiled graph that is being compared, called like one.

    Attributes:
        settled: called with what is to be called from now on, when no more is compared.
    """

    def __init__(
        self,
        executable: Executable,
        traced: TracedGraph,
        reference: Callable[[], Reference | None],
        runs: int | None,
        report: Callable[[str], None],
        done: Callable[[str], None],
    ) -> None:
        self._executable, self._traced, self._report, self._done = executable, traced, report, done
        self._make_reference = reference
        self.settled: Callable[[Callable[[list[Any]], Sequence[Any]]], None] = lambda run: None
        self._left = 1 if runs is None else runs
        self._later = list(LATER) if runs is None else []
        self._reference: Reference | None = None
        self._run: Callable[[list[Any]], Sequence[Any]] = self._compared
        self._drawn_from = [torch.default_generator, *_device_generators(traced), *generators(traced.module)]

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        return self._run(args)

    def _compared(self, args: list[Any]) -> Sequence[Any]:
        if not all(compat.has_memory(value) for value in args if isinstance(value, torch.Tensor)):
            return self._executable.run(args)  # a freed storage can be neither copied nor compared
        began = time.perf_counter()
        if self._reference is None:
            try:
                self._reference = self._make_reference()
            except Exception as error:  # the report says so
                return self._unproven(f"{type(error).__name__}: {error}", args)
        if self._reference is None:
            return self._unproven("it draws random numbers of its own", args)
        try:
            compiled, captured = _copies(args), _copies(args)
        except (MemoryError, torch.OutOfMemoryError):
            return self._unproven("no memory for copies of the inputs", args)
        states = [generator.get_state() for generator in self._drawn_from]
        have = _Outcome(list(self._executable.run(list(compiled))), compiled)
        self._set_back(states)
        try:
            want = _Outcome(list(self._reference.run(list(captured))), captured)
        except Exception as error:  # it cannot take what a compiled forward saved, say; the report says so
            self._set_back(states)
            return self._unproven(f"it raised {type(error).__name__}: {error}", args)
        self._set_back(states)
        found, shows = self._difference(args, have, want, states)
        if found:
            self._settle(self._reference.run)
            self._report(found)
            return self._reference.run(args)
        self._left -= 1
        milliseconds = 1e3 * (time.perf_counter() - began)
        self._done(f"equal to the captured graph run op by op (the comparison took {milliseconds:.1f} ms)")
        if self._left <= 0 and not shows and self._later:
            self._run, self._left = self._waiting(self._later.pop(0)), 1
        elif self._left <= 0:
            self._settle(self._executable.run)
        return self._executable.run(args)

    def _unproven(self, why: str, args: list[Any]) -> Sequence[Any]:
        self._settle(self._executable.run)
        self._done(f"not compared with the captured graph: {why}")
        return self._executable.run(args)

    def _settle(self, run: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._run = run
        self.settled(run)

    def _waiting(self, runs: int) -> Callable[[list[Any]], Sequence[Any]]:
        """Runs the compiled graph a few times before it is compared again."""

        def run(args: list[Any]) -> Sequence[Any]:
            nonlocal runs
            runs -= 1
            if runs <= 0:
                self._run = self._compared
            return self._executable.run(args)

        return run

    def _set_back(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._drawn_from, states, strict=True):
            generator.set_state(state)

    def _difference(
        self, args: list[Any], have: _Outcome, want: _Outcome, states: list[torch.Tensor]
    ) -> tuple[str, bool]:
        """What differs, in words, and whether anything could be seen in every result that can show something."""
        pairs = _pairs(args, have, want, self._planned())
        shows = all(pair.shows for pair in pairs)
        for pair in pairs:
            if pair.kind_differs:
                return f"{self._name(pair)} is {pair.kind_differs}", shows
        doubtful = [pair for pair in pairs if not pair.distance <= RELATIVE * pair.scale + pair.floor]
        if not doubtful:
            return "", shows
        reference, moved = self._reference, [0.0] * len(doubtful)
        assert reference is not None, "there is one to compare with"
        for seed in range(NOISY_RUNS):
            inputs = _copies(args)
            try:
                noisy = _Outcome(list(reference.noisy(list(inputs), seed)), inputs)
            except (
                RuntimeError
            ):  # noise led out of an operator's domain: the other runs tell, and without any it differs
                continue
            finally:
                self._set_back(states)
            by_place = {(pair.what, pair.index): pair for pair in _pairs(args, noisy, want, [])}
            for i, pair in enumerate(doubtful):
                moved[i] = max(moved[i], by_place[pair.what, pair.index].distance)
        for pair, rounding in zip(doubtful, moved, strict=True):
            if not pair.distance <= RELATIVE * pair.scale + pair.floor + FACTOR * rounding:
                error = f"{pair.distance:.3g} in norm, its {pair.measure} is {pair.scale:.3g}, rounding moves it by "
                return f"{self._name(pair)} is off by {error}{rounding:.3g}", shows
        return "", shows

    def _planned(self) -> list[torch.dtype | None]:
        """The dtypes of the outputs as traced: kernels of the reference may round statistics of norms otherwise."""
        outputs = next(iter(reversed(self._traced.module.graph.nodes))).args[0]
        return [getattr(node.meta.get("val"), "dtype", None) if isinstance(node, fx.Node) else None for node in outputs]

    def _name(self, pair: _Pair) -> str:
        """The tensor in the program's words: where an input comes from, or what computes an output."""
        if pair.what == "input":
            return f"input {pair.index} ({self._traced.inputs[pair.index].source})"
        node = next(iter(reversed(self._traced.module.graph.nodes))).args[0][pair.index]
        made = f" ({node.target})" if isinstance(node, fx.Node) and node.op == "call_function" else ""
        return f"output {pair.index}{made}"


@dataclass(frozen=True)
class _Outcome:
    """What a run returned, and its inputs afterwards."""

    outputs: list[Any]
    inputs: list[Any]


@dataclass(frozen=True)
class _Pair:
    """One value of two runs.

    Attributes:
        what: ``"output"`` or ``"input"``.
        index: which.
        kind_differs: type and shape, where those are others.
        distance: between the two, in norm; infinite where one is finite and the other is not.
        scale: norm of the value, or of its change where an input was written.
        floor: rounding of the value itself, in norm.
        measure: what the scale is, in words.
        shows: false for tensors of zeros, in which a mistake may not show.
    """

    what: str
    index: int
    kind_differs: str = ""
    distance: float = 0.0
    scale: float = 0.0
    floor: float = 0.0
    measure: str = "norm"
    shows: bool = True


def _pairs(before: list[Any], have: _Outcome, want: _Outcome, planned: list[torch.dtype | None]) -> list[_Pair]:
    """All values of two runs; outputs of ``have`` may have the ``planned`` dtypes where those of ``want`` do not."""
    dtypes = planned or [None] * len(want.outputs)
    outputs = enumerate(zip(have.outputs, want.outputs, dtypes, strict=True))
    found = [_pair("output", i, a, b, None, dtype) for i, (a, b, dtype) in outputs]
    found += [
        _pair("input", i, a, b, old) for i, (a, b, old) in enumerate(zip(have.inputs, want.inputs, before, strict=True))
    ]
    return found


def _pair(what: str, index: int, a: Any, b: Any, before: Any, planned: torch.dtype | None = None) -> _Pair:
    if not isinstance(b, torch.Tensor):
        if isinstance(b, float) and isinstance(a, float):
            same = a == b or (math.isnan(a) and math.isnan(b))
            return _Pair(what, index, distance=0.0 if same else abs(a - b), scale=abs(b), measure="value")
        return _Pair(what, index, "" if a == b and type(a) is type(b) else f"{a!r}, expected {b!r}")
    narrow = isinstance(a, torch.Tensor) and a.dtype == planned and _is_float(a) and _is_float(b)
    if not isinstance(a, torch.Tensor) or a.shape != b.shape or (a.dtype != b.dtype and not narrow):
        kind = f"{a.dtype}{list(a.shape)}" if isinstance(a, torch.Tensor) else type(a).__name__
        return _Pair(what, index, f"{kind}, expected {b.dtype}{list(b.shape)}")
    if before is not None and torch.equal(_dense(a), _dense(b)) and _same_bits(before, b):
        return _Pair(what, index)  # not written
    if b.device.type == "meta":
        return _Pair(what, index)
    if not _is_float(b):  # no rounding in them: each must be equal
        wrong = _dense(a) != _dense(b)
        return _Pair(what, index, distance=float(wrong.sum()), measure="count of what may differ")
    x, y = _numbers(a), _numbers(b)
    finite = y.isfinite()
    if not torch.equal(x.isfinite(), finite) or not torch.equal(x[~finite].nan_to_num(), y[~finite].nan_to_num()):
        return _Pair(what, index, distance=math.inf, scale=_norm(y[finite]))
    distance = _norm((x - y)[finite])
    if isinstance(before, torch.Tensor) and before.shape == b.shape and before.dtype == b.dtype:
        change = (y - _numbers(before))[finite]
        floor = torch.finfo(b.dtype).eps * _norm(y[finite]) if b.is_floating_point() else 0.0
        scale = _norm(change.nan_to_num(0, 0, 0))
        return _Pair(what, index, "", distance, scale, floor, "change", scale > 0)
    scale = _norm(y[finite])
    floor = torch.finfo(a.dtype).eps * scale if a.dtype != b.dtype else 0.0
    return _Pair(what, index, "", distance, scale, floor, shows=scale > 0 or b.numel() == 0)


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _same_bits(before: Any, after: torch.Tensor) -> bool:
    return (
        isinstance(before, torch.Tensor) and before.shape == after.shape and torch.equal(_dense(before), _dense(after))
    )


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers as float64, real and imaginary parts apart."""
    tensor = _dense(tensor)
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double().reshape(-1)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _norm(values: torch.Tensor) -> float:
    return float(values.norm())


def _device_generators(traced: TracedGraph) -> list[torch.Generator]:
    """The generators of the accelerators that a graph works on."""
    devices = {item.example.device for item in traced.inputs if isinstance(item.example, torch.Tensor)}
    return [torch.cuda.default_generators[device.index or 0] for device in devices if device.type == "cuda"]


def _copies(args: list[Any]) -> list[Any]:
    """Copies of the tensors; what shares memory is copied with the memory."""
    strided = [each for each in args if isinstance(each, torch.Tensor) and each.layout == torch.strided]
    storages = Counter(value.untyped_storage().data_ptr() for value in strided)
    memo: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout != torch.strided:
            return value.detach().clone()
        if not compat.has_memory(value):  # freed: the graph allocates it before it writes
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            made.untyped_storage().resize_(0)
            return made
        shared = storages[value.untyped_storage().data_ptr()] > 1
        return copy.deepcopy(value.detach(), memo) if shared else _copy(value.detach())

    return [copied(value) for value in args]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same strides, which compiled code relies on, in memory of its own."""
    dense = tensor.clone()
    if dense.stride() == tensor.stride() or tensor.numel() == 0:
        return dense
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span = tensor.as_strided((last + 1,), (1,)).clone()
    return span.as_strided(tensor.shape, tensor.stride())
