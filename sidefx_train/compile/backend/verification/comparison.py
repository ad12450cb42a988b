"""Compares two runs of one graph: finds values that differ by more than rounding.

First the plain distance is computed. If it is not small, the captured graph is run again with noise of the size of a
rounding error on each operation (``rounding_noise.py``), until a run explains the difference. If none does, it is run
in float64 (``exact.py``): a value that is as close to that as eager's own is correct. Elements that are finite in only
one run are judged one by one, by the same runs: a kernel may overflow in an intermediate where another does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

RELATIVE = 1e-3
"""Largest difference, in norm, that counts as equal at once: relative to the value, or to the change of a written
value."""

NOISY_RUNS = 3
FACTOR = 8.0
"""Limit of the compiled graph's distance, relative to the largest of the noisy runs."""

EXACT_FACTOR = 2.0
"""Limit of the distance from the float64 result, relative to eager's own."""


@dataclass(frozen=True)
class Outcome:
    """Results of a run, and its inputs afterwards."""

    outputs: list[Any]
    inputs: list[Any]

    def value(self, what: str, index: int) -> Any:
        """Returns an output, or an input after the run."""
        return (self.outputs if what == "output" else self.inputs)[index]


@dataclass(frozen=True)
class Pair:
    """One value of two runs.

    Attributes:
        what: ``"output"`` or ``"input"``.
        index: index of the output or input.
        kind_differs: dtype and shape, if they differ.
        distance: norm of the difference, where both are finite.
        unlike: elements that are finite, infinite or not a number in one run and something else in the other.
        scale: norm of the value, or of the change of a written input.
        floor: norm of the value's own rounding.
        measure: description of the scale.
        shows: False for tensors of zeros, which may hide an error.
    """

    what: str
    index: int
    kind_differs: str = ""
    distance: float = 0.0
    unlike: int = 0
    scale: float = 0.0
    floor: float = 0.0
    measure: str = "norm"
    shows: bool = True

    @property
    def allowed(self) -> float:
        """Distance that counts as equal at once."""
        return RELATIVE * self.scale + self.floor

    @property
    def inconclusive(self) -> bool:
        """True if more runs are needed to decide about equality."""
        return self.unlike > 0 or not self.distance <= self.allowed


class Disagreement:
    """A pair that is not equal at once, and the evidence of further runs.

    Args:
        pair: the pair.
        have: value of the compiled graph.
        want: value of the captured graph.
    """

    def __init__(self, pair: Pair, have: Any, want: Any) -> None:
        self.pair = pair
        self._dtype = want.dtype if isinstance(want, torch.Tensor) else torch.float64
        self._have, self._want = values_of(have), values_of(want)
        self._left_out: torch.Tensor | None = None
        self._unlike = ~same_kind(self._have, self._want)
        self._noise = 0.0
        self._exact = False

    def leave_out(self, a: Any, b: Any) -> None:
        """Leaves out the elements that differ between two runs whose unwritten memory had other contents."""
        a, b = values_of(a), values_of(b)
        left_out = ~((a == b) | (a.isnan() & b.isnan()))
        if not left_out.any():
            return
        self._left_out = left_out
        self._have, self._want = self._compared(self._have), self._compared(self._want)
        self._unlike = ~same_kind(self._have, self._want)
        scale = min(self.pair.scale, norm(self._want)) if self.pair.measure == "norm" else self.pair.scale
        unlike = int(self._unlike.sum())
        self.pair = replace(self.pair, distance=distance(self._have, self._want), unlike=unlike, scale=scale)

    def _compared(self, value: Any) -> torch.Tensor:
        """Returns a value's numbers, with zeros for those that are left out."""
        found = values_of(value)
        return found if self._left_out is None else found.masked_fill(self._left_out, 0)

    def is_settled(self) -> bool:
        """True if rounding explains the difference."""
        near = self._exact or self.pair.distance <= self.pair.allowed + FACTOR * self._noise
        return near and not self._unlike.any()

    def hear_noisy(self, value: Any) -> None:
        """Adds a run in which operations round differently."""
        value = self._compared(value)
        self._noise = max(self._noise, distance(value, self._want))
        self._unlike &= ~same_kind(self._have, value)

    def hear_exact(self, value: Any) -> None:
        """Adds a run in float64."""
        exact = self._compared(value)
        if exact.is_floating_point():
            near = (self._have - exact).abs() <= max(RELATIVE, 4 * torch.finfo(self._dtype).eps) * exact.abs()
            rounded = exact.to(self._dtype).double() if self._dtype.is_floating_point else exact
            self._unlike &= ~(same_kind(self._have, rounded) & (near | ~rounded.isfinite()))
        compared = self._have.isfinite() & self._want.isfinite()
        mine, eagers = distance(self._have[compared], exact[compared]), distance(self._want[compared], exact[compared])
        self._exact = mine <= self.pair.allowed + EXACT_FACTOR * eagers

    def in_words(self) -> str:
        """Returns the description of the difference, without the value's name."""
        pair, unlike = self.pair, int(self._unlike.sum())
        if unlike:
            first = int(self._unlike.nonzero()[0, 0])
            have, want = float(self._have[first]), float(self._want[first])
            return (
                f"has {have:.3g} for {want:.3g} in element {first} ({unlike} of {self._unlike.numel()} are like that)"
            )
        error = f"{pair.distance:.3g} in norm, its {pair.measure} is {pair.scale:.3g}"
        return f"is off by {error}, rounding changes it by {self._noise:.3g}"


def pairs(before: list[Any], have: Outcome, want: Outcome, planned: list[torch.dtype | None]) -> list[Pair]:
    """Returns all values of two runs; outputs of ``have`` may have the ``planned`` dtypes instead of ``want``'s."""
    dtypes = planned or [None] * len(want.outputs)
    outputs = enumerate(zip(have.outputs, want.outputs, dtypes, strict=True))
    found = [_pair("output", i, a, b, None, dtype) for i, (a, b, dtype) in outputs]
    inputs = enumerate(zip(have.inputs, want.inputs, before, strict=True))
    return found + [_pair("input", i, a, b, old) for i, (a, b, old) in inputs]


def differing(
    found: list[Pair],
    have: Outcome,
    want: Outcome,
    noisy: Callable[[int], Outcome | None],
    exact: Callable[[], Outcome | None],
    filled: Callable[[float], Outcome | None] = lambda value: None,
) -> list[tuple[Pair, str]]:
    """Returns the pairs that differ by more than rounding, each with a description.

    Args:
        found: all pairs.
        have: run of the compiled graph.
        want: run of the captured graph.
        noisy: runs the captured graph with noise of a seed; returns ``None`` if that raises.
        exact: runs it in float64; returns ``None`` if that raises.
        filled: runs it with a number in all memory that it allocates; returns ``None`` if it allocates none without
            writing to it, or if it raises.
    """
    wrong = [(pair, f"is {pair.kind_differs}") for pair in found if pair.kind_differs]
    if wrong:
        return wrong
    disagreements = [
        Disagreement(pair, have.value(pair.what, pair.index), want.value(pair.what, pair.index))
        for pair in found
        if pair.inconclusive
    ]
    fills = [run for run in map(filled, (0.0, 1.0)) if run is not None] if disagreements else []
    if len(fills) == 2:
        for disagreement in disagreements:
            disagreement.leave_out(*(run.value(disagreement.pair.what, disagreement.pair.index) for run in fills))
    for seed in range(NOISY_RUNS):
        if all(disagreement.is_settled() for disagreement in disagreements):
            return []
        moved = noisy(seed)
        if moved is not None:
            for disagreement in disagreements:
                disagreement.hear_noisy(moved.value(disagreement.pair.what, disagreement.pair.index))
    disagreements = [disagreement for disagreement in disagreements if not disagreement.is_settled()]
    known = exact() if disagreements else None
    if known is not None:
        for disagreement in disagreements:
            disagreement.hear_exact(known.value(disagreement.pair.what, disagreement.pair.index))
    return [
        (disagreement.pair, disagreement.in_words()) for disagreement in disagreements if not disagreement.is_settled()
    ]


def _pair(what: str, index: int, a: Any, b: Any, before: Any, planned: torch.dtype | None = None) -> Pair:
    if not isinstance(b, torch.Tensor):
        if not isinstance(b, float) or not isinstance(a, float):
            return Pair(what, index, "" if a == b and type(a) is type(b) else f"{a!r}, expected {b!r}")
        x, y = values_of(a), values_of(b)
        scale = abs(b) if math.isfinite(b) else 0.0
        return Pair(what, index, "", distance(x, y), int(not same_kind(x, y)), scale, measure="value")
    narrow = isinstance(a, torch.Tensor) and a.dtype == planned and _is_float(a) and _is_float(b)
    if not isinstance(a, torch.Tensor) or a.shape != b.shape or (a.dtype != b.dtype and not narrow):
        kind = f"{a.dtype}{list(a.shape)}" if isinstance(a, torch.Tensor) else type(a).__name__
        return Pair(what, index, f"{kind}, expected {b.dtype}{list(b.shape)}")
    if b.device.type == "meta":
        return Pair(what, index)
    if before is not None and torch.equal(_dense(a), _dense(b)) and _same_bits(before, b):
        return Pair(what, index)  # not written
    x, y = values_of(a), values_of(b)
    if not _is_float(b):  # not rounded: each must be equal
        return Pair(what, index, distance=distance(x, y), measure="count of what may differ")
    unlike = int((~same_kind(x, y)).sum())
    if isinstance(before, torch.Tensor) and before.shape == b.shape and before.dtype == b.dtype:
        floor = torch.finfo(b.dtype).eps * norm(y) if b.is_floating_point() else 0.0
        scale = norm(y - values_of(before))
        return Pair(what, index, "", distance(x, y), unlike, scale, floor, "change", scale > 0)
    scale = norm(y)
    floor = torch.finfo(a.dtype).eps * scale if a.dtype != b.dtype else 0.0
    return Pair(what, index, "", distance(x, y), unlike, scale, floor, shows=scale > 0 or b.numel() == 0)


def values_of(value: Any) -> torch.Tensor:
    """Returns a tensor's numbers, or a number, in one dimension: as float64 unless integers; complex ones as two."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor([value], dtype=torch.float64 if isinstance(value, float) else None)
    plain = _dense(value)
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return (plain.double() if plain.is_floating_point() else plain).reshape(-1)


def same_kind(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns where both are finite, both not a number, or the same infinity."""
    return (a.isfinite() & b.isfinite()) | (a == b) | (a.isnan() & b.isnan())


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the norm of the difference where both are finite; for integers, the number of differences."""
    if not (a.is_floating_point() and b.is_floating_point()):
        return float((a != b).sum())
    return norm(a - b)


def norm(values: torch.Tensor) -> float:
    """Returns the norm of the finite values."""
    found = float(values.norm())
    return found if math.isfinite(found) else float(values[values.isfinite()].norm())


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _same_bits(before: Any, after: torch.Tensor) -> bool:
    return (
        isinstance(before, torch.Tensor) and before.shape == after.shape and torch.equal(_dense(before), _dense(after))
    )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()
