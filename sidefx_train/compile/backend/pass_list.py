"""The graph passes of the Inductor backend, in order, each with its name in ``sidefx_train/switches.py``.

| pass | what it does | where |
|---|---|---|
| ``inductor_workarounds`` | writes out arguments that a pattern ignores | ``passes/inductor_workarounds.py`` |
| ``matmul`` | the fastest measured kernel for each matrix product | ``autotune/matmul.py`` |
| ``lstm`` | the fastest measured kernel for each LSTM layer | ``autotune/lstm.py`` |
| ``scatter_add_rows`` | a native kernel where rows are added up | ``passes/scatter_add_rows.py`` |
| ``decompose_variance`` | mean and variance as two sums | ``passes/decompose_variance.py`` |
| ``blocked_row_sums`` | sums over rows in blocks | ``passes/blocked_row_sums.py`` |
| ``rematerialize`` | cheap values are computed again in the backward | ``passes/rematerialize.py`` |
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from sidefx_train.compile.backend.autotune.lstm import choose_layers
from sidefx_train.compile.backend.autotune.matmul import choose_products
from sidefx_train.compile.backend.passes.blocked_row_sums import sum_by_blocks
from sidefx_train.compile.backend.passes.decompose_variance import decompose_variances
from sidefx_train.compile.backend.passes.inductor_workarounds import apply_inductor_workarounds
from sidefx_train.compile.backend.passes.rematerialize import recompute
from sidefx_train.compile.backend.passes.scatter_add_rows import sum_rows_natively
from sidefx_train.compile.graph.validation import check_graph
from sidefx_train.report import ChoiceRecord
from sidefx_train.switches import enabled

Outcome = tuple[str, list[ChoiceRecord]]
"""A note for the report, empty if there is none, and the choices made by autotuning."""


@dataclass(frozen=True)
class PassOptions:
    """Options of the passes.

    Attributes:
        threads: number of threads that will run the graph.
        autotune: passes may time candidates.
        deterministic: the order of sums must not depend on threads.
    """

    threads: int
    autotune: bool
    deterministic: bool


@dataclass(frozen=True)
class Pass:
    """A pass over a functional graph, which it changes in place.

    Attributes:
        name: name of its switch.
        run: ``run(module, fake_mode, options)``.
        when: ``when(options)`` returns True if the pass applies.
    """

    name: str
    run: Callable[[fx.GraphModule, Any, PassOptions], Outcome]
    when: Callable[[PassOptions], bool] = lambda options: True


def _workarounds(module: fx.GraphModule, fake_mode: Any, options: PassOptions) -> Outcome:
    apply_inductor_workarounds(module, fake_mode)
    return "", []


def _matmul(module: fx.GraphModule, fake_mode: Any, options: PassOptions) -> Outcome:
    return choose_products(module, options.threads)


def _lstm(module: fx.GraphModule, fake_mode: Any, options: PassOptions) -> Outcome:
    return choose_layers(module, fake_mode, options.threads)


def _rows(module: fx.GraphModule, fake_mode: Any, options: PassOptions) -> Outcome:
    return sum_rows_natively(module, fake_mode, every=options.deterministic), []


def _variance(module: fx.GraphModule, fake_mode: Any, options: PassOptions) -> Outcome:
    decompose_variances(module, fake_mode)
    return "", []


def _measured(options: PassOptions) -> bool:
    return options.autotune


PASSES = (
    Pass("inductor_workarounds", _workarounds),
    Pass("matmul", _matmul, _measured),
    Pass("lstm", _lstm, _measured),
    Pass("scatter_add_rows", _rows, lambda options: options.autotune or options.deterministic),
    Pass("decompose_variance", _variance),
    Pass("blocked_row_sums", lambda module, fake_mode, _: (sum_by_blocks(module, fake_mode), [])),
    Pass("rematerialize", lambda module, fake_mode, _: (recompute(module), [])),
)


@dataclass
class PassResults:
    """Results of all passes.

    Attributes:
        notes: notes for the report.
        choices: choices made by autotuning.
        seconds: seconds of each pass that ran, including its check.
    """

    notes: list[str] = field(default_factory=list)
    choices: list[ChoiceRecord] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def run_passes(module: fx.GraphModule, fake_mode: Any, options: PassOptions) -> PassResults:
    """Runs all applicable passes that are not disabled; the graph is checked after each of them.

    Args:
        module: a functional graph, changed in place.
        fake_mode: fake mode of its values.
        options: options of the passes.
    """
    results = PassResults()
    for each in PASSES:
        if not enabled(each.name) or not each.when(options):
            continue
        began = time.perf_counter()
        note, chosen = each.run(module, fake_mode, options)
        check_graph(each.name, module, fake_mode, functional=True)
        results.seconds[each.name] = time.perf_counter() - began
        results.notes += [note] if note else []
        results.choices += chosen
    return results
