"""Switches that disable this library's changes to Inductor's compilation, each by its name.

They help to find the change that causes a wrong or failing graph. ``SIDEFX_DISABLE="matmul,rematerialize"`` in the
environment disables some for a process, the option ``disabled_passes`` for a step, :func:`without` for a block of code.
An unknown name is an error where a step is created. A graph compiled with disabled changes has its own cache entry.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

ENVIRONMENT = "SIDEFX_DISABLE"
"""Environment variable with names separated by commas."""

CODEGEN = {
    "linear_strides": "strides of linear indices are read without simplification by sympy",
    "shared_dtype_rules": "the table of dtype rules is created once",
    "skip_empty_tails": "remainder loops of sizes that vectors divide are not generated",
    "skip_bounds": "bounds of values are computed only if some of them are indices",
    "fast_loop_bodies": "loop bodies are run without torch.fx.Interpreter",
    "skip_simplify": "ranges are used only if an index has quotients or remainders",
    "known_fake_values": "fake values of a graph are taken from its nodes",
    "idle_patterns": "patterns that cannot match in a graph are not created",
}
"""Changes that make code generation faster; the generated code is the same with and without them."""

GRAPH = {
    "composite_ops": "composite operators that are faster than their decomposition are kept whole",
    "attention": "attention is computed by the fastest measured candidate",
    "channels_last": "the memory format of convolutions is chosen by timing",
    "inductor_workarounds": "arguments that an Inductor pattern ignores become operators",
    "matmul": "matrix products are computed by the fastest measured kernel",
    "lstm": "LSTM layers are computed by the fastest measured kernel",
    "multi_tensor": "on a GPU, equal updates of many tensors are one kernel where that was measured to be faster",
    "scatter_add_rows": "a native kernel computes scatter-adds of rows",
    "decompose_variance": "mean and variance are computed as two sums",
    "blocked_row_sums": "sums over rows are computed in blocks",
    "rematerialize": "cheap values are recomputed in the backward",
}
"""Changes of what is computed, within rounding."""

COMPILE_TIME = {
    "loop_dedup": "loops that differ only in names are generated once",
    "repeated_regions": "equal regions of a graph are lowered once",
    "header_free_kernels": "kernels are compiled without torch's headers",
    "header_free_wrapper": "the function that calls the kernels is compiled without torch's headers",
}
"""Changes that make compilation faster; the results are bitwise equal."""

CORRECTNESS = {
    "kernel_order": "kernels run after those whose results they read",
    "mutations_by_index": "a buffer is overwritten in the loop that reads it only at the same index",
    "no_write_while_read": "no operand is overwritten while another operand is a view of it",
    "extern_strides": "results of called operators have the planned strides",
    "result_strides": "results have the strides they were traced with",
    "rounding_casts": "casts to float16 and bfloat16 round",
    "results_own_storage": "sums and products without effect that are results are copied",
    "copies_for_writes": "an input that gets another one's old value gets it before that is written",
    "rows_of_their_own": "rows that one tile computes are not kept in a buffer of one row",
    "masked_reads": "on a GPU, padding is filled in where its kernel computes what is padded",
    "zero_products": "products with 0 are computed: NaN stays NaN",
    "zero_sums": "sums with 0.0 are computed: -0.0 becomes 0.0",
    "small_arguments": "expm1 and atanh of vectors keep the digits of small numbers",
    "index_arrays": "indices that a store has taken out of a vector are used behind it only",
}
"""Changes that correct wrong results of Inductor; disabled, they show what Inductor does."""

SWITCHES = {**CODEGEN, **GRAPH, **COMPILE_TIME, **CORRECTNESS}
"""All names with a description of each."""

_off: frozenset[str] = frozenset()


def enabled(name: str) -> bool:
    """Returns True unless the change with this name is disabled.

    Raises:
        ValueError: the environment names an unknown switch.
    """
    return name not in switched_off()


def switched_off() -> frozenset[str]:
    """Returns the names of all disabled changes, from the environment and from :func:`without`.

    Raises:
        ValueError: the environment names an unknown switch.
    """
    text = os.environ.get(ENVIRONMENT, "")
    if not text:
        return _off
    return _off | checked(
        (name.strip() for name in text.split(",") if name.strip()), f"environment variable {ENVIRONMENT}: "
    )


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Disables changes within the context, for all threads.

    Args:
        names: keys of :data:`SWITCHES`.

    Raises:
        ValueError: a name is not a switch.
    """
    global _off
    before, _off = _off, _off | checked(names)
    try:
        yield
    finally:
        _off = before


def checked(names: Iterable[str], where: str = "") -> frozenset[str]:
    """Returns the names as a set.

    Args:
        names: of :data:`SWITCHES`.
        where: begins the message, and says where the names come from.

    Raises:
        ValueError: a name is not a switch.
    """
    chosen = frozenset(names)
    unknown = sorted(chosen - SWITCHES.keys())
    if unknown:
        raise ValueError(f"{where}no switch is called {', '.join(unknown)}; there are {', '.join(sorted(SWITCHES))}")
    return chosen
