"""Switches: each change that this library makes to how Inductor compiles a graph can be turned off by its name.

They are for finding out which change a wrong or failing graph comes from. ``SIDEFX_DISABLE="matmul,rematerialize"`` in
the environment turns some off for a process, the option ``disabled_passes`` for a step, :func:`without` for a block of
code. A graph that was compiled with
switches off has an entry of its own in the cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

ENVIRONMENT = "SIDEFX_DISABLE"
"""Environment variable that holds names, separated by commas."""

CODEGEN = {
    "linear_strides": "strides of linear indices are read off instead of simplified by sympy",
    "shared_dtype_rules": "the table of dtype rules is made once",
    "skip_empty_tails": "loops over the rest of a size that vectors divide are not written",
    "skip_bounds": "bounds of values are computed where some of them are indices",
    "fast_loop_bodies": "loop bodies are run without torch.fx.Interpreter",
    "skip_simplify": "ranges are looked at where an index has quotients or remainders",
    "known_fake_values": "fake values of a graph are taken from its nodes",
    "idle_patterns": "patterns that can match nothing in a graph are not made",
}
"""They make code generation faster; the generated code is the same with and without them."""

GRAPH = {
    "composite_ops": "operators that Inductor calls faster than it computes their parts are kept whole",
    "attention": "attention is computed by the fastest measured way",
    "channels_last": "the memory format of convolutions is chosen by measuring",
    "inductor_workarounds": "arguments that an Inductor pattern ignores are written out",
    "matmul": "matrix products are computed by the fastest measured kernel",
    "lstm": "LSTM layers are computed by the fastest measured kernel",
    "scatter_add_rows": "rows are added up by a native kernel",
    "decompose_variance": "mean and variance are computed as two sums",
    "blocked_row_sums": "sums over rows are computed in blocks",
    "rematerialize": "cheap values are computed again in the backward",
}
"""They change what is computed, within rounding."""

COMPILE_TIME = {
    "loop_dedup": "loops that are equal but for names are generated once",
    "repeated_regions": "equal regions of a graph are lowered once",
    "header_free_kernels": "kernels are compiled without torch's headers",
    "header_free_wrapper": "the function that calls the kernels is compiled without torch's headers",
}
"""They make compilation faster; the results are equal bit for bit."""

CORRECTNESS = {
    "kernel_order": "kernels run after those whose results they take",
    "mutations_by_index": "a buffer is overwritten in the loop that reads it only at the same index",
    "no_write_while_read": "no operand is overwritten that another operand is a view of",
    "extern_strides": "results of called operators have the strides that were planned with",
    "result_strides": "results have the strides they were traced with",
    "rounding_casts": "casts to float16 and bfloat16 round",
}
"""They mend results of Inductor that are wrong; off, they show what Inductor does by itself."""

SWITCHES = {**CODEGEN, **GRAPH, **COMPILE_TIME, **CORRECTNESS}
"""All names, each with what it does."""

_off: frozenset[str] = frozenset()


def enabled(name: str) -> bool:
    """True unless the change of this name is switched off.

    Raises:
        ValueError: the environment names a switch that does not exist.
    """
    return name not in switched_off()


def switched_off() -> frozenset[str]:
    """Names of all that is switched off, by the environment or by :func:`without`.

    Raises:
        ValueError: the environment names a switch that does not exist.
    """
    text = os.environ.get(ENVIRONMENT, "")
    return _off | checked(name.strip() for name in text.split(",") if name.strip()) if text else _off


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Switches changes off inside, for all threads.

    Args:
        names: of :data:`SWITCHES`.

    Raises:
        ValueError: there is no switch of such a name.
    """
    global _off
    before, _off = _off, _off | checked(names)
    try:
        yield
    finally:
        _off = before


def checked(names: Iterable[str]) -> frozenset[str]:
    """The names as a set.

    Raises:
        ValueError: there is no switch of such a name.
    """
    chosen = frozenset(names)
    unknown = sorted(chosen - SWITCHES.keys())
    if unknown:
        raise ValueError(f"no switch is called {', '.join(unknown)}; there are {', '.join(sorted(SWITCHES))}")
    return chosen
