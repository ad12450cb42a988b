"""The values passed between stages, all frozen.

capture -> :class:`TracedGraph` -> functionalize -> :class:`FunctionalGraph` -> backend -> :class:`Executable`.
The residual stage combines an executable with the captured effects, guards and sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import fx

from sidefx_train.report import ChoiceRecord, CudaGraphRecord

OWN = "sidefx_own"
"""Key in ``meta`` of an output node: its version in eager, if eager does not treat it as a view."""

DATA = "sidefx_data"
"""Key in ``meta`` of the node of a tensor's ``.data``."""

COUNTER = "sidefx_counter"
"""Key in ``meta`` of a placeholder whose version counter differs from the first input's in its storage: its
identity."""

CALLED = "sidefx_called"
"""Key in ``meta`` of a node: the operator that the program called; the node's own declares that results alias."""

NO_GRAD = "sidefx_no_grad"
"""Key in ``meta`` of the node of a view made with autograd off: ``"no_grad"`` or ``"inference"``."""

DERIVED = "sidefx_derived"
"""Key in ``meta`` of a node recorded while a derivative was computed: (name, sequence number) of the autograd node
whose derivative it is."""

FORWARD = "sidefx_forward"
"""Key in ``meta`` of any other node: sequence number of the newest autograd node, its own if it has one."""

LINE = "sidefx_line"
"""Key in ``meta`` of a node: the program's line at which it was recorded; for a derivative, that of the forward."""

ORIGIN = "sidefx_origin"
"""Key in ``meta`` of a forward node that a backward reads: its name in the recorded graph."""

SAME = "sidefx_same"
"""Key in ``meta`` of an alias that only distinguishes the gradients of two outputs of a node; no final graph has it."""

HIDDEN_FROM_AUTOGRAD = "sidefx_hidden_from_autograd"
"""Key in ``meta`` of a node that writes with autograd off: ``"no_grad"`` or ``"inference"``."""

PREDICATED = "sidefx_predicated"
"""Key in ``meta`` of a ``copy_`` of ``where(flag, new, old)``: it takes back a write where the flag is false."""

InputKind = Literal["static", "tensor", "scalar"]


@dataclass(frozen=True)
class GraphInput:
    """One placeholder of a captured graph.

    Attributes:
        name: the placeholder's name, unique in the graph.
        kind: ``"static"`` is bound once by identity (parameter, buffer, optimizer state), ``"tensor"`` is fetched at
            every call, ``"scalar"`` is a Python int or float fetched at every call.
        example: the fake tensor **at entry** (``torch.Tensor``), or the symbolic number of a scalar.
        hint: for a scalar, its value during the capture.
        source: readable source expression, for reports.
        writes: by how much the step increments the tensor's version counter; ``None``: by one if it is written.
        counter: position of an earlier input that has the same version counter.
    """

    name: str
    kind: InputKind
    example: Any
    source: str
    hint: Any = None
    writes: int | None = None
    counter: int | None = None

    @property
    def counts_steps(self) -> bool:
        """Whether it is a step counter of an optimizer."""
        return counts_steps(self.kind, self.source)


EXACT_IN_FLOAT32 = 2**24
"""Integers up to this bound, and their sums up to it, are exact in float32."""


def counts_steps(kind: str, label: str) -> bool:
    """Returns True for a step counter of an optimizer: a small integer, in whatever dtype.

    Args:
        kind: kind of the input.
        label: its source expression.
    """
    return kind == "static" and label.endswith("['step']")


@dataclass(frozen=True)
class TracedGraph:
    """The step's tensor program as recorded by the dispatcher.

    ``module.graph`` holds aten overloads (in-place and view ops included, in eager's order), host arithmetic on Python
    numbers (``operator.*``, ``math.*``, ``torch.sym_*``), ``aten._local_scalar_dense`` where a tensor became a Python
    number, and fused optimizer ops such as ``aten._fused_adamw_`` whose float arguments may be nodes. The output node
    holds a flat tuple of nodes. Nodes carry ``meta["val"]``.

    Attributes:
        module: the graph.
        inputs: its placeholders.
        fake_mode: fake mode of the tensors in ``meta``.
        uses_rng: it draws random numbers.
        gradients: it is a backward, whose results autograd takes over.
        created_generators: random generators that the step creates, each with the state to which every run resets it.
        asserts_sizes: what eager's kernels require of sizes that only the graph knows is asserted.
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    fake_mode: Any
    uses_rng: bool = False
    gradients: bool = False
    created_generators: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()
    asserts_sizes: bool = False


@dataclass(frozen=True)
class Name:
    """A value in the generated runner: ``a3`` an input, ``s1`` a host number, ``r2`` a result of the graph."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class TailCall:
    """An operation that runs after the graph; its arguments contain :class:`Name`."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class IndexCheck:
    """Values of an integer input must be in ``[low, high)`` or equal ``ignore``, else eager would raise.

    ``selected`` are the operations, each a name and constant arguments, that select the used values of the input.
    """

    position: int
    low: int
    high: int
    ignore: int | None = None
    selected: tuple[tuple[str, tuple[Any, ...]], ...] = ()


@dataclass(frozen=True)
class Output:
    """How the runner makes one output of the step.

    ``kind`` is ``"result"`` (``value`` is a :class:`Name`), ``"view"`` (``value`` names the tensor of which it is
    ``as_strided(*layout)``, with the offset relative to the input's), ``"number"`` (a :class:`Name`) or ``"constant"``.
    ``version`` is a result's version counter in eager, if eager does not treat it as a view. ``bits`` is (dtype, is
    conjugate, is negative) of a view that differs in them from its tensor.
    """

    kind: Literal["result", "view", "number", "constant"]
    value: Any
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
    version: int | None = None
    bits: tuple[torch.dtype, bool, bool] | None = None


@dataclass(frozen=True)
class SyntheticBase:
    """Storage in which inputs overlap.

    Attributes:
        members: positions of the inputs.
        starts: start of each, in bytes; ``as_strided`` may reach before all of them.
        size: number of elements.
        dtype: dtype of the inputs, or bytes if they differ.
    """

    members: tuple[int, ...]
    starts: tuple[int, ...]
    size: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class RunnerPlan:
    """The runner's work around a compiled graph.

    Attributes:
        inputs: inputs of the traced graph.
        results: results of the compiled graph, ``r0, r1, ...``: fake tensors.
        feeds: source of each placeholder of the graph, by name: ``a3`` an input, ``s1`` a host number, ``packed`` the
            scalar buffer, ``b0`` a synthetic base.
        bases: storages in which inputs overlap and one is written.
        packed: host numbers in the scalar buffer, in order.
        host: assignments of host numbers (prologue), one line each.
        late: assignments after the graph (numbers that depend on its results).
        mutated: input positions written by the graph itself.
        mutated_bases: bases written by the graph itself.
        deferred_copies: (input or base, result name): deferred mutations; the runner copies the new value after the
            whole graph has succeeded (a later error in the graph must not leave them behind).
        metadata_updates: positions of inputs with changed layout, with the new size, stride, and relative offset.
        tail: operations run after the graph on the real inputs and on results.
        moved: (input position, the host need not wait): inputs that the runner moves to the device.
        counters: (input position, host number, result): inputs on the CPU that the runner sets after the graph, if the
            result is true, or ``None``.
        device: the accelerator that the graph runs on, and the scalar buffer is on; ``None``: the CPU.
        outputs: how each user output is made.
        checks: conditions on index inputs, checked before anything runs.
        report: result with the flag that a computed index was out of range or an assumed condition did not hold (then
            nothing may be committed).
        assumes: there are assumed conditions.
        factorized: the flag also reports matrices that could not be factorized.
        covered: True if only the checked operations can raise for bad values.
        communicates: the graph contains collectives, so it cannot run a second time.
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
    moved: tuple[tuple[int, bool], ...] = ()
    counters: tuple[tuple[int, str, str | None], ...] = ()
    device: torch.device | None = None
    outputs: tuple[Output, ...] = ()
    checks: tuple[IndexCheck, ...] = ()
    report: str | None = None
    assumes: bool = False
    factorized: bool = False
    covered: bool = True
    notes: tuple[str, ...] = ()
    bases: tuple[SyntheticBase, ...] = ()
    communicates: bool = False

    @property
    def escaping(self) -> frozenset[int]:
        """Positions of the results that the program gets."""
        named = [str(out.value) for out in self.outputs if out.kind == "result"]
        return frozenset(int(name[1:]) for name in named if name.startswith("r"))


@dataclass(frozen=True, kw_only=True)
class FunctionalGraph(RunnerPlan):
    """The same program without in-place operations on intermediates and views of written inputs.

    Attributes:
        module: pure aten graph; its in-place input updates are trailing ``copy_`` nodes, its outputs ``r0, r1, ...``.
    """

    module: fx.GraphModule


class DeviceSection(Protocol):
    """What of a compiled graph a device records and replays.

    Attributes:
        device: what records.
        batch: sources of the inputs that a replay copies to the device.
        can_replay: there is a recording.
    """

    @property
    def device(self) -> Any: ...

    @property
    def batch(self) -> tuple[str, ...]: ...

    @property
    def can_replay(self) -> bool: ...

    def take_from(self, prefetcher: Any) -> None:
        """Lets replays take copies of inputs that ``prefetcher`` has on the device."""


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
        choices: choices made by autotuning.
        conditions: sympy expressions over the capture's symbols that the backend relied on: it may have specialized the
            code for a size or number of 0.
        verification: results of comparisons with the captured graph, as text; filled as it runs.
        identity: for a graph cached on disk, its sources and the hash of its library.
        functional: the graph to compare with, if lowering created it; the comparison takes it out.
        replays: counts the calls of its device section, if a device records it.
        hand_out: called with outputs, by position, that the program gets only as the gradient of an input, by position:
            replays may write them again.
        device_section: what of it a device records; ``None`` if none does.
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
    replays: CudaGraphRecord | None = None
    hand_out: Callable[[dict[int, int]], None] | None = None
    device_section: DeviceSection | None = None


def is_scalar(value: Any) -> bool:
    """Returns True for a symbolic or plain Python number."""
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))
