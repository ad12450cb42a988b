"""What passes between the stages: frozen values only.

capture -> :class:`TracedGraph` -> functionalize -> :class:`FunctionalGraph` -> backend -> :class:`Executable`.
The residual stage puts an executable together with the captured effects, guards and sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from sidefx_train.report import ChoiceRecord

OWN = "sidefx_own"
"""In ``meta`` of a node that is an output: its version in eager, where that does not take it for a view of another."""

DATA = "sidefx_data"
"""In ``meta`` of the node of a tensor's ``.data``."""

COUNTER = "sidefx_counter"
"""In ``meta`` of a placeholder whose version counter is not that of the first input in its memory: what tells it."""

CALLED = "sidefx_called"
"""In ``meta`` of a node: the operator that the program called, of which the node's shows that results share memory."""

NO_GRAD = "sidefx_no_grad"
"""In ``meta`` of the node of a view that was made while autograd was off: ``"no_grad"`` or ``"inference"``."""

DERIVED = "sidefx_derived"
"""In ``meta`` of a node that was recorded while a derivative was computed: the autograd node whose derivative it is, by
name and by its place in the order of the forward."""

FORWARD = "sidefx_forward"
"""In ``meta`` of any other node: the place of the autograd node that was made last, its own if it has one."""

LINE = "sidefx_line"
"""In ``meta`` of a node: the program's line that it was recorded at; of a derivative, that of the forward."""

ORIGIN = "sidefx_origin"
"""In ``meta`` of a node of the forward that a backward reads: its name in the graph that was recorded."""

SAME = "sidefx_same"
"""In ``meta`` of an alias that only tells apart the gradients of two outputs of an autograd node; no graph keeps it."""

HIDDEN_FROM_AUTOGRAD = "sidefx_hidden_from_autograd"
"""In ``meta`` of a node that writes while autograd is off: ``"no_grad"`` or ``"inference"``."""

InputKind = Literal["static", "tensor", "scalar"]


@dataclass(frozen=True)
class GraphInput:
    """One placeholder of a captured graph.

    Attributes:
        name: the placeholder's name, unique in the graph.
        kind: ``"static"`` is bound once by identity (parameter, buffer, optimizer state), ``"tensor"`` is fetched at
            every call, ``"scalar"`` is a Python int or float fetched at every call.
        example: the fake tensor as it was **at entry** (``torch.Tensor``), or the symbolic number of a scalar.
        hint: for a scalar, its value during the capture.
        source: readable source expression, for reports.
        writes: by how much the step moves the tensor's version counter; ``None``: by one if it is written.
        counter: position of an earlier input that has the same version counter.
    """

    name: str
    kind: InputKind
    example: Any
    source: str
    hint: Any = None
    writes: int | None = None
    counter: int | None = None


@dataclass(frozen=True)
class TracedGraph:
    """The step's tensor program as the dispatcher saw it.

    ``module.graph`` holds aten overloads (in-place and view ops included, in eager's order), host arithmetic on Python
    numbers (``operator.*``, ``math.*``, ``torch.sym_*``), ``aten._local_scalar_dense`` where a tensor became a Python
    number, and fused optimizer ops such as ``aten._fused_adamw_`` whose float arguments may be nodes. The output node
    holds a flat tuple of nodes. Nodes carry ``meta["val"]``.

    Attributes:
        module: the graph.
        inputs: its placeholders.
        fake_mode: of the fake tensors in ``meta``.
        uses_rng: it draws random numbers.
        gradients: it is a backward, whose results autograd takes over.
        anew: random generators that the step makes, each in the state in which every run finds it.
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    fake_mode: Any
    uses_rng: bool = False
    gradients: bool = False
    created_generators: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()


@dataclass(frozen=True)
class Name:
    """A value of the generated runner: ``a3`` an input, ``s1`` a host number, ``r2`` a result of the graph."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class TailCall:
    """An operation that runs after the graph, its arguments in terms of :class:`Name`."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class IndexCheck:
    """Values of an integer input must lie in ``[low, high)`` or equal ``ignore``, else eager would raise."""

    position: int
    low: int
    high: int
    ignore: int | None = None


@dataclass(frozen=True)
class Output:
    """How the runner makes one output of the step.

    ``kind`` is ``"result"`` (``value`` is a :class:`Name`), ``"view"`` (``value`` names the tensor of which it is
    ``as_strided(*layout)``, the offset counted from the input's own), ``"number"`` (a :class:`Name`) or ``"constant"``.
    ``version`` is a result's version counter in eager, where eager does not take it for a view. ``bits`` of a view of
    another type than the tensor's, or conjugate or negative: its type, whether it is conjugate, whether negative.
    """

    kind: Literal["result", "view", "number", "constant"]
    value: Any
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
    version: int | None = None
    bits: tuple[torch.dtype, bool, bool] | None = None


@dataclass(frozen=True)
class SyntheticBase:
    """Memory in which inputs overlap.

    Attributes:
        members: their positions.
        starts: where each begins, in bytes; ``as_strided`` may reach in front of all of them.
        size: number of elements.
        dtype: their type: that of the inputs, or bytes where those differ.
    """

    members: tuple[int, ...]
    starts: tuple[int, ...]
    size: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class RunnerPlan:
    """What the runner does around a compiled graph.

    Attributes:
        inputs: as in the traced graph.
        results: what the compiled graph returns, ``r0, r1, ...``: fake tensors.
        feeds: what each placeholder of the graph takes, by name: ``a3`` an input, ``s1`` a host number, ``packed``
            the block of host numbers, ``b0`` a synthetic base.
        bases: memory in which inputs overlap while one is written.
        packed: host numbers in the block, in order.
        host: assignments of host numbers (prologue), one line each.
        late: assignments after the graph (numbers that depend on its results).
        mutated: input positions written by the graph itself.
        mutated_bases: bases written by the graph itself.
        deferred_copies: (input or base, result name): the new value is a result and copied by the runner after the
            whole graph has succeeded (updates that an error later in the graph must not leave behind).
        metadata_updates: input positions whose layout changed, with the new size, stride, and distance from where it
            started.
        tail: operations run after the graph on the real inputs and on results.
        outputs: how each user output is made.
        checks: conditions on index inputs, checked before anything runs.
        report: result that says an index computed by the step was out of range, or a condition not what was taken for
            granted (then nothing may be committed).
        granted: there are such conditions.
        factorized: the flag says so of matrices that have no factorization, too.
        covered: True if nothing but the checked operations can raise for bad values.
        notes: choices worth reporting.
    """

    inputs: tuple[GraphInput, ...]
    results: tuple[Any, ...] = ()
    feeds: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    mutated: tuple[int, ...] = ()
    mutated_bases: tuple[int, ...] = ()
    deferred_copies: tuple[tuple[str, str], ...] = ()
    metadata_updates: tuple[tuple[int, tuple[int, ...], tuple[int, ...], int], ...] = ()
    tail: tuple[TailCall, ...] = ()
    outputs: tuple[Output, ...] = ()
    checks: tuple[IndexCheck, ...] = ()
    report: str | None = None
    assumes: bool = False
    factorized: bool = False
    covered: bool = True
    notes: tuple[str, ...] = ()
    bases: tuple[SyntheticBase, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FunctionalGraph(RunnerPlan):
    """The same program without in-place ops or views of inputs being written.

    Attributes:
        module: pure aten graph; its in-place input updates are trailing ``copy_`` nodes, its outputs ``r0, r1, ...``.
    """

    module: fx.GraphModule


@dataclass(frozen=True)
class Executable:
    """A compiled graph, ready to run.

    Attributes:
        run: ``run(args) -> outputs``. ``args`` is a fresh list, one real value per :class:`GraphInput`, in order; it
            may be cleared. Inputs are mutated in place as eager would have; outputs come in the traced graph's order,
            with eager's aliasing of inputs.
        atomic: True if an exception from ``run`` leaves every input as it was before the call.
        sources: generated code by name, for ``report.sources()``.
        seconds: wall time by stage (``functionalize``, ``lower``...).
        notes: choices worth reporting.
        choices: what was chosen by measuring.
        conditions: sympy expressions over the capture's symbols that the backend took for true: it may have seen that a
            size or number was 0, and compiled for that.
        verification: what comparisons with the captured graph came to, in words; filled as it runs.
        identity: for a graph that is kept on disk, what it was made from and the hash of its library.
        functional: what it is compared with, where that was made on the way; taken out by who compares.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    atomic: bool
    sources: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    choices: tuple[ChoiceRecord, ...] = ()
    conditions: tuple[Any, ...] = ()
    verification: list[str] = field(default_factory=list)
    identity: str = ""
    functional: list[FunctionalGraph] = field(default_factory=list)


def is_scalar(value: Any) -> bool:
    """True for a symbolic or plain Python number."""
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))
