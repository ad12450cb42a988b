"""Steps that pass a number, another one at each call, to an operator of torch's list, forward and backward.

    python tests/fuzz/changing_numbers.py                        every operator, on each backend, as a table
    python tests/fuzz/changing_numbers.py --backend inductor huber lerp    those whose names contain one of these
    python tests/fuzz/changing_numbers.py --kind bfloat16        in half precision
    python tests/fuzz/changing_numbers.py -v                     with the reasons

An operator is captured once with its first number and once more with a symbolic one; then it should replay. Exits with
1 if results differ from eager's. In half precision, and of float32 under autocast, they may be nearer to those in
float64, since compiled code rounds less often; an error that is clearly larger than eager's is a difference.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

import torch  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import sidefx_train  # noqa: E402
from tests.opinfo.run import operators  # noqa: E402
from tests.opinfo.variants import fresh, gradients, leaves, reasons  # noqa: E402

BACKENDS = ("eager", "aot_eager", "inductor")
KINDS = ("float32", "bfloat16", "float16", "autocast")
"""Dtype of the tensors; ``"autocast"``: float32, under autocast to bfloat16."""

FACTORS = (1.0, 1.02, 1.05, 1.03)
"""The number of each call, relative to that of the operator's sample; also below 1, where larger ones are invalid."""
CLOSE = 1e-3
TIMES = 3.0
"""How many times as large as eager's an error in half precision may be, beside one unit in the last place."""

SEED = 5

REPLAYS, EACH_VALUE, EAGER, DIFFERS = "replays", "captured at each value", "eager", "differs"

_NUMBERS = frozenset({"alpha", "beta", "value", "p", "min", "max", "margin", "exponent", "negative_slope", "lambd"})
"""Names of arguments that are numbers even if a sample has an integer there."""
SHAPING = frozenset(
    {"start", "end", "step", "steps", "scale_factor", "recompute_scale_factor", "rtol", "atol", "rcond"}
)


class State:
    """The changing number."""

    value = 0.0


@dataclass(frozen=True)
class Case:
    """An operator with one number to change.

    Attributes:
        name: the operator and the position or name of the argument.
        op: its ``OpInfo``.
        sample: its sample.
        place: position or name of the number.
        values: the numbers of the calls.
        kind: one of ``KINDS``.
        others: other numbers, for an operator that does not replay with the first ones, which may be special.
    """

    name: str
    op: Any
    sample: Any
    place: int | str
    values: tuple[float, ...]
    kind: str = "float32"
    others: tuple[tuple[float, ...], ...] = ()

    def call(self, given: tuple[Any, ...], number: Any) -> Any:
        x, args, kwargs = given
        if isinstance(self.place, int):
            args = (*args[: self.place], number, *args[self.place + 1 :])
        else:
            kwargs = {**kwargs, self.place: number}
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.kind == "autocast" else nullcontext():
            return self.sample.output_process_fn_grad(self.op.op(x, *args, **kwargs))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it computes."""
        return torch.bfloat16 if self.kind == "autocast" else getattr(torch, self.kind)

    @property
    def in_float64(self) -> Case:
        """The same operator on the same values in float64."""
        x, args, kwargs = _widened((self.sample.input, self.sample.args, self.sample.kwargs))
        process = self.sample.output_process_fn_grad
        sample = type(self.sample)(x, args=args, kwargs=kwargs, output_process_fn_grad=process)
        return replace(self, sample=sample, kind="float64")


@dataclass(frozen=True)
class Outcome:
    """What happened to a case on one backend, and why."""

    case: str
    backend: str
    kind: str
    why: str = ""


def _places(sample: Any) -> Iterator[tuple[int | str, float]]:
    for place, value in [*enumerate(sample.args), *sample.kwargs.items()]:
        named = type(value) is int and place in _NUMBERS and value > 0
        if (type(value) is float or named) and place not in SHAPING and 0 < abs(value) < 1e4:
            yield place, float(value)


def _widened(given: Any) -> Any:
    def wide(value: Any) -> Any:
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return torch.float64
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value.detach().double().requires_grad_(value.requires_grad)

    return pytree.tree_map(wide, given)


def cases(names: tuple[str, ...] = (), kind: str = "float32") -> Iterator[Case]:
    """Yields one case for each operator and number argument in its samples.

    Args:
        names: only operators whose names contain one of these.
        kind: one of ``KINDS``.
    """
    dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
    for name, op in operators().items():
        if names and not any(part in name for part in names):
            continue
        seen = set()
        differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        try:
            samples = list(op.sample_inputs("cpu", dtype, requires_grad=differentiable))
        except Exception:
            continue  # it takes no floats, or needs a library that is not installed
        for sample in samples:
            for place, value in _places(sample):
                if place in seen:
                    continue
                for factors in (FACTORS, tuple(1 / factor for factor in FACTORS)):
                    numbers = tuple(value * factor for factor in factors)
                    case = Case(f"{name} [{place}]", op, sample, place, numbers, kind)
                    if _is_valid(case):
                        seen.add(place)
                        yield case
                        break


def _run(case: Case, step: Any, state: State, number: float) -> Any:
    state.value = number
    given = fresh((case.sample.input, case.sample.args, case.sample.kwargs))
    torch.manual_seed(SEED)
    return step(given)


def _step_of(case: Case, state: State) -> Any:
    def step(given: tuple[Any, ...]) -> Any:
        out = case.call(given, state.value)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out), gradients(out, leaves(given))

    return step


def same_each_time(case: Case) -> bool:
    """Returns True if eager accepts every number of a case and gives the same results for it again."""
    state = State()
    step = _step_of(case, state)
    try:
        return all(_equal(*(_run(case, step, state, number) for _ in range(2)), 0.0) for number in case.values)
    except Exception:
        return False


def _is_valid(case: Case) -> bool:
    state = State()
    step = _step_of(case, state)
    try:
        for number in case.values:
            _run(case, step, state, number)
    except Exception:
        return False
    return True


def _equal(want: Any, have: Any, tolerance: float) -> bool:
    wanted, had = pytree.tree_leaves(want), pytree.tree_leaves(have)
    if len(wanted) != len(had):
        return False
    for a, b in zip(wanted, had, strict=True):
        if not isinstance(a, torch.Tensor):
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            return False
    return True


def _error_shown(want: Any, have: Any, exact: Any) -> bool:
    """Returns True if an error is clearly larger than eager's."""
    found = [pytree.tree_leaves(each) for each in (want, have, exact)]
    if len({len(each) for each in found}) > 1:
        return True
    for a, b, right in zip(*found, strict=True):
        if not isinstance(a, torch.Tensor):
            continue
        if a.shape != b.shape or a.dtype != b.dtype or a.shape != right.shape:
            return True
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return True
            continue
        rounded = right.to(a.dtype)
        finite = rounded.isfinite() & a.isfinite()
        if not torch.equal(b.isfinite() & finite, finite):
            return True
        a, b, right = (each[finite].double() for each in (a, b, right))
        if not right.numel():
            continue
        last_place = torch.finfo(rounded.dtype).eps * right.abs().clamp(min=torch.finfo(rounded.dtype).tiny)
        if ((b - right).abs() > TIMES * (a - right).abs().max() + last_place).any():
            return True
    return False


def _differs(case: Case, number: float, want: Any, have: Any, backend: str) -> bool:
    if case.kind == "float32" or backend == "eager":
        return not _equal(want, have, 0.0 if backend == "eager" else CLOSE)
    if _equal(want, have, 0.0):
        return False
    drawn = not torch.equal(torch.get_rng_state(), torch.manual_seed(SEED).get_state())
    wide, state = case.in_float64, State()
    try:
        exact = _run(wide, _step_of(wide, state), state, number)
    except Exception:
        exact = None
    if drawn or exact is None:  # nothing tells which is right
        return not _equal(want, have, TIMES * torch.finfo(case.dtype).eps)
    return _error_shown(want, have, exact)


def check(case: Case, backend: str) -> Outcome:
    """Runs a case eagerly and captured, and compares.

    Args:
        case: the operator and its number.
        backend: name of the backend.
    """
    outcome = _check_once(case, backend)
    for values in case.others:
        if outcome.kind in (REPLAYS, DIFFERS):
            break
        outcome = _check_once(replace(case, values=values), backend)
    return outcome


def _check_once(case: Case, backend: str) -> Outcome:
    state = State()
    step = _step_of(case, state)
    compiled = sidefx_train.compile(step, backend=backend, rng="eager", verify=0)  # the comparison is made here
    for number in case.values:
        want = _run(case, step, state, number)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                have = _run(case, compiled, state, number)
        except Exception as error:
            return Outcome(case.name, backend, DIFFERS, f"{type(error).__name__}: {error}".splitlines()[0])
        if _differs(case, number, want, have, backend):
            return Outcome(case.name, backend, DIFFERS, f"at {number}")
    why = reasons(compiled)
    if why:
        return Outcome(case.name, backend, EAGER, why)
    report = compiled.report()
    last = str(report.recaptures[-1].new) if report.recaptures else ""
    most = 2 if type(case.values[0]) is float else max(len(case.values) - 1, 3)  # sizes of 0 and 1 are special
    return Outcome(case.name, backend, REPLAYS if len(report.captures) <= most else EACH_VALUE, last)


def table(outcomes: list[Outcome], verbose: bool = False) -> str:
    """Returns the outcomes by backend and kind, as text."""
    groups = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.backend, outcome.kind].append(outcome)
    lines = []
    for (backend, kind), found in sorted(groups.items()):
        lines.append(f"{backend}: {kind}: {len(found)}")
        if verbose and kind != REPLAYS:
            lines += [f"    {each.case}: {each.why}" for each in found]
        else:
            lines.append("    " + ", ".join(each.case for each in found))
    return "\n".join(lines)


def main(chosen: Callable[[tuple[str, ...], str], Iterable[Case]], description: str | None) -> int:
    """Runs the cases named on the command line; returns the exit status.

    Args:
        chosen: returns the cases of the operators with these names, of a kind.
        description: what the command does.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("-v", "--verbose", action="store_true")
    given = parser.parse_args()
    outcomes = []
    for kind in given.kind or KINDS[:1]:
        for case in chosen(tuple(given.names), kind):
            for backend in given.backend or BACKENDS:
                outcomes.append(check(case, backend))
                print(f"{outcomes[-1].case:50} {kind:9} {backend:10} {outcomes[-1].kind}", file=sys.stderr, flush=True)
    print(table(outcomes, given.verbose))
    return any(outcome.kind == DIFFERS for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
