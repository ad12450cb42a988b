"""Strides of fake results, as a capture records them, against real ones, for operands in any order of dimensions.

    python tests/opinfo/layouts.py                     every operator of torch's list, forward and backward, as a table
    python tests/opinfo/layouts.py --seed 3 norm pad   with other layouts, those whose names contain one of these

Exits with 1 if strides differ.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from sidefx_train import torch_compat as compat  # noqa: E402
from sidefx_train.compile.graph.kernel_strides import lay_out  # noqa: E402
from tests.opinfo.run import operators  # noqa: E402

SAMPLES, LAYOUTS = 24, 2
"""Samples of each operator, and layouts tried for each."""


@dataclass(frozen=True)
class Difference:
    """One result whose fake strides are not the kernel's.

    Attributes:
        operator: the operator called, not the one of torch's list that calls it.
        index: index of the result.
        real, fake: its strides.
        operands: sizes and strides of the operands.
    """

    operator: str
    index: int
    real: tuple[int, ...]
    fake: tuple[int, ...]
    operands: list[Any]


class _Compares(TorchDispatchMode):
    """Runs each operator also on fake tensors, if its operands are not as in a call before."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, int], Difference] = {}
        self._seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, spec = pytree.tree_flatten((args, kwargs))
        call = func, tuple(map(_described, given))
        strided = all(t.layout is torch.strided and not t.is_quantized for t in given if isinstance(t, torch.Tensor))
        if func.namespace != "aten" or not strided or call in self._seen:
            return func(*args, **kwargs)
        self._seen.add(call)
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(t.detach()) if isinstance(t, torch.Tensor) else t for t in given]
        made = func(*args, **kwargs)
        fake_args, fake_kwargs = pytree.tree_unflatten(fakes, spec)
        try:
            with mode:
                fake = func(*fake_args, **fake_kwargs)
        except Exception:
            return made  # it has no fake kernel, or depends on values
        lay_out(func, fake_args, fake_kwargs, fake)
        for i, (a, b) in enumerate(zip(pytree.tree_leaves(made), pytree.tree_leaves(fake), strict=False)):
            if _is_other(a, b):
                operands = [_described(t) for t in given if isinstance(t, torch.Tensor)]
                self.found.setdefault((str(func), i), Difference(str(func), i, a.stride(), b.stride(), operands))
        return made


def _described(given: Any) -> Any:
    return (tuple(given.shape), given.stride(), given.dtype) if isinstance(given, torch.Tensor) else repr(given)


def _is_other(real: Any, fake: Any) -> bool:
    if not isinstance(real, torch.Tensor) or not isinstance(fake, torch.Tensor) or real.shape != fake.shape:
        return False
    sizes = zip(real.shape, real.stride(), fake.stride(), strict=True)
    return bool(real.numel()) and any(isinstance(b, int) and size > 1 and a != b for size, a, b in sizes)


def _laid_out(draw: random.Random, given: Any) -> Any:
    """Returns a tensor with the same values, its dimensions in memory in a random order, or with gaps."""
    if not isinstance(given, torch.Tensor) or given.layout is not torch.strided or given.dim() < 2:
        return given
    kind, made = draw.random(), given.detach()
    if kind > 0.9:
        made = made.repeat_interleave(2, -1)[..., ::2]
    elif kind > 0.75 and given.dim() == 4:
        made = made.contiguous(memory_format=torch.channels_last)
    elif kind > 0.2:
        order = draw.sample(range(given.dim()), given.dim())
        made = made.permute(order).contiguous().permute([order.index(i) for i in range(given.dim())])
    return made.requires_grad_(given.requires_grad)


def _run(draw: random.Random, op: Any, sample: Any) -> None:
    """Calls an operator and its backward."""
    x, args, kwargs = pytree.tree_map(lambda t: _laid_out(draw, t), (sample.input, sample.args, sample.kwargs))
    out = sample.output_process_fn_grad(op.op(x, *args, **kwargs))
    outs = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    given = [t for t in pytree.tree_leaves((x, args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    if outs and given:
        grads = [_laid_out(draw, torch.randn_like(t)).detach() for t in outs]
        torch.autograd.grad(outs, given, grads, allow_unused=True)


def differences(names: tuple[str, ...] = (), seed: int = 0, dtype: torch.dtype = torch.float32) -> Iterator[Difference]:
    """Yields the results whose strides differ, one for each operator and result.

    Args:
        names: only operators whose names contain one of these.
        seed: of the layouts.
        dtype: of the samples.
    """
    compat.know_layouts()
    draw, compares = random.Random(seed), _Compares()
    for name, op in operators().items():
        if names and not any(part in name for part in names):
            continue
        before = set(compares.found)
        try:
            samples = list(
                itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd), SAMPLES)
            )
        except Exception:
            continue  # it takes no such dtype, or needs a library that is not installed
        for sample, _ in itertools.product(samples, range(LAYOUTS)):
            try:
                with compares:
                    _run(draw, op, sample)
            except Exception:
                continue  # it refuses such strides or dtypes
        yield from (compares.found[key] for key in compares.found if key not in before)


def main() -> int:
    """Runs the command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    count = 0
    for each in differences(tuple(options.names), options.seed, getattr(torch, options.dtype)):
        count += 1
        print(f"{each.operator}, result {each.index}: {each.real}, fake {each.fake}; operands {each.operands}")
    print(f"{count} differ")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
