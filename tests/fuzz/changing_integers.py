"""Steps that pass an integer, another one at each call, to an operator of torch's list, forward and backward.

    python tests/fuzz/changing_integers.py                       every operator, on each backend, as a table
    python tests/fuzz/changing_integers.py --backend inductor roll pad    those whose names contain one of these
    python tests/fuzz/changing_integers.py -v                    with the reasons

These are the integers of an operator's samples, and integers in place of the floats there. An operator is captured once
with its first integer and once more with a symbolic one, which further ones replay. Special ones may have a capture of
their own, such as those that make a size 1. Exits with 1 if results differ from eager's.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

import torch  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from tests.fuzz.changing_numbers import SHAPING, Case, main, operators, same_each_time  # noqa: E402

STRUCTURAL: dict[str, tuple[str, ...]] = {
    "it names a dimension": (
        *("dim", "dim0", "dim1", "dim2", "dimension", "axis", "start_dim", "end_dim"),
        "ind",  # where the dimensions of ``tensorinv`` are cut in two
        *("dims of roll", "dims of tensordot"),  # which are rolled; how many are summed over
    ),
    "it is the number of the results": ("chunks", "sections", "indices", "num_chunks"),
    "it is the number of times that something is repeated, one operation each": (
        *("r", "edge_order", "n of diff", "n of linalg.matrix_power", "p of mvlgamma"),
    ),
    "it is an enumeration": ("interpolation_mode", "padding_mode", "custom_mask_type", "k of rot90"),
    "it says how channels are grouped, which decides the kernel": ("groups", "num_groups", "group"),
    "its samples have a lower rank, where the derivative is made of rounding errors": ("q of svd_lowrank",),
    "it is the length of a transform, whose kernel is chosen by it": ("n_fft", "hop_length", "win_length"),
}
"""Why an argument is one capture for each value, and the names of these arguments."""

RARE: dict[str, tuple[str, ...]] = {
    "C++ code reads it, and no program is known to change it": (
        *("correction of cov", "N of linalg.vander", "q of pca_lowrank", "bins of histogram"),
        *("padding_idx of nn.functional.embedding_bag", "step of unfold", "size of unfold_copy", "step of unfold_copy"),
        *("kernel_size of nn.functional.max_unpool3d", "stride of nn.functional.max_unpool3d"),
        *("kernel_size of nn.functional.fractional_max_pool2d", "output_size of nn.functional.fractional_max_pool2d"),
        *("kernel_size of nn.functional.fractional_max_pool3d", "output_size of nn.functional.fractional_max_pool3d"),
        *("steps of linspace.tensor_overload", "steps of logspace.tensor_overload"),
    ),
    "the operator is called by derivatives alone": tuple(
        f"{window} of max_pool2d_with_indices_backward" for window in ("kernel_size", "stride", "dilation", "padding")
    ),
}
"""The same for arguments that are captured at each value though another capture could do."""

_MOST, _SAMPLES = 3, 12
"""Limits of the sequences of numbers for a case, and of the samples that are tried for one."""


def argument_name(op: Any, place: int | str) -> str:
    """Returns the name of an argument in the operator's schema, or in the signature of its Python function."""
    if isinstance(place, str):
        return place
    for name in (op.aten_name, op.name.rpartition(".")[2], op.name.replace(".", "_")):
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            arguments = getattr(packet, overload)._schema.arguments
            if place + 1 >= len(arguments) or "Tensor" not in str(arguments[0].type):
                continue
            if any(kind in str(arguments[place + 1].real_type) for kind in ("int", "Int", "number")):
                return arguments[place + 1].name
    try:
        return list(inspect.signature(op.op).parameters)[place + 1]
    except (IndexError, ValueError, TypeError):
        return str(place)


def why_excluded(op: Any, place: int | str) -> str:
    """Returns why an argument is one capture for each value; an empty text if it should not be."""
    name = argument_name(op, place)
    names = (name, f"{name} of {op.name}", f"{name} of {op.full_name}")
    tables = (*STRUCTURAL.items(), *RARE.items())
    return next((why for why, excluded in tables if any(each in excluded for each in names)), "")


def _is_empty(sample: Any) -> bool:
    return any(
        isinstance(each, torch.Tensor) and each.numel() == 0
        for each in pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    )


def _sequences(value: int | float) -> Iterator[tuple[int, ...]]:
    """Yields numbers for the calls, longer sequences first."""
    if type(value) is float:
        yield from ((3, 4, 5, 6, 7), (2, 3, 4, 5))
        return
    for count in (5, 4, 3):
        starts = (max(value, 3), value + 1, value, 2, 1, value - count + 1, value - 1)
        yield from (tuple(range(start, start + count)) for start in dict.fromkeys(starts))


def _case(label: str, op: Any, sample: Any, place: int | str, value: int | float) -> Case | None:
    """Returns a case with the numbers that eager accepts; ``None`` if there are none."""
    found: list[Case] = []
    for numbers in _sequences(value):
        case = Case(label, op, sample, place, numbers)
        if len(found) < _MOST and (not found or len(numbers) >= len(found[0].values)) and same_each_time(case):
            found.append(case)
    return replace(found[0], others=tuple(each.values for each in found[1:])) if found else None


def cases(names: tuple[str, ...] = (), kind: str = "float32") -> Iterator[Case]:
    """Yields one case for each operator and integer argument in its samples that is not excluded.

    Args:
        names: only operators whose names contain one of these.
        kind: ``"float32"``.
    """
    for name, op in operators().items():
        if names and not any(part in name for part in names):
            continue
        try:
            samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))
        except Exception:
            continue  # it takes no floats, or needs a library that is not installed
        found: dict[str, Case] = {}
        tried: Counter[str] = Counter()
        for sample in filter(lambda each: not _is_empty(each), samples):
            for place, value in [*enumerate(sample.args), *sample.kwargs.items()]:
                label = f"{name} [{place}]" + (" of floats" if type(value) is float else "")
                known = type(value) is int or (type(value) is float and place not in SHAPING)
                if not known or why_excluded(op, place) or tried[label] >= _SAMPLES:
                    continue
                if label in found and len(found[label].values) > 3:
                    continue
                tried[label] += 1
                case = _case(label, op, sample, place, value)
                if case is not None and (label not in found or len(case.values) > len(found[label].values)):
                    found[label] = case
        yield from found.values()


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
